"""The way out of a box: what it lets through to the proxy, and what it learns on the way."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web

from turnmill.conversation.client import Retry
from turnmill.conversation.http import HttpClient
from turnmill.errors import GenerationFailed, LeaseLost
from turnmill.rollout.box.relay import Relay, RelayServer, Watch, check_listener

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTE = "/a/chatsecret0123456789/v1"


class Proxy:
    """Answers by `answer`, keeps what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.answer: Answer = completion

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append(
            (request.method, request.raw_path, body, {name.lower(): value for name, value in request.headers.items()})
        )
        return await self.answer(request)


async def completion(request: web.Request) -> web.StreamResponse:
    choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice]})


def failing(status: int, code: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": code}}, status=status)

    return answer


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Proxy, Relay, str, ClientSession]]:
    """A proxy, a relay to it, where the relay listens, and a client."""
    proxy = Proxy()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with HttpClient() as session, ClientSession(timeout=ClientTimeout(20)) as client:
        relay = Relay(session, call_timeout_s=20.0, retry=Retry(for_s=0.3, first_s=0.01, most_s=0.02))
        listener = socket.create_server(("127.0.0.1", 0))
        floods: list[str] = []
        server = RelayServer(relay, listener, on_flood=floods.append)
        await server.start()
        try:
            yield proxy, relay, f"http://127.0.0.1:{listener.getsockname()[1]}", client
        finally:
            await server.close()
            await runner.cleanup()


def opened(relay: Relay, proxy: Proxy) -> tuple[str, Watch]:
    return relay.open(proxy.url + ROUTE, deadline=asyncio.get_running_loop().time() + 20)


async def test_a_call_goes_to_the_proxy_under_its_secret_and_with_a_key() -> None:
    async with relayed() as (proxy, relay, url, client):
        path, watch = opened(relay, proxy)
        headers = {"Authorization": "Bearer mine", "Idempotency-Key": "k-1", "X-Other": "x", "Prefer": "wait=5"}
        async with client.post(url + path + "/chat/completions", data=b'{"messages": []}', headers=headers) as answer:
            assert (answer.status, (await answer.json())["choices"][0]["message"]["content"]) == (200, "hi")
        async with client.post(url + path + "/completions", data=b"{}") as answer:
            assert answer.status == 200

    assert [asked[:3] for asked in proxy.asked] == [
        ("POST", ROUTE + "/chat/completions", b'{"messages": []}'),
        ("POST", ROUTE + "/completions", b"{}"),
    ]
    first, second = proxy.asked[0][3], proxy.asked[1][3]
    assert (first["idempotency-key"], first["prefer"]) == ("k-1", "wait=5")
    assert not {"authorization", "x-other"} & first.keys()
    assert len(second["idempotency-key"]) == 32
    assert (watch.failure, watch.num_pending) == (None, 0)
    assert "chatsecret" not in path


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("POST", "/rollouts/report", 404),
        ("POST", "/chat/completions/../../../v1/rollouts/report", 404),
        ("POST", "/chat/completions/%2e%2e/%2e%2e/rollouts/report", 404),
        ("POST", "/chat/completions/..%2f..%2fv1%2frollouts%2freport", 404),
        ("POST", "/chat/completions/%2e%2e%2f%2E%2E%2frollouts%2freport", 404),
        ("GET", "/chat/completions/%2e%2e", 404),
        ("GET", "/chat/completions/a%2Fb", 404),
        ("GET", "/chat/completions/a%5cb", 404),
        ("GET", "/chat/completions/a%00", 404),
        ("POST", "//rollouts/report", 404),
        ("POST", "/chat/completions;/../rollouts/report", 404),
        ("GET", "/models?x=1", 404),
        ("GET", "/", 404),
        ("DELETE", "/chat/completions", 405),
        ("PUT", "/models", 405),
    ],
)
async def test_only_the_routes_of_a_conversation_can_be_named(method: str, route: str, status: int) -> None:
    async with relayed() as (proxy, relay, url, _):
        path, _ = opened(relay, proxy)
        assert await raw_status(url, method, path + route) == status
    assert proxy.asked == []


async def raw_status(url: str, method: str, target: str, headers: str = "") -> int:
    """The status of a request whose target no client tidies up."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n{headers}\r\n".encode("latin-1"))
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize("target", ["/r/guessed0123456789abcd/v1/chat/completions", ROUTE + "/chat/completions", "/"])
async def test_a_path_that_is_not_of_a_rollout_is_refused(target: str) -> None:
    async with relayed() as (proxy, relay, url, _):
        opened(relay, proxy)
        assert await raw_status(url, "POST", target) == 401
    assert proxy.asked == []


async def test_an_address_in_the_request_line_leads_nowhere_else() -> None:
    async with relayed() as (proxy, relay, url, _):
        path, _ = opened(relay, proxy)
        other = proxy.url + ROUTE + "/chat/completions"
        assert await raw_status(url, "POST", other) == 401
        assert await raw_status(url, "POST", "http://203.0.113.1" + path + "/chat/completions") == 200
        # Whose path it is decides, and not the host that is named before it.
        assert await raw_status(url, "CONNECT", proxy.url.removeprefix("http://")) == 400
    assert [asked[1] for asked in proxy.asked] == [ROUTE + "/chat/completions"]


@pytest.mark.parametrize(
    "headers",
    [
        "Idempotency-Key: a\r\n POST /v1/rollouts/report HTTP/1.1\r\n",
        "Idempotency-Key: a\nX-Other: b\r\n",
        "Idempotency-Key: a\rX-Other: b\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\n",
        "X: " + 700_000 * "x" + "\r\n",
    ],
)
async def test_requests_that_two_could_read_in_two_ways_are_one_to_the_proxy_or_none(headers: str) -> None:
    async with relayed() as (proxy, relay, url, _):
        path, _ = opened(relay, proxy)
        assert await raw_status(url, "POST", path + "/chat/completions", headers) >= 400
    assert proxy.asked == []


@pytest.mark.parametrize("name", ["Authorization", "X-Forwarded-Host", "Host", "Cookie", "X-Amz-Date"])
async def test_a_box_s_own_headers_do_not_reach_the_proxy(name: str) -> None:
    async with relayed() as (proxy, relay, url, client):
        path, _ = opened(relay, proxy)
        async with client.post(url + path + "/chat/completions", data=b"{}", headers={name: "of-the-box"}) as answer:
            assert answer.status == 200
    assert "of-the-box" not in proxy.asked[0][3].values()


async def test_tokens_that_were_asked_for_and_are_missing_are_a_failure_that_the_relay_knows_of() -> None:
    async with relayed() as (proxy, relay, url, client):
        path, watch = opened(relay, proxy)
        for body, failure in [
            (b'{"messages": [{"content": "return_token_ids"}]}', None),
            (b'{"return_token_ids": false}', None),
            (b'{"return_token_ids": true}', GenerationFailed),
        ]:
            async with client.post(url + path + "/chat/completions", data=body) as answer:
                assert answer.status == 200
            assert type(watch.failure) is (failure or type(None))


@pytest.mark.parametrize("body", ["{}", '{"choices": []}', '{"choices": [{"token_ids": "x"}]}', "{"])
async def test_a_completion_that_is_none_is_a_failure_that_the_relay_knows_of(body: str) -> None:
    async with relayed() as (proxy, relay, url, client):

        async def odd(request: web.Request) -> web.StreamResponse:
            return web.Response(text=body, content_type="application/json")

        proxy.answer = odd
        path, watch = opened(relay, proxy)
        async with client.post(url + path + "/chat/completions", data=b"{}") as answer:
            assert answer.status == 200
    assert isinstance(watch.failure, GenerationFailed)


async def test_answers_that_nobody_reads_count_as_calls_under_way_but_not_as_pending() -> None:
    async with relayed() as (proxy, relay, url, _):

        async def long(request: web.Request) -> web.StreamResponse:
            choice = {"message": {"role": "assistant", "content": "x" * (16 << 20)}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice]})

        path, watch = opened(relay, proxy)
        proxy.answer = long
        host, port = url.removeprefix("http://").split(":")
        writers = []
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            writers.append(writer)
        async with asyncio.timeout(20):
            while watch.num_unread < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert watch.num_pending == 0
        for writer in writers:
            writer.transport.abort()
        async with asyncio.timeout(20):
            while watch.num_unread:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_path_is_good_while_its_rollout_is_played() -> None:
    async with relayed() as (proxy, relay, url, _):
        path, _ = opened(relay, proxy)
        relay.close(path)
        assert await raw_status(url, "POST", path + "/chat/completions") == 401


async def test_headers_that_can_not_be_sent_on_are_refused() -> None:
    async with relayed() as (proxy, relay, url, _):
        path, _ = opened(relay, proxy)
        assert await raw_status(url, "POST", path + "/chat/completions", "Idempotency-Key: \xe9\r\n") == 400
    assert proxy.asked == []


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [
        (400, "context_length_exceeded", None),
        (400, "invalid_request", None),
        (500, "server_error", GenerationFailed),
        (504, "call_timeout", GenerationFailed),
        (409, "attempt_over", LeaseLost),
    ],
)
async def test_failures_are_known_from_the_proxy_s_answers(status: int, code: str, failure: Any) -> None:
    async with relayed() as (proxy, relay, url, client):
        proxy.answer = failing(status, code)
        path, watch = opened(relay, proxy)
        async with client.post(url + path + "/chat/completions", data=b"{}") as answer:
            assert answer.status == status

    assert type(watch.failure) is (failure or type(None))


async def test_a_proxy_that_stays_away_is_asked_again_here_and_told_as_final() -> None:
    async with relayed() as (proxy, relay, url, client):
        proxy.answer = failing(503, "shutting_down")
        path, watch = opened(relay, proxy)
        async with client.post(url + path + "/chat/completions", data=b"{}") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (500, "backend_unavailable")

    assert len(proxy.asked) > 1
    assert len({asked[3]["idempotency-key"] for asked in proxy.asked}) == 1
    assert watch.failure is not None


async def test_an_answer_that_comes_later_is_pending_until_it_was_fetched() -> None:
    async with relayed() as (proxy, relay, url, client):

        async def later(request: web.Request) -> web.StreamResponse:
            if request.method == "POST":
                return web.json_response({"step_id": "t_0_0"}, status=202)
            return await completion(request)

        proxy.answer = later
        path, watch = opened(relay, proxy)
        async with client.post(url + path + "/chat/completions", data=b"{}") as answer:
            assert answer.status == 202
        assert watch.num_pending == 1
        async with client.get(url + path + "/chat/completions/t_0_0") as answer:
            assert answer.status == 200
        assert watch.num_pending == 0


async def test_a_call_is_given_up_when_its_client_has_gone_or_its_rollout_has_ended() -> None:
    async with relayed() as (proxy, relay, url, client):
        is_asked = asyncio.Event()

        async def silent(request: web.Request) -> web.StreamResponse:
            is_asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        proxy.answer = silent
        path, watch = opened(relay, proxy)
        asking = asyncio.create_task(client.post(url + path + "/chat/completions", data=b"{}"))
        await is_asked.wait()
        assert watch.num_pending == 1
        asking.cancel()
        async with asyncio.timeout(20):
            while watch.num_pending:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        is_asked.clear()
        asking = asyncio.create_task(client.post(url + path + "/chat/completions", data=b"{}"))
        await is_asked.wait()
        relay.close(path)
        async with asyncio.timeout(20):
            while watch.num_pending:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        asking.cancel()


async def test_events_are_sent_on_as_such() -> None:
    async with relayed() as (proxy, relay, url, client):

        async def events(request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")

        proxy.answer = events
        path, _ = opened(relay, proxy)
        async with client.post(url + path + "/chat/completions", data=b"{}") as answer:
            assert (answer.content_type, await answer.read()) == ("text/event-stream", b"data: [DONE]\n\n")


async def test_a_rollout_has_so_many_calls_under_way_and_no_more() -> None:
    async with relayed() as (proxy, relay, url, client):

        async def silent(request: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        proxy.answer = silent
        path, watch = opened(relay, proxy)
        asking = [asyncio.create_task(client.post(url + path + "/chat/completions", data=b"{}")) for _ in range(64)]
        async with asyncio.timeout(20):
            while watch.num_pending < 64:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await raw_status(url, "POST", path + "/chat/completions") == 429
        relay.close(path)
        for each in asking:
            each.cancel()


def test_only_a_listening_socket_of_this_machine_is_served() -> None:
    with socket.socket() as plain, pytest.raises(ValueError, match="no listening"):
        check_listener(plain)
    with socket.create_server(("0.0.0.0", 0)) as everywhere, pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        check_listener(everywhere)
    with socket.socket(socket.AF_UNIX) as local, pytest.raises(ValueError, match="no listening"):
        check_listener(local)
