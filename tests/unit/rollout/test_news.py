"""Two schedulers on one queue of ended rollouts: neither takes away what the other one waits for."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.conversation.history import checked_sample, ended_message
from turnmill.errors import BackendUnavailable, TurnmillError
from turnmill.ports import Leased, Message, RunPorts, Write
from turnmill.records import Purpose, SampleRecord, SampleState, Task, encode, sample_key
from turnmill.rollout.news import Listener
from turnmill.rollout.scheduler import Scheduler

RUN_ID = "run-1"
TASK = Task(id="task", metadata={"prompt": "Guess."})
BOTH = (Purpose.TRAIN, Purpose.EVAL)


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[RunPorts]:
    opened = open_run(tmp_path, RUN_ID, num_replicas=1)
    yield opened
    opened.close()


async def end(ports: RunPorts, purpose: Purpose, sample_id: str) -> None:
    """Write a sample's end as the proxy does, and send the news."""
    (stored,) = await ports.records.get([sample_key(RUN_ID, purpose, sample_id)])
    assert stored is not None
    ended = replace(checked_sample(stored), state=SampleState.REPORTED, reward=1.0)
    await ports.records.write([Write(key=ended.key, value=encode(ended), expected=None)])
    await ports.rollout_response.send([ended_message(ended)])


async def test_each_scheduler_is_told_of_its_own_samples_by_a_message(ports: RunPorts) -> None:
    listener = Listener(ports.rollout_response, BOTH)
    schedulers = {
        purpose: Scheduler(ports.records, ports.rollout_request, listener.inboxes[purpose], RUN_ID, purpose, Config())
        for purpose in BOTH
    }
    listener.start()
    for scheduler in schedulers.values():
        await scheduler.start()
    for scheduler in schedulers.values():
        assert await scheduler.request([(TASK, "group")] * 3) == ["task_0", "task_1", "task_2"]
    for g in range(3):
        for purpose in BOTH:
            await end(ports, purpose, f"task_{g}")
    for purpose, scheduler in schedulers.items():
        found: list[SampleRecord] = []
        while len(found) < 3:
            found += await scheduler.ended()
        assert {sample.purpose for sample in found} == {purpose}
        assert (scheduler.counts.num_told, scheduler.counts.num_found, scheduler.counts.num_ignored) == (3, 0, 0)
    for scheduler in schedulers.values():
        await scheduler.close()
    await listener.close()


async def test_news_of_nobody_here_and_what_is_none_are_dropped(ports: RunPorts) -> None:
    listener = Listener(ports.rollout_response, [Purpose.EVAL])
    listener.start()
    inbox = listener.inboxes[Purpose.EVAL]
    await ports.rollout_response.send([Message(body=b"no message", group="g", dedup_id="1")])
    scheduler = Scheduler(ports.records, ports.rollout_request, inbox, RUN_ID, Purpose.TRAIN, Config())
    await scheduler.start()
    await scheduler.request([(TASK, "group")])
    await end(ports, Purpose.TRAIN, "task_0")
    (sample,) = await scheduler.ended()
    assert sample.sample_id == "task_0" and scheduler.counts.num_found == 1, "the records told it"
    assert await inbox.take(max_messages=1) == []
    await scheduler.close()
    await listener.close()
    await listener.close()


class Broken:
    """A queue whose store is gone."""

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        raise BackendUnavailable("the disk is gone")


async def test_whoever_waits_for_news_hears_that_there_will_be_none(ports: RunPorts) -> None:
    listener = Listener(Broken(), BOTH)
    listener.start()
    for inbox in listener.inboxes.values():
        with pytest.raises(BackendUnavailable, match="the disk is gone"):
            await inbox.take(max_messages=1, wait_s=60.0)
    scheduler = Scheduler(
        ports.records, ports.rollout_request, listener.inboxes[Purpose.TRAIN], RUN_ID, Purpose.TRAIN, Config()
    )
    await scheduler.start()
    with pytest.raises(TurnmillError, match="the disk is gone"):
        await asyncio.wait_for(scheduler.ended(), 60.0)
    await scheduler.close()
    await listener.close()
