"""Histories that clients send, checked: from JSON to messages with the keys that matter, and their hashes.

A history is as long as its conversation and comes again with each turn, so that only what is new of it is read.
"""

from typing import Any

import msgspec

from turnmill.conversation.bodies import decoded, short
from turnmill.conversation.branches import MAX_NESTING, is_nested_deeply, prefix_hashes, text_of
from turnmill.conversation.tools import Offered, parse_tools
from turnmill.errors import InvalidRequest
from turnmill.records import TEXT_ROLE, encode

# By their names in requests; `developer` is OpenAI's newer name of `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Whose messages may be a content and nothing else.
_PLAIN_ROLES = ("user", "assistant", "system")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
# Requests of an attempt that are remembered: as many branches are gone on from without a full check.
MAX_HEARD = 4
# JSON of messages without the closing bracket, what their hashes start from, the hashes, the last one's role.
_Beginning = tuple[bytes, bytes, list[bytes], str]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a request, checked; those that were checked before are not read again."""

    # JSON array as it came.
    raw: bytes
    # The messages from index `start` on, with the keys that matter and their content as text.
    tail: list[dict[str, Any]]
    start: int
    # Prefix hashes of all messages.
    hashes: list[bytes]
    # Role of the last message.
    last_role: str

    def since(self, index: int) -> list[dict[str, Any]]:
        """The messages from `index` on, with the keys that matter and their content as text."""
        if index >= self.start:
            return self.tail[index - self.start :]
        late = msgspec.json.decode(self.raw)[index:]
        return [_message(item, index + offset) for offset, item in enumerate(late)]


class Heard:
    """The latest requests of one attempt. One that begins with the bytes of another is read from there on only.

    So a turn costs the same however long the conversation is. Every client writes what it said before as it wrote it
    then; for one that does not, each request is read as a whole.
    """

    def __init__(self) -> None:
        # The latest last.
        self._latest: list[_Beginning] = []
        # By their JSON, the latest last.
        self._offered: dict[bytes, Offered] = {}

    def offered(self, raw: bytes) -> Offered:
        """The JSON array of a request's tools; raises `InvalidRequest` for the first that is not served."""
        known = self._offered.get(raw)
        if known is None:
            known = parse_tools(raw)
            while len(self._offered) >= MAX_HEARD:
                del self._offered[next(iter(self._offered))]
            self._offered[raw] = known
        return known

    def read(self, raw: bytes, start: bytes = b"") -> Said:
        """The JSON array of a request's messages; raises `InvalidRequest` for the first that is not served.

        `start`: what the hashes of a conversation with the request's tools start from.
        """
        known: _Beginning | None = None
        for entry in self._latest:
            is_longer = known is None or len(entry[0]) > len(known[0])
            if is_longer and entry[1] == start and _goes_on(raw, entry[0]):
                known = entry
        found: list[Any] = []
        hashes: list[bytes] = []
        last_role = ""
        if known is None:
            found = _messages(decoded(raw))
        else:
            hashes, last_role = list(known[2]), known[3]
            rest = raw[len(known[0]) :].lstrip()
            if rest != b"]":
                found = _messages(decoded(b"[" + rest[1:]))
            # Gone on from: in a conversation without branches one entry is all there is.
            self._latest.remove(known)
        index = len(hashes)
        new = [_message(item, index + offset) for offset, item in enumerate(found)]
        hashes += prefix_hashes(new, hashes[-1] if hashes else start)
        last_role = new[-1]["role"] if new else last_role
        self._latest = [*self._latest[1 - MAX_HEARD :], (raw[:-1].rstrip(), start, hashes, last_role)]
        return Said(raw=raw, tail=new, start=index, hashes=hashes, last_role=last_role)


def text_said(text: str) -> Said:
    """A plain text, as the one message of its conversation."""
    message = {"role": TEXT_ROLE, "content": text}
    return Said(
        raw=encode([message]), tail=[message], start=0, hashes=prefix_hashes([message]), last_role=message["role"]
    )


def _goes_on(raw: bytes, beginning: bytes) -> bool:
    """The array begins with these messages and is at its end then, or has another message."""
    return raw.startswith(beginning) and raw[len(beginning) : len(beginning) + 8].lstrip()[:1] in (b",", b"]")


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return value


def _message(value: Any, index: int) -> dict[str, Any]:
    """The message with the keys that matter, its content as one text."""
    if (
        type(value) is dict
        and len(value) == 2
        and value.get("role") in _PLAIN_ROLES
        and type(value.get("content")) is str
    ):
        return value
    where = f"messages[{index}]"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    said = value.get("role")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise InvalidRequest(f"{where}.role = {short(said)} is none of {', '.join(ROLES)}", param=f"{where}.role")
    for key, item in value.items():
        # Client libraries send back what they received, with null for each field that they know.
        if key not in MESSAGE_KEYS and item is not None and item != []:
            raise InvalidRequest(f"{where}.{key} is not served", param=f"{where}.{key}")
    message: dict[str, Any] = {"role": role, "content": _content(value.get("content"), f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if value.get(key) is not None:
            if not isinstance(value[key], str):
                raise InvalidRequest(f"{where}.{key} must be a text", param=f"{where}.{key}")
            message[key] = value[key]
    if role == "tool" and not message.get("tool_call_id"):
        raise InvalidRequest(f"{where} answers a tool call: tool_call_id says which", param=f"{where}.tool_call_id")
    if value.get("tool_calls"):
        if role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls are the assistant's alone", param=f"{where}.tool_calls")
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{where}.tool_calls")
    return message


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a text or a list of text parts", param=where)
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}: parts of type {short(kind)} are not served, only text", param=where, code="unsupported_value"
            )
    return text_of(value)


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list of calls", param=where)
    if is_nested_deeply(value):
        raise InvalidRequest(f"{where} is nested more than {MAX_NESTING} deep", param=where)
    return [_tool_call(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    """A call in OpenAI's form, its arguments as a text; without what a client that put it together may have left."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or value.get("type", "function") != "function":
        raise InvalidRequest(f"{where} must be a call with id, type function, function.name and arguments", param=where)
    call_id, arguments = value.get("id"), function.get("arguments")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{where}.id must be a text: the answer to the call names it", param=f"{where}.id")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else encode(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
