"""Stored conversations, played again for an environment that may have changed: nothing is sampled, nothing is written.

    sample + the calls that its reporting attempt consumed -> open -> secret
    chat request -> the next stored answer below the same parent -> Answer a choice
               '-> none: the conversation would have gone another way -> Divergence, once and for all

What counts as the same request is what counts for a new attempt of a sample that is played: the same code compares. The
routes are those of agents alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnmill.conversation.admission import Limits
from turnmill.conversation.agents import Agents, agent_route
from turnmill.conversation.asgi import HttpError, refusal, send_json, to_http
from turnmill.conversation.attempts import Answer, Attempt, Entry
from turnmill.conversation.branches import canonical, in_order
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.history import path_of
from turnmill.conversation.registry import name_in, new_name, new_secret
from turnmill.conversation.requests import ChatRequest, Offer, parse_chat, parse_text
from turnmill.conversation.streaming import Pace
from turnmill.conversation.tokens import tokens_of
from turnmill.errors import GenerationFailed, NotFound, TurnmillError, Unauthorized
from turnmill.records import TEXT_ROLE, Call, Purpose, SampleRecord, encode

# Codes of the errors that stand in the place of an answer.
DIVERGED, FULL = "diverged", "context_length_exceeded"
# Most tokens that a template puts around a message, and before a conversation (its own system prompt, tools).
_AROUND_MESSAGE, _BEFORE_ALL = 64, 1024
# Characters around a difference that are shown, on each side of it.
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a conversation would have gone another way than the stored one."""

    # Of the requests of the rollout, from 1: the first one without a stored answer.
    turn: int
    # Text for people: what differs.
    what: str


@dataclass(kw_only=True)
class Replayed:
    """One conversation that is played again."""

    sample: SampleRecord
    # By id, in the order of their c: those that the reporting attempt consumed.
    calls: dict[str, Call]
    attempt: Attempt
    divergence: Divergence | None = None
    # Requests so far, transport retries not counted.
    num_requests: int = 0

    @classmethod
    def of(cls, sample: SampleRecord, calls: Sequence[Call], name: str) -> "Replayed":
        """`calls` are those of `sample.calls`."""
        # An attempt behind all others, so that it replays them.
        again = Attempt(sample=replace(sample, attempt=sample.attempt + 1), name=name, next_call=0, call_bound=0)
        again.load(calls)
        return cls(sample=sample, calls={call.call_id: call for call in in_order(calls)}, attempt=again)

    @property
    def consumed(self) -> list[Call]:
        """The calls that were asked for, in order of first use."""
        return [self.calls[call_id] for call_id in self.attempt.consumed]

    def answer(self, request: ChatRequest, key: str | None, is_retry: bool) -> tuple[Answer, ...]:
        """The stored answers to a request, or to the one that it repeats; raises `GenerationFailed`, see `_fail`."""
        entry = self.attempt.retry_of(request, key, is_retry)
        if entry is None:
            if self.divergence is not None:
                raise _diverged(self.divergence)
            self.num_requests += 1
            entry, recorded = self.attempt.begin(request, key)
            found = [call for call in recorded if call is not None]
            if len(found) < len(recorded):
                entry.error = self._fail(entry, request)
                raise entry.error
            self.attempt.deliver(entry, found)
        if entry.error is not None or entry.answers is None:
            raise entry.error or GenerationFailed(DIVERGED, "the request has no stored answer")
        if request.has_logprobs or request.has_token_ids:
            return tokens_of(entry.answers, self.calls, has_prompt=request.has_token_ids)
        return entry.answers

    def _fail(self, entry: Entry, request: ChatRequest) -> GenerationFailed:
        """Why there is no stored answer.

        A request that found the context full left no record: in a rollout that ended so, one behind the last stored
        answer of its branch is taken for it, unless its conversation can't have been that long.
        """
        parent = entry.parent.call_id if entry.parent is not None else None
        waiting = [call for call_id, call in self.calls.items() if call_id not in self.attempt.consumed]
        below = [call for call in waiting if call.parent == parent]
        ended_full = self.sample.is_truncated
        if ended_full and not below and not _surely_fits(entry, request, self.sample.request.max_length):
            return GenerationFailed(FULL, "the conversation is full, as it was when it was played")
        expected = next(iter(below or waiting), None)
        what = _ended(entry) if expected is None else _difference(request, expected, self.calls)
        self.divergence = Divergence(turn=self.num_requests, what=what)
        return _diverged(self.divergence)


@dataclass(kw_only=True)
class ReplayedChats:
    """Implements `agents.Chats` for all conversations that are played again at once."""

    # Of rollouts that are trained, and of each purpose.
    offer: Offer
    offers: Mapping[Purpose, Offer]
    # When the run began, Unix seconds.
    created_at: float
    # By the names in their secrets.
    _open: dict[str, Replayed] = field(default_factory=dict)
    is_lone: bool = True

    def open(self, sample: SampleRecord, calls: Sequence[Call]) -> tuple[str, Replayed]:
        """The secret by which its environment finds the conversation, until `close`."""
        name = new_name()
        self._open[name] = replayed = Replayed.of(sample, calls, name)
        return new_secret(name), replayed

    def close(self, secret: str) -> None:
        del self._open[name_in(secret)]

    def _of(self, secret: str) -> Replayed:
        replayed = self._open.get(name_in(secret))
        if replayed is None:
            raise Unauthorized("unknown chat secret")
        return replayed

    async def parse(self, secret: str, body: bytes, *, is_text: bool = False) -> ChatRequest:
        replayed = self._of(secret)
        offer = self.offers[replayed.sample.purpose]
        return parse_text(body, offer) if is_text else parse_chat(body, offer, replayed.attempt.heard)

    async def chat(
        self,
        secret: str,
        request: ChatRequest,
        *,
        key: str | None = None,
        is_retry: bool = False,
        hold_s: float | None = None,
    ) -> tuple[Answer, ...]:
        return self._of(secret).answer(request, key, is_retry)

    async def step(self, secret: str, step_id: str, *, hold_s: float = 0.0) -> tuple[Answer, ...]:
        raise NotFound(f"there is no step {step_id}: each answer is there at once")

    async def models(self, secret: str) -> tuple[Sequence[str], float]:
        self._of(secret)
        return self.offer.models, self.created_at


class ReplayApp:
    """The routes of agents over stored conversations, as an ASGI application."""

    def __init__(self, chats: ReplayedChats) -> None:
        self._agents = Agents(chats, to_http, hold_s=None, limits=Limits(), pace=Pace())

    def end(self, secret: str) -> None:
        """The conversation of this secret is over."""
        self._agents.end(secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = agent_route(scope["path"])
            if found is None:
                raise refusal(404, "not_found", "stored conversations have the routes of agents alone")
            reply = await self._agents.serve(found, scope, receive, send)
        except HttpError as error:
            await send_json(send, error.status, error.body(), error.headers)
        except TurnmillError as error:
            answer = to_http(error)
            await send_json(send, answer.status, answer.body(), answer.headers)
        else:
            if reply is not None:
                await send_json(send, *reply)


# ---------------------------------------------------------------- what differs


def _diverged(divergence: Divergence) -> GenerationFailed:
    return GenerationFailed(DIVERGED, f"turn {divergence.turn} was never played: {divergence.what}")


def _surely_fits(entry: Entry, request: ChatRequest, max_length: int) -> bool:
    """Whether the request can't have found the context full: a token is at least a byte of what it stands for."""
    most = entry.parent.num_tokens if entry.parent is not None else _BEFORE_ALL + len(encode(request.tools))
    most += sum(len(encode(message)) + _AROUND_MESSAGE for message in entry.messages)
    return most < max_length


def _ended(entry: Entry) -> str:
    last = entry.messages[-1]
    return f"the stored conversation ends before it; it goes on with {_shown(last, 0)}"


def _difference(request: ChatRequest, expected: Call, calls: dict[str, Call]) -> str:
    """The first thing in which a request is another one than that of a stored call."""
    path = path_of(expected, calls)
    now, then = request.said.since(0), _said_in(path)
    for index, (new, old) in enumerate(zip(now, then, strict=False)):
        if canonical(new) != canonical(old):
            at = _first_difference(_text(new), _text(old))
            return f"messages[{index}] is {_shown(new, at)}, stored is {_shown(old, at)}"
    if len(now) != len(then):
        longer, which = (now, "stored") if len(now) > len(then) else (then, "asked for now")
        return f"messages[{min(len(now), len(then))}] is {_shown(longer[min(len(now), len(then))], 0)}; {which} is none"
    parameters: list[tuple[str, Any, Any]] = [
        ("tools", request.tools or [], path[0].tools or []),
        ("tool_choice", request.tool_choice, expected.tool_choice),
        ("n", request.num_choices, expected.num_choices),
        *((name, getattr(request.sampling, name), getattr(expected.sampling, name)) for name in _SAMPLING),
    ]
    different = next(((name, new, old) for name, new, old in parameters if new != old), None)
    if different is None:
        return "it was asked for once more than it was played"
    name, now_text, old_text = different[0], encode(different[1]).decode(), encode(different[2]).decode()
    at = _first_difference(now_text, old_text)
    return f"{name} is {_excerpt(now_text, at, str)}, stored is {_excerpt(old_text, at, str)}"


_SAMPLING = ("temperature", "top_k", "top_p", "max_new_tokens", "stop", "seed")


def _said_in(path: Sequence[Call]) -> list[dict[str, Any]]:
    """All that was said up to the request of the last call; a plain text is one message."""
    messages = [
        message
        for call, before in zip(path, [None, *path], strict=False)
        for message in [*([before.reply] if before is not None else []), *call.messages]
    ]
    if messages[0]["role"] == TEXT_ROLE:
        return [{"role": TEXT_ROLE, "content": "".join(message["content"] or "" for message in messages)}]
    return messages


def _text(message: dict[str, Any]) -> str:
    """What a message says, the tools that it calls included."""
    calls = message.get("tool_calls")
    return (message.get("content") or "") + (encode(calls).decode() if calls else "")


def _first_difference(new: str, old: str) -> int:
    pairs = zip(new, old, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(new), len(old)))


def _shown(message: dict[str, Any], at: int) -> str:
    return f"{message['role']} {_excerpt(_text(message), at)}"


def _excerpt(text: str, at: int, form: Callable[[str], str] = repr) -> str:
    begin, end = max(0, at - _SHOWN), at + _SHOWN
    return ("…" if begin else "") + form(text[begin:end]) + ("…" if end < len(text) else "")
