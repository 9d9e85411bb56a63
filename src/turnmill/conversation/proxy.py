"""HTTP for workers and agents, over the sessions of a run: a plain ASGI application.

    POST /v1/rollouts/lease | heartbeat      worker token        rollouts to play
    POST /a/<chat secret>/v1/chat/completions                    OpenAI chat completions: the answer, or 202 and a step
    GET  /a/<chat secret>/v1/chat/completions/<step>             the answer, or 202 once more
    POST /v1/rollouts/report                 report secret       the end of an attempt
    GET  /healthz

The chat routes are there without `/a/<chat secret>` as well, with the secret as bearer token.

The routes are dispatched by hand: a turn of a small model takes about a millisecond, of which a framework's routing,
request and response objects would take a fifth. Secrets travel in paths and headers, so no access log is written.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from turnmill.conversation.asgi import HttpError, bearer_of, read_body, refusal, send_json, to_http, until_disconnect
from turnmill.conversation.attempts import Answer, Pending
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.leases import Lease
from turnmill.conversation.requests import DEFAULT_MODEL, parse_object, parse_report
from turnmill.conversation.service import Service
from turnmill.errors import (
    BackendUnavailable,
    InvalidInput,
    InvalidRequest,
    NotDeployed,
    NotFound,
    ShuttingDown,
    TurnmillError,
)
from turnmill.records import encode

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
MAX_ROLLOUTS = 4096
# The secret, and the step that is asked for.
_CHAT = re.compile(r"(?:/a/([A-Za-z0-9_\-]{16,128}))?/v1/chat/completions(?:/(.+))?")
_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")


def create_app(sessions: Service, *, hold_s: float | None = None) -> "App":
    """The ASGI application for a run's sessions.

    `hold_s`: how long a client is kept waiting for the answer of a call before it is sent away with 202 to ask again;
    it may wish for less. None: as long as it takes, except for clients that say how long they want to wait.
    """
    return App(sessions, hold_s)


class App:
    """The routes."""

    def __init__(self, sessions: Service, hold_s: float | None) -> None:
        self.sessions = sessions
        self._hold_s = hold_s
        self._routes: dict[tuple[str, str], Callable[[Scope, Receive, bytes], Awaitable[bytes]]] = {
            ("POST", "/v1/rollouts/lease"): self._lease,
            ("POST", "/v1/rollouts/heartbeat"): self._heartbeat,
            ("POST", "/v1/rollouts/report"): self._report,
            ("GET", "/healthz"): self._health,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not served; run the server with lifespan and websockets off")
        try:
            status, body = await self._dispatch(scope, receive)
        except HttpError as error:
            status, body = error.status, error.body()
        except TurnmillError as error:
            failure = _of_backend(error)
            answer = to_http(failure or error)
            if failure is not None:
                self.sessions.fail(failure)
            elif answer.status == 500:
                logger.error("%s", error)
            status, body = answer.status, answer.body()
        await send_json(send, status, body)

    async def _dispatch(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        path, method = scope["path"], scope["method"]
        chat = _CHAT.fullmatch(path)
        if chat is not None and method == ("POST" if chat[2] is None else "GET"):
            secret = chat[1] or bearer_of(scope)
            return await (self._chat(scope, receive, secret) if chat[2] is None else self._step(scope, secret, chat[2]))
        route = self._routes.get((method, path))
        if route is None:
            known = chat is not None or any(path == known_path for _, known_path in self._routes)
            if known:
                raise refusal(405, "method_not_allowed", f"{method} is not served here")
            raise refusal(404, "not_found", "no such route")
        return 200, await route(scope, receive, b"" if method == "GET" else await read_body(receive))

    # ------------------------------------------------------------ routes

    async def _chat(self, scope: Scope, receive: Receive, secret: str) -> tuple[int, bytes]:
        key: str | None = None
        is_retry = False
        hold_s = self._hold_s
        for name, value in scope["headers"]:
            if name == b"idempotency-key":
                key = value.decode("latin-1")
            elif name == b"x-stainless-retry-count":
                is_retry = value.strip() not in (b"", b"0")
            elif name == b"prefer":
                hold_s = _hold(value, self._hold_s)
        request = self.sessions.parse(secret, await read_body(receive))
        key = key or request.request_id
        answer = await self.sessions.chat(secret, request, key=key, is_retry=is_retry, hold_s=hold_s)
        return _completion(answer, request.model)

    async def _step(self, scope: Scope, secret: str, step_id: str) -> tuple[int, bytes]:
        hold_s = 0.0
        for name, value in scope["headers"]:
            if name == b"prefer":
                hold_s = _hold(value, self._hold_s) or 0.0
        answer = await self.sessions.step(secret, step_id, hold_s=min(hold_s, MAX_WAIT_S))
        return _completion(answer, DEFAULT_MODEL)

    async def _lease(self, scope: Scope, receive: Receive, body: bytes) -> bytes:
        self.sessions.check_worker(bearer_of(scope))
        raw = parse_object(body)
        worker = _field(raw, "worker", str)
        most = _field(raw, "max_rollouts", int)
        wait_s = float(_field(raw, "wait_s", (int, float)))
        if not worker or len(worker) > 128:
            raise InvalidRequest("worker must be a name of 1 to 128 characters", param="worker")
        if not 1 <= most <= MAX_ROLLOUTS:
            raise InvalidRequest(f"max_rollouts must be between 1 and {MAX_ROLLOUTS}", param="max_rollouts")
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise InvalidRequest(f"wait_s must be between 0 and {MAX_WAIT_S:g}", param="wait_s")
        leases = await self.sessions.lease(worker, most, wait_s, gone=partial(until_disconnect, receive))
        return encode({"rollouts": [_lease_body(lease, self.sessions.base_url) for lease in leases]})

    async def _heartbeat(self, scope: Scope, receive: Receive, body: bytes) -> bytes:
        self.sessions.check_worker(bearer_of(scope))
        tokens = _field(parse_object(body), "lease_tokens", list)
        if len(tokens) > MAX_ROLLOUTS or not all(isinstance(token, str) for token in tokens):
            raise InvalidRequest(f"lease_tokens must be at most {MAX_ROLLOUTS} texts", param="lease_tokens")
        return encode({"lost": await self.sessions.heartbeat(tokens)})

    async def _report(self, scope: Scope, receive: Receive, body: bytes) -> bytes:
        await self.sessions.report(bearer_of(scope), parse_report(body))
        return b'{"status":"recorded"}'

    async def _health(self, scope: Scope, receive: Receive, body: bytes) -> bytes:
        if not self.sessions.is_healthy:
            raise ShuttingDown("the proxy is closing")
        return b'{"status":"ok"}'


# ---------------------------------------------------------------- requests and answers


def _of_backend(error: TurnmillError) -> BackendUnavailable | None:
    """What keeps everybody from being served.

    A request is refused with `InvalidRequest` or `NotFound`; other invalid input is the backend's configuration, such
    as a right that is missing, or is no more there. Blamed on the client, it would end rollouts as faults of their
    environment.
    """
    is_refusal = isinstance(error, InvalidRequest | NotFound) and not isinstance(error, NotDeployed)
    if isinstance(error, InvalidInput) and not is_refusal:
        return BackendUnavailable(str(error))
    return error if isinstance(error, BackendUnavailable) else None


def _field(raw: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"{key} is missing or of the wrong type", param=key)
    return value


def _hold(preferences: bytes, most: float | None) -> float | None:
    """How long to wait for an answer as a Prefer header (RFC 7240) wishes, where the server waits at most `most`.

    `wait=N` waits so many seconds, `respond-async` without it not at all; others say nothing about it.
    """
    items = [item.strip().lower() for item in preferences.decode("latin-1").split(",")]
    waits = [float(found[1]) for item in items if (found := _WAIT.fullmatch(item))]
    if not waits and "respond-async" not in items:
        return most
    wished = waits[0] if waits else 0.0
    return wished if most is None else min(wished, most)


def _lease_body(lease: Lease, base_url: str) -> dict[str, Any]:
    return {
        "request": lease.request,
        "attempt": lease.attempt,
        "base_url": f"{base_url}/a/{lease.chat_secret}/v1",
        "report_secret": lease.report_secret,
        "deadline": lease.deadline,
        "lease_token": lease.lease_token,
        "lease_s": lease.lease_s,
    }


def _completion(answers: tuple[Answer, ...] | Pending, model: str) -> tuple[int, bytes]:
    if isinstance(answers, Pending):
        return 202, encode({"step_id": answers.step_id, "status": "pending"})
    answer = answers[0]
    choice = {"index": 0, "message": answer.reply, "finish_reason": answer.finish_reason, "logprobs": None}
    usage = {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }
    completion = {
        "id": answer.call_id,
        "object": "chat.completion",
        "created": int(answer.created_at),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return 200, encode(completion)
