"""The syntax of a model's tool calls, learned from its own chat template; no table of model names.

    stand-in calls -> the template -> what opens calls | one call | what stands between two | what closes them

A template that renders calls in a way that is not known here has no syntax: its replies are text.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from turnmill.errors import GenerationFailed
from turnmill.generation.call_forms import Form, JsonForm, Keys, NamedForm, ParameterForm, object_at
from turnmill.generation.chat_template import ANSWERED, ASKED, REPLY, ChatTemplate
from turnmill.generation.tool_syntax import ToolSyntax

# Arguments of the stand-in call of index i: {_KEY: _VALUE + i}.
_KEY, _VALUE = "turnmill_key", "turnmill-value-"
_THOUGHT = "turnmill-stand-in-thought"
_TOOL_NAME = "turnmill_tool"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "turnmill-tool-description",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}


def stand_in_call(index: int, call_id: str | None = None, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """A call as messages hold it."""
    given = {_KEY: f"{_VALUE}{index}"} if arguments is None else arguments
    function = {"name": _name(index), "arguments": json.dumps(given)}
    return {"id": call_id or _id(index), "type": "function", "function": function}


def call_end(text: str, index: int) -> int:
    """Where the arguments' value of a rendered stand-in call ends; -1 where the template did not render it."""
    value = f"{_VALUE}{index}"
    place = text.find(value)
    return place + len(value) if place >= 0 else -1


def _name(index: int) -> str:
    return f"turnmill_call_{index}"


def _id(index: int) -> str:
    return f"standin{index:02}"


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered reply of stand-in calls."""

    # Between the prompt and the reply: what every turn has there. None: the turn does not begin as the prompt does.
    before: str | None
    text: str
    # Ends the turn.
    end_text: str


class _Span(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rendered stand-in call is, and how it is written."""

    start: int
    end: int
    form: Form
    # Place of the name, and of the arguments.
    name: int
    arguments: int


def renders_tools(template: ChatTemplate) -> bool:
    """Whether a prompt tells the model which tools there are."""
    try:
        text = template.render([ASKED], [TOOL], generation_prompt=True)
    except GenerationFailed:
        return False
    return _TOOL_NAME in text


def learn(template: ChatTemplate) -> ToolSyntax | None:
    """None where the template renders no calls, or writes them in a way that is not known here.

    Also finds out whether the template wants the arguments of calls as objects or as text.
    """
    for as_text in (False, True):
        template.arguments_as_text = as_text
        syntax = _learn(template)
        if syntax is not None:
            return syntax
    template.arguments_as_text = False
    return None


def _learn(template: ChatTemplate) -> ToolSyntax | None:
    one, two = _reply_that_calls(template, 1), _reply_that_calls(template, 2)
    if one is None:
        return None
    parts = _parts(one, two) or _parts_with_parameters(template, one, two)
    words = _words(one.text[: parts.name], template.specials) if parts is not None else []
    if parts is None or (not words and not isinstance(parts.form, JsonForm)):
        # Not known, or such that any text might be a call.
        return None
    opener = one.text[: parts.start]
    around = thoughts(template)
    before = ""
    if around is not None and not around[0].strip():
        # The prompt has begun thoughts, which have to end before a call.
        before = around[1] if one.before is None else one.before
    written = one.text + (two.text if two is not None else "")
    ids = [template.tokenizer.convert_tokens_to_ids(token) for token in template.specials if token in written]
    opener_words = _words(opener, template.specials)
    return ToolSyntax(
        form=parts.form,
        opener=_pattern(opener_words),
        closer=_behind(parts.closer),
        separator=_behind(parts.separator) if parts.separator is not None else None,
        mark=opener_words[0] if opener_words else "",
        before_name=before + one.text[: parts.name],
        before_arguments=parts.before_arguments,
        end_text=one.end_text,
        special_ids=frozenset(ids),
        thoughts_begin=around[0].strip() if around is not None else "",
        thoughts_end=around[1].strip() if around is not None else None,
    )


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendered reply of one call is made of."""

    form: Form
    # Places of the call and of its name.
    start: int
    name: int
    # From the name to the arguments; None where these come first.
    before_arguments: str | None
    # The words behind the last call, and those between two; None where there is one call at most.
    closer: list[str]
    separator: list[str] | None


def _parts(one: _Reply, two: _Reply | None) -> _Parts | None:
    """Of calls whose arguments are objects."""
    spans, both = _spans(one.text, 1), _spans(two.text, 2) if two is not None else None
    if spans is None:
        return None
    (call,) = spans
    name_end = call.name + len(_name(0))
    between = two.text[both[0].end : both[1].start] if two is not None and both is not None else None
    return _Parts(
        form=call.form,
        start=call.start,
        name=call.name,
        before_arguments=one.text[name_end : call.arguments] if name_end < call.arguments else None,
        closer=_tags(one.text[call.end :]),
        separator=_tags(between) if between is not None else None,
    )


def _parts_with_parameters(template: ChatTemplate, one: _Reply, two: _Reply | None) -> _Parts | None:
    """Of calls whose arguments stand by themselves: what a call with one argument has, and a call without has not."""
    none = _reply_that_calls(template, 1, arguments={})
    value = f"{_VALUE}0"
    name, key, place = (one.text.find(mark) for mark in (_name(0), _KEY, value))
    if none is None or _name(0) not in none.text or not 0 <= name < key < place:
        return None
    head = one.text[name + len(_name(0)) : key]
    middle = one.text[key + len(_KEY) : place]
    tail = one.text[place + len(value) :]
    end, bare_end = _tags(tail), _tags(none.text.partition(_name(0))[2])
    num_common = _num_common(end[::-1], bare_end[::-1])
    closer, end, header = end[len(end) - num_common :], end[: len(end) - num_common], bare_end[: -num_common or None]
    opener = _tags(head)[len(header) :]
    if not (header and opener and end and closer and middle.strip()) or _tags(head)[: len(header)] != header:
        return None
    between = None
    if two is not None:
        between = _tags(two.text[two.text.find(value) + len(value) : two.text.find(_name(1))])[len(end) :]
    form = ParameterForm.of(
        head=_behind(header).pattern,
        opener=_pattern(opener).pattern,
        # White space that the template puts around a value is none of it.
        middle=_exact(middle.strip()) + _optional(middle[len(middle.rstrip()) :]),
        end=_optional(tail[: len(tail) - len(tail.lstrip())]) + _pattern(end).pattern,
    )
    before_arguments = head[: head.find(opener[0])]
    return _Parts(form=form, start=name, name=name, before_arguments=before_arguments, closer=closer, separator=between)


def _reply_that_calls(template: ChatTemplate, num_calls: int, arguments: dict[str, Any] | None = None) -> _Reply | None:
    """How the template renders a reply that only calls; None where it does not."""
    calls = [stand_in_call(i, arguments=arguments) for i in range(num_calls)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        text = template.render([ASKED, message], [TOOL], generation_prompt=False)
        prompt = template.render([ASKED], [TOOL], generation_prompt=True)
        start = reply_start(template, text, [TOOL])
    except GenerationFailed:
        return None
    reply = text[start:]
    last = _name(num_calls - 1)
    place = call_end(reply, num_calls - 1) if arguments is None else reply.find(last) + len(last)
    end = _end(template, reply[place:]) if place >= 0 else None
    if end is None:
        return None
    before = text[len(prompt) : start] if text.startswith(prompt) else None
    return _Reply(before=before, text=reply[: place + end[0]], end_text=end[1])


def reply_start(template: ChatTemplate, text: str, tools: list[dict[str, Any]] | None) -> int:
    """Where the reply begins in the rendered text of the stand-in question and a reply."""
    prompt = template.render([ASKED], tools, generation_prompt=True)
    plain = template.render(ANSWERED, tools, generation_prompt=False)
    # A turn begins with what every turn does (no thoughts, for instance), which the prompt may hold only a part of.
    num_begun = _num_common(text, plain[: plain.find(REPLY)])
    return max(num_begun, len(prompt) if text.startswith(prompt) else 0)


def _end(template: ChatTemplate, tail: str) -> tuple[int, str] | None:
    """Where the turn ends in what follows the last arguments, and by which token."""
    place = tail.find(template.end_text)
    if place >= 0:
        return place, template.end_text
    # Another one than ends replies without calls.
    found = max(((tail.rfind(token), token) for token in template.specials), default=(-1, ""))
    return found if found[0] >= 0 else None


def _spans(text: str, num_calls: int) -> list[_Span] | None:
    spans: list[_Span] = []
    for index in range(num_calls):
        span = _span(text, spans[-1].end if spans else 0, index)
        if span is None:
            return None
        spans.append(span)
    return spans


def _span(text: str, place: int, index: int) -> _Span | None:
    """The stand-in call of this index: the outermost object that holds it, or its name and the object behind it."""
    name, arguments = _name(index), {_KEY: f"{_VALUE}{index}"}
    for match in re.finditer(r"\{", text[place:]):
        start = place + match.start()
        found = object_at(text, start)
        if found is None:
            continue
        value, end = found
        name_place = text.find(name, place)
        if value == arguments:
            if not place <= name_place < start:
                return None
            middle = text[name_place + len(name) : start].replace(_id(index), "\0")
            form: Form = NamedForm.of(_behind(middle.split()).pattern.replace("\0", r"\w+"))
            return _Span(start=name_place, end=end, form=form, name=name_place, arguments=start)
        name_path = _path_to(value, name)
        # Some templates print arguments as the text that clients send.
        arguments_path = _path_to(value, arguments) or _path_to(value, json.dumps(arguments))
        if name_path is None or arguments_path is None:
            continue
        form = JsonForm(name_path=name_path, arguments_path=arguments_path, id_path=_path_to(value, _id(index)))
        return _Span(start=start, end=end, form=form, name=name_place, arguments=_value_place(text, start, index))
    return None


def _value_place(text: str, start: int, index: int) -> int:
    """Where the arguments begin inside of a rendered call."""
    before_key = text[start : text.find(_KEY, start)]
    return start + before_key.rfind("{")


def _path_to(value: Any, target: Any, path: Keys = ()) -> Keys | None:
    if value == target:
        return path
    items: Iterator[tuple[str, Any]] = iter(value.items()) if isinstance(value, dict) else iter(())
    return next((found for key, item in items if (found := _path_to(item, target, (*path, key))) is not None), None)


def thoughts(template: ChatTemplate) -> tuple[str, str] | None:
    """What the template puts in front of a reply's thoughts, and behind them; None where it knows none."""
    message = {**ANSWERED[1], "reasoning_content": _THOUGHT}
    try:
        text = template.render([ASKED, message], generation_prompt=False)
        prompt = template.render([ASKED], generation_prompt=True)
    except GenerationFailed:
        return None
    before, found, behind = text.partition(_THOUGHT)
    after, is_answered, _ = behind.partition(REPLY)
    return (before[_num_common(before, prompt) :], after) if found and is_answered and after.strip() else None


def _num_common(first: Sequence[str], second: Sequence[str]) -> int:
    """How many characters, or words, both begin with."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _words(text: str, specials: Collection[str]) -> list[str]:
    """The parts of a text between which white space may come and go."""
    marks = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
    parts = re.split(f"({marks})", text) if marks else [text]
    return [word for part in parts for word in ([part] if part in specials else part.split())]


def _tags(text: str) -> list[str]:
    """As `_words`, with tags by themselves."""
    return re.findall(r"<[^<>\s]*>?|>|[^<>\s]+", text)


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    """Begins with a word, where there is one: nothing is searched for from every space of a text."""
    return re.compile("".join(re.escape(word) + r"\s*" for word in words))


def _behind(words: Sequence[str]) -> re.Pattern[str]:
    """As `_pattern`, after any white space."""
    return re.compile(r"\s*" + _pattern(words).pattern)


def _exact(text: str) -> str:
    """A pattern in which white space may come and go between words, and nothing follows the last."""
    return r"\s*".join(re.escape(word) for word in _tags(text))


def _optional(space: str) -> str:
    return f"(?:{re.escape(space)})?"
