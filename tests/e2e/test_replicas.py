"""Two replicas in processes of their own; one of them is killed, stopped or told to end while conversations run."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.house import CONFIG, MODEL, House, accounted, open_house
from tests.e2e.one_go import in_one_go
from turnmill.backends.embedded import ProcessLauncher, open_root_records, open_run
from turnmill.config import to_dict
from turnmill.conversation.history import read_calls
from turnmill.errors import RoleFailed
from turnmill.generation.renderer import Renderer
from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.processes import EXIT_REFUSED, MAX_RESTARTS, REPLICA_FINAL_EXIT_CODES, check_roles
from turnmill.ports import Message, RoleSpec, RoleStatus
from turnmill.records import (
    GONE_AFTER_S,
    Purpose,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunStatus,
    SampleState,
    Version,
    call_prefix,
    decode,
    live_replicas,
    replica_key,
    replica_name,
    token_count_key,
)
from turnmill.training.samples import rows_of

TWO = replace(CONFIG, generation_replicas=2, generation_slots=8)
REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def replicas(house: House) -> AsyncIterator[list["asyncio.subprocess.Process"]]:
    """Both, once they serve."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.replica_child"),
            *(str(house.folder), str(index), json.dumps(to_dict(house.config))),
            cwd=REPOSITORY,
        )
        for index in range(2)
    ]
    try:
        await until(house, lambda statuses: len(live_replicas(statuses, house_time(statuses))) == 2)
        yield processes
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


def house_time(statuses: list[ReplicaStatus]) -> float:
    """As of the latest sign of life."""
    return max((status.updated_at for status in statuses), default=0.0)


async def statuses_of(house: House) -> list[ReplicaStatus]:
    found = await house.ports.records.scan(replica_key("house", ""))
    return [decode(item.value, ReplicaStatus) for item in found]


async def until(house: House, holds: Callable[[list[ReplicaStatus]], bool]) -> list[ReplicaStatus]:
    while True:
        statuses = await statuses_of(house)
        if holds(statuses):
            return statuses
        await asyncio.sleep(0.1)


async def num_tokens(house: House, index: int) -> int:
    """That a replica sampled, in calls whose record is its own."""
    (stored,) = await house.ports.records.get([token_count_key("house", Purpose.TRAIN, replica_name(index))])
    return int(stored.value) if stored is not None else 0


async def until_sampled(house: House, index: int, more_than: int = 0) -> None:
    while True:
        if await num_tokens(house, index) > more_than:
            return
        await asyncio.sleep(0.05)


async def until_moved(house: House) -> None:
    while True:
        if house.sessions.calls.counts.num_moved:
            return
        await asyncio.sleep(0.1)


async def check_all(house: House) -> None:
    """Every sample has ended, every call has one record and exact tokens, and sampler and trainer agree on them."""
    samples = await house.samples()
    assert sum(accounted(samples).values()) == len(samples) and not any(sample.state.is_open for sample in samples)
    renderer = Renderer(MODEL)
    trained = [sample for sample in samples if sample.state is SampleState.TRAINED]
    assert trained
    for sample in trained:
        calls = await read_calls(house.ports.records, "house", Purpose.TRAIN, sample.sample_id)
        live = [call for call in calls if call.call_id in sample.calls]
        assert [call.parent for call in live[1:]] == [call.call_id for call in live[:-1]]
        (row,) = rows_of(sample, live)
        assert row.token_ids == in_one_go(renderer, live)
        stored = await house.ports.records.scan(call_prefix("house", Purpose.TRAIN, sample.sample_id))
        assert {item.version for item in stored} == {1}
    for metric in await house.metrics():
        assert metric.values["audit_mean"] < 1e-4 and metric.values["audit_max"] < 1e-3


@pytest.mark.slow
async def test_conversations_of_a_replica_that_is_killed_end_at_the_other_one(tmp_path: Path) -> None:
    async with open_house(tmp_path, TWO, has_replica=False) as house, replicas(house) as (_, second):
        training = asyncio.create_task(house.train())
        await until_sampled(house, 1)
        second.kill()
        await training
        assert (await house.status()).state == "succeeded"
        assert house.sessions.calls.counts.num_moved > 0 and house.sessions.calls.counts.num_timeouts == 0
        await check_all(house)


@pytest.mark.slow
async def test_a_replica_that_was_stopped_for_long_comes_back_and_its_late_answers_are_discarded(
    tmp_path: Path,
) -> None:
    config = replace(TWO, max_steps=500)
    async with open_house(tmp_path, config, has_replica=False) as house, replicas(house) as (_, second):
        training = asyncio.create_task(house.train())
        await until_sampled(house, 1)
        (_, before) = await statuses_of(house)
        second.send_signal(signal.SIGSTOP)
        await asyncio.sleep(GONE_AFTER_S)
        await until_moved(house)
        sampled = await num_tokens(house, 1)
        second.send_signal(signal.SIGCONT)
        _, after = await until(house, lambda statuses: statuses[1].joined_at > before.joined_at)
        assert (after.pid, after.state) == (before.pid, ReplicaState.SERVING)
        # New conversations are its own again.
        await until_sampled(house, 1, more_than=sampled + 64)
        house.stop.set()
        await training
        await check_all(house)


@pytest.mark.slow
async def test_a_replica_that_is_told_to_end_hands_its_conversations_over(tmp_path: Path) -> None:
    async with (
        open_house(tmp_path, replace(TWO, max_steps=4), has_replica=False) as house,
        replicas(house) as (_, second),
    ):
        training = asyncio.create_task(house.train())
        await until_sampled(house, 1)
        second.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(second.wait(), GONE_AFTER_S) == 0
        assert (await statuses_of(house))[1].state is ReplicaState.STOPPED
        await training
        assert (await house.status()).state == "succeeded"
        await check_all(house)
        counts = await house.ports.generate_request[1].counts()
        assert counts.in_flight == 0


# ---------------------------------------------------------------- weights that are not what was published


@pytest.mark.slow
async def test_a_replica_that_twice_finds_other_weights_than_were_published_ends_the_run_with_what_it_found(
    tmp_path: Path,
) -> None:
    """Started by the launcher, as in a run; nobody answers the call that waits for it."""
    run = Run(
        run_id="altered",
        cause="test",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config=to_dict(CONFIG),
        sources={},
        data_path=None,
        worker_token_hash="",
    )
    runs = open_root_records(tmp_path)
    launcher = ProcessLauncher(tmp_path)
    ports = open_run(tmp_path, run.run_id, num_replicas=1)
    try:
        await RunRecord.create(runs, run)
        version = Version(incarnation=1, n=1)
        published = await ports.weights.publish(version, MODEL, "0" * 32)
        await ports.weights.point(version)
        await ports.generate_request[0].send([Message(body=b"{}", group="a_0", dedup_id=None)])
        spec = RoleSpec(
            role="replica",
            name="replica-0",
            run_id=run.run_id,
            max_restarts=MAX_RESTARTS,
            final_exit_codes=REPLICA_FINAL_EXIT_CODES,
        )
        await launcher.start(spec)
        role = await until_failed(launcher)
        assert (role.exit_code, role.num_restarts) == (EXIT_REFUSED, 1)
        with pytest.raises(RoleFailed, match=rf"its memory does not hold version 1\.1.*{'0' * 32}"):
            await check_roles(launcher)
        assert published.location in "".join(role.log_tail)
        (stored,) = await ports.records.get([replica_key(run.run_id, "replica-0")])
        assert stored is not None
        status = decode(stored.value, ReplicaStatus)
        assert (status.state, status.num_refusals, status.fingerprints) == (ReplicaState.STOPPED, 2, {})
        counts = await ports.generate_request[0].counts()
        assert (counts.available, counts.in_flight, counts.delayed) == (1, 0, 0)
    finally:
        await launcher.close()
        ports.close()
        runs.close()


async def until_failed(launcher: ProcessLauncher) -> RoleStatus:
    while True:
        (role,) = await launcher.statuses()
        if role.state != "running":
            return role
        await asyncio.sleep(0.1)
