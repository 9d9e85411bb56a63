"""What clients may ask, checked before anything happens: chat bodies and reports, from JSON to typed requests.

A key that would change nothing is refused by name, never ignored: silence would let a client believe that it works.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from turnmill.conversation.branches import MAX_NESTING, is_nested_deeply, prefix_hashes, request_identity, text_of
from turnmill.errors import InvalidRequest
from turnmill.records import InvalidReason, Sampling

ROLES = ("system", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
# Read elsewhere or without effect on what is sampled.
PLAIN_KEYS = frozenset({"model", "messages", "request_id", "sample_id", "user", "metadata", "store"})
MAX_TEXT = 4096
# What an answer says that it is from where the client named none.
DEFAULT_MODEL = "turnmill"
# Requests of an attempt that are remembered: as many branches are gone on from without a full check.
MAX_HEARD = 4


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body."""
    value = _decoded(body)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _decoded(raw: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_json(error) from error


def _parts(body: bytes) -> dict[str, msgspec.Raw]:
    """The JSON object in a request body, its values as they came."""
    try:
        return _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_json(error) from error


def _no_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid JSON: {error}")


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


# ---------------------------------------------------------------- chat


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a request, checked; those that were checked before are not read again."""

    # JSON array as it came.
    raw: bytes
    # The messages from index `start` on, as they came.
    tail: list[Any]
    start: int
    # Prefix hashes of all messages.
    hashes: list[bytes]
    # Role of the last message.
    last_role: str

    def since(self, index: int) -> list[dict[str, Any]]:
        """The messages from `index` on, with the keys that matter and their content as text."""
        late = self.tail[index - self.start :] if index >= self.start else msgspec.json.decode(self.raw)[index:]
        return [_message(item, index + offset) for offset, item in enumerate(late)]


class Heard:
    """The latest requests of one attempt. One that begins with the bytes of another is read from there on only.

    So a turn costs the same however long the conversation is. Every client writes what it said before as it wrote it
    then; for one that does not, each request is read as a whole.
    """

    def __init__(self) -> None:
        # (JSON of the messages without the closing bracket, their prefix hashes, the last one's role), the latest last.
        self._latest: list[tuple[bytes, list[bytes], str]] = []

    def read(self, raw: bytes) -> Said:
        """The JSON array of a request's messages; raises `InvalidRequest` for the first that is not served."""
        known = max(
            (entry for entry in self._latest if _goes_on(raw, entry[0])), key=lambda entry: len(entry[0]), default=None
        )
        tail: list[Any] = []
        hashes: list[bytes] = []
        last_role = ""
        if known is None:
            tail = _messages(_decoded(raw))
        else:
            hashes, last_role = list(known[1]), known[2]
            rest = raw[len(known[0]) :].lstrip()
            if rest != b"]":
                tail = _messages(_decoded(b"[" + rest[1:]))
            # Gone on from: in a conversation without branches one entry is all there is.
            self._latest.remove(known)
        start = len(hashes)
        new = [_message(item, start + index) for index, item in enumerate(tail)]
        hashes += prefix_hashes(new, hashes[-1] if hashes else b"")
        last_role = new[-1]["role"] if new else last_role
        self._latest = [*self._latest[1 - MAX_HEARD :], (raw[:-1].rstrip(), hashes, last_role)]
        return Said(raw=raw, tail=tail, start=start, hashes=hashes, last_role=last_role)


def _goes_on(raw: bytes, beginning: bytes) -> bool:
    """The array begins with these messages and is at its end then, or has another message."""
    return raw.startswith(beginning) and raw[len(beginning) : len(beginning) + 8].lstrip()[:1] in (b",", b"]")


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One chat completion that the run can serve."""

    said: Said
    # Of the whole request: what a transport retry repeats.
    identity: str
    sampling: Sampling
    model: str
    # Body key `request_id`: marks a transport retry like an Idempotency-Key.
    request_id: str | None
    # The sample that the client believes to play; None: not said.
    sample_id: str | None
    # As the client sent them; None: none.
    tools: list[dict[str, Any]] | None = None
    # See `GenerateRequest.tool_choice`.
    tool_choice: str = "auto"
    num_choices: int = 1
    # `/v1/completions`: the one message is a text.
    is_text: bool = False
    is_streamed: bool = False
    has_usage_chunk: bool = False
    has_logprobs: bool = False
    # The tokens of prompt and reply come with the answer.
    has_token_ids: bool = False


# Keys that may be present with a value that asks for what happens anyway.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "stream": lambda value: value is False,
    "stream_options": lambda value: value is None,
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value == "none",
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "top_k": lambda value: value in (0, -1),
    "top_p": lambda value: value == 1,
    "min_p": lambda value: value == 0,
    "stop": lambda value: value == [],
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "logit_bias": lambda value: value == {},
    "response_format": lambda value: value == {"type": "text"},
}
_WHY = {
    "n": "one choice a call is made",
    "stream": "answers are not streamed",
    "tools": "tools are not served",
}


def parse_chat(body: bytes, allowed: Sampling, heard: Heard) -> ChatRequest:
    """A chat body against the run's sampling parameters; raises `InvalidRequest` naming the key."""
    parts = _parts(body)
    messages = parts.pop("messages", None)
    raw = {key: _decoded(part) for key, part in parts.items()}
    max_new_tokens = allowed.max_new_tokens
    for key, value in raw.items():
        if key in PLAIN_KEYS or value is None:
            continue
        if key in ("max_tokens", "max_completion_tokens"):
            max_new_tokens = min(max_new_tokens, _token_limit(key, value, allowed.max_new_tokens))
        elif key == "temperature":
            if isinstance(value, bool) or value != allowed.temperature:
                raise _not_allowed(key, value, f"the run samples at temperature {allowed.temperature:g}; leave it out")
        elif key not in _NEUTRAL:
            raise InvalidRequest(f"unknown parameter {key!r}", param=key)
        elif not _NEUTRAL[key](value):
            why = _WHY.get(key, "calls use the run's sampling parameters; leave it out")
            raise _not_allowed(key, value, why)
    sampling = (
        allowed
        if max_new_tokens == allowed.max_new_tokens
        else msgspec.structs.replace(allowed, max_new_tokens=max_new_tokens)
    )
    said = heard.read(b"null" if messages is None else bytes(messages))
    if said.last_role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's; a call answers a user, system or tool message", param="messages"
        )
    return ChatRequest(
        said=said,
        identity=request_identity(said.hashes[-1], sampling),
        sampling=sampling,
        model=_text(raw, "model") or DEFAULT_MODEL,
        request_id=_text(raw, "request_id"),
        sample_id=_text(raw, "sample_id"),
    )


def _not_allowed(key: str, value: Any, why: str) -> InvalidRequest:
    return InvalidRequest(f"{key} = {_short(value)} is not served: {why}", param=key, code="unsupported_value")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _token_limit(key: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{key} must be a positive integer, not {_short(value)}", param=key)
    if value > most:
        raise _not_allowed(key, value, f"the run allows at most {most} new tokens a call")
    return value


def _text(raw: dict[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and (not isinstance(value, str) or len(value) > MAX_TEXT):
        raise InvalidRequest(f"{key} must be a text of at most {MAX_TEXT} characters", param=key)
    return value


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return value


def _message(value: Any, index: int) -> dict[str, Any]:
    """The message with the keys that matter, its content as one text."""
    if type(value) is dict and len(value) == 2 and value.get("role") in ROLES and type(value.get("content")) is str:
        return value
    where = f"messages[{index}]"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role = value.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role = {_short(role)} is none of {', '.join(ROLES)}", param=f"{where}.role")
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
    if value.get("tool_calls"):
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
            raise InvalidRequest(f"{where}: parts of type {_short(kind)} are not served, only text", param=where)
    return text_of(value)


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    def is_call(item: Any) -> bool:
        function = item.get("function") if isinstance(item, dict) else None
        return isinstance(function, dict) and isinstance(function.get("name"), str)

    if not isinstance(value, list) or not all(map(is_call, value)):
        raise InvalidRequest(f"{where} must be a list of calls with function.name and function.arguments", param=where)
    if is_nested_deeply(value):
        raise InvalidRequest(f"{where} is nested more than {MAX_NESTING} deep", param=where)
    return value


# ---------------------------------------------------------------- reports


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says about the end of an attempt: a score, or a reason why there is none."""

    sample_id: str
    score: float | None
    metrics: dict[str, float]
    reason: InvalidReason | None
    stop_reason: str | None
    detail: str | None

    def check_range(self, rewards: dict[str, list[float]]) -> None:
        """Raises `InvalidRequest` for a score outside `rewards["range"]`."""
        low, high = rewards["range"]
        if self.score is not None and not low <= self.score <= high:
            raise InvalidRequest(
                f"aggregate_reward_score {self.score:g} is outside the range {low:g} to {high:g} of the request",
                param="aggregate_reward_score",
            )


_REPORT_KEYS = ("id", "aggregate_reward_score", "metrics_list")
_REPORT_OPTIONAL = ("reason", "stop_reason", "detail")


def parse_report(body: bytes) -> Report:
    """A report body; raises `InvalidRequest` naming the key."""
    raw = parse_object(body)
    for key in _REPORT_KEYS:
        if key not in raw:
            raise InvalidRequest(f"a report needs {', '.join(_REPORT_KEYS)}; {key} is missing", param=key)
    for key in raw:
        if key not in _REPORT_KEYS + _REPORT_OPTIONAL:
            raise InvalidRequest(f"unknown key {key!r}", param=key)
    score = raw["aggregate_reward_score"]
    if score is not None:
        score = _number(score, "aggregate_reward_score")
    reason = _text(raw, "reason")
    if reason is not None and reason not in [*InvalidReason]:
        raise InvalidRequest(f"reason {reason!r} is none of {', '.join(InvalidReason)}", param="reason")
    if (score is None) != (reason is not None):
        raise InvalidRequest(
            "a report has either a score or a reason: null as aggregate_reward_score needs a reason "
            f"({', '.join(InvalidReason)}), and a score excludes one",
            param="reason",
        )
    sample_id, detail = _text(raw, "id"), raw.get("detail")
    if detail is not None and not isinstance(detail, str):
        raise InvalidRequest("detail must be a text", param="detail")
    if not sample_id:
        raise InvalidRequest("id must be the id of the sample", param="id")
    return Report(
        sample_id=sample_id,
        score=score,
        metrics=_metrics(raw["metrics_list"]),
        reason=InvalidReason(reason) if reason is not None else None,
        stop_reason=_text(raw, "stop_reason"),
        # For people only, so its beginning is better than a refused report.
        detail=detail[:MAX_TEXT] if detail else None,
    )


def _number(value: Any, where: str) -> float:
    number = finite(value)
    if number is None:
        raise InvalidRequest(f"{where} must be a finite number, not {_short(value)}", param=where)
    return number


def finite(value: Any) -> float | None:
    """The number that a client sent; None for what is none, or beyond a float: JSON's integers have no end."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, list):
        raise InvalidRequest("metrics_list must be a list", param="metrics_list")
    metrics: dict[str, float] = {}
    for index, item in enumerate(value):
        where = f"metrics_list[{index}]"
        if not isinstance(item, dict) or item.keys() != {"name", "value", "type"}:
            raise InvalidRequest(f"{where} must have name, value and type", param=where)
        if not isinstance(item["name"], str) or not item["name"]:
            raise InvalidRequest(f"{where}.name must be a text", param=f"{where}.name")
        if item["type"] not in ("Reward", "Metric"):
            raise InvalidRequest(f"{where}.type must be Reward or Metric", param=f"{where}.type")
        if item["name"] in metrics:
            raise InvalidRequest(f"{where}.name {item['name']!r} is there twice", param=f"{where}.name")
        metrics[item["name"]] = _number(item["value"], f"{where}.value")
    return metrics
