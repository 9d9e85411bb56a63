"""HTTP/1.1 for an ASGI application: the connections of a server that accepts them and, in the end, closes them.

    bytes -> llhttp -> Exchange -> a task of the application -> its answer -> the next exchange | the end
                          '-> those of a client that does not wait for its answers queue up, and nothing more is read

A general server spends more on an exchange than all else that a turn does in this process: it writes head and body one
after the other, sets a timer for each answer, and is ready for logs, upgrades and middlewares that nobody here asks
for. What an application can see is ASGI 3 (HTTP only), so that the same one runs elsewhere.
"""

import asyncio
import logging
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from turnmill.conversation.exchange import Application, Exchange, plain

logger = logging.getLogger(__name__)
# Of a request's line and headers, and of what stands between the chunks of a body and behind them; what is read at once
# may exceed it.
MAX_HEAD_BYTES = 64 * 1024
# What is read of a body before the application asks for it.
_READ_AHEAD_BYTES = 64 * 1024
_BAD_REQUEST = plain(400, b"Invalid HTTP request received.")
_HEAD_TOO_LARGE = plain(431, b"The headers are too large.")


class Connection(asyncio.Protocol):
    """One client: its requests are answered one after the other, in their order.

    It ends when the client is silent for `idle_s` (at most twice that) while the server waits for it: for a request,
    for the rest of one, or for the client to read. Methods from `on_message_begin` on are called by the parser.
    """

    def __init__(
        self,
        app: Application,
        *,
        connections: "set[Any]",
        tasks: "set[asyncio.Task[None]]",
        idle_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Is in `connections` while it is open, and its tasks are in `tasks` while they run."""
        self._app = app
        self._connections = connections
        self._tasks = tasks
        self._idle_s = idle_s
        self._loop = loop
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        # What is equal in all scopes of the connection.
        self._scope: dict[str, Any] = {}
        # On the loop's clock.
        self._heard_at = 0.0
        # Bytes that the client had not taken when the timer last rang.
        self._num_unsent = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._is_in_head = False
        # Read since the parser last came to the end of something.
        self._num_head_bytes = 0
        # Being read; being answered; read after that one.
        self._reading: Exchange | None = None
        self._running: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._is_paused = False
        # Whatever else comes is ignored.
        self._is_deaf = False
        # No further request is answered.
        self._is_ending = False
        # Set when the transport, which had more to send than it should, takes more; None: it takes more.
        self._can_write: asyncio.Event | None = None

    def shutdown(self) -> None:
        """End when the request that is being answered is answered, or at once."""
        self._is_ending = True
        if self._running is None:
            self._transport.close()
        else:
            self._running.keeps_alive = False

    # ------------------------------------------------------------ for exchanges

    def write(self, data: bytes) -> None:
        """To the client, if it is still there."""
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def is_full(self) -> bool:
        """More was written than the client takes for now."""
        return self._can_write is not None

    async def drained(self) -> None:
        """Return when the transport can take more."""
        if self._can_write is not None:
            await self._can_write.wait()

    def resume_reading(self) -> None:
        """Unless requests wait for their turn; that their client has gone is noticed behind them then."""
        if self._is_paused and not self._queue and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def answered(self, exchange: Exchange) -> None:
        """The next request's turn, or the end."""
        self._running = None
        self._heard_at = self._loop.time()
        if not exchange.keeps_alive or self._is_ending:
            self._is_ending = True
            # What is on its way is read to its end: closing before that could take the answer from the client.
            if self._reading is not exchange:
                self._transport.close()
        elif self._queue:
            self._start(self._queue.popleft())
        self.resume_reading()

    def give_up(self, exchange: Exchange, answer: bytes | None) -> None:
        """End instead of answering; None: a part was sent, and the client must see that it was cut."""
        exchange.is_answered = True
        self._running = None
        self._is_ending = True
        if answer is None:
            self._transport.abort()
        else:
            self.write(answer)
            self._transport.close()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports only look like one.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "root_path": "",
        }
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(self._idle_s, self._look)

    def _look(self) -> None:
        """End, if the client has been silent for too long while it was its turn."""
        is_waiting = self._running is None or (self._running is self._reading and not self._is_paused)
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent != self._num_unsent:
            # It reads, however slowly.
            self._num_unsent = num_unsent
            self._heard_at = self._loop.time()
        silent_s = self._loop.time() - self._heard_at
        if not is_waiting and self._can_write is None:
            silent_s = 0.0
        if silent_s >= self._idle_s:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._idle_s - silent_s, self._look)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._is_deaf:
            return
        # Parsing sets it to 0 wherever something ends.
        self._num_head_bytes += len(data)
        try:
            self._parse(data)
        except HttpParserError:
            logger.warning("a client sent what is no HTTP")
            self._refuse(_BAD_REQUEST)
        else:
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        """Raises `HttpParserError`."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except HttpParserUpgrade as asked:
                # The parser takes what follows the head for another protocol, even where it is the body.
                head = self._head_without_upgrade()
                self._parser = HttpRequestParser(self)
                self._parser.feed_data(head)
                rest = rest[asked.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        """What was read, as if the client had not asked for another protocol; raises `HttpParserError` for CONNECT."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            raise HttpParserError("there is no way to another server here")
        headers = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(headers))

    def _refuse(self, answer: bytes) -> None:
        """Take no more of what the client sends; what was understood before that is answered first."""
        self._is_deaf = True
        broken, self._reading = self._reading, None
        if broken is not None and broken in self._queue:
            self._queue.remove(broken)
        elif broken is not None:
            broken.cut()
        last = self._queue[-1] if self._queue else self._running
        if last is not None:
            last.keeps_alive = False
        else:
            if broken is None:
                self.write(answer)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._timer.cancel()
        self._is_ending = True
        if self._running is not None:
            self._running.cut()
        self._queue.clear()
        self.resume_writing()
        # It refers to this object.
        del self._parser

    def pause_writing(self) -> None:
        self._can_write = asyncio.Event()

    def resume_writing(self) -> None:
        self._heard_at = self._loop.time()
        if self._can_write is not None:
            self._can_write.set()
            self._can_write = None

    # ------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._expects_continue = False
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # behind a body in chunks
        name = name.lower()
        if name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        if self._parser.should_upgrade():
            return  # and comes again, without asking for it
        version = self._parser.get_http_version()
        # What these raise is an HttpParserError to who feeds the parser.
        url = parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope = {
            **self._scope,
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }
        self._reading = exchange = Exchange(
            self,
            scope,
            keeps_alive=version == "1.1" and self._parser.should_keep_alive(),
            expects_continue=self._expects_continue and version == "1.1",
        )
        if self._running is None and not self._is_ending:
            self._start(exchange)
        else:
            self._queue.append(exchange)
            self._pause_reading()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        exchange = self._reading
        # Of an answered request the rest is of no interest.
        if exchange is not None and not exchange.is_answered:
            exchange.add(body)
            if exchange.num_unread > _READ_AHEAD_BYTES:
                self._pause_reading()

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        exchange, self._reading = self._reading, None
        if exchange is not None:
            exchange.end()
            if exchange.is_answered and self._is_ending:
                self._transport.close()

    def _start(self, exchange: Exchange) -> None:
        self._running = exchange
        task = self._loop.create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pause_reading(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()


def _address(address: Any) -> tuple[str, int] | None:
    """Host and port; None for what has none, like a Unix socket."""
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
