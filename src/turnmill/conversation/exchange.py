"""One request over HTTP and its answer, as an ASGI application sees them: what it is called with.

    parts of the body -> receive -> application -> send -> head and first part of the answer in one write, then the rest

A response is held back until its first part is there, as ASGI demands; each further part is written when it comes, so
that answers can be streamed.
"""

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def plain(status: int, text: bytes) -> bytes:
    """A whole answer of the server's own, after which the connection ends."""
    head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
    return _STATUS_LINES[status] + head + text


_FAILED = plain(500, b"Internal Server Error")


class Line(Protocol):
    """What an exchange needs of its connection."""

    @property
    def is_full(self) -> bool:
        """More was written than the client takes for now."""
        ...

    async def drained(self) -> None:
        """Return when it takes more."""
        ...

    def write(self, data: bytes) -> None:
        """To the client, if it is still there."""
        ...

    def resume_reading(self) -> None:
        """The application waits for what comes next."""
        ...

    def answered(self, exchange: "Exchange") -> None:
        """The last part was written."""
        ...

    def give_up(self, exchange: "Exchange", answer: bytes | None) -> None:
        """No answer will come; None: a part was sent, and the client must see that it was cut."""
        ...


class Exchange:
    """A request and its answer."""

    __slots__ = (
        "_arrived",
        "_chunks",
        "_expects_continue",
        "_has_begun",
        "_head",
        "_is_chunked",
        "_is_cut",
        "_is_heard",
        "_is_whole",
        "_left",
        "_line",
        "_scope",
        "is_answered",
        "keeps_alive",
        "num_unread",
    )

    def __init__(self, line: Line, scope: Scope, *, keeps_alive: bool, expects_continue: bool) -> None:
        # The connection is used for another request afterwards.
        self.keeps_alive = keeps_alive
        # The whole answer was given to the transport.
        self.is_answered = False
        # Bytes of the body that the application did not take yet.
        self.num_unread = 0
        self._line = line
        self._scope = scope
        self._expects_continue = expects_continue
        self._chunks: list[bytes] = []
        # The body was read to its end; the application was given its end; nothing more will come of it.
        self._is_whole = self._is_heard = self._is_cut = False
        # Set by whatever the application may wait for.
        self._arrived: asyncio.Event | None = None
        # The answer's head, until it is sent with the first part of the body; something of it was sent.
        self._head: bytes | None = None
        self._has_begun = False
        # The body is sent in chunks; bytes of it that are still to come, None where its length was not said.
        self._is_chunked = False
        self._left: int | None = None

    async def run(self, app: Application) -> None:
        """Have the application answer; what it does not answer is a 500."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:  # the supervision boundary of a request: whatever failed, the client is told
            logger.exception("a request could not be answered")
        finally:
            if not self.is_answered:
                self._line.give_up(self, None if self._has_begun else _FAILED)

    # ------------------------------------------------------------ the connection's side

    def add(self, body: bytes) -> None:
        """A part of the request's body came."""
        self._chunks.append(body)
        self.num_unread += len(body)
        self._wake()

    def end(self) -> None:
        """The request is there as a whole."""
        self._is_whole = True
        self._wake()

    def cut(self) -> None:
        """Nothing more will come from the client."""
        self._is_cut = True
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    # ------------------------------------------------------------ the application's side

    async def receive(self) -> Event:
        """The next part of the body, or `http.disconnect` when there is no use in going on."""
        if self._expects_continue:
            self._expects_continue = False
            if not self._chunks and not self._is_whole:
                self._line.write(_CONTINUE)
        while not self._has_news():
            self._line.resume_reading()
            if self._arrived is None:
                self._arrived = asyncio.Event()
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_cut or self._is_heard or self.is_answered:
            return {"type": "http.disconnect"}
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        self.num_unread = 0
        self._is_heard = self._is_whole
        return {"type": "http.request", "body": body, "more_body": not self._is_whole}

    def _has_news(self) -> bool:
        if self._is_cut or self.is_answered:
            return True
        return not self._is_heard and (self._is_whole or bool(self._chunks))

    async def send(self, event: Event) -> None:
        """Take a part of the answer; waits while the client reads slowly. Sent to nobody it is lost."""
        if self._line.is_full:
            await self._line.drained()
        kind = event["type"]
        if kind == "http.response.start" and self._head is None:
            self._head = self._make_head(event["status"], event.get("headers", ()))
        elif kind == "http.response.body" and self._head is not None and not self.is_answered:
            self._send_body(event.get("body", b""), is_last=not event.get("more_body"))
        else:
            raise RuntimeError(f"{kind} can't be sent now")

    def _make_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"transfer-encoding":
                continue  # how the body is sent is said here
            elif name == b"connection":
                self.keeps_alive = self.keeps_alive and b"close" not in value.lower()
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if self._scope["method"] == "HEAD" or status in (204, 304):
            self._left = 0
        elif self._left is None and self._scope["http_version"] == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        elif self._left is None:
            self.keeps_alive = False
        if not self.keeps_alive or self._expects_continue:
            # A client that was not told to go on may send the body all the same, or not; it is too late to tell it.
            self.keeps_alive = self._expects_continue = False
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a header of the answer holds a line break")
        return head + b"\r\n"

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self._scope["method"] == "HEAD":
            body = b""
        if self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the body of the answer is not as long as its content-length says")
        self._line.write(body if self._has_begun else (self._head or b"") + body)
        self._has_begun = True
        if is_last:
            self.is_answered = True
            self._wake()
            self._line.answered(self)
