"""Both clients with the proxy that sends everybody away to ask again, over a network that loses answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.unit.conversation.conftest import WORKER_TOKEN
from tests.unit.conversation.later_server import lost
from turnmill import AsyncTurnmillClient
from turnmill.conversation.client import ChatClient, LeasedRollout, Retry, RolloutApi
from turnmill.conversation.hosting import serve
from turnmill.conversation.http import HttpClient
from turnmill.conversation.polling import Pauses
from turnmill.conversation.proxy import create_app
from turnmill.records import RolloutResult, SampleState

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

FAST = Retry(for_s=30.0, first_s=0.001, most_s=0.01)
POLL = Pauses(first_s=0.001, most_s=0.01)
_DROPPED = ("host", "content-length", "transfer-encoding", "connection")
Complete = Callable[[list[Any]], Awaitable[str]]


@asynccontextmanager
async def lossy(urls: list[str]) -> AsyncIterator[str]:
    """A way to the proxies, each in its turn, on which every third answer is lost."""
    count = 0

    async def forward(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        number = count
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        url = urls[number % len(urls)] + request.raw_path
        async with http.request(request.method, url, data=await request.read(), headers=headers) as answer:
            body = await answer.read()
        response = web.Response(status=answer.status, body=body, content_type="application/json")
        return await lost(request, response) if number % 3 == 1 else response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


@asynccontextmanager
async def holding_nothing(world: "World") -> AsyncIterator[str]:
    """The run's proxies, as they serve where a request must not be held; the way to them."""
    async with AsyncExitStack() as stack:
        apps = [create_app(service, hold_s=0.0) for service in world.services]
        ports = [await stack.enter_async_context(serve(app)) for app in apps]
        yield await stack.enter_async_context(lossy([f"http://127.0.0.1:{port}" for port in ports]))


async def play(complete: Complete, num_turns: int = 4) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": "Guess."}]
    for turn in range(num_turns):
        messages += [
            {"role": "assistant", "content": await complete(messages)},
            {"role": "user", "content": f"Again {turn}."},
        ]
    return [message["content"] for message in messages if message["role"] == "assistant"]


def exact(num_turns: int = 4) -> list[str]:
    return [f"answer task_0_{turn}" for turn in range(num_turns)]


async def check_sample(world: "World", num_turns: int = 4) -> None:
    sample = await world.sample()
    assert (sample.state, sample.reward) == (SampleState.REPORTED, 0.5)
    assert sample.calls == tuple(f"task_0_{turn}" for turn in range(num_turns))
    assert len({request.step_id for request in world.replica.requests}) == num_turns
    assert world.counts.num_forks == 0


async def test_openais_client_loses_nothing_and_samples_nothing_twice(world: "World") -> None:
    rollout = await world.begin()
    async with holding_nothing(world) as url:
        base_url = url + rollout["base_url"][rollout["base_url"].index("/a/") :]
        async with AsyncTurnmillClient(
            base_url=base_url, poll_interval_s=0.01, report_secret=rollout["report_secret"]
        ) as client:

            async def complete(messages: list[Any]) -> str:
                completion = await client.chat.completions.create(model="turnmill", messages=messages)
                return completion.choices[0].message.content or ""

            assert await play(complete) == exact()
            await client.report_rollout("task_0", 0.5)

    await check_sample(world)


async def test_the_light_client_loses_nothing_and_samples_nothing_twice(world: "World") -> None:
    await world.add_sample()
    async with holding_nothing(world) as url, HttpClient() as session:
        leased = await lease_one(world, session)
        base_url = url + leased.base_url[leased.base_url.index("/a/") :]
        deadline = time.monotonic() + 30
        chat = ChatClient(session, base_url, timeout_s=10.0, deadline=deadline, retry=FAST, poll=POLL)

        async def complete(messages: list[Any]) -> str:
            return (await chat.complete(messages)).content

        assert await play(complete) == exact()
        await RolloutApi(session, url, WORKER_TOKEN, retry=FAST).report(leased, RolloutResult(reward=0.5))

    await check_sample(world)


async def lease_one(world: "World", session: HttpClient) -> LeasedRollout:
    api = RolloutApi(session, world.url, WORKER_TOKEN)
    (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=5)
    return leased


async def test_a_client_that_prefers_not_to_wait_is_sent_away_and_comes_back(world: "World") -> None:
    rollout = await world.begin()
    async with AsyncTurnmillClient(
        base_url=rollout["base_url"], default_headers={"Prefer": "respond-async"}, poll_interval_s=0.01
    ) as client:
        world.replica.may_answer.clear()
        call = asyncio.create_task(
            client.chat.completions.create(model="turnmill", messages=[{"role": "user", "content": "hello"}])
        )
        await world.replica.was_asked.wait()
        world.replica.may_answer.set()
        completion = await call

    assert completion.choices[0].message.content == "answer task_0_0"
    assert len(world.replica.requests) == 1


@pytest.mark.parametrize("code", ["context_length_exceeded", "engine_failed"])
async def test_a_failed_call_fails_later_too(world: "World", code: str) -> None:
    world.replica.reply = lambda request: {"code": code, "message": "out of luck"}
    rollout = await world.begin()
    async with holding_nothing(world) as url:
        base_url = url + rollout["base_url"][rollout["base_url"].index("/a/") :]
        async with AsyncTurnmillClient(base_url=base_url, poll_interval_s=0.01) as client:
            with pytest.raises(openai.APIStatusError, match="out of luck"):
                await client.chat.completions.create(model="turnmill", messages=[{"role": "user", "content": "hello"}])
