"""What an agent is served: OpenAI's API below a chat secret, over the sessions of a run.

POST chat/completions | completions -> parsed -> admitted -> answered: as a whole | 202 and a step | as a stream
GET  chat/completions/<step> | completions/<step>      -> the answer, or 202 once more
GET  models | models/<name>
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from turnmill.conversation.admission import Admission, Limits
from turnmill.conversation.answers import completion_of, model_of, models_of
from turnmill.conversation.asgi import HttpError, bearer_of, read_body, refusal
from turnmill.conversation.attempts import Answer, Pending
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.registry import name_in
from turnmill.conversation.requests import DEFAULT_MODEL, ChatRequest, Offer
from turnmill.conversation.streaming import Pace, send_events, send_stream
from turnmill.errors import TurnmillError
from turnmill.records import encode

# How long a question for a step is kept waiting, seconds.
MAX_WAIT_S = 30.0
# How long a step counts as a call under way whose client does not come back.
_KEPT_S = 600.0
# The secret, the route, and the step or the model that is asked for.
_ROUTE = re.compile(r"(?:/a/([A-Za-z0-9_\-]{16,128}))?/v1/(chat/completions|completions|models)(?:/(.+))?")
_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")
# Status and JSON of an answer; None: it was sent already.
Reply = tuple[int, bytes] | None


class Chats(Protocol):
    """Who answers agents: `Service` says what each method does. The sessions of a run, or its stored conversations."""

    @property
    def is_lone(self) -> bool: ...

    @property
    def offer(self) -> Offer: ...

    async def parse(self, secret: str, body: bytes, *, is_text: bool = False) -> ChatRequest: ...

    async def chat(
        self,
        secret: str,
        request: ChatRequest,
        *,
        key: str | None = None,
        is_retry: bool = False,
        hold_s: float | None = None,
    ) -> tuple[Answer, ...] | Pending: ...

    async def step(self, secret: str, step_id: str, *, hold_s: float = 0.0) -> tuple[Answer, ...] | Pending: ...

    async def models(self, secret: str) -> tuple[Sequence[str], float]: ...


def agent_route(path: str) -> re.Match[str] | None:
    """A path that is an agent's, for `Agents.serve`; None for any other."""
    return _ROUTE.fullmatch(path)


def not_allowed(method: str) -> HttpError:
    return refusal(405, "method_not_allowed", f"{method} is not served here")


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """How a request for a call was sent: what its headers say."""

    key: str | None
    is_retry: bool
    # Seconds that its client wants to be kept waiting, within what the server does; None: as long as it takes.
    hold_s: float | None
    # The client said so itself: it knows what to do with a 202.
    is_patient: bool

    @classmethod
    def of(cls, headers: Sequence[tuple[bytes, bytes]], most_s: float | None) -> "_Call":
        key: str | None = None
        is_retry = is_patient = False
        hold_s = most_s
        for name, value in headers:
            if name == b"idempotency-key":
                key = value.decode("latin-1")
            elif name == b"x-stainless-retry-count":
                is_retry = value.strip() not in (b"", b"0")
            elif name == b"prefer" and (wish_s := _wish(value)) is not None:
                is_patient, hold_s = True, wish_s if most_s is None else min(wish_s, most_s)
        return cls(key=key, is_retry=is_retry, hold_s=hold_s, is_patient=is_patient)


class Agents:
    """The routes; each is for the attempt whose chat secret was shown."""

    def __init__(
        self,
        sessions: Chats,
        explain: Callable[[TurnmillError], HttpError],
        *,
        hold_s: float | None,
        limits: Limits,
        pace: Pace,
    ) -> None:
        """`explain` makes an answer of an error; the rest is as in `proxy.create_app`."""
        self._sessions = sessions
        self._explain = explain
        self._hold_s = hold_s
        self._admission = Admission(limits)
        self._pace = pace

    async def serve(self, found: re.Match[str], scope: Scope, receive: Receive, send: Send) -> Reply:
        """What `agent_route` found, asked for by any method. Raises `HttpError` and `TurnmillError`."""
        method, route, name = scope["method"], found[2], found[3]
        if method != ("POST" if route != "models" and name is None else "GET"):
            raise not_allowed(method)
        secret = found[1] or bearer_of(scope)
        if route == "models":
            return await self.models(secret, name)
        is_text = route == "completions"
        if name is None:
            return await self.complete(scope, receive, send, secret, is_text=is_text)
        return await self.step(scope, secret, name, is_text=is_text)

    async def complete(self, scope: Scope, receive: Receive, send: Send, secret: str, *, is_text: bool) -> Reply:
        """POST: a call, or several."""
        call = _Call.of(scope["headers"], self._hold_s)
        request = await self._sessions.parse(secret, await read_body(receive), is_text=is_text)
        if call.is_retry and self._admission.was_refused(secret, request.identity):
            call = msgspec.structs.replace(call, is_retry=False)
        self._admission.enter(secret, request.identity, request.num_choices)
        try:
            if request.is_streamed and not call.is_patient:
                await self._stream(send, secret, request, call)
                return None
            completion = await self._answer(secret, request, call, call.hold_s)
            if isinstance(completion, Pending):
                return _later(completion)
            if request.is_streamed:
                await send_events(send, completion, has_usage=request.has_usage_chunk)
                return None
            return 200, encode(completion)
        finally:
            self._admission.leave(secret, request.num_choices)

    async def _answer(
        self, secret: str, request: ChatRequest, call: _Call, hold_s: float | None
    ) -> dict[str, Any] | Pending:
        key = call.key or request.request_id
        answers = await self._sessions.chat(secret, request, key=key, is_retry=call.is_retry, hold_s=hold_s)
        if isinstance(answers, Pending):
            if self._sessions.is_lone:
                self._admission.keep(secret, answers.step_id, request.num_choices, for_s=_KEPT_S)
            return answers
        self._admission.settle(secret, answers[0].call_id)
        return completion_of(answers, request.model, is_text=request.is_text)

    async def _stream(self, send: Send, secret: str, request: ChatRequest, call: _Call) -> None:
        """A stream is held until its answer is there: who reads one can't be sent away with 202."""
        if self._hold_s is None:
            asking, pace = self._whole(secret, request, call, None), self._pace
        else:
            # What is sent is seen at the end only: signs of life would be none, and errors keep their status.
            asking, pace = self._whole(secret, request, call, MAX_WAIT_S), Pace(first_s=None)
        await send_stream(send, asking, has_usage=request.has_usage_chunk, explain=self._explain, pace=pace)

    async def _whole(self, secret: str, request: ChatRequest, call: _Call, hold_s: float | None) -> dict[str, Any]:
        completion = await self._answer(secret, request, call, hold_s)
        if isinstance(completion, Pending):
            raise HttpError(
                status=503,
                type="server_error",
                code="answer_pending",
                message="the answer is not there yet; send the request again, as a retry of this one",
                headers=((b"retry-after", b"1"),),
            )
        return completion

    async def step(self, scope: Scope, secret: str, step_id: str, *, is_text: bool) -> Reply:
        """GET: what has become of a call whose client was sent away."""
        hold_s = 0.0
        for name, value in scope["headers"]:
            if name == b"prefer" and (wish_s := _wish(value)) is not None:
                hold_s = wish_s if self._hold_s is None else min(wish_s, self._hold_s)
        settle = partial(self._admission.settle, secret, step_id)
        try:
            answers = await self._sessions.step(secret, step_id, hold_s=min(hold_s, MAX_WAIT_S))
        except TurnmillError:
            settle()
            raise
        if isinstance(answers, Pending):
            return _later(answers)
        settle()
        return 200, encode(completion_of(answers, DEFAULT_MODEL, is_text=is_text))

    def end(self, secret: str) -> None:
        """The attempt of this secret, of any kind, is over."""
        self._admission.end(name_in(secret))

    async def models(self, secret: str, name: str | None) -> Reply:
        """GET: the names of the run's model, or one of them."""
        names, created_at = await self._sessions.models(secret)
        if name is None:
            return 200, encode(models_of(names, created_at))
        return 200, encode(model_of(self._sessions.offer.check_model(name), created_at))


def _wish(preferences: bytes) -> float | None:
    """How many seconds a Prefer header (RFC 7240) wishes to be kept waiting; None: it says nothing about it.

    `wait=N` waits so many seconds, `respond-async` without it not at all.
    """
    items = [item.strip().lower() for item in preferences.decode("latin-1").split(",")]
    waits = [float(found[1]) for item in items if (found := _WAIT.fullmatch(item))]
    if waits:
        return waits[0]
    return 0.0 if "respond-async" in items else None


def _later(pending: Pending) -> Reply:
    return 202, encode({"step_id": pending.step_id, "status": "pending"})
