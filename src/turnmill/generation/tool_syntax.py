"""How a model writes tool calls: reads them out of a reply, and begins a reply that has to call.

    sampled text -> ToolSyntax.read -> content, calls           forced call -> ToolSyntax.opening -> how a reply begins

A call is a JSON object that holds name and arguments under whatever keys ({"name": ..., "parameters": {...}}), or a
name, a text and the arguments as a JSON object. White space between the parts is as the model likes it. A call that
can't be read is text: the model made it, and gets what follows from it.
"""

import json
import re
from typing import Any

import msgspec

from turnmill.errors import GenerationFailed

# The strictest template wants nine letters and digits.
ID_LENGTH = 9
_ID = re.compile(r"[a-zA-Z0-9]{9}")
# Keys that lead to a part of an object.
Keys = tuple[str, ...]


class ReadCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the model wrote it."""

    name: str
    # A JSON object.
    arguments: str
    # Of nine letters and digits; None where the model wrote no such.
    id: str | None


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Of one call."""

    # Keys of an object that lead to its parts; `name_path` None: the name stands by itself, the arguments behind it.
    name_path: Keys | None
    arguments_path: Keys = ()
    id_path: Keys | None = None
    # Between a name that stands by itself and the arguments.
    middle: re.Pattern[str] = re.compile("")


class ToolSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """Reads calls and begins them."""

    form: Form
    # Begin and end of a reply's calls; an opener of white space only: calls are all that the reply says.
    opener: re.Pattern[str]
    closer: re.Pattern[str]
    # None: the template knows one call a reply.
    separator: re.Pattern[str] | None
    # What a reply that calls begins with, for streams; "" where it is the call itself.
    mark: str
    # The first call up to its name; from the name to the arguments, None where the arguments come first.
    before_name: str
    before_arguments: str | None
    # Ends a turn that calls.
    end_text: str
    # Control tokens that calls are written with.
    special_ids: frozenset[int]
    # What thoughts end with, in which nothing is called; None: the template knows no thoughts.
    thoughts_end: str | None

    def read(self, text: str) -> tuple[str, list[ReadCall]]:
        """The text outside of calls, and the calls; all of the text where nothing in it can be read as a call."""
        start = self._thoughts(text)
        if not self.mark:
            start += _num_spaces(text[start:])
            group = self._group(text, start)
            is_all = group is not None and not text[group[1] :].strip()
            return (_said(text[:start]), group[0]) if group is not None and is_all else (text, [])
        calls: list[ReadCall] = []
        outside: list[str] = []
        place, search = 0, start
        while (match := self.opener.search(text, search)) is not None:
            group = self._group(text, match.end())
            if group is None:
                search = match.end()
                continue
            outside.append(text[place : match.start()])
            calls += group[0]
            place = search = group[1]
        return (_said("".join([*outside, text[place:]])) if calls else text), calls

    def num_certain(self, text: str) -> int:
        """Characters at the beginning of a growing text that no call will take up."""
        start = self._thoughts(text)
        behind = text[start:]
        if not self.mark:
            is_open = behind.lstrip()[:1] in ("", "{")
            held = start if is_open else len(text) - overlap(text, self.thoughts_end or "")
        else:
            place = behind.find(self.mark)
            held = start + place if place >= 0 else len(text) - overlap(text, self.mark)
        # White space in front of a call is no content.
        return len(text[:held].rstrip())

    def opening(self, name: str | None) -> str:
        """What a reply that must call begins with, up to the name, or through the one that is given.

        Raises `GenerationFailed` where the template writes arguments in front of the name.
        """
        if name is None:
            return self.before_name.rstrip()
        if self.before_arguments is None:
            raise GenerationFailed("invalid_request", "this model's tool calls can't be begun by their name")
        spelled = json.dumps(name, ensure_ascii=False)[1:-1] if self.form.name_path is not None else name
        return (self.before_name + spelled + self.before_arguments).rstrip()

    def _thoughts(self, text: str) -> int:
        """Where they end."""
        place = text.rfind(self.thoughts_end) if self.thoughts_end else -1
        return place + len(self.thoughts_end or "") if place >= 0 else 0

    def _group(self, text: str, place: int) -> tuple[list[ReadCall], int] | None:
        """The calls from `place` on, and where what closes them ends."""
        found = _call_at(self.form, text, place)
        calls: list[ReadCall] = []
        while found is not None:
            call, place = found
            calls.append(call)
            between = self.separator.match(text, place) if self.separator is not None else None
            found = _call_at(self.form, text, between.end()) if between is not None else None
        end = self.closer.match(text, place) if calls else None
        return (calls, end.end()) if end is not None else None


# ---------------------------------------------------------------- reading


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


def _call_at(form: Form, text: str, place: int) -> tuple[ReadCall, int] | None:
    if form.name_path is None:
        head = re.compile(rf"([^\s\[\]{{}}<>]+?){form.middle.pattern}").match(text, place)
        found = object_at(text, head.end()) if head is not None else None
        call = _read_call(head[1], found[0], None) if head is not None and found is not None else None
    else:
        found = object_at(text, place)
        if found is None:
            return None
        parts = [_at(found[0], path) for path in (form.name_path, form.arguments_path, form.id_path or ())]
        call = _read_call(*parts)
    return (call, found[1]) if call is not None and found is not None else None


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


def _said(outside: str) -> str:
    """White space alone says nothing."""
    return outside if outside.strip() else ""


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip())


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
