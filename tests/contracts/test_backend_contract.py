"""What holds of a deployment and its runs, on whatever they are, for those who open them and those who only look."""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.backends.embedded import EmbeddedBackend, open_weights
from turnmill.errors import InvalidInput
from turnmill.ports import (
    Backend,
    BatchActivity,
    Count,
    Message,
    QueueCounts,
    RunPorts,
    SampleActivity,
    Write,
    queue_names,
)
from turnmill.records import (
    Batch,
    BatchState,
    InvalidReason,
    Metric,
    Purpose,
    RolloutRequest,
    RunClock,
    SampleRecord,
    SampleState,
    TrainingStatus,
    batch_prefix,
    encode,
    sample_prefix,
    token_count_key,
    training_key,
)
from turnmill.wiring.local_compute import LocalCompute

# As runs are named that nobody names: no stack of another deployment is called so.
RUN_ID = "20260101-000000-abcd"
EMPTY = QueueCounts(available=0, in_flight=0, delayed=0, dead=0)


@pytest.fixture
def deployment(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Backend:
    if backend == "embedded":
        return EmbeddedBackend(tmp_path)
    from turnmill.backends.aws.backend import AwsBackend, clients_of, find_account
    from turnmill.backends.aws.deployment import deploy_deployment

    settings = request.getfixturevalue("emulator").settings(f"t-{os.urandom(4).hex()}")
    asyncio.run(deploy_deployment(clients_of(settings), settings, lambda _: None))
    account = find_account(settings).account
    aws = AwsBackend(settings, account=account, weights_of=lambda run_id: open_weights(tmp_path, run_id))
    return LocalCompute(aws, tmp_path)


@pytest.fixture
def ports(deployment: Backend) -> Iterator[RunPorts]:
    """Of a run whose infrastructure is not there yet."""
    opened = deployment.open_run(RUN_ID, num_replicas=1)
    yield opened
    opened.close()


def sample(sample_id: str, state: SampleState, **changes: object) -> SampleRecord:
    request = RolloutRequest(
        run_id=RUN_ID, sample_id=sample_id, purpose=Purpose.TRAIN, max_length=8, rewards={}, data={}, timestamp=""
    )
    record = SampleRecord(
        run_id=RUN_ID,
        purpose=Purpose.TRAIN,
        sample_id=sample_id,
        task_id="t",
        group_id="g",
        state=state,
        created_at=time.time(),
        request=request,
        deadline=0.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


async def stored(ports: RunPorts, *records: SampleRecord | Batch) -> None:
    assert all(await ports.records.write([Write(key=one.key, value=encode(one), expected=None) for one in records]))


async def test_a_run_that_was_never_deployed_looks_empty(deployment: Backend, ports: RunPorts) -> None:
    def look() -> None:
        reader, activity = deployment.reader(RUN_ID), deployment.activity(RUN_ID)
        for name in queue_names(1):
            assert reader.counts(name) == EMPTY == activity.queue(name).counts
            assert reader.dead_letters(name) == []
        assert reader.records(sample_prefix(RUN_ID, Purpose.TRAIN), limit=-1) == []
        assert reader.samples() == {} and reader.metrics() == []
        assert activity.samples() == SampleActivity() and activity.batches() == BatchActivity()
        assert activity.calls().row == 0
        assert deployment.look_at_records("runs/all/") == []

    await asyncio.to_thread(look)
    assert await ports.records.get([training_key(RUN_ID)]) == [None]
    assert await ports.records.scan(batch_prefix(RUN_ID)) == []
    assert await ports.infra.retire() == 0


async def test_the_time_of_a_run_is_written_down_before_it_is_deployed(deployment: Backend, ports: RunPorts) -> None:
    clock = RunClock(run_id=RUN_ID, attempt=1, began_at=1.0, seconds=2.0)
    assert await ports.records.write([Write(key=clock.key, value=encode(clock), expected=None)]) == [True]
    await ports.infra.deploy()
    training = TrainingStatus(run_id=RUN_ID, incarnation=1, state="running", step=0, max_steps=1, updated_at=1.0)
    keys = [clock.key, training_key(RUN_ID)]
    status = Write(key=keys[1], value=encode(training), expected=0)
    assert await ports.records.write([Write(key=keys[0], value=b"{}", expected=1), status]) == [True, True]
    first, second = await ports.records.get(keys)
    assert first is not None and second is not None
    assert (first.version, first.value, second.version) == (2, b"{}", 1)
    found = await asyncio.to_thread(lambda: deployment.reader(RUN_ID).records(f"clocks/{RUN_ID}/", limit=-1))
    assert [item.key for item in found] == [clock.key]


async def test_readers_see_what_lies_in_the_queues_without_taking_it(deployment: Backend, ports: RunPorts) -> None:
    await ports.infra.deploy()
    await ports.rollout_request.send([Message(body=b"x", group=f"g{i}", dedup_id=None) for i in range(3)])
    await ports.rollout_request.lease(max_messages=1, lease_s=30.0)
    counts = await asyncio.to_thread(deployment.reader(RUN_ID).counts, "rollout_request")
    assert (counts.available, counts.in_flight) == (2, 1)
    activity = await asyncio.to_thread(deployment.activity(RUN_ID).queue, "rollout_request")
    assert activity.counts == counts


async def test_samples_are_counted_by_what_became_of_them(deployment: Backend, ports: RunPorts) -> None:
    await ports.infra.deploy()
    await stored(
        ports,
        sample("a_0", SampleState.REPORTED, reward=1.0),
        sample("a_1", SampleState.INVALID, reason=InvalidReason.INFRA, created_at=1.0),
        sample("a_2", SampleState.INVALID, reason=InvalidReason.ENV_ERROR, created_at=2.0),
        sample("a_3", SampleState.REQUESTED),
    )
    found = await asyncio.to_thread(deployment.reader(RUN_ID).samples)
    train = Purpose.TRAIN
    assert found == {
        (train, SampleState.REPORTED): 1,
        (train, SampleState.INVALID): 2,
        (train, SampleState.REQUESTED): 1,
    }
    seen = await asyncio.to_thread(deployment.activity(RUN_ID).samples)
    assert seen.by_state == {"reported": 1, "invalid": 2, "requested": 1} and seen.num_rewarded == 1
    assert seen.invalid is not None and seen.invalid.key.endswith("a_2")


async def test_whoever_watches_sees_each_batch_and_each_call(deployment: Backend, ports: RunPorts) -> None:
    await ports.infra.deploy()
    activity = deployment.activity(RUN_ID)
    for step in range(1, 40):
        batch = Batch(run_id=RUN_ID, step=step, groups=(("a",),))
        await stored(ports, batch)
        seen = await asyncio.to_thread(activity.batches)
        assert seen.has_recorded
        await stored(ports, replace(batch, state=BatchState.APPLIED))
        applied = await asyncio.to_thread(activity.batches)
        assert not applied.has_recorded and (applied.row, applied.num_writes) > (seen.row, seen.num_writes)
    anew = await asyncio.to_thread(deployment.activity(RUN_ID).batches)
    assert anew.row == applied.row == 39 and not anew.has_recorded

    rows = [(await asyncio.to_thread(activity.calls)).row]
    for number in range(2):
        write = Write(key=f"calls/{RUN_ID}/train/a_0/a_0_{number}", value=b'{"created_at": 5.0}', expected=0)
        count = Count(key=token_count_key(RUN_ID, Purpose.TRAIN, "replica-0"), amount=3)
        assert await ports.answers.write([(write, Message(body=b"x", group="g", dedup_id=None))], [count]) == [True]
        rows.append((await asyncio.to_thread(activity.calls)).row)
    assert rows == sorted(set(rows))


async def test_the_mark_of_the_steps_changes_with_each_metric(deployment: Backend, ports: RunPorts) -> None:
    await ports.infra.deploy()
    activity = deployment.activity(RUN_ID)
    marks = [await asyncio.to_thread(activity.steps_mark)]
    for step in (1, 2):
        await ports.metrics.write(
            Metric(run_id=RUN_ID, step=step, incarnation=1, time=1.0, values={"reward_mean": 0.5})
        )
        marks.append(await asyncio.to_thread(activity.steps_mark))
        assert await asyncio.to_thread(activity.steps_mark) == marks[-1]
    assert marks[0] != marks[1] != marks[2]
    assert [metric.step for metric in await asyncio.to_thread(deployment.reader(RUN_ID).metrics)] == [1, 2]


async def test_records_are_read_page_by_page(deployment: Backend, ports: RunPorts) -> None:
    await ports.infra.deploy()
    prefix = sample_prefix(RUN_ID, Purpose.TRAIN)
    keys = [f"{prefix}s{number:02d}" for number in range(12)]
    await ports.records.write([Write(key=key, value=b"{}", expected=0) for key in keys])
    reader = deployment.reader(RUN_ID)
    first = await asyncio.to_thread(lambda: reader.records(prefix, limit=5))
    rest = await asyncio.to_thread(lambda: reader.records(prefix, after=first[-1].key, limit=-1))
    assert [item.key for item in [*first, *rest]] == keys


async def test_the_records_of_a_deployment_outlive_its_runs(deployment: Backend, ports: RunPorts) -> None:
    await ports.infra.deploy()
    await ports.runs.write([Write(key="runs/all/x", value=b"1", expected=0)])
    await ports.infra.delete()
    assert [item.value for item in await asyncio.to_thread(deployment.look_at_records, "runs/all/")] == [b"1"]
    records = deployment.open_records()
    assert await records.write([Write(key="runs/all/x", value=None, expected=1)]) == [True]
    records.close()


def test_an_id_that_no_run_can_have_is_refused(deployment: Backend) -> None:
    for run_id in ("", "../x", "a/b", "*"):
        for opened in (
            deployment.reader,
            deployment.activity,
            lambda run_id: deployment.open_run(run_id, num_replicas=1),
        ):
            with pytest.raises(InvalidInput):
                opened(run_id)
