"""HTTP for workers and agents, over `Sessions`: a plain ASGI application and its server.

    POST /v1/rollouts/lease | heartbeat      worker token        rollouts to play
    POST /a/<chat secret>/v1/chat/completions                    OpenAI chat completions
    POST /v1/rollouts/report                 report secret       the end of an attempt
    GET  /healthz

The routes are dispatched by hand: a turn of a small model takes about a millisecond, of which a framework's routing,
request and response objects would take a fifth. Secrets travel in paths and headers, so no access log is written.
"""

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from turnmill.conversation.asgi import HttpError, bearer_of, read_body, refusal, to_http, until_disconnect
from turnmill.conversation.attempts import Answer
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.leases import Lease
from turnmill.conversation.requests import parse_object, parse_report
from turnmill.conversation.serving import listening
from turnmill.conversation.sessions import Sessions
from turnmill.errors import (
    BackendUnavailable,
    InvalidRequest,
    ShuttingDown,
    TurnmillError,
)
from turnmill.records import encode

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
MAX_ROLLOUTS = 4096
_CHAT = re.compile(r"/a/([A-Za-z0-9_\-]{16,128})/v1/chat/completions")


def create_app(sessions: Sessions) -> "App":
    """The ASGI application for a run's sessions."""
    return App(sessions)


class App:
    """The routes."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
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
            status, body = 200, await self._dispatch(scope, receive)
        except HttpError as error:
            status, body = error.status, error.body()
        except TurnmillError as error:
            answer = to_http(error)
            if answer.status == 500:
                logger.error("%s", error)
            elif isinstance(error, BackendUnavailable):
                self.sessions.fail(error)
            status, body = answer.status, answer.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _dispatch(self, scope: Scope, receive: Receive) -> bytes:
        path, method = scope["path"], scope["method"]
        chat = _CHAT.fullmatch(path)
        if chat is not None and method == "POST":
            return await self._chat(scope, receive, chat[1])
        route = self._routes.get((method, path))
        if route is None:
            known = chat is not None or any(path == known_path for _, known_path in self._routes)
            if known:
                raise refusal(405, "method_not_allowed", f"{method} is not served here")
            raise refusal(404, "not_found", "no such route")
        return await route(scope, receive, b"" if method == "GET" else await read_body(receive))

    # ------------------------------------------------------------ routes

    async def _chat(self, scope: Scope, receive: Receive, secret: str) -> bytes:
        key: str | None = None
        is_retry = False
        for name, value in scope["headers"]:
            if name == b"idempotency-key":
                key = value.decode("latin-1")
            elif name == b"x-stainless-retry-count":
                is_retry = value.strip() not in (b"", b"0")
        request = self.sessions.parse(secret, await read_body(receive))
        answer = await self.sessions.chat(secret, request, key=key or request.request_id, is_retry=is_retry)
        return _completion(answer, request.model)

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


def _field(raw: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"{key} is missing or of the wrong type", param=key)
    return value


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


def _completion(answer: Answer, model: str) -> bytes:
    choice = {"index": 0, "message": answer.reply, "finish_reason": answer.finish_reason, "logprobs": None}
    usage = {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }
    return encode(
        {
            "id": answer.call_id,
            "object": "chat.completion",
            "created": int(answer.created_at),
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    )


# ---------------------------------------------------------------- server


@asynccontextmanager
async def serve(app: App, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Serve on the running loop; yields the port (chosen by the system for 0).

    On leaving, calls and lease requests that wait are sent away with 503 before the server closes.
    """
    async with listening(app, host=host, port=port, name="proxy", stop=app.sessions.stop) as bound:
        if not app.sessions.base_url:
            app.sessions.base_url = f"http://{host}:{bound}"
        yield bound
