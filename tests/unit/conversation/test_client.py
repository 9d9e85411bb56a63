"""The worker's client against a real HTTP server on this machine."""

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from turnmill.conversation.client import ChatClient, LeasedRollout, Retry, RolloutApi
from turnmill.conversation.http import HttpClient
from turnmill.errors import BackendUnavailable, GenerationFailed, InvalidInput, LeaseLost
from turnmill.records import FinishReason, InvalidReason, ReplyTokens, RolloutRequest, RolloutResult, StopReason

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETION: dict[str, Any] = {
    "id": "t_0_0",
    "object": "chat.completion",
    "created": 1,
    "model": "turnmill",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "crane"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
FAST = Retry(for_s=30.0, first_s=0.001, most_s=0.01)
SECRET = "chatsecret0123456789"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """Gives prepared answers in order; keeps what was asked."""

    answers: list[Answer]
    url: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        self.was_asked.set()
        return await self.answers[len(self.bodies) - 1](request)

    @property
    def keys(self) -> list[str]:
        return [headers["Idempotency-Key"] for headers in self.headers]


def answer(status: int, body: Any) -> Answer:
    async def give(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return give


def error(status: int, code: str | None, message: str = "because") -> Answer:
    shape = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return answer(status, {"error": shape})


def page(status: int) -> Answer:
    """What a load balancer says."""

    async def give(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="<html>no</html>", content_type="text/html")

    return give


async def reset(request: web.Request) -> web.StreamResponse:
    """Half an answer, then the connection is gone."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id":')
    assert request.transport is not None
    request.transport.abort()
    return response


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


OK = answer(200, COMPLETION)


@asynccontextmanager
async def serving(*answers: Answer) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(list(answers))
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with HttpClient() as session:
            yield server, session
    finally:
        await runner.cleanup()


def chat_client(server: Server, session: HttpClient, **options: Any) -> ChatClient:
    settings: dict[str, Any] = {"timeout_s": 30.0, "deadline": math.inf, "retry": FAST, **options}
    return ChatClient(session, f"{server.url}/a/{SECRET}/v1", **settings)


def rollout_api(server: Server, session: HttpClient) -> RolloutApi:
    return RolloutApi(session, server.url, "workertoken", retry=FAST)


def a_rollout(server: Server) -> dict[str, Any]:
    request = {
        "sample_id": "t_0",
        "timestamp": "2026-01-01T00:00:00Z",
        "max_length": 100,
        "rewards": {"range": [0.0, 1.0]},
        "data": {"prompt": "hello", "answer": "crane"},
        "version": "v0",
        "run_id": "r",
        "purpose": "train",
        "a_later_field": 1,
    }
    return {
        "request": request,
        "attempt": 1,
        "base_url": f"{server.url}/a/{SECRET}/v1",
        "report_secret": "reportsecret0123456789",
        "deadline": time.time() + 60,
        "lease_token": "leasetoken0123456789",
        "lease_s": 15,
    }


async def a_lease(server: Server, session: HttpClient) -> LeasedRollout:
    (leased,) = await rollout_api(server, session).lease(worker="worker-0", max_rollouts=8, wait_s=0)
    return leased


async def test_a_completion_becomes_a_reply() -> None:
    async with serving(OK) as (server, session):
        reply = await chat_client(server, session).complete(MESSAGES, max_tokens=5)

    assert (reply.content, reply.finish_reason) == ("crane", FinishReason.STOP)
    assert reply.message == {"role": "assistant", "content": "crane"}
    assert reply.usage["total_tokens"] == 5
    assert server.paths == [f"/a/{SECRET}/v1/chat/completions"]
    assert server.bodies == [{"model": "turnmill", "messages": MESSAGES, "max_tokens": 5}]


async def test_a_reply_without_text_has_empty_content() -> None:
    choice = {"message": {"role": "assistant", "content": None}, "finish_reason": "length"}
    async with serving(answer(200, {"choices": [choice]})) as (server, session):
        reply = await chat_client(server, session).complete(MESSAGES)

    assert (reply.content, reply.finish_reason) == ("", FinishReason.LENGTH)


@pytest.mark.parametrize("trouble", [page(502), page(503), page(504), error(503, "closing"), reset])
async def test_a_transport_failure_is_repeated_as_the_same_call(trouble: Answer) -> None:
    async with serving(trouble, trouble, OK) as (server, session):
        reply = await chat_client(server, session).complete(MESSAGES)

    assert reply.content == "crane"
    assert len(server.keys) == 3
    assert len(set(server.keys)) == 1
    assert server.bodies[0] == server.bodies[2]


async def test_each_call_has_a_key_of_its_own_even_for_equal_messages() -> None:
    async with serving(OK, OK) as (server, session):
        client = chat_client(server, session)
        await client.complete(MESSAGES)
        await client.complete(MESSAGES)

    assert len(set(server.keys)) == 2


async def test_an_exchange_that_takes_too_long_is_repeated() -> None:
    async with serving(silence, OK) as (server, session):
        reply = await chat_client(server, session, timeout_s=0.2).complete(MESSAGES)

    assert reply.content == "crane"
    assert len(set(server.keys)) == 1


async def test_a_server_that_is_not_there_yet_is_tried_again() -> None:
    async with serving(OK) as (server, session):
        app = web.Application()
        app.router.add_post("/{path:.*}", server.handle)
        late = web.AppRunner(app)
        await late.setup()
        # Bound, but not listening: connections are refused.
        address = socket.socket()
        address.bind(("127.0.0.1", 0))
        port = address.getsockname()[1]
        client = ChatClient(
            session, f"http://127.0.0.1:{port}/a/{SECRET}/v1", timeout_s=5, deadline=math.inf, retry=FAST
        )
        call = asyncio.create_task(client.complete(MESSAGES))
        await asyncio.sleep(0.02)
        assert not call.done()
        await web.SockSite(late, address).start()
        assert (await call).content == "crane"
        await late.cleanup()


def busy(**headers: str) -> Answer:
    async def give(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, text="<html>later</html>", headers=headers)

    return give


async def test_a_busy_server_is_waited_for_as_long_as_it_says_and_as_long_as_it_takes() -> None:
    fast = Retry(for_s=0.0, first_s=0.001, most_s=0.01)
    wishes = [busy(), busy(), busy(**{"Retry-After": "1"}), busy(**{"Retry-After": "soon"})]
    async with serving(*wishes, OK) as (server, session):
        started = time.monotonic()
        client = chat_client(server, session, retry=fast, deadline=started + 30)
        assert (await client.complete(MESSAGES)).content == "crane"
        assert time.monotonic() - started >= 1.0

    assert len(set(server.keys)) == 1


async def test_without_a_deadline_a_busy_server_is_tried_as_any_other() -> None:
    async with serving(*[busy()] * 1000) as (server, session):
        client = chat_client(server, session, retry=Retry(for_s=0.1, first_s=0.01, most_s=0.02))
        with pytest.raises(BackendUnavailable, match="HTTP 429"):
            await client.complete(MESSAGES)


MEASURED: dict[str, Any] = {
    **COMPLETION,
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            **COMPLETION["choices"][0],
            "token_ids": [4, 5],
            "logprobs": {"content": [{"token": "token_id:4", "logprob": -0.5}, {"token": "token_id:5", "logprob": -1}]},
        }
    ],
}


async def test_the_tokens_are_in_the_reply_of_who_asked_for_them() -> None:
    async with serving(answer(200, MEASURED), answer(200, MEASURED)) as (server, session):
        client = chat_client(server, session)
        reply = await client.complete(MESSAGES, return_token_ids=True, tools=[])
        assert reply.tokens == ReplyTokens(prompt_ids=[1, 2, 3], sampled_ids=[4, 5], logprobs=[-0.5, -1.0])
        assert (await client.complete(MESSAGES)).tokens is None

    asked = {"return_token_ids": True, "logprobs": True, "tools": []}
    assert server.bodies[0] == {"model": "turnmill", "messages": MESSAGES, **asked}


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "logprobs"])
async def test_tokens_that_are_missing_are_a_failed_generation(missing: str) -> None:
    choice = {name: value for name, value in MEASURED["choices"][0].items() if name != missing}
    body = {**{name: value for name, value in MEASURED.items() if name != missing}, "choices": [choice]}
    async with serving(answer(200, body)) as (server, session):
        with pytest.raises(GenerationFailed, match="tokens that were asked for"):
            await chat_client(server, session).complete(MESSAGES, return_token_ids=True)


async def test_repeating_ends_with_the_time_for_it() -> None:
    async with serving(*[page(503)] * 1000) as (server, session):
        client = chat_client(server, session, retry=Retry(for_s=0.1, first_s=0.01, most_s=0.02))
        with pytest.raises(BackendUnavailable, match="HTTP 503") as caught:
            await client.complete(MESSAGES)

    assert SECRET not in str(caught.value)
    assert len(server.keys) > 1


async def test_repeating_ends_with_the_deadline() -> None:
    async with serving(*[page(503)] * 1000) as (server, session):
        client = chat_client(server, session, deadline=time.monotonic() + 0.1)
        with pytest.raises(BackendUnavailable):
            await client.complete(MESSAGES)


async def test_the_deadline_ends_an_exchange_that_hangs() -> None:
    async with serving(silence, silence) as (server, session):
        client = chat_client(server, session, deadline=time.monotonic() + 0.1)
        with pytest.raises(BackendUnavailable, match="Timeout"):
            await client.complete(MESSAGES)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_refused_request_is_not_repeated(status: int) -> None:
    async with serving(error(status, "invalid_request", "too hot")) as (server, session):
        with pytest.raises(InvalidInput, match="too hot"):
            await chat_client(server, session).complete(MESSAGES, temperature=2)

    assert len(server.keys) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "context_length_exceeded"), (504, "call_timeout"), (500, "server_error"), (401, "invalid_api_key")],
)
async def test_an_answer_that_is_an_error_carries_its_code_and_is_not_repeated(status: int, code: str) -> None:
    async with serving(error(status, code)) as (server, session):
        with pytest.raises(GenerationFailed, match="because") as caught:
            await chat_client(server, session).complete(MESSAGES)

    assert caught.value.code == code
    assert len(server.keys) == 1


async def test_409_means_that_the_lease_is_lost() -> None:
    async with serving(error(409, "conflict", "attempt 2 is current")) as (server, session):
        with pytest.raises(LeaseLost, match="attempt 2 is current"):
            await chat_client(server, session).complete(MESSAGES)

    assert len(server.keys) == 1


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"message": "crane"}]}, "text"])
async def test_an_answer_that_is_no_completion_is_a_failed_generation(body: Any) -> None:
    async with serving(answer(200, body)) as (server, session):
        with pytest.raises(GenerationFailed) as caught:
            await chat_client(server, session).complete(MESSAGES)

    assert caught.value.code == "invalid_response"


async def test_a_cancelled_call_ends_at_once() -> None:
    async with serving(silence) as (server, session):
        call = asyncio.create_task(chat_client(server, session).complete(MESSAGES))
        await server.was_asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_lease_brings_rollouts_whose_secrets_do_not_print() -> None:
    async with serving(error(503, "closing")) as (server, session):
        server.answers.append(answer(200, {"rollouts": [a_rollout(server)]}))
        leased = await a_lease(server, session)

    assert isinstance(leased.request, RolloutRequest)
    assert leased.request.data == {"prompt": "hello", "answer": "crane"}
    assert leased.base_url.endswith(f"/a/{SECRET}/v1")
    assert not any(secret in repr(leased) for secret in (SECRET, leased.report_secret, leased.lease_token))
    assert server.paths == ["/v1/rollouts/lease"] * 2
    assert server.headers[0]["Authorization"] == "Bearer workertoken"
    assert server.bodies[0] == {"worker": "worker-0", "max_rollouts": 8, "wait_s": 0}


async def test_an_unfilled_long_poll_brings_nothing() -> None:
    async with serving(answer(200, {"rollouts": []})) as (server, session):
        assert await rollout_api(server, session).lease(worker="worker-0", max_rollouts=8, wait_s=0) == []


async def test_a_wrong_worker_token_is_invalid_input() -> None:
    async with serving(error(401, "invalid_api_key", "wrong token")) as (server, session):
        with pytest.raises(InvalidInput, match=r"lease was refused by the proxy \(HTTP 401\): wrong token"):
            await rollout_api(server, session).lease(worker="worker-0", max_rollouts=8, wait_s=0)

    assert len(server.bodies) == 1


async def test_a_heartbeat_names_the_lost_leases() -> None:
    async with serving(page(502), answer(200, {"lost": ["b"]})) as (server, session):
        lost = await rollout_api(server, session).heartbeat(worker="worker-0", lease_tokens=["a", "b"])

    assert lost == ["b"]
    assert server.bodies[1] == {"worker": "worker-0", "lease_tokens": ["a", "b"]}


async def test_a_report_is_repeated_until_it_is_recorded() -> None:
    result = RolloutResult(reward=1.0, metrics={"turns": 2.0}, stop_reason=StopReason.MAX_TURNS)
    async with serving() as (server, session):
        recorded = answer(200, {"status": "recorded"})
        server.answers += [answer(200, {"rollouts": [a_rollout(server)]}), page(503), reset, recorded]
        await rollout_api(server, session).report(await a_lease(server, session), result)

    assert server.paths[1:] == ["/v1/rollouts/report"] * 3
    assert server.headers[1]["Authorization"] == "Bearer reportsecret0123456789"
    assert server.bodies[3] == {
        "id": "t_0",
        "aggregate_reward_score": 1.0,
        "metrics_list": [{"name": "turns", "value": 2.0, "type": "Metric"}],
        "stop_reason": "max_turns",
    }


async def test_a_report_without_a_reward_carries_null_and_the_reason() -> None:
    result = RolloutResult(reason=InvalidReason.ENV_ERROR, detail="KeyError")
    async with serving() as (server, session):
        server.answers += [answer(200, {"rollouts": [a_rollout(server)]}), answer(200, {"status": "recorded"})]
        await rollout_api(server, session).report(await a_lease(server, session), result)

    assert server.bodies[1] == {
        "id": "t_0",
        "aggregate_reward_score": None,
        "metrics_list": [],
        "reason": "env_error",
        "detail": "KeyError",
    }


@pytest.mark.parametrize(
    ("status", "expected"), [(409, LeaseLost), (401, LeaseLost), (400, InvalidInput), (500, BackendUnavailable)]
)
async def test_a_refused_report_is_named_for_what_it_means(status: int, expected: type[Exception]) -> None:
    async with serving() as (server, session):
        server.answers += [answer(200, {"rollouts": [a_rollout(server)]}), error(status, None)]
        with pytest.raises(expected, match="because"):
            await rollout_api(server, session).report(await a_lease(server, session), RolloutResult(reward=1.0))

    assert len(server.bodies) == 2


async def test_an_answer_that_is_no_lease_is_an_unavailable_backend() -> None:
    async with serving(answer(200, {"rollouts": [{"attempt": 1}]})) as (server, session):
        with pytest.raises(BackendUnavailable, match="lease can't be read"):
            await rollout_api(server, session).lease(worker="worker-0", max_rollouts=8, wait_s=0)


def test_pauses_double_up_to_the_longest_and_vary() -> None:
    retry = Retry(first_s=0.1, most_s=3.0)
    pauses = [[retry.pause_s(n) for _ in range(50)] for n in (1, 2, 3, 100)]

    for most, values in zip((0.1, 0.2, 0.4, 3.0), pauses, strict=True):
        assert all(most / 2 <= value <= most for value in values)
        assert len(set(values)) > 1
