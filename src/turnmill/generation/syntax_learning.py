"""The syntax of a model's tool calls, learned from its own chat template; no table of model names.

    stand-in calls -> the template -> what opens calls | one call | what stands between two | what closes them

A template that renders calls in a way that is not known here has no syntax: its replies are text.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from turnmill.errors import GenerationFailed
from turnmill.generation.chat_template import ANSWERED, ASKED, REPLY, ChatTemplate
from turnmill.generation.tool_syntax import Form, Keys, ToolSyntax, object_at

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


def stand_in_call(index: int, call_id: str | None = None) -> dict[str, Any]:
    """A call as messages hold it."""
    arguments = json.dumps({_KEY: f"{_VALUE}{index}"})
    function = {"name": _name(index), "arguments": arguments}
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

    # Between the prompt and the reply: what every turn has there.
    before: str
    text: str
    # Of it what stands behind the last arguments' value.
    tail: str
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
    one = _reply_that_calls(template, 1)
    if one is None:
        return None
    text, tail, end_text = one.text, one.tail, one.end_text
    spans = _spans(text, 1)
    if spans is None:
        return None
    (call,) = spans
    two = _reply_that_calls(template, 2)
    both = _spans(two.text, 2) if two is not None else None
    opener = text[: call.start]
    specials = template.specials
    words = _words(opener, specials)
    if not words and call.form.name_path is None:
        # Any text might be a call.
        return None
    between = two.text[both[0].end : both[1].start] if two is not None and both is not None else None
    written = opener + tail + (between or "") + text[call.start : call.end]
    around = thoughts(template)
    # The prompt has begun thoughts, which have to end before a call.
    is_thinking = around is not None and not around[0].strip()
    ids = [template.tokenizer.convert_tokens_to_ids(token) for token in specials if token in written]
    return ToolSyntax(
        form=call.form,
        opener=_pattern(opener, specials),
        closer=_behind(text[call.end :], specials),
        separator=_behind(between, specials) if between is not None else None,
        mark=words[0] if words else "",
        before_name=(one.before if is_thinking else "") + text[: call.name],
        before_arguments=text[call.name + len(_name(0)) : call.arguments] if call.name < call.arguments else None,
        end_text=end_text,
        special_ids=frozenset(ids),
        thoughts_end=around[1].strip() if around is not None else None,
    )


def _reply_that_calls(template: ChatTemplate, num_calls: int) -> _Reply | None:
    """How the template renders a reply that only calls; None where it does not."""
    message = {"role": "assistant", "content": "", "tool_calls": [stand_in_call(i) for i in range(num_calls)]}
    try:
        text = template.render([ASKED, message], [TOOL], generation_prompt=False)
        prompt = template.render([ASKED], [TOOL], generation_prompt=True)
        start = reply_start(template, text, [TOOL])
    except GenerationFailed:
        return None
    reply = text[start:]
    place = call_end(reply, num_calls - 1)
    end = _end(template, reply[place:]) if place >= 0 else None
    if end is None:
        return None
    before = text[len(prompt) : start] if text.startswith(prompt) else ""
    return _Reply(before=before, text=reply[: place + end[0]], tail=reply[place : place + end[0]], end_text=end[1])


def reply_start(template: ChatTemplate, text: str, tools: list[dict[str, Any]] | None) -> int:
    """Where the reply begins in the rendered text of the stand-in question and a reply."""
    prompt = template.render([ASKED], tools, generation_prompt=True)
    plain = template.render(ANSWERED, tools, generation_prompt=False)
    # A turn begins with what every turn does (no thoughts, for instance), which the prompt may hold only a part of.
    begun = _common(text, plain[: plain.find(REPLY)])
    return max(len(begun), len(prompt) if text.startswith(prompt) else 0)


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
            pattern = _pattern(middle, frozenset()).pattern.replace("\0", r"\w+")
            form = Form(name_path=None, middle=re.compile(r"\s*" + pattern))
            return _Span(start=name_place, end=end, form=form, name=name_place, arguments=start)
        name_path = _path_to(value, name)
        # Some templates print arguments as the text that clients send.
        arguments_path = _path_to(value, arguments) or _path_to(value, json.dumps(arguments))
        if name_path is None or arguments_path is None:
            continue
        form = Form(name_path=name_path, arguments_path=arguments_path, id_path=_path_to(value, _id(index)))
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
    return (before[len(_common(before, prompt)) :], after) if found and is_answered and after.strip() else None


def _common(first: str, second: str) -> str:
    num = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return first[:num]


def _words(text: str, specials: Collection[str]) -> list[str]:
    """The parts of a text between which white space may come and go."""
    marks = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
    parts = re.split(f"({marks})", text) if marks else [text]
    return [word for part in parts for word in ([part] if part in specials else part.split())]


def _pattern(text: str, specials: Collection[str]) -> re.Pattern[str]:
    """Begins with a word, where there is one: nothing is searched for from every space of a text."""
    return re.compile("".join(re.escape(word) + r"\s*" for word in _words(text, specials)))


def _behind(text: str, specials: Collection[str]) -> re.Pattern[str]:
    """As `_pattern`, after any white space."""
    return re.compile(r"\s*" + _pattern(text, specials).pattern)
