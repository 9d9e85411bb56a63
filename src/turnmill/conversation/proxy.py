"""HTTP for workers and agents, over the sessions of a run: a plain ASGI application.

    POST /v1/rollouts/lease | heartbeat      worker token        rollouts to play
    POST /a/<chat secret>/v1/chat/completions | completions      OpenAI's: the answer, a stream, or 202 and a step
    GET  /a/<chat secret>/v1/chat/completions/<step>             the answer, or 202 once more
    GET  /a/<chat secret>/v1/models                              the names of the run's model
    POST /v1/rollouts/report                 report secret       the end of an attempt
    GET  /healthz

The routes of agents are there without `/a/<chat secret>` as well, with the secret as bearer token.

The routes are dispatched by hand: a turn of a small model takes about a millisecond, of which a framework's routing,
request and response objects would take a fifth. Secrets travel in paths and headers, so no access log is written.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from turnmill.conversation.admission import Limits
from turnmill.conversation.agents import MAX_WAIT_S, Agents, Reply, agent_route, not_allowed
from turnmill.conversation.asgi import HttpError, bearer_of, read_body, refusal, send_json, to_http, until_disconnect
from turnmill.conversation.bodies import number, parse_object
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.leases import Lease
from turnmill.conversation.reports import parse_report
from turnmill.conversation.service import Service
from turnmill.conversation.streaming import Pace
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

MAX_ROLLOUTS = 4096


def create_app(
    sessions: Service,
    *,
    hold_s: float | None = None,
    limits: Limits | None = None,
    pace: Pace | None = None,
) -> "App":
    """The ASGI application for a run's sessions.

    `hold_s`: how long a client is kept waiting for the answer of a call before it is sent away with 202 to ask again;
    it may wish for less. None: as long as it takes, except for clients that say how long they want to wait. `limits`:
    how many calls may be under way. `pace`: when a stream shows that it lives.
    """
    return App(sessions, hold_s=hold_s, limits=limits or Limits(), pace=pace or Pace())


class App:
    """The routes."""

    def __init__(self, sessions: Service, *, hold_s: float | None, limits: Limits, pace: Pace) -> None:
        self.sessions = sessions
        self._agents = Agents(sessions, self._explain, hold_s=hold_s, limits=limits, pace=pace)
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
            reply = await self._dispatch(scope, receive, send)
        except HttpError as error:
            await send_json(send, error.status, error.body(), error.headers)
        except TurnmillError as error:
            answer = self._explain(error)
            await send_json(send, answer.status, answer.body(), answer.headers)
        else:
            if reply is not None:
                await send_json(send, *reply)

    def _explain(self, error: TurnmillError) -> HttpError:
        """An error as its answer; one that keeps everybody from being served is told to the sessions."""
        failure = _of_backend(error)
        answer = to_http(failure or error)
        if failure is not None:
            self.sessions.fail(failure)
        elif answer.status == 500:
            logger.error("%s", error)
        return answer

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Reply:
        path, method = scope["path"], scope["method"]
        agent = agent_route(path)
        if agent is not None:
            return await self._agents.serve(agent, scope, receive, send)
        route = self._routes.get((method, path))
        if route is None:
            if any(path == known for _, known in self._routes):
                raise not_allowed(method)
            raise refusal(404, "not_found", "no such route")
        return 200, await route(scope, receive, b"" if method == "GET" else await read_body(receive))

    # ------------------------------------------------------------ routes

    async def _lease(self, scope: Scope, receive: Receive, body: bytes) -> bytes:
        self.sessions.check_worker(bearer_of(scope))
        raw = parse_object(body)
        worker = _field(raw, "worker", str)
        most = _field(raw, "max_rollouts", int)
        wait_s = number(raw.get("wait_s"), "wait_s")
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
        secret = bearer_of(scope)
        await self.sessions.report(secret, parse_report(body))
        self._agents.end(secret)
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
