"""The worker's side of the proxy: a light client for chat completions, and the rollout routes.

    lease -> LeasedRollout -> complete, complete, ... -> report;  heartbeat beside it

One `HttpClient` serves all rollouts of a worker. This module is the retry owner for everything between worker and
proxy: transport errors and 502, 503, 504 are repeated with jittered back-off, under the caller's deadline; after a 429
it waits for as long as the proxy says, until that deadline. A repeated chat call carries the same Idempotency-Key, so
it is the same call; one that is answered with 202 is asked for until its answer is there. A repeated lease may leave
rollouts leased to nobody: their leases run out. Heartbeats and reports are idempotent.
"""

import asyncio
import itertools
import logging
import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from turnmill.conversation.http import Busy, HttpClient, Url
from turnmill.conversation.polling import ACCEPTED, POLL, Pauses, finished, preference, step_of, step_path
from turnmill.conversation.requests import DEFAULT_MODEL
from turnmill.errors import BackendUnavailable, GenerationFailed, InvalidInput, LeaseLost
from turnmill.records import FinishReason, InvalidReason, Reply, ReplyTokens, RolloutRequest, RolloutResult, encode

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TRANSIENT = (502, 503, 504)
# A server that is busy says for how long, but not for ever, seconds.
_MOST_RETRY_AFTER_S = 30.0
# 400s that are an end of the conversation; all others are a fault of the request.
_CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True, kw_only=True)
class Retry(Pauses):
    """How long and how often a request is repeated."""

    # Seconds from the first failure to giving up.
    for_s: float = 60.0
    first_s: float = 0.1
    most_s: float = 3.0


@dataclass(frozen=True, kw_only=True)
class LeasedRollout:
    """What a worker is given to play one attempt."""

    request: RolloutRequest
    attempt: int
    # OpenAI base URL; holds the attempt's chat secret.
    base_url: str = field(repr=False)
    # Allows exactly one report; never enters the environment.
    report_secret: str = field(repr=False)
    # Unix seconds at which the attempt ends.
    deadline: float
    lease_token: str = field(repr=False)
    # Seconds without a heartbeat after which the rollout is leased again.
    lease_s: float


class ChatClient:
    """Chat completions of one rollout attempt."""

    def __init__(
        self,
        session: HttpClient,
        base_url: str,
        *,
        timeout_s: float,
        deadline: float,
        retry: Retry = Retry(),
        poll: Pauses = POLL,
    ) -> None:
        """`timeout_s` bounds one HTTP exchange; `deadline` (on the monotonic clock) bounds a call with its repeats.

        `poll` are the pauses between the questions for an answer that comes later.
        """
        self._session = session
        self._url = Url.parse(base_url.rstrip("/") + "/chat/completions")
        self._poll = poll
        # A key of its own for each call: random for the attempt, then counted.
        self._key = secrets.token_hex(16)
        self._num_calls = 0
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._retry = retry

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, return_token_ids: bool = False, **params: Any
    ) -> Reply:
        """The next message after `messages`; `params` are those of a chat completion (`tools`, `tool_choice`, ...).

        `return_token_ids`: with the tokens of prompt and reply as they are recorded, and their log-probs.

        Raises `GenerationFailed` with code `context_length_exceeded` for a full conversation, and with another code
        where the proxy or the generation failed; `InvalidInput` for a request that is not allowed; `LeaseLost` when
        the attempt is no longer current; `BackendUnavailable` when the proxy could not be reached in time.
        """
        self._num_calls += 1
        if params.get("n", 1) != 1 or params.get("stream"):
            raise InvalidInput("complete() gives one reply as a whole: leave n and stream out, and call it n times")
        if return_token_ids:
            params |= {"return_token_ids": True, "logprobs": True}
        request = encode({"model": DEFAULT_MODEL, "messages": messages, **params})
        status, body = await self._ask(self._url, request, {"Idempotency-Key": f"{self._key}-{self._num_calls}"})
        if status == ACCEPTED:
            status, body = await self._answer_of(status, body)
        if status != 200:
            raise chat_error(status, body)
        return self._reply(body, has_tokens=return_token_ids)

    async def _ask(self, url: Url, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return await ask(
            self._session,
            url,
            body,
            headers,
            timeout_s=self._timeout_s,
            deadline=self._deadline,
            retry=self._retry,
        )

    async def _answer_of(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer that comes later."""
        step_id = step_of(status, body)
        if step_id is None:
            raise GenerationFailed("invalid_response", "the proxy's answer comes later, but does not say where")
        url = Url.parse(self._url.text + step_path(step_id))
        for count in itertools.count(1):
            pause_s = self._poll.pause_s(count)
            if time.monotonic() + pause_s >= self._deadline:
                break
            await asyncio.sleep(pause_s)
            headers = preference(min(self._timeout_s, self._deadline - time.monotonic()))
            answer = finished(*await self._ask(url, None, headers), step_id=step_id)
            if answer is not None:
                return answer
        raise BackendUnavailable("the proxy took the request, but its answer did not come in time")

    @staticmethod
    def _reply(body: bytes, *, has_tokens: bool) -> Reply:
        try:
            completion = _COMPLETION.decode(body)
        except msgspec.DecodeError as error:
            raise GenerationFailed("invalid_response", f"the proxy's completion can't be read: {error}") from error
        if not completion.choices:
            raise GenerationFailed("invalid_response", "the proxy's completion has no choices")
        choice = completion.choices[0]
        return Reply(
            message=choice.message,
            finish_reason=choice.finish_reason,
            usage=completion.usage,
            tokens=_tokens(completion) if has_tokens else None,
            call_id=completion.id or "",
        )


class RolloutApi:
    """The rollout routes of the proxy, for a worker that shows the run's worker token."""

    def __init__(
        self,
        session: HttpClient,
        proxy_url: str,
        worker_token: str,
        *,
        timeout_s: float = 30.0,
        retry: Retry = Retry(),
    ) -> None:
        """`timeout_s` bounds one HTTP exchange, a long poll's wait not counted."""
        self._session = session
        base = proxy_url.rstrip("/") + "/v1/rollouts"
        self._urls = {route: Url.parse(f"{base}/{route}") for route in ("lease", "heartbeat", "report")}
        self._worker_token = worker_token
        self._timeout_s = timeout_s
        self._retry = retry

    async def lease(self, *, worker: str, max_rollouts: int, wait_s: float) -> list[LeasedRollout]:
        """Up to `max_rollouts` rollouts; waits up to `wait_s` for the first, and returns [] when none came.

        Raises `InvalidInput` for a wrong worker token, `BackendUnavailable` when the proxy stays away.
        """
        body = {"worker": worker, "max_rollouts": max_rollouts, "wait_s": wait_s}
        answer = await self._call("lease", self._worker_token, body, timeout_s=wait_s + self._timeout_s)
        return _read("lease", answer, _LEASES).rollouts

    async def heartbeat(self, *, worker: str, lease_tokens: Sequence[str], timeout_s: float | None = None) -> list[str]:
        """Renew leases; returns the tokens of those that are lost. Raises as `lease` does."""
        body = {"worker": worker, "lease_tokens": lease_tokens}
        answer = await self._call("heartbeat", self._worker_token, body, timeout_s=timeout_s)
        return _read("heartbeat", answer, _LOST).lost

    async def report(self, leased: LeasedRollout, result: RolloutResult) -> None:
        """Report how an attempt ended; idempotent.

        Raises `LeaseLost` when it is no longer the current attempt (nothing was recorded), `InvalidInput` when the
        proxy refuses the content, `BackendUnavailable` when it stays away.
        """
        body: dict[str, Any] = {
            "id": leased.request.sample_id,
            "aggregate_reward_score": result.reward,
            "metrics_list": [
                {"name": name, "value": value, "type": "Metric"} for name, value in result.metrics.items()
            ],
        }
        optional: dict[str, InvalidReason | str | None] = {
            "reason": result.reason,
            "stop_reason": result.stop_reason,
            "detail": result.detail,
        }
        body.update({name: value for name, value in optional.items() if value is not None})
        if result.turn_rewards:
            body["turn_rewards"] = result.turn_rewards
        await self._call("report", leased.report_secret, body)

    async def _call(self, route: str, secret: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> bytes:
        try:
            content = encode(body)
        except (TypeError, ValueError) as error:
            # An environment's words (half a surrogate pair, say): its own fault, and not that of the whole worker.
            raise InvalidInput(f"{route} can't be sent: {error}") from error
        status, answer = await ask(
            self._session,
            self._urls[route],
            content,
            {"Authorization": f"Bearer {secret}"},
            timeout_s=timeout_s or self._timeout_s,
            deadline=math.inf,
            retry=self._retry,
        )
        if status == 200:
            return answer
        text = f"{route} was refused by the proxy (HTTP {status}): {_error_of(answer, status).message}"
        # A report secret that is unknown belongs to an attempt that is over.
        if status == 409 or (route == "report" and status == 401):
            raise LeaseLost(text)
        raise InvalidInput(text) if 400 <= status < 500 else BackendUnavailable(text)


# ---------------------------------------------------------------- what comes over the wire


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    id: str | None = None
    usage: dict[str, Any] = {}
    prompt_token_ids: list[int] | None = None


class _Leases(msgspec.Struct):
    rollouts: list[LeasedRollout]


class _Lost(msgspec.Struct):
    lost: list[str]


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_COMPLETION = msgspec.json.Decoder(_Completion)
_LEASES = msgspec.json.Decoder(_Leases)
_LOST = msgspec.json.Decoder(_Lost)
_ERROR_BODY = msgspec.json.Decoder(_ErrorBody)


def _tokens(completion: _Completion) -> ReplyTokens:
    """Raises `GenerationFailed` where the proxy left them out: tokens that were asked for are needed."""
    choice = completion.choices[0]
    logprobs = [] if choice.logprobs is None else [item.logprob for item in choice.logprobs.content]
    if completion.prompt_token_ids is None or choice.token_ids is None or len(logprobs) != len(choice.token_ids):
        raise GenerationFailed("invalid_response", "the proxy's completion has not the tokens that were asked for")
    return ReplyTokens(prompt_ids=completion.prompt_token_ids, sampled_ids=choice.token_ids, logprobs=logprobs)


def _read(route: str, answer: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(answer)
    except msgspec.DecodeError as error:
        raise BackendUnavailable(f"the proxy's answer to {route} can't be read: {error}") from error


def _shaped_error(body: bytes) -> _Error | None:
    """The error that an OpenAI-shaped body holds; None for any other body, such as a load balancer's page."""
    try:
        return _ERROR_BODY.decode(body).error
    except msgspec.DecodeError:
        return None


def _error_of(body: bytes, status: int) -> _Error:
    return _shaped_error(body) or _Error(message=body[:200].decode(errors="replace"), code=f"http_{status}")


def chat_error(status: int, body: bytes) -> Exception:
    error = _error_of(body, status)
    code = error.code or error.type or f"http_{status}"
    if status == 409:
        return LeaseLost(f"the attempt is no longer current: {error.message}")
    if code == _CONTEXT_LENGTH_EXCEEDED or status in (401, 403) or status >= 500:
        return GenerationFailed(code, error.message or f"HTTP {status}")
    return InvalidInput(f"the proxy refused the request ({code}): {error.message}")


async def ask(
    session: HttpClient,
    url: Url,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    deadline: float,
    retry: Retry,
) -> tuple[int, bytes]:
    """Status and body of the answer to a POST, without a body to a GET; raises `BackendUnavailable` without one."""
    num_failures, give_up = 0, deadline
    while True:
        wished_s: float | None = None
        try:
            left_s = max(0.001, min(timeout_s, deadline - time.monotonic()))
            if body is None:
                status, answer = await session.get(url, headers, timeout_s=left_s)
            else:
                status, answer = await session.post(url, body, headers, timeout_s=left_s)
            # A 504 of the proxy itself is the answer to the call (call_timeout); a network's 504 is none.
            if status not in _TRANSIENT or (status == 504 and _shaped_error(answer) is not None):
                return status, answer
            trouble = f"HTTP {status}"
        except Busy as busy:
            trouble, wished_s = str(busy), busy.retry_after_s or retry.most_s
        except (OSError, BackendUnavailable) as error:
            # The latter where a request can't be signed for now.
            trouble = f"{type(error).__name__}: {error}"
        num_failures += 1
        now = time.monotonic()
        if wished_s is not None and math.isfinite(deadline):
            # It is there and has others before this one: that lasts as long as it lasts.
            num_failures, give_up = 0, deadline
        elif num_failures == 1:
            give_up = min(deadline, now + retry.for_s)
        pause_s = retry.pause_s(num_failures) if wished_s is None else _spread(wished_s)
        if now + pause_s >= give_up:
            raise BackendUnavailable(f"no answer from the proxy after {num_failures} tries: {trouble}")
        # Never the URL: its path may hold a secret.
        logger.warning("no answer from the proxy (%s), another try follows in %.1f s", trouble, pause_s)
        await asyncio.sleep(pause_s)


def _spread(wished_s: float) -> float:
    """At least as long as the server wishes, each client a little longer than the other."""
    return min(wished_s, _MOST_RETRY_AFTER_S) * random.uniform(1.0, 1.5)
