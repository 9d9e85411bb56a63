"""What clients of a served model may ask: OpenAI's chat completions and completions, checked.

A key that would change nothing is refused by name, as everywhere: silence would let a client believe that it works.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from turnmill.conversation.bodies import finite, parse_object
from turnmill.conversation.messages import Heard
from turnmill.conversation.requests import check_temperature
from turnmill.conversation.tools import NO_TOOLS, parse_tool_choice, parse_tools
from turnmill.errors import InvalidRequest
from turnmill.records import Sampling

MAX_CHOICES = 32
MAX_STOPS = 16
# OpenAI's default for completions.
_COMPLETION_TOKENS = 16
# Without effect on what is sampled.
_PLAIN = frozenset({"model", "messages", "prompt", "user", "metadata", "store", "safety_identifier"})
# Keys that may be present with a value that asks for what happens anyway.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "functions": lambda value: value == [],
    "function_call": lambda value: value == "none",
    "parallel_tool_calls": lambda value: value is True,
    "min_p": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "top_logprobs": lambda value: value == 0,
    "logit_bias": lambda value: value == {},
    "response_format": lambda value: value == {"type": "text"},
}


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request."""

    model: str
    # None for a text.
    messages: list[dict[str, Any]] | None
    text: str | None
    # OpenAI's form; None: there are none.
    tools: list[dict[str, Any]] | None
    # As `GenerateRequest.tool_choice`.
    tool_choice: str
    # `sampling.max_new_tokens` is not looked at.
    sampling: Sampling
    # None: as many as there is room for, or as the model was trained with.
    max_tokens: int | None
    num_choices: int
    seed: int | None
    is_streamed: bool
    has_usage_chunk: bool
    has_logprobs: bool


def parse_wish(body: bytes, *, is_chat: bool, temperature: float) -> Wish:
    """A body of `/v1/chat/completions`, or of `/v1/completions`; `temperature` holds where it gives none.

    Raises `InvalidRequest` naming the key.
    """
    raw = {key: value for key, value in parse_object(body).items() if value is not None}
    reader = _Reader(raw)
    model = reader.take("model", str, "a text")
    if model is None:
        raise InvalidRequest("model is missing", param="model")
    limits = [reader.whole(key, least=1) for key in ("max_tokens", "max_completion_tokens")]
    max_tokens = min((limit for limit in limits if limit is not None), default=None)
    temperature = reader.number("temperature", 0.0, 2.0, temperature)
    check_temperature(temperature)
    top_p = reader.number("top_p", 0.0, 1.0, 1.0)
    if top_p == 0.0:
        raise InvalidRequest("top_p must be greater than 0", param="top_p")
    top_k = reader.whole("top_k", least=-1)
    is_streamed = bool(reader.take("stream", bool, "true or false"))
    has_logprobs = bool(reader.take("logprobs", bool, "true or false"))
    if has_logprobs and (is_streamed or not is_chat):
        raise _unsupported("logprobs", True, "they come with chat completions that are not streamed; leave it out")
    offered = parse_tools(msgspec.json.encode(reader.take("tools", list, "a list of tools"))) if is_chat else NO_TOOLS
    wish = Wish(
        model=model,
        messages=_messages(raw) if is_chat else None,
        text=None if is_chat else _prompt(raw),
        tools=offered.tools,
        tool_choice=parse_tool_choice(reader.take("tool_choice", object, "a choice"), offered) if is_chat else "auto",
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=max(0, top_k or 0), stop=_stops(reader)),
        max_tokens=max_tokens if is_chat else max_tokens or _COMPLETION_TOKENS,
        num_choices=reader.whole("n", least=1, most=MAX_CHOICES) or 1,
        seed=reader.whole("seed"),
        is_streamed=is_streamed,
        has_usage_chunk=_has_usage_chunk(reader, is_streamed=is_streamed),
        has_logprobs=has_logprobs,
    )
    _check_rest({key: value for key, value in raw.items() if key not in reader.known}, is_chat=is_chat)
    return wish


class _Reader:
    """Values by key; remembers which keys were asked for."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self.known: set[str] = set()

    def take(self, key: str, kind: type, what: str) -> Any:
        """None where it is not there."""
        self.known.add(key)
        value = self._raw.get(key)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise InvalidRequest(f"{key} must be {what}", param=key)
        return value

    def whole(self, key: str, *, least: int | None = None, most: int | None = None) -> int | None:
        value: int | None = self.take(key, int, "an integer")
        if value is not None and least is not None and value < least:
            raise InvalidRequest(f"{key} must be at least {least}, not {value}", param=key)
        if value is not None and most is not None and value > most:
            raise InvalidRequest(f"{key} must be at most {most}, not {value}", param=key)
        return value

    def number(self, key: str, least: float, most: float, default: float) -> float:
        self.known.add(key)
        value = finite(self._raw.get(key, default))
        if value is None or not least <= value <= most:
            raise InvalidRequest(f"{key} must be a number from {least:g} to {most:g}", param=key)
        return value


def _check_rest(raw: dict[str, Any], *, is_chat: bool) -> None:
    """Of the keys that nothing else reads: they ask for nothing, or are refused."""
    for key, value in raw.items():
        if key == ("prompt" if is_chat else "messages") or (key not in _PLAIN and key not in _NEUTRAL):
            raise InvalidRequest(f"unknown parameter {key!r}", param=key)
        if key in _NEUTRAL and not _NEUTRAL[key](value):
            raise _unsupported(key, value, "leave it out")


def _unsupported(key: str, value: Any, why: str) -> InvalidRequest:
    shown = repr(value)
    return InvalidRequest(f"{key} = {shown[:60]} is not served: {why}", param=key, code="unsupported_value")


def _messages(raw: dict[str, Any]) -> list[dict[str, Any]]:
    said = Heard().read(msgspec.json.encode(raw.get("messages")))
    if said.last_role == "assistant":
        raise InvalidRequest("the last of the messages is the assistant's: nothing to answer", param="messages")
    return said.since(0)


def _prompt(raw: dict[str, Any]) -> str:
    prompt = raw.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt must be one text; ask once for each", param="prompt")
    return prompt


def _stops(reader: _Reader) -> tuple[str, ...]:
    value = reader.take("stop", object, "a text or a list of texts")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidRequest("stop must be a text or a list of texts, none of them empty", param="stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop holds at most {MAX_STOPS} texts", param="stop")
    return tuple(stops)


def _has_usage_chunk(reader: _Reader, *, is_streamed: bool) -> bool:
    options = reader.take("stream_options", dict, "an object")
    if options is None:
        return False
    if not is_streamed:
        raise InvalidRequest("stream_options are for streams only", param="stream_options")
    unknown = options.keys() - {"include_usage", "include_obfuscation"}
    if unknown or not all(isinstance(value, bool) for value in options.values()):
        raise InvalidRequest("stream_options may hold include_usage, true or false", param="stream_options")
    return bool(options.get("include_usage"))
