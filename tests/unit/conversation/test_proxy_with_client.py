"""One sample's whole way through the shipped parts: scheduler, queues, proxy, light client, and back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from turnmill.conversation.client import ChatClient, LeasedRollout, RolloutApi
from turnmill.conversation.hosting import serve
from turnmill.conversation.http import HttpClient
from turnmill.conversation.proxy import create_app
from turnmill.errors import GenerationFailed, InvalidInput, LeaseLost
from turnmill.records import DropReason, InvalidReason, Purpose, RolloutResult, SampleRecord, SampleState, Task
from turnmill.rollout.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World, WorldOf

TASK = Task(id="task", metadata={"prompt": "Guess."})


@asynccontextmanager
async def parts(world: "World") -> AsyncIterator[tuple[Scheduler, RolloutApi, HttpClient]]:
    ports = world.ports
    scheduler = Scheduler(
        ports.records, ports.rollout_request, ports.rollout_response, "run-1", Purpose.TRAIN, world.config
    )
    await scheduler.start()
    async with HttpClient() as session:
        yield scheduler, RolloutApi(session, world.url, "worker-token-0123456789"), session
    await scheduler.close()


def client(http: HttpClient, leased: LeasedRollout) -> ChatClient:
    return ChatClient(http, leased.base_url, timeout_s=10.0, deadline=time.monotonic() + 10)


async def play(http: HttpClient, leased: LeasedRollout, num_turns: int = 3) -> None:
    chat = client(http, leased)
    messages = [{"role": "user", "content": "Guess."}]
    for _ in range(num_turns):
        reply = await chat.complete(messages)
        messages += [reply.message, {"role": "user", "content": "Again."}]


async def test_many_samples_go_all_the_way_and_nothing_is_left(world: "World") -> None:
    async with parts(world) as (scheduler, api, http):
        wanted = await scheduler.request([(TASK, "g")] * 12)
        rollouts: list[LeasedRollout] = []
        while len(rollouts) < 12:
            rollouts += await api.lease(worker="w", max_rollouts=12, wait_s=5)
        assert await api.heartbeat(worker="w", lease_tokens=[item.lease_token for item in rollouts]) == []

        async def whole(leased: LeasedRollout) -> None:
            await play(http, leased)
            await api.report(leased, RolloutResult(reward=0.5, metrics={"turns": 3.0}))

        await asyncio.gather(*map(whole, rollouts))
        samples: list[SampleRecord] = []
        while len(samples) < 12:
            samples += await scheduler.ended()
        assert sorted(sample.sample_id for sample in samples) == sorted(wanted)
        assert {len(sample.calls) for sample in samples} == {3}
        assert scheduler.num_open == 0
        assert world.counts.num_forks == 0
        assert not world.is_lone or world.sessions.num_attempts == 0


async def test_a_worker_that_dies_is_replaced_and_the_sample_ends_once(world_of: "WorldOf") -> None:
    async with world_of(worker_lease_s=0.3) as world, parts(world) as (scheduler, api, http):
        await scheduler.request([(TASK, "g")])
        (dead,) = await api.lease(worker="w0", max_rollouts=1, wait_s=5)
        await play(http, dead, num_turns=2)
        (alive,) = await api.lease(worker="w1", max_rollouts=1, wait_s=5)
        await play(http, alive, num_turns=3)
        with pytest.raises(LeaseLost):
            await client(http, dead).complete([{"role": "user", "content": "Guess."}])
        with pytest.raises(LeaseLost):
            await api.report(dead, RolloutResult(reward=1.0))
        await api.report(alive, RolloutResult(reward=0.25))
        (sample,) = await scheduler.ended()
        assert (sample.reward, sample.attempt) == (0.25, 2)
        # Two replayed, one of its own.
        assert sample.calls == ("task_0_0", "task_0_1", "task_0_2")


async def test_a_sample_that_every_worker_loses_ends_as_invalid(world_of: "WorldOf") -> None:
    async with world_of(worker_lease_s=0.1, max_attempts=2) as world, parts(world) as (scheduler, api, _http):
        await scheduler.request([(TASK, "g")])
        for _ in range(2):
            assert len(await api.lease(worker="w", max_rollouts=1, wait_s=5)) == 1
        assert await api.lease(worker="w", max_rollouts=1, wait_s=5) == []
        (sample,) = await scheduler.ended()
        assert (sample.state, sample.reason, sample.attempt) == (SampleState.INVALID, InvalidReason.INFRA, 2)


async def test_a_dropped_sample_is_told_to_the_worker_that_plays_it(world: "World") -> None:
    async with parts(world) as (scheduler, api, _http):
        await scheduler.request([(TASK, "g"), (TASK, "g")])
        (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=5)
        await scheduler.drop(["task_0", "task_1"], DropReason.CANCELLED)
        assert await api.heartbeat(worker="w", lease_tokens=[leased.lease_token]) == [leased.lease_token]
        with pytest.raises(LeaseLost):
            await api.report(leased, RolloutResult(reward=1.0))
        # The one that was never leased is given to nobody.
        assert await api.lease(worker="w", max_rollouts=2, wait_s=0.05) == []


async def test_refusals_reach_the_client_as_its_own_errors(world: "World") -> None:
    async with parts(world) as (scheduler, api, http):
        await scheduler.request([(TASK, "g")])
        (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=5)
        world.replica.reply = lambda request: {"code": "context_length_exceeded", "message": "too long"}
        with pytest.raises(GenerationFailed) as failed:
            await client(http, leased).complete([{"role": "user", "content": "Guess."}])
        assert failed.value.code == "context_length_exceeded"
        with pytest.raises(InvalidInput, match="temperature"):
            await client(http, leased).complete([{"role": "user", "content": "Guess."}], temperature=0.1)
        with pytest.raises(InvalidInput, match="outside the range"):
            await api.report(leased, RolloutResult(reward=2.0))


async def test_clients_of_a_proxy_that_holds_nobody_ask_again_until_they_are_answered(world: "World") -> None:
    async with parts(world) as (scheduler, api, http), serve(create_app(world.services[0], hold_s=0.0)) as port:
        await scheduler.request([(TASK, "g")])
        (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=5)
        path = leased.base_url[leased.base_url.index("/a/") :]
        await play(http, replace(leased, base_url=f"http://127.0.0.1:{port}{path}"))
        await api.report(leased, RolloutResult(reward=0.5))
        (sample,) = await scheduler.ended()
        assert sample.calls == ("task_0_0", "task_0_1", "task_0_2")
        assert world.counts.num_forks == 0
