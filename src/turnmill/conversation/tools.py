"""The tools that a client offers to the model, and which of them it wants called: OpenAI's forms, checked."""

import re
from typing import Any

import msgspec

from turnmill.conversation.bodies import decoded, flag, short
from turnmill.conversation.branches import MAX_NESTING, conversation_start, is_nested_deeply
from turnmill.errors import InvalidRequest

MAX_TOOLS = 128
# Of all tools, as they came.
MAX_TOOLS_BYTES = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODES = ("auto", "none", "required")


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request."""

    # In OpenAI's form, each with what a template may render: name, description, parameters. None: there are none.
    tools: list[dict[str, Any]] | None
    names: frozenset[str]
    # What the hashes of its conversation start from.
    start: bytes


NO_TOOLS = Offered(tools=None, names=frozenset(), start=b"")


def parse_tools(raw: bytes) -> Offered:
    """The JSON array under `tools`; raises `InvalidRequest` naming the first that is not served."""
    if len(raw) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"tools have at most {MAX_TOOLS_BYTES} bytes in all, these have {len(raw)}", param="tools")
    value = decoded(raw)
    if value is None or value == []:
        return NO_TOOLS
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} tools", param="tools")
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(value)]
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            where = f"tools[{index}].function.name"
            raise InvalidRequest(f"{where}: a tool named {name} is there twice", param=where)
        names.add(name)
    return Offered(tools=tools, names=frozenset(names), start=conversation_start(tools))


def parse_tool_choice(value: Any, offered: Offered) -> str:
    """`tool_choice` as a generate request says it; None where the client says nothing."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in _MODES:
            raise InvalidRequest(f"tool_choice {short(value)} is none of {', '.join(_MODES)}", param="tool_choice")
        if offered.tools is None:
            if value == "required":
                raise InvalidRequest("tool_choice = 'required' needs tools", param="tool_choice")
            return "auto"
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f"tool_choice must be {', '.join(_MODES)}, or an object with type function and function.name",
            param="tool_choice",
        )
    if name not in offered.names:
        raise InvalidRequest(f"tool_choice names {short(name)}, which is not among the tools", param="tool_choice")
    return f"function:{name}"


def _tool(value: Any, where: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "function" or not isinstance(value.get("function"), dict):
        raise InvalidRequest(f"{where} must be an object with type function and function", param=where)
    _check_keys(value, ("type", "function"), where)
    function, where = value["function"], f"{where}.function"
    _check_keys(function, ("name", "description", "parameters", "strict"), where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name must be 1 to 64 letters, digits, _ and -, not {short(name)}", param=f"{where}.name"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a text", param=f"{where}.description")
    if function.get("strict") is not None:
        # Frameworks set it by default. Nothing is constrained: what the policy writes is what is trained on.
        flag(function["strict"], f"{where}.strict")
    said = {"name": name} if description is None else {"name": name, "description": description}
    parameters = _parameters(function.get("parameters"), f"{where}.parameters")
    return {"type": "function", "function": {**said, "parameters": parameters}}


def _parameters(value: Any, where: str) -> dict[str, Any]:
    """A JSON schema of an object; none is one without properties."""
    if value is None or value == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict) or value.get("type") != "object":
        raise InvalidRequest(f"{where} must be a JSON schema of type object", param=where)
    properties, required = value.get("properties", {}), value.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(item, dict | bool) for item in properties.values()):
        raise InvalidRequest(f"{where}.properties must hold a schema for each name", param=f"{where}.properties")
    if not isinstance(required, list) or not all(isinstance(item, str) for item in required):
        raise InvalidRequest(f"{where}.required must be a list of names", param=f"{where}.required")
    if is_nested_deeply(value):
        raise InvalidRequest(f"{where} is nested more than {MAX_NESTING} deep", param=where)
    return value


def _check_keys(value: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            raise InvalidRequest(f"{where}.{key} is not served", param=f"{where}.{key}")
