"""Our connections under a listener of the test's, and clients whose every byte is the test's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from turnmill.conversation.exchange import Application, Receive, Scope, Send
from turnmill.conversation.server import Connection

FOREVER_S = 1000.0
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


@dataclass
class Client:
    """The client's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[str, bytes]:
        """Head and body of one answer with a length or in chunks."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if "content-length" in lines:
            return head, await self.reader.readexactly(int(lines["content-length"]))
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return head, body

    async def rest(self) -> bytes:
        """Everything until the server ends the connection."""
        return await self.reader.read()


@dataclass
class Server:
    """A listening server without uvicorn."""

    port: int
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client


@asynccontextmanager
async def serving(app: Application, idle_s: float = FOREVER_S) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    server = Server(port=0)
    listener = await loop.create_server(
        lambda: Connection(app, connections=server.connections, tasks=server.tasks, idle_s=idle_s, loop=loop),
        "127.0.0.1",
        0,
    )
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        for client in server.clients:
            client.writer.transport.abort()
        listener.close()
        for connection in list(server.connections):
            connection.shutdown()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        while server.connections:  # noqa: ASYNC110 - their end has no event
            await asyncio.sleep(0.001)


async def read(receive: Receive) -> bytes:
    body = b""
    while True:
        event = await receive()
        assert event["type"] == "http.request"
        body += bytes(event["body"])
        if not event["more_body"]:
            return body


async def reply(send: Send, body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Method, path and body."""
    body = await read(receive)
    await reply(send, f"{scope['method']} {scope['path']} ".encode() + body)
