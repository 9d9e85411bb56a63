"""The HTTP client against servers that speak, misspeak and fall silent, byte by byte."""

import asyncio
import gc
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.unit.conversation.raw_server import (
    FOREVER_S,
    OK,
    Exchange,
    always,
    echo,
    listening,
    post,
    serving,
    silence,
)
from turnmill.conversation.http import HttpClient, TransportError, Url
from turnmill.errors import InvalidInput

# ---------------------------------------------------------------- what is sent


async def test_a_request_says_where_to_what_and_how_long() -> None:
    async with serving(always(OK)) as (server, client):
        assert await post(client, server, b'{"a":1}', headers={"Authorization": "Bearer x"}) == (200, b"ok")
        (request,) = server.requests
    lines = request.head.split("\r\n")
    assert lines[0] == "POST /a/path?q=1 HTTP/1.1"
    assert sorted(lines[1:-2]) == [
        "Authorization: Bearer x",
        "Content-Length: 7",
        "Content-Type: application/json",
        f"Host: 127.0.0.1:{server.port}",
    ]
    assert request.body == b'{"a":1}'


@pytest.mark.parametrize("value", ["a\r\nHost: evil", "a\nb", "a\rb", "ä", "a\x00", "\ud800"])
async def test_a_header_that_would_become_another_is_refused_and_not_shown(value: str) -> None:
    async with serving(always(OK)) as (server, client):
        with pytest.raises(InvalidInput, match="the header Authorization can't be sent") as refused:
            await post(client, server, headers={"Authorization": f"secret{value}"})
        assert "secret" not in str(refused.value)
        assert server.num_connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "proxy",
        "//proxy/a",
        "ftp://proxy/a",
        "http://",
        "http:///a",
        "http://proxy:port/a",
        "http://proxy:99999/a",
        "http://[::1/a",
        "http://proxy/a b",
        "http://proxy/a\r\nX: y",
        "http://proxy/\u00e4",
        "http://pr\u00f6xy/a",
        "http://user:password@proxy/a",
        "http://user@proxy/a",
    ],
)
def test_a_url_that_can_not_be_posted_to_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        Url.parse(url)


@pytest.mark.parametrize(
    ("url", "host", "port", "first"),
    [
        ("http://proxy", "proxy", 80, "POST / HTTP/1.1\r\nHost: proxy\r\n"),
        ("https://proxy/a/b#c", "proxy", 443, "POST /a/b HTTP/1.1\r\nHost: proxy\r\n"),
        ("http://[::1]:8080/a?b=c", "::1", 8080, "POST /a?b=c HTTP/1.1\r\nHost: [::1]:8080\r\n"),
    ],
)
def test_a_url_says_host_port_and_path(url: str, host: str, port: int, first: str) -> None:
    parsed = Url.parse(url)
    assert (parsed.host, parsed.port, parsed.is_secure) == (host, port, url.startswith("https"))
    assert f"POST{parsed.target.decode()}".startswith(first)


# ---------------------------------------------------------------- connections


async def test_a_connection_is_used_again_and_a_second_one_only_beside_it() -> None:
    async with serving(echo) as (server, client):
        for number in range(5):
            assert await post(client, server, b"%d" % number) == (200, b"%d" % number)
        assert server.num_connections == 1
        await asyncio.gather(*(post(client, server) for _ in range(4)))
        assert server.num_connections == 4
        await asyncio.gather(*(post(client, server) for _ in range(4)))
        assert server.num_connections == 4


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_everybody_gets_the_answer_to_the_own_request(run: Callable[..., None]) -> None:
    async def converse() -> None:
        async with serving(echo) as (server, client):

            async def talk(name: int) -> None:
                for turn in range(20):
                    body = b"%d %d " % (name, turn) + b"x" * (name * turn)
                    timeout_s = 0.002 if (name + turn) % 5 == 0 else FOREVER_S
                    try:
                        assert await post(client, server, body, timeout_s=timeout_s) == (200, body)
                    except TimeoutError:
                        assert timeout_s < FOREVER_S

            await asyncio.gather(*map(talk, range(16)))

    run(converse())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_connections_whose_making_was_cut_short_do_not_hold_up_the_end(run: Callable[..., None]) -> None:
    async def hurry() -> None:
        for round in range(40):
            async with serving(always(OK)) as (server, client):
                # Of each some time out before there is a connection, some while there is one, some get an answer.
                tries = [post(client, server, timeout_s=0.00005 * (number + round)) for number in range(20)]
                for found in await asyncio.gather(*tries, return_exceptions=True):
                    assert found == (200, b"ok") or isinstance(found, TimeoutError)

    run(asyncio.wait_for(hurry(), 30.0))


async def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    async with serving(always(OK)) as (server, client):
        await post(client, server)
        server.requests[0].writer.close()
        await asyncio.sleep(0.02)
        assert await post(client, server) == (200, b"ok")
        assert [request.connection for request in server.requests] == [0, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_that_the_server_wants_closed_is_closed(answer: bytes) -> None:
    async with serving(always(answer)) as (server, client):
        for _ in range(2):
            assert await post(client, server) == (200, b"ok")
        assert [request.connection for request in server.requests] == [0, 1]


@pytest.mark.parametrize(
    "surplus",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nfor",
        b"HTTP/1.1 200 OK\r\nContent-Len",
        b"H",
        b"garbage",
    ],
)
@pytest.mark.parametrize("is_later", [False, True], ids=["with-the-answer", "later"])
async def test_bytes_that_nobody_asked_for_answer_no_later_request(surplus: bytes, is_later: bool) -> None:
    rest = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"[len(surplus) :]
    async with serving(always(OK if is_later else OK + surplus, rest + OK, OK)) as (server, client):
        assert await post(client, server) == (200, b"ok")
        if is_later:
            server.requests[0].writer.write(surplus)
            await asyncio.sleep(0.02)
        server.handle = always(OK)
        assert await post(client, server) == (200, b"ok")
        assert [request.connection for request in server.requests] == [0, 1]


async def test_a_connection_with_a_request_still_on_its_way_is_not_used_again() -> None:
    """Answered before it was read: a server that refuses a body by its length."""

    async def refuse_then_serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno" if not ends else OK)
        ends.append(writer)

    async with listening(refuse_then_serve) as (url, ends):
        async with HttpClient() as client:
            assert await client.post(url, bytes(50_000_000), {}, timeout_s=FOREVER_S) == (413, b"no")
            assert await client.post(url, b"{}", {}, timeout_s=FOREVER_S) == (200, b"ok")
        assert len(ends) == 2


# ---------------------------------------------------------------- answers


async def test_an_interim_answer_is_none() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with serving(always(interim + OK)) as (server, client):
        for _ in range(2):
            assert await post(client, server) == (200, b"ok")
        assert server.num_connections == 1


async def test_an_interim_answer_alone_is_waited_past() -> None:
    async def slow(exchange: Exchange) -> bytes:
        exchange.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.02)
        return OK

    async with serving(slow) as (server, client):
        assert await post(client, server) == (200, b"ok")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_answer_may_come_in_chunks_and_in_any_pieces(size: int) -> None:
    head = b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = head + b"3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nTrailer: t\r\n\r\n"

    async def in_pieces(exchange: Exchange) -> bytes:
        for start in range(0, len(whole), size):
            exchange.writer.write(whole[start : start + size])
            await exchange.writer.drain()
            await asyncio.sleep(0)
        return b""

    async with serving(in_pieces) as (server, client):
        for _ in range(2):
            assert await post(client, server) == (201, b"abcdefgh")
        assert server.num_connections == 1


async def test_an_answer_may_be_empty() -> None:
    async with serving(always(b"HTTP/1.1 204 No Content\r\n\r\n")) as (server, client):
        for _ in range(2):
            assert await post(client, server) == (204, b"")
        assert server.num_connections == 1


async def test_a_large_answer_is_whole() -> None:
    async with serving(echo) as (server, client):
        body = bytes(range(256)) * 20_000
        assert await post(client, server, body) == (200, body)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        # Without a length nobody can say whether this is all.
        b"HTTP/1.1 200 OK\r\n\r\nperhaps all",
    ],
)
async def test_a_connection_that_ends_before_the_answer_is_complete_gives_none(part: bytes) -> None:
    async def break_off(exchange: Exchange) -> bytes | None:
        exchange.writer.write(part)
        return None

    async with serving(break_off) as (server, client):
        with pytest.raises(TransportError, match="ended before the answer was complete"):
            await post(client, server)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_gives_no_answer(answer: bytes) -> None:
    async with serving(always(answer)) as (server, client):
        with pytest.raises(TransportError, match="no HTTP"):
            await post(client, server)
        await server.until(lambda: server.ended == {0})


async def test_nobody_there_is_an_error_of_the_system() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    async with listening(never) as (url, _):
        pass
    async with HttpClient() as client:
        with pytest.raises(ConnectionRefusedError):
            await client.post(url, b"{}", {}, timeout_s=FOREVER_S)


# ---------------------------------------------------------------- ends


async def test_a_time_out_ends_the_connection_and_its_late_answer_reaches_nobody() -> None:
    go_on = asyncio.Event()

    async def late(exchange: Exchange) -> bytes:
        if exchange.body == b"first":
            await go_on.wait()
            return b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate"
        return OK

    async with serving(late) as (server, client):
        with pytest.raises(TimeoutError):
            # Long enough for the connection to be there, and the request on it.
            await post(client, server, b"first", timeout_s=0.5)
        go_on.set()
        assert await post(client, server, b"second") == (200, b"ok")
        assert [request.connection for request in server.requests] == [0, 1]
        await server.until(lambda: 0 in server.ended)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_under_way_together_time_out_in_the_order_of_their_deadlines(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> None:
        ended: list[float] = []

        async def ask(client: HttpClient, url: Url, timeout_s: float) -> None:
            with pytest.raises(TimeoutError):
                await client.post(url, b"{}", {}, timeout_s=timeout_s)
            ended.append(timeout_s)

        async with serving(silence) as (server, client):
            forever = asyncio.create_task(ask(client, server.url, FOREVER_S))
            # Later ones are due earlier, and a timer that rang is set again for the next.
            await asyncio.gather(*(ask(client, server.url, timeout_s) for timeout_s in (0.6, 0.2, 0.4)))
            assert ended == [0.2, 0.4, 0.6] and not forever.done()
            forever.cancel()
            await asyncio.wait({forever})

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


async def test_a_server_that_accepts_and_never_reads_is_timed_out() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)

    async with listening(never) as (url, ends), HttpClient() as client:
        with pytest.raises(TimeoutError):
            await client.post(url, bytes(50_000_000), {}, timeout_s=0.05)


async def test_a_cancelled_request_ends_its_connection_at_once() -> None:
    async with serving(silence) as (server, client):
        task = asyncio.create_task(post(client, server))
        await server.until(lambda: len(server.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda: server.ended == {0})


async def test_a_client_that_is_left_leaves_no_connection_open_and_serves_no_more() -> None:
    """Idle ones, one whose server is silent, one whose server reads nothing, and one that is just being made."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        if len(ends) == 3:
            are_there.set()
        if len(ends) == 1:
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(OK)

    are_there = asyncio.Event()
    async with listening(never) as (url, ends):
        async with HttpClient() as client:
            assert await client.post(url, b"{}", {}, timeout_s=FOREVER_S) == (200, b"ok")
            waiting = [
                asyncio.create_task(client.post(url, body, {}, timeout_s=FOREVER_S))
                for body in (b"", b"{}", bytes(50_000_000))
            ]
            await are_there.wait()
            waiting.append(asyncio.create_task(client.post(url, b"{}", {}, timeout_s=FOREVER_S)))
            await asyncio.sleep(0)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, TransportError), outcome
        with pytest.raises(TransportError, match="the client is closed"):
            await client.post(url, b"{}", {}, timeout_s=FOREVER_S)
    # A transport that was left open would say so here.
    gc.collect()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    async with serving(always(OK), tls) as (server, client):
        with pytest.raises(ssl.SSLCertVerificationError):
            await post(client, server, timeout_s=FOREVER_S)
        assert server.requests == []
