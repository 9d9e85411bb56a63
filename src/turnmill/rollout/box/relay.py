"""The only way out of a box: its HTTP requests come in here, and those for the model go on to the proxy.

    environment -> POST <path of the rollout>/chat/completions -> relay -> POST <base_url>/chat/completions -> proxy
                                                                    '-> Watch: pending calls, what failed

The box knows neither where the proxy is nor the chat secret: its path is good at the relay only, and only while its
rollout is played. What the runner must know about the calls it learns here, from the answers of the proxy, and never
from the box. The relay is the retry owner between box and proxy, with the same rules as a client in the worker.
"""

import asyncio
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import msgspec

from turnmill.conversation.asgi import HttpError, read_body, refusal, send_json, unless_gone
from turnmill.conversation.client import Retry, ask, chat_error
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.http import HttpClient, Url
from turnmill.conversation.polling import finished, step_of, step_path
from turnmill.conversation.server import Connection
from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED
from turnmill.errors import BackendUnavailable, GenerationFailed, InvalidInput, LeaseLost

# The routes of a conversation, as they follow a rollout's path; no other one of the proxy can be named.
_ROUTE = re.compile(rb"/(chat/completions|completions|models)(/[A-Za-z0-9%._:~-]{1,1000})?")
_PATH = re.compile(rb"(/r/[A-Za-z0-9_-]+/v1)(/.*)")
_HEADERS = (b"idempotency-key", b"prefer", b"x-stainless-retry-count")
_KEY = "idempotency-key"
_JSON, _EVENTS = b"application/json", b"text/event-stream"
# The client in the box waits this much longer for the relay than the relay for the proxy.
_CALL_MARGIN_S = 30.0
_IDLE_S = 75.0
_RETRY = Retry()
# Seconds for sending a body; requests that one rollout may have under way, answers that it did not read among them;
# bodies that are read at once; bytes of bodies and answers held for all rollouts.
_READ_S = 20.0
_MOST_CALLS, _MOST_READS, _MOST_BYTES = 64, 16, 256 * 1024 * 1024
# Connections without a request, or with what is none; those that are open at once, as many as a process may have files.
_MOST_EMPTY, _MOST_OPEN = 500, 1024


@dataclass(kw_only=True, eq=False)
class Watch:
    """What is known about the calls of one rollout."""

    base_url: str = field(repr=False)
    # On the monotonic clock.
    deadline: float
    # The failure that decides the rollout: of the model, of the infrastructure, or a lost lease.
    failure: Exception | None = None
    # Requests under way.
    requests: set[asyncio.Task[None]] = field(default_factory=set)
    # Steps that were accepted, and whose answers were not fetched yet; whether they are to have tokens.
    steps: dict[str, bool] = field(default_factory=dict)
    # Answers that the box has not read.
    num_unread: int = 0

    @property
    def num_pending(self) -> int:
        """Calls without an answer."""
        return len(self.requests) + len(self.steps)

    def note(self, status: int, body: bytes, *, wants_tokens: bool) -> None:
        """An answer of the proxy to a call."""
        error = _fault_of(body, wants_tokens=wants_tokens) if status == 200 else chat_error(status, body)
        if isinstance(error, LeaseLost):
            self.failure = error
        elif isinstance(error, GenerationFailed) and error.code != CONTEXT_LENGTH_EXCEEDED:
            self.failure = self.failure or error


class Relay:
    """An ASGI application for all boxes of a worker."""

    def __init__(self, session: HttpClient, *, call_timeout_s: float, retry: Retry = _RETRY) -> None:
        self._session = session
        self._timeout_s = call_timeout_s + _CALL_MARGIN_S / 2
        self._retry = retry
        self._watches: dict[bytes, Watch] = {}
        self._reads = asyncio.Semaphore(_MOST_READS)
        self._num_bytes = 0

    def open(self, base_url: str, *, deadline: float) -> tuple[str, Watch]:
        """The path of a rollout in the box, and what becomes known of its calls; until `close`."""
        path = f"/r/{secrets.token_urlsafe(16)}/v1"
        watch = Watch(base_url=base_url.rstrip("/"), deadline=deadline)
        self._watches[path.encode()] = watch
        return path, watch

    def close(self, path: str) -> None:
        """Nothing of the rollout is answered any more; what is under way is given up."""
        watch = self._watches.pop(path.encode())
        for request in watch.requests:
            request.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            watch, route = self._find(scope)
            await self._answer(watch, route, scope, receive, send)
        except HttpError as error:
            await send_json(send, error.status, error.body())

    def _find(self, scope: Scope) -> tuple[Watch, str]:
        """Raises `HttpError` for anything but a route of a rollout that is being played."""
        path = _PATH.fullmatch(scope["raw_path"])
        watch = self._watches.get(path[1]) if path else None
        if path is None or watch is None:
            raise refusal(401, "invalid_api_key", "there is no rollout at this path")
        if not _is_route(path[2]) or scope["query_string"]:
            raise refusal(404, "not_found", "a rollout may ask for chat completions, completions and models")
        if scope["method"] not in ("GET", "POST"):
            raise refusal(405, "method_not_allowed", "only GET and POST")
        return watch, path[2].decode()

    async def _answer(self, watch: Watch, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        if len(watch.requests) + watch.num_unread >= _MOST_CALLS:
            raise refusal(429, "too_many_requests", f"a rollout may have {_MOST_CALLS} calls under way")
        task = asyncio.current_task()
        assert task is not None
        watch.requests.add(task)
        try:
            headers = _forwarded(scope)
            body: bytes | None = None
            if scope["method"] == "POST":
                body = await self._read(receive)
                headers.setdefault(_KEY, secrets.token_hex(16))
            with self._held(len(body or b"")):
                asking = asyncio.create_task(self._ask(watch, route, body, headers), name="relay-call")
                answer = await unless_gone(asking, receive)
        finally:
            watch.requests.discard(task)
        if answer is None:
            return
        # It is no longer pending: who does not read must not be taken for one who waits for the model.
        watch.num_unread += 1
        self._num_bytes += len(answer[1])
        try:
            await _send(send, *answer)
        finally:
            watch.num_unread -= 1
            self._num_bytes -= len(answer[1])

    @contextmanager
    def _held(self, num_bytes: int) -> Iterator[None]:
        """Raises `HttpError` where there is no room for a body of that size."""
        if self._num_bytes + num_bytes > _MOST_BYTES:
            raise refusal(429, "too_many_requests", "the calls of all rollouts are too large together")
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def _read(self, receive: Receive) -> bytes:
        """A body; its sender must not keep others from sending theirs."""
        try:
            async with self._reads, asyncio.timeout(_READ_S):
                return await read_body(receive)
        except TimeoutError as error:
            raise refusal(408, "timeout", f"the body did not come within {_READ_S:g} s") from error

    async def _ask(self, watch: Watch, route: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        url = Url.parse(watch.base_url + route)
        try:
            status, answer = await ask(
                self._session,
                url,
                body,
                headers,
                timeout_s=self._timeout_s,
                deadline=watch.deadline,
                retry=self._retry,
            )
        except BackendUnavailable as error:
            watch.failure = watch.failure or error
            # No status that a client in the box repeats: that was done here.
            text = refusal(500, "backend_unavailable", str(error))
            return text.status, text.body()
        except InvalidInput as error:
            raise refusal(400, "invalid_request", str(error)) from error
        _follow(watch, route, body, status, answer)
        return status, answer


def _is_route(path: bytes) -> bool:
    """Also as somebody behind the proxy's address would read it who takes %2F for a slash."""
    if not _ROUTE.fullmatch(path):
        return False
    read = unquote_to_bytes(path)
    return b".." not in read and b"\\" not in read and read.count(b"/") == path.count(b"/") and b"\0" not in read


def _follow(watch: Watch, route: str, asked: bytes | None, status: int, answer: bytes) -> None:
    """Learn from an answer; `asked` is the body of a call, None for a question about a step."""
    if asked is not None:
        wants_tokens = _wants_tokens(asked)
        step_id = step_of(status, answer)
        if step_id is None:
            watch.note(status, answer, wants_tokens=wants_tokens)
        elif len(watch.steps) < _MOST_CALLS:
            watch.steps[step_id] = wants_tokens
        return
    step_id = next((step for step in watch.steps if route.endswith(step_path(step))), None)
    if step_id is not None and (ended := finished(status, answer, step_id=step_id)) is not None:
        watch.note(*ended, wants_tokens=watch.steps.pop(step_id))


class _Asked(msgspec.Struct):
    return_token_ids: bool | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


_ASKED = msgspec.json.Decoder(_Asked)
_COMPLETION = msgspec.json.Decoder(_Completion)


def _wants_tokens(body: bytes) -> bool:
    # Few calls do, and a long conversation is not read for the others.
    if b"return_token_ids" not in body:
        return False
    try:
        return bool(_ASKED.decode(body).return_token_ids)
    except msgspec.DecodeError:
        return False


def _fault_of(body: bytes, *, wants_tokens: bool) -> GenerationFailed | None:
    """What a client would call a failure in a completion, though the proxy did not."""
    if not body.startswith(b"{"):
        return None  # events
    try:
        completion = _COMPLETION.decode(body)
    except msgspec.DecodeError as error:
        return GenerationFailed("invalid_response", f"the proxy's completion can't be read: {error}")
    if not completion.choices:
        return GenerationFailed("invalid_response", "the proxy's completion has no choices")
    has_tokens = completion.prompt_token_ids is not None and all(
        choice.token_ids is not None for choice in completion.choices
    )
    if wants_tokens and not has_tokens:
        return GenerationFailed("invalid_response", "the proxy's completion has not the tokens that were asked for")
    return None


def _forwarded(scope: Scope) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}


async def _send(send: Send, status: int, body: bytes) -> None:
    """Returns when the box has read nearly all of it."""
    kind = _JSON if body.startswith(b"{") else _EVENTS
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    # Waits until the former is on its way.
    await send({"type": "http.response.body", "body": b""})


class RelayServer:
    """The relay at one listening socket, that of a box; `close` ends it with all of its connections."""

    def __init__(self, relay: Relay, listener: socket.socket, *, on_flood: Callable[[str], None]) -> None:
        """`on_flood` is told why a box must be ended that makes connections without asking for anything.

        Raises `ValueError` for a socket that is none to serve at: the box made it.
        """
        check_listener(listener)
        self._relay = relay
        self._on_flood = on_flood
        self._num_connections = 0
        self._num_requests = 0
        self._listener = listener
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._server = await loop.create_server(self._connect, sock=self._listener)

    def _connect(self) -> Connection:
        self._num_connections += 1
        if self._num_connections > self._num_requests + _MOST_EMPTY:
            self._on_flood("it makes connections to the relay, and asks for nothing")
        elif len(self._connections) > _MOST_OPEN:
            self._on_flood(f"it has more than {_MOST_OPEN} connections to the relay")
        loop = asyncio.get_running_loop()
        return Connection(self._answer, connections=self._connections, tasks=self._tasks, idle_s=_IDLE_S, loop=loop)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_requests += 1
        await self._relay(scope, receive, send)

    async def close(self) -> None:
        """Idempotent."""
        if self._server is None:
            self._listener.close()
            return
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.shutdown()
        await self._server.wait_closed()
        self._server = None


def check_listener(listener: socket.socket) -> None:
    """Raises `ValueError` unless it listens at a TCP port of this machine."""
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.family != socket.AF_INET or listener.type != socket.SOCK_STREAM or not is_listening:
        raise ValueError("it is no listening TCP socket")
    if listener.getsockname()[0] != "127.0.0.1":
        raise ValueError("it does not listen at 127.0.0.1")
