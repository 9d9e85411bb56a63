"""What clients may ask, checked before anything happens: bodies of chats and of completions, as typed requests.

A key that would change nothing is refused by name, never ignored: silence would let a client believe that it works.
"""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from turnmill.config import Config
from turnmill.conversation.bodies import decoded, finite, flag, parts_of, short, text_at, whole
from turnmill.conversation.branches import request_identity
from turnmill.conversation.messages import Heard, Said, text_said
from turnmill.conversation.tools import NO_TOOLS, Offered, parse_tool_choice
from turnmill.errors import InvalidRequest
from turnmill.records import MIN_TEMPERATURE, Purpose, RunKind, Sampling

# The run's model, for clients that name none, and for those that do not know which it is.
DEFAULT_MODEL = "turnmill"
MAX_CHOICES = 16
MAX_STOPS, MAX_STOP_TEXT = 16, 256
# OpenAI's default for completions.
_TEXT_TOKENS = 16
_SEEDS = (-(2**63), 2**63 - 1)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a run offers its clients."""

    # Of calls that say nothing else.
    sampling: Sampling = Sampling()
    # Names of its model.
    models: tuple[str, ...] = (DEFAULT_MODEL,)
    # A client's own sampling parameters are recorded with its calls; False: they are refused.
    takes_sampling: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        kind: RunKind,
        *,
        served_model_names: Sequence[str] = (),
        client_sampling: str = "refuse",
        purpose: Purpose = Purpose.TRAIN,
    ) -> "Offer":
        """What a run of this kind with these parameters offers in rollouts of a purpose."""
        base = config.base_model
        # A foreign trainer's model is known to it alone; of a folder only the name is anybody's business.
        own = () if kind is RunKind.EXTERNAL else (PurePath(base).name,) if base.startswith("/") else (base,)
        return cls(
            sampling=Sampling(
                temperature=config.val_temperature if purpose is Purpose.EVAL else config.temperature,
                max_new_tokens=config.max_new_tokens,
            ),
            models=tuple(dict.fromkeys((DEFAULT_MODEL, *own, *served_model_names))),
            takes_sampling=client_sampling == "record",
        )

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries; raises `InvalidRequest` for a model that is not the run's.

        A judge's call that came here by mistake must not be answered by the policy.
        """
        if name is not None and name not in self.models:
            raise InvalidRequest(
                f"the model {short(name)} is not served here; the run's model is {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return name or DEFAULT_MODEL


# What the rollouts of a run may be for. Of a foreign trainer's nobody knows which it evaluates with.
_PURPOSES = {
    RunKind.TRAIN: tuple(Purpose),
    RunKind.EVAL: (Purpose.EVAL,),
    RunKind.EXTERNAL: (Purpose.TRAIN,),
}


def offers_of(config: Config, kind: RunKind) -> dict[Purpose, Offer]:
    """What a run of this kind with these parameters offers, by what its rollouts are for."""
    return {
        purpose: Offer.of(
            config,
            kind,
            served_model_names=config.served_model_names,
            client_sampling=config.client_sampling,
            purpose=purpose,
        )
        for purpose in _PURPOSES[kind]
    }


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
    # In OpenAI's form, with what a template may render; None: none.
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


# Read elsewhere or without effect on what is sampled.
_PLAIN = frozenset(
    "model request_id sample_id user metadata store safety_identifier prompt_cache_key prompt_cache_retention".split()
)
_READ = frozenset(
    "max_tokens temperature top_p top_k stop seed n stream stream_options return_token_ids tool_choice".split()
)
_READ_IN_CHATS = _READ | {"max_completion_tokens", "logprobs", "parallel_tool_calls"}
# Keys that may be present with a value that asks for what happens anyway.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "min_p": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "logit_bias": lambda value: value == {},
}
_NEUTRAL_IN_CHATS: dict[str, Callable[[Any], bool]] = {
    **_NEUTRAL,
    "functions": lambda value: value == [],
    "function_call": lambda value: value == "none",
    "top_logprobs": lambda value: value == 0,
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "service_tier": lambda value: value in ("auto", "default"),
}
_NEUTRAL_IN_TEXTS: dict[str, Callable[[Any], bool]] = {
    **_NEUTRAL,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "best_of": lambda value: value == 1,
    "logprobs": lambda value: False,
}
_WHY = {
    "parallel_tool_calls": "the model samples freely and may call several tools in one answer; leave it out",
    "response_format": "nothing constrains what the model samples; ask for a form in the prompt, or offer a tool",
    "functions": "offer tools",
    "function_call": "use tool_choice",
    "top_logprobs": "the log-probs of the tokens that were sampled are all there is; leave it out",
    "modalities": "only text is served",
    "service_tier": "there is one; leave it out",
    "echo": "the prompt is not said again; leave it out",
    "suffix": "nothing is filled in between; leave it out",
    "best_of": "all choices are told; leave it out",
    "logprobs": "they are told in chats; leave it out",
}


def parse_chat(body: bytes, offer: Offer, heard: Heard) -> ChatRequest:
    """A chat body against what the run offers; raises `InvalidRequest` naming the key."""
    parts = parts_of(body)
    messages, tools = parts.pop("messages", None), parts.pop("tools", None)
    raw = {key: value for key, part in parts.items() if (value := decoded(part)) is not None}
    model = offer.check_model(text_at(raw, "model"))
    offered = NO_TOOLS if tools is None else heard.offered(bytes(tools))
    wishes = _wishes(raw, offer, offered, is_text=False)
    said = heard.read(b"null" if messages is None else bytes(messages), offered.start)
    if said.last_role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's; a call answers a user, system or tool message", param="messages"
        )
    return _request(said, raw, model, wishes, offered)


def parse_text(body: bytes, offer: Offer) -> ChatRequest:
    """A body of `/v1/completions`, as a chat whose one message is the text to go on with; raises as `parse_chat`."""
    raw = {key: value for key, part in parts_of(body).items() if (value := decoded(part)) is not None}
    model = offer.check_model(text_at(raw, "model"))
    prompt = raw.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest("prompt must be one text that is not empty; ask once for each", param="prompt")
    raw.setdefault("max_tokens", min(_TEXT_TOKENS, offer.sampling.max_new_tokens))
    return _request(text_said(prompt), raw, model, _wishes(raw, offer, NO_TOOLS, is_text=True), NO_TOOLS)


class _Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for beside an answer to its messages; the fields are those of `ChatRequest`."""

    sampling: Sampling
    tool_choice: str = "auto"
    num_choices: int = 1
    is_text: bool = False
    is_streamed: bool = False
    has_usage_chunk: bool = False
    has_logprobs: bool = False
    has_token_ids: bool = False


def _request(said: Said, raw: dict[str, Any], model: str, wishes: _Wishes, offered: Offered) -> ChatRequest:
    return ChatRequest(
        said=said,
        identity=request_identity(said.hashes[-1], wishes.sampling, wishes.tool_choice, wishes.num_choices),
        sampling=wishes.sampling,
        model=model,
        request_id=text_at(raw, "request_id"),
        sample_id=text_at(raw, "sample_id"),
        tools=offered.tools,
        tool_choice=wishes.tool_choice,
        num_choices=wishes.num_choices,
        is_text=wishes.is_text,
        is_streamed=wishes.is_streamed,
        has_usage_chunk=wishes.has_usage_chunk,
        has_logprobs=wishes.has_logprobs,
        has_token_ids=wishes.has_token_ids,
    )


# ---------------------------------------------------------------- parameters


def _wishes(raw: dict[str, Any], offer: Offer, offered: Offered, *, is_text: bool) -> _Wishes:
    """What the parameters of a body ask for; raises `InvalidRequest` for the first that is not served."""
    if _PLAIN.issuperset(raw):
        # As most bodies are: all is said in the messages.
        return _Wishes(sampling=offer.sampling, is_text=is_text)
    _check_keys(raw, is_text=is_text)
    is_streamed = "stream" in raw and flag(raw["stream"], "stream")
    if raw.get("parallel_tool_calls") is not None:
        is_parallel = flag(raw["parallel_tool_calls"], "parallel_tool_calls")
        if not is_parallel and offered.tools is not None:
            raise _not_served("parallel_tool_calls", False)
    return _Wishes(
        sampling=_sampling(raw, offer),
        tool_choice=parse_tool_choice(raw.get("tool_choice"), offered),
        num_choices=whole(raw.get("n", 1), "n", 1, MAX_CHOICES),
        is_text=is_text,
        is_streamed=is_streamed,
        has_usage_chunk=_has_usage_chunk(raw.get("stream_options"), is_streamed=is_streamed),
        has_logprobs="logprobs" in raw and flag(raw["logprobs"], "logprobs"),
        has_token_ids="return_token_ids" in raw and flag(raw["return_token_ids"], "return_token_ids"),
    )


def _check_keys(raw: dict[str, Any], *, is_text: bool) -> None:
    read, neutral = (_READ, _NEUTRAL_IN_TEXTS) if is_text else (_READ_IN_CHATS, _NEUTRAL_IN_CHATS)
    for key, value in raw.items():
        if key in _PLAIN or key in read:
            continue
        if key not in neutral:
            raise InvalidRequest(f"unknown parameter {key!r}", param=key)
        if not neutral[key](value):
            raise _not_served(key, value)


def _not_served(key: str, value: Any, why: str | None = None) -> InvalidRequest:
    why = why or _WHY.get(key, "calls use the run's sampling parameters; leave it out")
    return InvalidRequest(f"{key} = {short(value)} is not served: {why}", param=key, code="unsupported_value")


def _sampling(raw: dict[str, Any], offer: Offer) -> Sampling:
    """The run's, with what the client may say itself."""
    run = offer.sampling
    limits = [
        _token_limit(key, raw[key], run.max_new_tokens) for key in ("max_tokens", "max_completion_tokens") if key in raw
    ]
    sampling = Sampling(
        temperature=_number(raw, "temperature", run.temperature, 0.0, 2.0),
        top_p=_number(raw, "top_p", run.top_p, 0.0, 1.0),
        top_k=max(0, whole(raw.get("top_k", run.top_k), "top_k", -1, 2**31 - 1)),
        max_new_tokens=min(limits, default=run.max_new_tokens),
        stop=_stops(raw.get("stop")),
        seed=whole(raw["seed"], "seed", *_SEEDS) if "seed" in raw else None,
    )
    check_temperature(sampling.temperature)
    if sampling.top_p == 0.0:
        raise InvalidRequest("top_p must be greater than 0", param="top_p")
    for key in () if offer.takes_sampling else ("temperature", "top_p", "top_k"):
        own = getattr(run, key)
        if getattr(sampling, key) != own:
            raise _not_served(key, raw[key], f"the run samples with {key} {own:g}; leave it out")
    return sampling


def _number(raw: dict[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = finite(raw.get(key, default))
    if value is None or not least <= value <= most:
        raise InvalidRequest(f"{key} must be a number from {least:g} to {most:g}, not {short(raw[key])}", param=key)
    return value


def check_temperature(value: float) -> None:
    """Raises `InvalidRequest` for one so close to 0 that it is neither greedy nor exact."""
    if 0 < value < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be 0 or at least {MIN_TEMPERATURE:g}, not {value:g}", param="temperature"
        )


def _token_limit(key: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{key} must be a positive integer, not {short(value)}", param=key)
    if value > most:
        raise _not_served(key, value, f"the run allows at most {most} new tokens a call")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(
        isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_TEXT for stop in stops
    ):
        raise InvalidRequest(
            f"stop must be a text or a list of texts, each of 1 to {MAX_STOP_TEXT} characters", param="stop"
        )
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop holds at most {MAX_STOPS} texts", param="stop")
    return tuple(stops)


def _has_usage_chunk(value: Any, *, is_streamed: bool) -> bool:
    if value is None:
        return False
    if not is_streamed:
        raise InvalidRequest("stream_options are for streams only", param="stream_options")
    options = value if isinstance(value, dict) else {"": value}
    asked = {key: item for key, item in options.items() if item is not None}
    if asked.keys() - {"include_usage", "include_obfuscation"} or asked.get("include_obfuscation", False) is not False:
        raise InvalidRequest("stream_options may hold include_usage, true or false", param="stream_options")
    return flag(asked.get("include_usage", False), "stream_options.include_usage")
