"""HTTP/1.1 on kept connections, with bodies in memory: what a turn needs of an HTTP client and no more.

    post | get -> an idle connection | a new one -> head + body in one write -> llhttp -> (status, body) -> idle again
                                                              anything unexpected '-> closed, and never used again
    429 -> `Busy`: no answer to the request, but when to send it again

A general client spends more time on a request than everything else that a worker does in a turn (redirects, cookies,
encodings, middlewares, streams). Parsing is that of Node.js (llhttp, through httptools). Who calls owns the retries.

An answer must say how long it is (Content-Length or chunks): one that ends with its connection can't be told from one
that was cut, and counts as incomplete.
"""

import asyncio
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from turnmill.errors import InvalidInput

# A connection that was idle for longer may be closed by the other side at any moment, so it is not used again.
_IDLE_S = 60.0
# How much too early a loop's timer may ring, seconds: uvloop counts whole milliseconds.
_TICK_S = 0.001
# Makes the headers of a request from its method, URL, headers and body: a signature, where the server asks for one.
# Raises `BackendUnavailable` where it can't for now, which is as good as no connection.
Sign = Callable[[str, str, Mapping[str, str], bytes], Awaitable[Mapping[str, str]]]
_JSON = "application/json"
# Text that may stand in a request line or a header.
_PRINTABLE = frozenset(map(chr, range(0x21, 0x7F)))


_TOO_MANY_REQUESTS = 429


class Busy(OSError):
    """The server takes no more requests for now: 429."""

    def __init__(self, retry_after_s: float | None) -> None:
        """`retry_after_s`: when it wants to be asked again, seconds from now; None: it does not say."""
        super().__init__("HTTP 429")
        self.retry_after_s = retry_after_s


class TransportError(ConnectionError):
    """No usable answer: the connection ended before it was complete, or what came is no HTTP."""


@dataclass(frozen=True, kw_only=True)
class Url:
    """Where to send to; the path may hold a secret."""

    host: str
    port: int
    is_secure: bool
    # As it was given, without a fragment.
    text: str = field(repr=False)
    # The first lines of each request's head, behind the method.
    target: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "Url":
        """Raises `InvalidInput` for anything but an http or https URL of printable ASCII."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise InvalidInput(f"not a URL: {error}") from error
        is_secure = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname or not _PRINTABLE.issuperset(text):
            raise InvalidInput("the base URL of the proxy must begin with http:// or https:// and name a host")
        if parts.username is not None or parts.password is not None:
            raise InvalidInput("the base URL of the proxy must not hold a user name or a password: they are not sent")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = f" {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        port = port or (443 if is_secure else 80)
        text = f"{parts.scheme}://{parts.netloc}{path}"
        return cls(host=parts.hostname, port=port, is_secure=is_secure, text=text, target=target.encode())


class HttpClient:
    """Connections of one event loop, as many as there are requests at once; `async with` closes them."""

    def __init__(self, sign: Sign | None = None) -> None:
        """`sign` makes the headers of every request, again for each that is repeated; None: they are sent as given."""
        self._sign = sign
        self._idle: dict[tuple[str, int, bool], list[_Connection]] = {}
        self._connections = _Connections()
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        # Later requests, and those that are about to get a connection, fail; those under way end with theirs.
        self._is_closed = True
        await self._connections.end()

    async def post(self, url: Url, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `TimeoutError`, or `OSError` (`TransportError` among them) without one.

        Raises `Busy` for a 429, `InvalidInput` for a header that is no printable ASCII.
        """
        lines = await self._lines("POST", url, {"Content-Type": _JSON, **headers}, body)
        request = b"POST%b%bContent-Length: %d\r\n\r\n%b" % (url.target, lines, len(body), body)
        return await self._send(url, request, timeout_s)

    async def get(self, url: Url, headers: Mapping[str, str], *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer; raises as `post` does."""
        lines = await self._lines("GET", url, headers, b"")
        return await self._send(url, b"GET%b%b\r\n" % (url.target, lines), timeout_s)

    async def _lines(self, method: str, url: Url, headers: Mapping[str, str], body: bytes) -> bytes:
        if self._sign is not None:
            headers = await self._sign(method, url.text, headers, body)
        return "".join([_header(name, value) for name, value in headers.items()]).encode()

    async def _send(self, url: Url, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        give_up = time.monotonic() + timeout_s
        connection = self._take(url)
        if connection is None:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect(url)
        try:
            if self._is_closed:
                raise TransportError("the client is closed")
            answer: tuple[int, bytes] = await connection.exchange(request, give_up)
        except BaseException:
            # Its answer may still come: nobody else must take it for theirs.
            connection.abort()
            raise
        if connection.is_reusable:
            self._idle.setdefault((url.host, url.port, url.is_secure), []).append(connection)
        else:
            connection.abort()
        if answer[0] == _TOO_MANY_REQUESTS:
            raise Busy(connection.retry_after_s)
        return answer

    def _take(self, url: Url) -> "_Connection | None":
        """The connection that was used last, so that surplus ones age."""
        idle = self._idle.get((url.host, url.port, url.is_secure), [])
        while idle:
            connection = idle.pop()
            if connection.is_reusable and time.monotonic() - connection.used_at < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, url: Url) -> "_Connection":
        if url.is_secure and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(loop, self._connections), url.host, url.port, ssl=self._tls if url.is_secure else None
        )
        # Not before: one whose making was cancelled is closed by the loop, and uvloop never tells of its end.
        connection.register()
        return connection


def _header(name: str, value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        # A line feed in it would begin another header. The value may be a secret.
        raise InvalidInput(f"the header {name} can't be sent: it holds other characters than printable ASCII")
    return f"{name}: {value}\r\n"


class _Connections:
    """The open connections of a client, with one timer for all exchanges: set to the earliest deadline, and forward.

    A timer for each exchange would be started and cancelled a thousand times for each time that it rings.
    """

    def __init__(self) -> None:
        self._open: set[_Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        # On the monotonic clock, like all deadlines here.
        self._rings_at = math.inf

    def add(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def discard(self, connection: "_Connection") -> None:
        self._open.discard(connection)

    def watch(self, give_up: float) -> None:
        """See to it that exchanges with this deadline are ended in time."""
        if give_up < self._rings_at:
            self._stop()
            self._rings_at = give_up
            delay_s = max(0.0, give_up - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    async def end(self) -> None:
        self._stop()
        await asyncio.gather(*[connection.end() for connection in self._open])

    def _ring(self) -> None:
        self._rings_at = math.inf
        now = time.monotonic() + _TICK_S
        due = [connection for connection in self._open if connection.give_up <= now]
        for connection in sorted(due, key=lambda connection: connection.give_up):
            connection.time_out()
        self.watch(min((connection.give_up for connection in self._open), default=math.inf))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = math.inf


class _Connection(asyncio.Protocol):
    """One connection and at most one exchange at a time; the callbacks from `on_message_begin` on are the parser's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, registry: _Connections) -> None:
        self._registry = registry
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = loop.create_future()
        self._parser = HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._chunks: list[bytes] = []
        self._keeps_alive = True
        self.used_at = 0.0
        # What the latest answer says of when to ask again.
        self.retry_after_s: float | None = None
        # When the exchange under way has taken too long; never, without one.
        self.give_up = math.inf

    def register(self) -> None:
        """Be closed with the client, unless it ended already."""
        if not self._closed.done():
            self._registry.add(self)

    @property
    def is_reusable(self) -> bool:
        """Nothing but the next request can be on its way: not even the rest of one that was answered early."""
        transport = self._transport
        if not self._keeps_alive or transport is None or transport.is_closing():
            return False
        return not transport.get_write_buffer_size()

    async def exchange(self, request: bytes, give_up: float) -> tuple[int, bytes]:
        """Raises `TimeoutError` at `give_up`, on the monotonic clock."""
        if self._transport is None or self._transport.is_closing():
            raise TransportError("the connection is closed")
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(request)
        self.give_up = give_up
        self._registry.watch(give_up)
        try:
            return await answer
        finally:
            self.give_up = math.inf

    def time_out(self) -> None:
        """End the exchange under way: its answer did not come in time."""
        self.give_up = math.inf
        self._fail(TimeoutError("no answer in time"))

    def abort(self) -> None:
        """Close at once; idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def end(self) -> None:
        """Close at once, and wait until the loop has done so; a polite end would wait for what the peer does."""
        self.abort()
        await self._closed

    def _fail(self, error: OSError) -> None:
        self._keeps_alive = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports only look like one.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            # Bytes that nobody asked for.
            self._keeps_alive = False
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(TransportError(f"the answer is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.discard(self)
        if not self._closed.done():
            self._closed.set_result(None)
        self._fail(TransportError(f"the connection ended before the answer was complete ({exc or 'closed'})"))

    # ------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.done():
            # More came with the answer: whose it is, nobody can say, so the next request must not get it.
            self._keeps_alive = False

        self.retry_after_s = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self.retry_after_s = float(value)

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            # An interim answer: the real one follows.
            self._chunks.clear()
            return
        self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive()
        self.used_at = time.monotonic()
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))
