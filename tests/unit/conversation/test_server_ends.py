"""How connections end: what is no HTTP, clients that go away or say nothing, and the server's own end."""

import asyncio
import logging
from typing import Any

import pytest

from tests.unit.conversation.server_bench import FOREVER_S, GET, echo, read, reply, serving
from turnmill.conversation.exchange import Receive, Scope, Send

# ---------------------------------------------------------------- what is no HTTP, and clients that go away


@pytest.mark.parametrize(
    "data",
    [
        b"no http\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"CONNECT h:443 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_without_a_traceback(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(data)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.endswith(b"connection: close\r\n\r\nInvalid HTTP request received.")
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.WARNING, None)]


async def test_what_was_understood_before_is_answered_first() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nno http\r\n\r\n")
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200") == 2
        assert answers.endswith(b"connection: close\r\n\r\nGET /2 ")


async def broken_off(scope: Scope, receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            break
    await reply(send, b"cut", status=400)


async def test_a_body_that_breaks_off_ends_its_request_only() -> None:
    async with serving(broken_off) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nnone\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400") and answer.endswith(b"connection: close\r\n\r\ncut")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", 400),
    ],
)
async def test_headers_and_trailers_without_end_are_refused(sent: bytes, status: int) -> None:
    async with serving(broken_off) as server:
        client = await server.connect()
        client.send(sent)
        await client.writer.drain()
        answer = asyncio.create_task(client.reader.readuntil(b"\r\n"))
        num_sent = 0
        while not answer.done() and num_sent < 10_000_000:
            client.send(b"y" * 10_000 if sent.endswith(b";") else b"x: " + b"y" * 10_000 + b"\r\n")
            num_sent += 10_000
            await asyncio.sleep(0.001)
        assert answer.done()
        # A connection that is closed before all was read may be reset, which takes the answer along.
        assert isinstance(answer.exception(), ConnectionError) or answer.result().startswith(b"HTTP/1.1 %d " % status)
        assert not server.connections and not server.tasks


@pytest.mark.parametrize("sent", [GET, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"])
async def test_an_application_is_told_when_its_client_has_gone(sent: bytes) -> None:
    gone: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        gone.put_nowait("begun")
        while (await receive())["type"] != "http.disconnect":
            pass
        # To nobody: no error.
        await reply(send, b"late")
        gone.put_nowait("told")

    async with serving(app) as server:
        client = await server.connect()
        client.send(sent)
        assert await gone.get() == "begun"
        client.writer.transport.abort()
        assert await gone.get() == "told"
        assert gone.empty()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", GET])
async def test_a_client_that_is_silent_for_too_long_is_sent_away(sent: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await reply(send, b"")
        else:
            await broken_off(scope, receive, send)

    async with serving(app, idle_s=0.05) as server:
        client = await server.connect()
        client.send(sent)
        assert (await client.rest()).count(b"HTTP/1.1") == (sent == GET)


async def test_a_client_that_waits_for_its_answer_is_not_sent_away() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.3)
        await echo(scope, receive, send)

    async with serving(app, idle_s=0.02) as server:
        client = await server.connect()
        client.send(GET)
        assert (await client.answer())[1] == b"GET /x "


async def test_a_client_that_does_not_read_is_sent_away() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"x" * 50_000_000)
        await receive()
        ended.set()

    async with serving(app, idle_s=0.1) as server:
        client = await server.connect()
        client.send(GET)
        await client.reader.readuntil(b"\r\n\r\n")
        while server.connections:  # noqa: ASYNC110 - their end has no event
            await asyncio.sleep(0.01)
        assert ended.is_set()


async def test_a_client_that_reads_slowly_is_not_sent_away() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"x" * 20_000_000)

    async with serving(app, idle_s=0.2) as server:
        client = await server.connect()
        client.send(GET)
        await client.reader.readuntil(b"\r\n\r\n")
        num_read = 0
        while num_read < 20_000_000:
            part = await client.reader.read(1_000_000)
            assert part
            num_read += len(part)
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- the end


async def test_a_server_that_closes_answers_what_it_was_asked_and_no_more() -> None:
    begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await may_go_on.wait()
        await echo(scope, receive, send)

    async with serving(app) as server:
        idle, busy = await server.connect(), await server.connect()
        busy.send(GET + GET)
        await begun.wait()
        while len(server.connections) < 2:  # noqa: ASYNC110 - their making has no event
            await asyncio.sleep(0.001)
        for connection in list(server.connections):
            connection.shutdown()
        assert await idle.rest() == b""
        may_go_on.set()
        assert await busy.rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\nGET /x "


async def test_a_request_that_is_cancelled_is_a_500() -> None:
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.sleep(FOREVER_S)

    async with serving(app) as server:
        client = await server.connect()
        client.send(GET)
        await begun.wait()
        for task in server.tasks:
            task.cancel()
        assert (await client.rest()).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("wait", [True, False])
async def test_an_application_may_wait_for_its_client_beside_its_work(wait: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        gone: asyncio.Future[Any] = asyncio.ensure_future(receive())
        if wait:
            await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await reply(send, b"done")
        assert (await receive())["type"] == "http.disconnect"

    async with serving(app) as server:
        client = await server.connect()
        for _ in range(2):
            client.send(GET)
            assert (await client.answer())[1] == b"done"
