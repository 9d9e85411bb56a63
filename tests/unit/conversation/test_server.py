"""What the server makes of requests and answers, byte by byte over real sockets."""

import asyncio

import pytest

from tests.unit.conversation.server_bench import GET, echo, read, reply, serving
from turnmill.conversation.exchange import Application, Receive, Scope, Send


def parts(*bodies: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Application:
    """Answers with these parts, of whatever length they are."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    return app


# ---------------------------------------------------------------- requests


async def test_requests_of_one_connection_are_answered_one_after_the_other() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        for number in range(3):
            client.send(b"POST /%d?q=1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc" % number)
            head, body = await client.answer()
            assert head == "HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n"
            assert body == b"POST /%d abc" % number


async def test_an_application_sees_what_asgi_promises() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await reply(send, b"")

    async with serving(app) as server:
        client = await server.connect()
        client.send(b"GET /a%20b/%C3%A9?q=%20 HTTP/1.1\r\nHost: h\r\nX-Name: Value\r\nX-Empty:\r\n\r\n")
        await client.answer()
        own = client.writer.get_extra_info("sockname")
        client.send(b"GET http://h/absolute HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.answer()
    assert seen[0] == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/a b/é",
        "raw_path": b"/a%20b/%C3%A9",
        "query_string": b"q=%20",
        "root_path": "",
        "headers": [(b"host", b"h"), (b"x-name", b"Value"), (b"x-empty", b"")],
        "client": own,
        "server": ("127.0.0.1", server.port),
    }
    assert seen[1]["path"] == "/absolute"


async def test_a_request_may_come_byte_by_byte() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        for byte in b"POST /slow HTTP/1.1\r\nContent-Length: 2\r\n\r\nok":
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer())[1] == b"POST /slow ok"


async def test_a_body_may_come_in_chunks_with_trailers() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX-Late: 1\r\n\r\n"
        )
        assert (await client.answer())[1] == b"POST / abcde"
        client.send(GET)
        assert (await client.answer())[1] == b"GET /x "


async def test_requests_that_come_together_are_answered_in_their_order() -> None:
    running = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.001)
        running -= 1
        await echo(scope, receive, send)

    async with serving(app) as server:
        client = await server.connect()
        client.send(b"".join(b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n%d" % (n, n % 10) for n in range(30)))
        for number in range(30):
            assert (await client.answer())[1] == b"POST /%d %d" % (number, number % 10)


async def test_a_large_body_is_read_no_faster_than_it_is_taken() -> None:
    may_read = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_read.wait()
        await reply(send, str(len(await read(receive))).encode())

    async with serving(app) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n" + b"x" * 50_000_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.writer.drain()
        may_read.set()
        assert (await client.answer())[1] == b"50000000"


async def test_what_an_application_does_not_read_of_a_request_is_passed_over() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, scope["path"].encode(), status=413)
        assert (await receive())["type"] == "http.disconnect"

    async with serving(app) as server:
        client = await server.connect()
        client.send(b"POST /large HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n")
        assert (await client.answer())[1] == b"/large"
        client.send(b"x" * 3_000_000 + GET)
        assert (await client.answer())[1] == b"/x"


# ---------------------------------------------------------------- expectations, versions, methods


async def test_a_client_that_expects_it_is_told_to_go_on() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"ok")
        assert (await client.answer())[1] == b"POST / ok"
        client.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok")
        assert (await client.answer())[1] == b"POST / ok"


async def test_a_client_that_was_not_told_to_go_on_is_told_that_the_connection_ends() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"no", status=401)

    async with serving(app) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        head, _ = await client.answer()
        assert head.startswith("HTTP/1.1 401") and "connection: close" in head
        client.send(b"ok")
        assert await client.rest() == b""


@pytest.mark.parametrize("num_early", [0, 1])
async def test_a_client_is_not_told_to_go_on_within_or_after_an_answer(num_early: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"no" * (2 - num_early), "more_body": num_early > 0})
        await receive()
        if num_early:
            await send({"type": "http.response.body", "body": b"no"})

    async with serving(app) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        assert await client.reader.readexactly(2) == b"no"
        client.send(b"ok")
        assert await client.rest() == b"no"


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
    ],
)
async def test_a_connection_that_is_for_one_request_ends_with_its_answer(request_head: bytes) -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(request_head)
        assert await client.rest() == b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nGET / "


async def test_what_comes_after_the_last_request_of_a_connection_takes_no_answer_away() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n" + GET)
        assert (await client.rest()).endswith(b"\r\n\r\nGET /a ")


async def test_the_answer_to_head_has_no_body() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        client.send(b"HEAD / HTTP/1.1\r\n\r\n" + GET)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n"
        assert (await client.answer())[1] == b"GET /x "


@pytest.mark.parametrize(
    "length", [b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
async def test_a_request_that_asks_for_another_protocol_is_read_as_if_it_had_not(length: bytes) -> None:
    asking = (
        b"POST /%d HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n" + length
    )
    async with serving(echo) as server:
        client = await server.connect()
        client.send(b"".join(asking % number for number in range(9)) + GET)
        for number in range(9):
            head, body = await client.answer()
            assert (head, body) == ("HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n", b"POST /%d abc" % number)
        assert (await client.answer())[1] == b"GET /x "
        for byte in asking % 0:
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer())[1] == b"POST /0 abc"


# ---------------------------------------------------------------- answers


async def test_an_answer_without_a_length_is_sent_in_chunks() -> None:
    app = parts(b"a", b"", b"bc", headers=((b"transfer-encoding", b"gzip"), (b"x", b"y")))
    async with serving(app) as server:
        client = await server.connect()
        client.send(GET)
        head, body = await client.answer()
        assert (head, body) == ("HTTP/1.1 200 OK\r\nx: y\r\ntransfer-encoding: chunked\r\n\r\n", b"abc")
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert await client.rest() == b"HTTP/1.1 200 OK\r\nx: y\r\nconnection: close\r\n\r\nabc"


async def test_each_part_of_an_answer_is_sent_when_it_is_there() -> None:
    may_go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await may_go_on.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async with serving(app) as server:
        client = await server.connect()
        client.send(GET)
        assert (await client.reader.readuntil(b"one\r\n")).endswith(b"3\r\none\r\n")
        may_go_on.set()
        assert await client.reader.readexactly(13) == b"3\r\ntwo\r\n0\r\n\r\n"


async def test_an_application_waits_for_a_client_that_reads_slowly() -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(400):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            sent += 1
        await send({"type": "http.response.body"})

    async with serving(app) as server:
        client = await server.connect()
        client.send(GET)
        await client.reader.readuntil(b"\r\n\r\n")
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 400
        while sent < 400:
            await client.reader.read(1 << 20)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x", b"a\r\nset-cookie: b")],
        [(b"x\n", b"a")],
        [(b"content-length", b"1")],
        [(b"content-length", b"3")],
        [(b"content-length", b"two")],
    ],
)
async def test_an_answer_that_is_none_is_a_500(
    headers: list[tuple[bytes, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ab"})

    async with serving(app) as server:
        client = await server.connect()
        client.send(GET)
        assert (await client.rest()).startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert [record.message for record in caplog.records] == ["a request could not be answered"]


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Ends without an answer."""


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError


async def repeating(scope: Scope, receive: Receive, send: Send) -> None:
    for _ in range(2):
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def headless(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize("app", [nothing, failing, repeating, headless])
async def test_an_application_that_does_not_answer_is_a_500_and_the_end_of_the_connection(app: Application) -> None:
    async with serving(app) as server:
        client = await server.connect()
        client.send(GET + GET)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 500 ") and answer.endswith(b"close\r\n\r\nInternal Server Error")


async def test_an_answer_that_breaks_off_is_seen_to_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        raise ZeroDivisionError

    async with serving(app) as server:
        client = await server.connect()
        client.send(GET)
        answer = await client.rest()
        assert answer.endswith(b"4\r\nsome\r\n")
    assert len(caplog.records) == 1
