"""The scheduler over real embedded ports; the proxy's part is written into the records by hand."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.conversation.history import checked_sample, ended_message, failed_by_infra
from turnmill.errors import Conflict, NotFound, RecordCorrupt, TurnmillError
from turnmill.ports import Message, RunPorts, Write
from turnmill.records import (
    DeadSample,
    DropReason,
    InvalidReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    Task,
    dead_letter_key,
    decode,
    encode,
    sample_key,
)
from turnmill.rollout.scheduler import Scheduler

RUN_ID = "run-1"
CONFIG = Config(max_length=100, max_attempts=3, training_timeout=100.0, worker_lease_s=10.0)
# Seconds: three attempts of 110 s, and a margin.
PATIENCE_S = 390.0
TASK = Task(id="task", metadata={"prompt": "Guess.", "answer": "crane"})


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[RunPorts]:
    opened = open_run(tmp_path, RUN_ID, num_replicas=1)
    yield opened
    opened.close()


@asynccontextmanager
async def running(
    ports: RunPorts,
    *,
    config: Config = CONFIG,
    purpose: Purpose = Purpose.TRAIN,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(
        ports.records, ports.rollout_request, ports.rollout_response, RUN_ID, purpose, config, clock=clock
    )
    await scheduler.start()
    yield scheduler
    await scheduler.close()


async def sample_of(ports: RunPorts, sample_id: str = "task_0") -> SampleRecord:
    (stored,) = await ports.records.get([sample_key(RUN_ID, Purpose.TRAIN, sample_id)])
    assert stored is not None
    return checked_sample(stored)


async def end(ports: RunPorts, sample_id: str = "task_0", *, tell: bool = True, **changes: Any) -> SampleRecord:
    """Write a sample's end as the proxy does, and send the news."""
    ended = replace(await sample_of(ports, sample_id), **{"state": SampleState.REPORTED, "reward": 1.0, **changes})
    await ports.records.write([Write(key=ended.key, value=encode(ended), expected=None)])
    if tell:
        await ports.rollout_response.send([ended_message(ended)])
    return ended


async def test_a_request_is_recorded_and_sent(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        assert await scheduler.request([(TASK, "g1"), (TASK, "g1"), (Task(id="other", metadata={}), "g2")]) == [
            "task_0",
            "task_1",
            "other_0",
        ]
        assert scheduler.num_open == 3
        assert await scheduler.request([]) == []
    sample = await sample_of(ports, "task_1")
    assert (sample.state, sample.task_id, sample.group_id, sample.attempt) == (SampleState.REQUESTED, "task", "g1", 0)
    # Three attempts of 110 s each, and a minute.
    assert sample.deadline - sample.created_at == pytest.approx(PATIENCE_S)
    messages = await ports.rollout_request.lease(max_messages=10, lease_s=10)
    requests = [decode(message.body, RolloutRequest) for message in messages]
    assert requests[1] == sample.request
    assert (requests[1].max_length, requests[1].rewards, requests[1].data) == (
        100,
        {"range": [0.0, 1.0]},
        TASK.metadata,
    )
    assert [message.group for message in messages] == ["task_0", "task_1", "other_0"]


async def test_an_end_is_told_once(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g"), (TASK, "g")])
        first = await end(ports, "task_0")
        assert await scheduler.ended() == [first]
        second = await end(ports, "task_1", state=SampleState.INVALID, reward=None, reason=InvalidReason.ENV_ERROR)
        assert await scheduler.ended() == [second]
        assert scheduler.num_open == 0
        assert (scheduler.counts.num_told, scheduler.counts.num_found) == (2, 0)


async def test_ended_waits_for_the_news(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")])
        waiting = asyncio.create_task(scheduler.ended())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await end(ports)
        assert [sample.sample_id for sample in await waiting] == ["task_0"]


async def test_an_end_whose_message_is_lost_is_found_in_the_records(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")])
        await end(ports, tell=False)
        assert [sample.sample_id for sample in await scheduler.ended()] == ["task_0"]
        assert (scheduler.counts.num_told, scheduler.counts.num_found) == (0, 1)


async def test_messages_about_foreign_samples_are_acked_and_counted(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")])
        ended = await end(ports, tell=False)
        foreign = replace(ended, sample_id="stranger_0")
        evaluated = replace(ended, purpose=Purpose.EVAL)
        await ports.rollout_response.send([ended_message(foreign), ended_message(evaluated), ended_message(ended)])
        await ports.rollout_response.send([Message(body=b"no json", group="x", dedup_id="x")])
        assert [sample.sample_id for sample in await scheduler.ended()] == ["task_0"]
        again = Message(body=ended_message(ended).body, group="task_0", dedup_id="again")
        await ports.rollout_response.send([again])
        await _until_empty(ports)
        assert scheduler.counts.num_ignored == 3


async def _until_empty(ports: RunPorts) -> None:
    while True:
        counts = await ports.rollout_response.counts()
        if not counts.available and not counts.in_flight:
            return
        await asyncio.sleep(0.01)


async def test_numbers_go_on_after_a_restart_and_by_purpose(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")] * 3)
        await end(ports, "task_1")
        await scheduler.ended()
    async with running(ports) as scheduler:
        assert scheduler.num_open == 0
        assert await scheduler.request([(TASK, "g")]) == ["task_3"]
        # What the process before had asked for is not told to this one.
        await end(ports, "task_0")
        await end(ports, "task_3")
        assert [sample.sample_id for sample in await scheduler.ended()] == ["task_3"]
    async with running(ports, purpose=Purpose.EVAL) as scheduler:
        assert await scheduler.request([(TASK, "g")]) == ["task_0"]


async def test_a_sample_past_its_deadline_ends_as_invalid_with_a_dead_letter(ports: RunPorts) -> None:
    hands = [0.0]
    async with running(ports, clock=lambda: hands[0]) as scheduler:
        await scheduler.request([(TASK, "g")])
        leased = replace(await sample_of(ports), state=SampleState.LEASED, attempt=2)
        await ports.records.write([Write(key=leased.key, value=encode(leased), expected=None)])
        hands[0] = PATIENCE_S + 1
        (sample,) = await scheduler.ended()
        assert (sample.state, sample.reason) == (SampleState.INVALID, InvalidReason.INFRA)
        assert sample == await sample_of(ports)
        assert (scheduler.num_open, scheduler.counts.num_expired) == (0, 1)
    (stored,) = await ports.records.get([dead_letter_key(RUN_ID, "train/task_0")])
    assert stored is not None
    assert decode(stored.value, DeadSample).num_attempts == 2


async def test_a_sample_that_waits_for_a_slot_while_others_end_is_not_given_up(ports: RunPorts) -> None:
    hands = [0.0]
    async with running(ports, clock=lambda: hands[0]) as scheduler:
        await scheduler.request([(TASK, "g")] * 3)
        hands[0] = PATIENCE_S - 1
        await end(ports, "task_0")
        await scheduler.ended()
        late = await sample_of(ports, "task_1")
        hands[0] = PATIENCE_S + 1
        # Found by the look at the records that sees the late one, too.
        await end(ports, "task_2", tell=False)
        assert [sample.sample_id for sample in await scheduler.ended()] == ["task_2"]
        assert await sample_of(ports, "task_1") == late
        assert (scheduler.num_open, scheduler.counts.num_expired) == (1, 0)


async def test_samples_whose_date_of_expiry_the_wall_clock_has_passed_are_not_given_up(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        *early, last = await scheduler.request([(TASK, "g")] * 8)
        for sample_id in early:
            sample = replace(await sample_of(ports, sample_id), deadline=time.time() - 3600)
            await ports.records.write([Write(key=sample.key, value=encode(sample), expected=None)])
        # Each found by a look at the records that sees the others, too.
        for ending in (last, early[0]):
            await end(ports, ending, tell=False)
            assert [sample.sample_id for sample in await scheduler.ended()] == [ending]
        assert (scheduler.num_open, scheduler.counts.num_expired) == (6, 0)


async def test_dropping_takes_open_and_reported_samples_and_leaves_invalid_ones(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        sample_ids = await scheduler.request([(TASK, "g")] * 4)
        await end(ports, "task_1", state=SampleState.LEASED, reward=None, tell=False)
        await end(ports, "task_2", tell=False)
        invalid = failed_by_infra(await sample_of(ports, "task_3"), "lost")
        await ports.records.write([Write(key=invalid.key, value=encode(invalid), expected=None)])
        await scheduler.drop(sample_ids, DropReason.SURPLUS)
        await scheduler.drop(sample_ids, DropReason.STALE)
        samples = [await sample_of(ports, sample_id) for sample_id in sample_ids]
        assert [sample.state for sample in samples] == [SampleState.DROPPED] * 3 + [SampleState.INVALID]
        assert {sample.drop_reason for sample in samples[:3]} == {DropReason.SURPLUS}
        assert samples[2].reward == 1.0
        assert scheduler.num_open == 0


async def test_a_dropped_sample_is_not_told_any_more(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")] * 2)
        await end(ports, "task_0")
        await _until_empty(ports)
        await scheduler.drop(["task_0"], DropReason.NO_SIGNAL)
        await end(ports, "task_1")
        assert [sample.sample_id for sample in await scheduler.ended()] == ["task_1"]


async def test_a_sample_in_a_batch_and_an_unknown_one_can_not_be_dropped(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")])
        await end(ports, state=SampleState.BATCHED, step=1, tell=False)
        with pytest.raises(Conflict, match="task_0 is batched"):
            await scheduler.drop(["task_0"], DropReason.SURPLUS)
        with pytest.raises(NotFound, match="task_9"):
            await scheduler.drop(["task_9"], DropReason.SURPLUS)


async def test_two_schedulers_of_one_purpose_are_a_conflict(ports: RunPorts) -> None:
    async with running(ports) as first, running(ports) as second:
        await first.request([(TASK, "g")])
        with pytest.raises(Conflict, match="two schedulers"):
            await second.request([(TASK, "g")])


async def test_an_altered_record_stops_who_waits(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")])
        await end(ports, report_digest="0" * 32)
        with pytest.raises(RecordCorrupt, match="task_0"):
            await scheduler.ended()


async def test_a_closed_scheduler_says_so(ports: RunPorts) -> None:
    async with running(ports) as scheduler:
        await scheduler.request([(TASK, "g")])
        waiting = asyncio.create_task(scheduler.ended())
        await asyncio.sleep(0)
    with pytest.raises(TurnmillError, match="not running"):
        await waiting
    with pytest.raises(TurnmillError, match="not running"):
        await scheduler.ended()
