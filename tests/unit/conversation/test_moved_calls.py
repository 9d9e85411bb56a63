"""Calls whose replica is gone are answered by another one, in both forms of the proxy; nothing is lost or doubled."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conversation.conftest import RUN_ID, Form, ScriptedReplica, World, open_world
from turnmill.conversation.routing import rendezvous
from turnmill.ports import Write
from turnmill.records import (
    GenerateRequest,
    Purpose,
    ReplicaState,
    ReplicaStatus,
    Version,
    call_key,
    encode,
    replica_key,
    replica_name,
)

# Of these conversations some belong to either replica.
SAMPLES = [f"task_{index}" for index in range(12)]


async def say(world: World, index: int, state: ReplicaState, *, joined_at: float = 1.0) -> None:
    status = ReplicaStatus(
        run_id=RUN_ID,
        replica=replica_name(index),
        version=Version(incarnation=0, n=0),
        fingerprints={},
        # As if it gave signs of life all the time.
        updated_at=time.time(),
        pid=1,
        state=state,
        joined_at=joined_at,
    )
    key = replica_key(RUN_ID, status.replica)
    await world.ports.records.write([Write(key=key, value=encode(status), expected=None)])


@contextlib.asynccontextmanager
async def two_replicas(root: Path, form: Form) -> AsyncIterator[tuple[World, ScriptedReplica]]:
    """A world whose second replica is the test's own, and both say that they serve."""
    async with open_world(root, form=form, num_replicas=2) as world:
        for index in range(2):
            await say(world, index, ReplicaState.SERVING)
        second = ScriptedReplica(world.ports, index=1)
        running = asyncio.create_task(second.run())
        try:
            yield world, second
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def asked(replica: ScriptedReplica) -> list[tuple[str, int]]:
    """What a replica was sent, in order: sample and epoch."""
    return [(request.sample_id, request.epoch) for request in replica.requests]


@pytest.mark.parametrize("form", list(Form))
async def test_calls_that_wait_at_a_replica_that_drains_are_answered_by_another(tmp_path: Path, form: Form) -> None:
    async with two_replicas(tmp_path, form) as (world, second):
        rollouts = {sample: await world.begin(sample) for sample in SAMPLES}
        lost = [sample for sample in SAMPLES if rendezvous(sample, range(2)) == 1]
        assert 0 < len(lost) < len(SAMPLES)
        second.may_answer.clear()
        chats = {sample: asyncio.create_task(world.chat(rollouts[sample], "Guess.")) for sample in SAMPLES}
        await second.was_asked.wait()
        await say(world, 1, ReplicaState.DRAINING)
        answers = {sample: await chat for sample, chat in chats.items()}
        assert {sample: answer.text for sample, answer in answers.items()} == {
            sample: f"answer {sample}_0" for sample in SAMPLES
        }
        assert sorted(sample for sample, epoch in asked(world.replica) if epoch) == sorted(lost)
        # It answers after all, too late; and what it said changes nothing.
        second.may_answer.set()
        second.reply = lambda request: f"late {request.step_id}"
        again = [await world.chat(rollouts[sample], "Guess again.") for sample in lost]
        assert {answer.status for answer in again} == {200}
        for sample in SAMPLES:
            await world.report(rollouts[sample])
            key = call_key(RUN_ID, Purpose.TRAIN, sample, f"{sample}_0")
            (stored,) = await world.ports.records.get([key])
            assert stored is not None and stored.version == 1
            calls = (await world.sample(sample)).calls
            assert len(calls) == len(set(calls)) == (2 if sample in lost else 1)


@pytest.mark.parametrize("form", list(Form))
async def test_a_running_conversation_stays_where_it_went_and_new_ones_are_shared_when_the_replica_is_back(
    tmp_path: Path, form: Form
) -> None:
    async with two_replicas(tmp_path, form) as (world, second):
        sample = next(sample for sample in SAMPLES if rendezvous(sample, range(2)) == 1)
        rollout = await world.begin(sample)
        await world.chat(rollout, "Guess.")
        assert asked(second) == [(sample, 0)]
        await say(world, 1, ReplicaState.STOPPED)
        second.requests.clear()
        await _until_routed_to(world, rollout, world.replica)
        # Back, and serving since now.
        await say(world, 1, ReplicaState.SERVING, joined_at=time.time())
        new = [f"new_{index}" for index in range(200)]
        wins = next(each for each in new if rendezvous(each, range(2)) == 1)
        stays = next(each for each in new if rendezvous(each, range(2)) == 0)
        late = await world.begin(wins)
        await _until_routed_to(world, late, second)
        second.requests.clear()
        await world.chat(rollout, "And now.")
        assert second.requests == []
        await world.chat(await world.begin(stays), "Guess.")
        assert second.requests == []


async def _until_routed_to(world: World, rollout: dict[str, Any], replica: ScriptedReplica) -> None:
    """Chat until the proxies have seen what the replicas say."""
    while True:
        num = len(replica.requests)
        answer = await world.chat(rollout, f"Guess {time.monotonic()}.")
        assert answer.status == 200
        if len(replica.requests) > num:
            return
        await asyncio.sleep(0.2)


async def test_a_retry_waits_for_the_call_that_was_moved(tmp_path: Path) -> None:
    """The client is gone when its replica is, and comes back."""
    async with two_replicas(tmp_path, Form.LONE) as (world, second):
        sample = next(sample for sample in SAMPLES if rendezvous(sample, range(2)) == 1)
        rollout = await world.begin(sample)
        second.may_answer.clear()
        first = asyncio.create_task(world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"}))
        await second.was_asked.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await say(world, 1, ReplicaState.STOPPED)
        answer = await world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"})
        assert answer.text == f"answer {sample}_0"
        (moved,) = world.replica.requests
        assert isinstance(moved, GenerateRequest) and moved.epoch == 1
        assert world.sessions.calls.counts.num_moved == 1
