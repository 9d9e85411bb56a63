"""A port that is the same for each server that follows another one."""

import asyncio
import socket

import pytest

from turnmill.conversation.exchange import Application, Receive, Scope, Send
from turnmill.conversation.serving import listening, reserved_port

HOST = "127.0.0.1"


def answering(body: bytes) -> Application:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": body})

    return app


async def asked(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer[-1:]


async def test_servers_follow_one_another_at_a_reserved_port() -> None:
    with reserved_port(HOST) as port:
        with pytest.raises(ConnectionRefusedError):
            await asked(port)
        for body in (b"1", b"2"):
            async with listening(answering(body), host=HOST, port=port, is_reserved=True, name="test") as bound:
                assert bound == port and await asked(port) == body


def test_nobody_else_gets_a_reserved_port() -> None:
    with reserved_port(HOST) as port, pytest.raises(OSError, match="in use"):
        socket.create_server((HOST, port))
