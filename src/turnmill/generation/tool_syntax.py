"""How a model writes tool calls: reads them out of a reply, and begins a reply that has to call.

    sampled text -> ToolSyntax.read -> content, calls           forced call -> ToolSyntax.opening -> how a reply begins

White space between the parts is as the model likes it. A call that can't be read is text: the model made it, and gets
what follows from it.
"""

import re
from typing import Any

import msgspec
from msgspec import structs

from turnmill.errors import GenerationFailed
from turnmill.generation.call_forms import Form, ParameterForm, ReadCall, Schemas, schemas_of
from turnmill.generation.texts import overlap

# The strictest template wants nine letters and digits.
ID_LENGTH = 9


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
    # What thoughts begin with ("": the prompt has begun them) and end with; nothing is called in them. None: there are
    # none.
    thoughts_begin: str
    thoughts_end: str | None
    # Of the tools that may be called, where arguments are written without quotes.
    schemas: Schemas = {}

    def knowing(self, tools: list[dict[str, Any]] | None) -> "ToolSyntax":
        """The syntax for a request with these tools."""
        return structs.replace(self, schemas=schemas_of(tools)) if isinstance(self.form, ParameterForm) else self

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
        return (self.before_name + self.form.spelled(name) + self.before_arguments).rstrip()

    def _thoughts(self, text: str) -> int:
        """Where they end: at the end of the text where they do not."""
        if self.thoughts_end is None or not text.lstrip().startswith(self.thoughts_begin):
            return 0
        place = text.find(self.thoughts_end)
        if place < 0:
            # Where the prompt begins them it may have ended them as well.
            return len(text) if self.thoughts_begin else 0
        return place + len(self.thoughts_end)

    def _group(self, text: str, place: int) -> tuple[list[ReadCall], int] | None:
        """The calls from `place` on, and where what closes them ends."""
        found = self.form.at(text, place, self.schemas)
        calls: list[ReadCall] = []
        while found is not None:
            call, place = found
            calls.append(call)
            between = self.separator.match(text, place) if self.separator is not None else None
            found = self.form.at(text, between.end(), self.schemas) if between is not None else None
        end = self.closer.match(text, place) if calls else None
        return (calls, end.end()) if end is not None else None


def _said(outside: str) -> str:
    """White space alone says nothing."""
    return outside if outside.strip() else ""


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip())
