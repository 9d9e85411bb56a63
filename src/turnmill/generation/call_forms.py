"""The ways in which models write one call: each reads the call that begins at a place of a text.

JsonForm        {"name": "f", "arguments": {...}}               under whatever keys
NamedForm       f<separator>{...}                               a name, and the arguments as an object
ParameterForm   f><parameter=a>1</parameter>                    a name, and each argument by itself
"""

import json
import re
from typing import Any

import msgspec

# Keys that lead to a part of an object.
Keys = tuple[str, ...]
# By the name of a tool: the JSON schemas of its parameters, by their names.
Schemas = dict[str, dict[str, Any]]

_ID = re.compile(r"[a-zA-Z0-9]{9}")
# What no name of a tool or of a parameter holds.
_NAME = r"([^\s\[\]{}<>]+?)"
# How a template's language prints what JSON writes in another way.
_PRINTED = {"True": True, "False": False, "None": None}


class ReadCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the model wrote it."""

    name: str
    # A JSON object.
    arguments: str
    # Of nine letters and digits; None where the model wrote no such.
    id: str | None = None


class JsonForm(msgspec.Struct, frozen=True, kw_only=True):
    """An object that holds the parts of a call."""

    name_path: Keys
    arguments_path: Keys
    id_path: Keys | None

    def at(self, text: str, place: int, schemas: Schemas) -> tuple[ReadCall, int] | None:
        found = object_at(text, place)
        if found is None:
            return None
        value, end = found
        call_id = _at(value, self.id_path) if self.id_path is not None else None
        call = _read_call(_at(value, self.name_path), _at(value, self.arguments_path), call_id)
        return (call, end) if call is not None else None

    def spelled(self, name: str) -> str:
        """The name as it is written."""
        return json.dumps(name, ensure_ascii=False)[1:-1]


class NamedForm(msgspec.Struct, frozen=True, kw_only=True):
    """A name, and behind it the arguments as an object."""

    # The name and what stands between it and the arguments.
    head: re.Pattern[str]

    @classmethod
    def of(cls, between: str) -> "NamedForm":
        """`between`: a pattern."""
        return cls(head=re.compile(_NAME + between))

    def at(self, text: str, place: int, schemas: Schemas) -> tuple[ReadCall, int] | None:
        head = self.head.match(text, place)
        found = object_at(text, head.end()) if head is not None else None
        call = _read_call(head[1], found[0], None) if head is not None and found is not None else None
        return (call, found[1]) if call is not None and found is not None else None

    def spelled(self, name: str) -> str:
        return name


class ParameterForm(msgspec.Struct, frozen=True, kw_only=True):
    """A name, and behind it each argument with a beginning and an end of its own."""

    head: re.Pattern[str]
    # What opens an argument, its name, and what stands between that and the value.
    parameter: re.Pattern[str]
    # Behind the value.
    end: re.Pattern[str]

    @classmethod
    def of(cls, *, head: str, opener: str, middle: str, end: str) -> "ParameterForm":
        """Of patterns: behind the name, in front of a parameter's name, behind that, behind its value."""
        return cls(head=re.compile(_NAME + head), parameter=re.compile(opener + _NAME + middle), end=re.compile(end))

    def at(self, text: str, place: int, schemas: Schemas) -> tuple[ReadCall, int] | None:
        head = self.head.match(text, place)
        if head is None:
            return None
        place = head.end()
        known = schemas.get(head[1], {})
        arguments: dict[str, Any] = {}
        while (begin := self.parameter.match(text, place)) is not None:
            end = self.end.search(text, begin.end())
            if end is None:
                return None
            arguments[begin[1]] = _value(text[begin.end() : end.start()], known.get(begin[1]))
            place = end.end()
        call = _read_call(head[1], arguments, None)
        return (call, place) if call is not None else None

    def spelled(self, name: str) -> str:
        return name


Form = JsonForm | NamedForm | ParameterForm


def schemas_of(tools: list[dict[str, Any]] | None) -> Schemas:
    """Of the tools of a request, as far as they are known."""
    schemas: Schemas = {}
    for tool in tools or ():
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(properties, dict):
            schemas[function["name"]] = properties
    return schemas


# ---------------------------------------------------------------- values


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_reject)


def object_at(text: str, place: int) -> tuple[dict[str, Any], int] | None:
    """The JSON object that begins at `place`, and where it ends."""
    if not text.startswith("{", place):
        return None
    try:
        value, end = _decoder.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    return value, end


def _value(text: str, schema: Any) -> Any:
    """An argument that was written without quotes: a text where the tool wants one, or where it is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    written = text.strip()
    if written in _PRINTED:
        return _PRINTED[written]
    try:
        return _decoder.decode(written)
    except (ValueError, RecursionError):
        return text


def _at(value: Any, path: Keys) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _read_call(name: Any, arguments: Any, call_id: Any) -> ReadCall | None:
    """None where it has no name, or no object of arguments, or holds what no text can."""
    if isinstance(arguments, str):
        found = object_at(arguments.strip(), 0)
        arguments = found[0] if found is not None and found[1] == len(arguments.strip()) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
    except (ValueError, RecursionError):
        # A number that is none, or half of a surrogate pair.
        return None
    is_id = isinstance(call_id, str) and _ID.fullmatch(call_id) is not None
    return ReadCall(name=name, arguments=written, id=call_id if is_id else None)
