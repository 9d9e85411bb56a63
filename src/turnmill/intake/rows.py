"""One row of a data file, and everything that is wrong with it.

{"id": text, "metadata": {"prompt": text or messages, "answer"?: text, "task"?: text, "info"?: object or its text}}
"""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turnmill.errors import printable
from turnmill.intake import strict_json
from turnmill.intake.strict_json import NotStrict
from turnmill.records import Task

# Keys that either all rows of a file have or none.
OPTIONAL_KEYS = ("answer", "task", "info")
ROLES = ("system", "user", "assistant", "tool")

_ROW_KEYS = ("id", "metadata")
_METADATA_KEYS = ("prompt", *OPTIONAL_KEYS)
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")

# A row with more problems than this is told so once: what is in a row must not decide how much memory it takes.
_MAX_PER_ROW = 20

# Every rule by its stable name, as reports give it.
RULES = {
    "missing_file": "the file exists",
    "not_a_file": "it is a regular file, no folder, pipe or device",
    "unreadable": "it can be opened and read",
    "file_name": "its name ends in .jsonl",
    "empty_file": "it has at least one row",
    "encoding": "it is UTF-8, not compressed",
    "line_too_long": "a line has at most 8 MiB",
    "truncated": "the last line is whole",
    "json": "each line is one JSON value",
    "nesting": "objects and lists are nested at most 64 levels deep",
    "duplicate_key": "no object has a key twice",
    "finite_number": "numbers are finite: no NaN, no Infinity, no 1e999",
    "number": "integers have at most 4 300 digits",
    "unicode": "strings hold no lone surrogates",
    "object": "a row is an object",
    "unknown_key": "a row has only id and metadata, metadata only prompt, answer, task, info",
    "required": "id, metadata and metadata.prompt are there",
    "type": "each field has its type",
    "blank": "id, prompt and the content of messages hold more than white space",
    "info_json": "an info that is a string is the JSON text of an object",
    "role": "a message's role is system, user, assistant or tool",
    "message_key": "a message has only the keys that its role can have",
    "tool_call": 'tool_calls is a list of {"id", "type": "function", "function": {"name", "arguments"}}',
    "duplicate_id": "ids are unique in the file",
    "all_or_none": "answer, task, info: if one row has it, all rows have it",
    "environment": "the run's environment can play each row",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a data file."""

    # From 1; None when it is about the file as a whole.
    line: int | None
    # In characters, from 1; None where unknown.
    column: int | None
    # Path of the field, such as `metadata.answer`; None when it is about the line or the file.
    field: str | None
    # A key of `RULES`.
    rule: str
    message: str

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.line, self.column) if part is not None)
        return " ".join([*([f"{place}:"] if place else []), *([f"{self.field}:"] if self.field else []), self.message])


@dataclass(frozen=True, kw_only=True)
class Row:
    """What could be read of one line."""

    line: int
    # None where it is missing or no usable id.
    id: str | None
    # None where it is missing or no object.
    metadata: dict[str, Any] | None
    problems: tuple[Problem, ...]

    @property
    def task(self) -> Task:
        """The row as a task; only for one without problems."""
        assert self.id is not None and self.metadata is not None and not self.problems
        return Task(id=self.id, metadata=self.metadata)


def parse_row(data: bytes, *, line: int, offset: int = 0, is_open_end: bool = False) -> Row:
    """Read one line (without its line end), which starts at byte `offset` of the file.

    `is_open_end` says that the file ends in this line without a line end: if it doesn't parse, it may be cut off.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return _failed(line, _not_utf8(error, data, line=line, offset=offset, is_open_end=is_open_end))
    try:
        value = strict_json.loads(text)
    except NotStrict as error:
        return _failed(line, _not_strict(error, text, line=line, is_open_end=is_open_end))
    checker = _Checker(text, line)
    return checker.row(value)


def _failed(line: int, problem: Problem) -> Row:
    return Row(line=line, id=None, metadata=None, problems=(problem,))


def _not_utf8(error: UnicodeDecodeError, data: bytes, *, line: int, offset: int, is_open_end: bool) -> Problem:
    column = len(data[: error.start].decode()) + 1
    if is_open_end and error.reason == "unexpected end of data":
        message = "the file ends in the middle of a character: the last line is cut off"
        return Problem(line=line, column=column, field=None, rule="truncated", message=message)
    byte = data[error.start]
    latin = printable(bytes([byte]).decode("cp1252", errors="replace"))
    message = (
        f"byte 0x{byte:02X} at byte {offset + error.start} of the file is not UTF-8 "
        f'(Latin-1 or Windows-1252, where it is "{latin}"?): save the file as UTF-8'
    )
    return Problem(line=line, column=column, field=None, rule="encoding", message=message)


def _not_strict(error: NotStrict, text: str, *, line: int, is_open_end: bool) -> Problem:
    rule, message, column = error.rule, str(error), error.column
    if rule == "json" and is_open_end and strict_json.is_cut_off(text):
        rule, message = "truncated", "the file ends in the middle of this row: the last line is cut off"
    elif rule == "json" and text.startswith("\ufeff"):
        message = "a byte order mark in the middle of the file: remove it (were two files joined?)"
    elif rule == "json" and text.strip() in ("{", "["):
        message += "; each row must be on one line (is this pretty-printed JSON?)"
    elif rule == "json" and "\r" in text:
        message += "; lines must end in LF or CRLF, not in a lone CR"
    if error.key is not None:
        column = _column_of(text, error.key, occurrence=2)
    field = None if error.key is None else printable(error.key)
    return Problem(line=line, column=column, field=field, rule=rule, message=message)


def _column_of(text: str, key: str, *, occurrence: int = 1) -> int | None:
    """Column of a key that is in the line exactly `occurrence` times (of the last one); None: can't be told."""
    found = [match.start() + 1 for match in re.finditer(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)]
    return found[-1] if len(found) == occurrence else None


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _closest(name: str, names: Iterable[str]) -> str:
    close = [] if len(name) > 60 else difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


class _Checker:
    """The rules for the value of one line; collects all that do not hold."""

    def __init__(self, text: str, line: int) -> None:
        self._text = text
        self._line = line
        self._problems: list[Problem] = []

    def row(self, value: Any) -> Row:
        row_id, metadata = None, None
        if not isinstance(value, dict):
            self._add("object", None, f"a row must be an object with id and metadata, not {_kind(value)}", column=1)
        else:
            self._unknown(value, "", _ROW_KEYS)
            if self._required(value, "id", "") and self._text_field(value["id"], "id"):
                row_id = value["id"]
            if self._required(value, "metadata", "") and self._is(dict, value["metadata"], "metadata"):
                metadata = value["metadata"]
                self._metadata(metadata)
        return Row(line=self._line, id=row_id, metadata=metadata, problems=tuple(self._problems))

    def _metadata(self, metadata: dict[str, Any]) -> None:
        self._unknown(metadata, "metadata.", _METADATA_KEYS)
        if self._required(metadata, "prompt", "metadata."):
            prompt = metadata["prompt"]
            if isinstance(prompt, list):
                self._messages(prompt)
            else:
                self._text_field(prompt, "metadata.prompt", expected="a string or a list of messages")
        for key in ("answer", "task"):
            if key in metadata:
                self._is(str, metadata[key], f"metadata.{key}")
        if "info" in metadata:
            self._info(metadata["info"])

    def _info(self, info: Any) -> None:
        if isinstance(info, dict):
            return
        if not isinstance(info, str):
            self._add("type", "metadata.info", f"must be an object or its JSON text, not {_kind(info)}")
            return
        try:
            value = strict_json.loads(info)
        except NotStrict as error:
            self._add("info_json", "metadata.info", f"must be an object or its JSON text: {error}")
            return
        if not isinstance(value, dict):
            self._add("info_json", "metadata.info", f"its JSON text must be that of an object, not {_kind(value)}")

    # ---------------------------------------------------------------- messages

    def _messages(self, messages: list[Any]) -> None:
        if not messages:
            self._add("blank", "metadata.prompt", "the list of messages is empty")
        for index, message in enumerate(messages):
            if self._is_full:
                break
            field = f"metadata.prompt[{index}]"
            if self._is(dict, message, field):
                self._message(message, field)

    def _message(self, message: dict[str, Any], field: str) -> None:
        if not self._required(message, "role", f"{field}."):
            return
        role = message["role"]
        if role not in ROLES:
            hint = _closest(role, ROLES) if isinstance(role, str) else ""
            self._add(
                "role",
                f"{field}.role",
                f"{printable(json.dumps(role, ensure_ascii=False))} is not one of {', '.join(ROLES)}{hint}",
            )
            return
        owners = {"tool_calls": "assistant", "tool_call_id": "tool"}
        for key in message:
            if self._is_full:
                break
            if key not in _MESSAGE_KEYS:
                hint = _closest(key, _MESSAGE_KEYS)
                self._add("message_key", f"{field}.{printable(key)}", f"a message has no such key{hint}")
            elif owners.get(key, role) != role:
                self._add("message_key", f"{field}.{key}", f"only a message of role {owners[key]} has it")
        has_calls = role == "assistant" and message.get("tool_calls") is not None
        if has_calls:
            self._tool_calls(message["tool_calls"], f"{field}.tool_calls")
        if role == "tool" and self._required(message, "tool_call_id", f"{field}."):
            self._text_field(message["tool_call_id"], f"{field}.tool_call_id")
        # Beside tool calls an assistant's content may be missing, null or empty.
        if not (has_calls and message.get("content") in (None, "")) and self._required(message, "content", f"{field}."):
            self._text_field(message["content"], f"{field}.content")
        if "name" in message:
            self._text_field(message["name"], f"{field}.name")

    def _tool_calls(self, calls: Any, field: str) -> None:
        if not isinstance(calls, list) or not calls:
            self._add("tool_call", field, "must be a list with at least one tool call")
            return
        for index, call in enumerate(calls):
            if self._is_full:
                break
            at = f"{field}[{index}]"
            if not isinstance(call, dict):
                self._add("tool_call", at, f"must be an object, not {_kind(call)}")
                continue
            function = call.get("function")
            parts = {f"{at}.id": call.get("id")}
            if isinstance(function, dict):
                parts[f"{at}.function.name"] = function.get("name")
                if not isinstance(function.get("arguments"), str):
                    self._add("tool_call", f"{at}.function.arguments", "must be a string: the arguments as JSON text")
            else:
                self._add("tool_call", f"{at}.function", "must be an object with name and arguments")
            if call.get("type") != "function":
                self._add("tool_call", f"{at}.type", 'must be "function"')
            for name, value in parts.items():
                if not isinstance(value, str) or not value.strip():
                    self._add("tool_call", name, "must be a string that is not blank")

    # ---------------------------------------------------------------- single rules

    def _unknown(self, value: dict[str, Any], prefix: str, known: tuple[str, ...]) -> None:
        for key in value:
            if self._is_full:
                break
            if key not in known:
                where = f"{'metadata' if prefix else 'a row'} has only {', '.join(known)}"
                message = f"unknown key: {where}; custom fields belong into metadata.info{_closest(key, known)}"
                self._add("unknown_key", f"{prefix}{printable(key)}", message)

    def _required(self, value: dict[str, Any], key: str, prefix: str) -> bool:
        if key not in value:
            self._add("required", f"{prefix}{key}", "is missing")
        return key in value

    def _is(self, kind: type, value: Any, field: str, *, expected: str | None = None) -> bool:
        if not isinstance(value, kind):
            self._add("type", field, f"must be {expected or _kind(kind())}, not {_kind(value)}")
        return isinstance(value, kind)

    def _text_field(self, value: Any, field: str, *, expected: str | None = None) -> bool:
        """A string that is more than white space."""
        if not self._is(str, value, field, expected=expected):
            return False
        if not value.strip():
            self._add("blank", field, "must not be blank")
        return bool(value.strip())

    @property
    def _is_full(self) -> bool:
        return len(self._problems) > _MAX_PER_ROW

    def _add(self, rule: str, field: str | None, message: str, *, column: int | None = None) -> None:
        if self._is_full:
            return
        if len(self._problems) == _MAX_PER_ROW:
            field, message, column = None, "and more problems in this row", 1
        elif column is None and field is not None:
            column = _column_of(self._text, field.rsplit(".", 1)[-1])
        self._problems.append(Problem(line=self._line, column=column, field=field, rule=rule, message=message))
