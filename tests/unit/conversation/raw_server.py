"""HTTP servers whose every byte is the test's."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from turnmill.conversation.http import HttpClient, Url

FOREVER_S = 1000.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Exchange:
    """One request as a server got it."""

    head: str
    body: bytes
    # Counts the server's connections.
    connection: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


# Gives the bytes of the answer; None closes the connection without one.
Handle = Callable[[Exchange], Awaitable[bytes | None]]


@dataclass
class Server:
    """Reads requests and answers with what its handler says."""

    handle: Handle
    port: int = 0
    scheme: str = "http"
    num_connections: int = 0
    # Connections that ended, by their number.
    ended: set[int] = field(default_factory=set)
    requests: list[Exchange] = field(default_factory=list)
    # Told of each request and of each end of a connection.
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> Url:
        return Url.parse(f"{self.scheme}://127.0.0.1:{self.port}/a/path?q=1")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.num_connections
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.split("\r\n") if line.startswith("Content-Length: "))
                body = await reader.readexactly(int(length[16:]))
                exchange = Exchange(head=head, body=body, connection=number, reader=reader, writer=writer)
                self.requests.append(exchange)
                await self._tell()
                answer = await self.handle(exchange)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone, as some tests want
        finally:
            writer.close()
            self.ended.add(number)
            await self._tell()

    async def _tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with self.news:
            await self.news.wait_for(is_so)


@asynccontextmanager
async def serving(handle: Handle, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(handle, scheme="https" if tls else "http")
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        async with HttpClient() as client:
            yield server, client
        await server.until(lambda: len(server.ended) == server.num_connections)
    finally:
        listener.close()
        await listener.wait_closed()


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[Url, list[asyncio.StreamWriter]]]:
    """A server that does what the test says to, and leaves its ends of the connections in the list."""
    ends: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Url.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"), ends
    finally:
        for writer in ends:
            writer.transport.abort()
        listener.close()
        await listener.wait_closed()


def always(*answers: bytes | None) -> Handle:
    """These answers one after the other, the last one ever after."""
    left = list(answers)

    async def handle(exchange: Exchange) -> bytes | None:
        return left.pop(0) if len(left) > 1 else left[0]

    return handle


async def silence(exchange: Exchange) -> bytes | None:
    """Until the client goes away."""
    await exchange.reader.read()
    return None


async def echo(exchange: Exchange) -> bytes:
    """The request's body, after a moment that depends on it."""
    await asyncio.sleep(0.001 * (len(exchange.body) % 7))
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(exchange.body), exchange.body)


async def post(client: HttpClient, server: Server, body: bytes = b"{}", **options: Any) -> tuple[int, bytes]:
    headers = options.pop("headers", {})
    return await client.post(server.url, body, headers, timeout_s=options.pop("timeout_s", FOREVER_S))
