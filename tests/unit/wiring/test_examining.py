"""Looking at a run from outside, and the watchdog that does it from inside: real folders and processes."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from turnmill.backends.embedded import only_one, open_root_records, open_run
from turnmill.conversation.history import ended_message
from turnmill.errors import StageFailed
from turnmill.health.diagnosis import STORE, examine
from turnmill.health.snapshot import TRAINER, ProcessState, Snapshot
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import Message, Write
from turnmill.records import (
    AlertKind,
    Baseline,
    BaselineVerdict,
    Batch,
    BatchState,
    Call,
    FinishReason,
    InvalidReason,
    Purpose,
    RolloutRequest,
    Run,
    RunStatus,
    SampleRecord,
    SampleState,
    Sampling,
    StageRecord,
    TrainingStatus,
    encode,
    training_key,
)
from turnmill.wiring.reading.runs import began
from turnmill.wiring.watching.examining import Examiner
from turnmill.wiring.watching.watchdog import StallCheck

HANDLE = {"trainer": TRAINER, "after_incarnation": 0}
STAGES = (
    StageRecord(name="StartRewardWorkers", state="done", started_at=0.0, handle={"workers": ["worker-0"]}),
    StageRecord(name="SubmitTraining", state="running", started_at=0.0, handle={}),
)


async def make_run(root: Path, **changes: object) -> Run:
    """An active run of this process that needs a worker."""
    run = Run(
        run_id="r1",
        cause="test/r1",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config={},
        sources={},
        data_path="tasks.jsonl",
        stages=STAGES,
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )
    run = replace(run, **changes)  # type: ignore[arg-type]
    store = open_root_records(root)
    try:
        await RunRecord.create(store, run)
    finally:
        store.close()
    return run


def sample(number: int, state: SampleState, **changes: object) -> SampleRecord:
    sample_id = f"t_{number}"
    request = RolloutRequest(
        sample_id=sample_id, timestamp="", max_length=10, rewards={"range": [0.0, 1.0]}, data={}, run_id="r1"
    )
    record = SampleRecord(
        run_id="r1",
        purpose=Purpose.TRAIN,
        sample_id=sample_id,
        task_id="t",
        group_id="g",
        state=state,
        created_at=0.0,
        request=request,
        deadline=0.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


async def write_samples(root: Path, *samples: SampleRecord) -> None:
    ports = open_run(root, "r1", num_replicas=1)
    try:
        await ports.records.write([Write(key=each.key, value=encode(each), expected=None) for each in samples])
    finally:
        ports.close()


def look(root: Path) -> Snapshot:
    return Examiner(root, "r1", window_s=1.0).look().snapshot


@contextmanager
def role(
    root: Path, name: str, run_id: str = "r1", code: str = "import time; time.sleep(60)"
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose command line is that of a role."""
    arguments = ["role", "worker", "--root", str(root.absolute()), "--run", run_id, "--name", name]
    with subprocess.Popen([sys.executable, "-c", code, *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


async def until(probe: Callable[[], bool]) -> None:
    """Look until it holds; the test's time-out is the patience."""
    while True:
        if probe():
            return
        await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(root: Path, stall_after_s: float) -> AsyncIterator[StallCheck]:
    check = StallCheck(root, "r1", stall_after_s)
    await check.start()
    try:
        yield check
    finally:
        await check.close()


async def until_found(check: StallCheck, wanted: bool = True) -> None:
    while True:
        if bool(await check.look()) is wanted:
            return
        await asyncio.sleep(0.01)


def _raises_nothing(check: StallCheck) -> bool:
    check.check()
    return False


def files_of(root: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in root.rglob("*") if path.suffix != ".db-shm"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


async def test_a_look_waits_for_no_writer_and_leaves_no_trace(tmp_path: Path) -> None:
    await make_run(tmp_path)
    ports = open_run(tmp_path, "r1", num_replicas=1)
    try:
        await ports.rollout_request.send([Message(body=b"{}", group="t_0", dedup_id=None)])
        await ports.rollout_request.lease(max_messages=1, lease_s=60)
        await ports.rollout_request.send([Message(body=b"{}", group="t_1", dedup_id=None)])
        # As a process does that is stopped in the middle of a transaction.
        locked = sqlite3.connect(tmp_path / "runs/r1/queues/rollout_request.db", isolation_level=None)
        try:
            locked.execute("BEGIN IMMEDIATE")
            locked.execute("DELETE FROM messages")
            before = files_of(tmp_path)
            seen = await asyncio.to_thread(look, tmp_path)
            assert files_of(tmp_path) == before
        finally:
            locked.close()
    finally:
        ports.close()
    queue = seen.queues["rollout_request"]
    assert (queue.available, queue.in_flight, queue.most_received, queue.num_receives) == (1, 1, "t_0", 1)
    assert queue.renewed_ago_s is not None and not seen.unreadable
    before = files_of(tmp_path)
    look(tmp_path)
    assert files_of(tmp_path) == before


async def test_processes_are_found_by_what_they_were_started_with_and_told_apart(tmp_path: Path) -> None:
    await make_run(tmp_path)

    def state() -> ProcessState:
        view = look(tmp_path).process("worker-0")
        assert view is not None
        return view.state

    assert state() is ProcessState.GONE
    with role(tmp_path, "worker-0", run_id="another"), role(tmp_path / "elsewhere", "worker-0"):
        assert state() is ProcessState.GONE
        with role(tmp_path, "worker-0") as process:
            # It has its arguments once it is past exec.
            await until(lambda: state() is ProcessState.ALIVE)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: state() is ProcessState.STOPPED)
            process.kill()
            # A zombie is gone, too.
            await until(lambda: state() is ProcessState.GONE)


async def test_a_file_that_can_t_be_read_is_told_and_all_else_is_seen(tmp_path: Path) -> None:
    await make_run(tmp_path)
    await write_samples(tmp_path, sample(0, SampleState.LEASED))
    damaged = tmp_path / "runs/r1/records/calls.db"
    damaged.write_bytes(b"no database at all" * 100)
    seen = look(tmp_path)
    assert seen.samples.by_state == {"leased": 1}
    assert seen.unreadable and all(str(damaged) in each for each in seen.unreadable)
    assert STORE in [diagnosis.role for diagnosis in examine(seen).diagnoses]


async def test_a_record_that_is_none_is_told_and_all_else_is_seen(tmp_path: Path) -> None:
    await make_run(tmp_path)
    await write_samples(tmp_path, sample(0, SampleState.LEASED))
    ports = open_run(tmp_path, "r1", num_replicas=1)
    try:
        await ports.records.write([Write(key=training_key("r1"), value=b"\0", expected=0)])
    finally:
        ports.close()
    seen = look(tmp_path)
    assert seen.samples.by_state == {"leased": 1}
    assert [training_key("r1") in each for each in seen.unreadable] == [True]
    assert STORE in [diagnosis.role for diagnosis in examine(seen).diagnoses]


async def test_a_trainer_is_not_missed_while_the_baseline_is_played(tmp_path: Path) -> None:
    stages = (StageRecord(name="SubmitTraining", state="running", started_at=0.0, handle=HANDLE),)
    await make_run(tmp_path, stages=stages)
    assert look(tmp_path).process(TRAINER) is None
    passed = Baseline(
        run_id="r1",
        attempt=1,
        verdict=BaselineVerdict.SIGNAL,
        is_ignored=False,
        threshold=1.0,
        num_rollouts=64,
        num_passed=3,
        num_invalid=0,
        low=0.0,
        high=0.1,
        reward_min=0.0,
        reward_mean=0.1,
        reward_max=1.0,
        num_rewards=2,
        tasks=(),
    )
    ports = open_run(tmp_path, "r1", num_replicas=1)
    try:
        await ports.records.write([Write(key=passed.key, value=encode(passed), expected=0)])
    finally:
        ports.close()
    assert [view.name for view in look(tmp_path).processes] == ["control", TRAINER]


async def test_a_trainer_is_needed_at_once_where_no_baseline_is_played(tmp_path: Path) -> None:
    stages = (StageRecord(name="SubmitTraining", state="running", started_at=0.0, handle=HANDLE),)
    await make_run(tmp_path, stages=stages, config={"baseline_rollouts": 0})
    assert look(tmp_path).process(TRAINER) is not None


async def test_a_trainer_that_only_looks_after_open_samples_is_no_progress(tmp_path: Path) -> None:
    """With thousands of them that takes a share of a core: a hanging environment must not hide behind it."""
    stages = (StageRecord(name="SubmitTraining", state="running", started_at=0.0, handle=HANDLE),)
    await make_run(tmp_path, stages=stages, config={"baseline_rollouts": 0})
    await write_samples(tmp_path, sample(0, SampleState.LEASED))
    with role(tmp_path, TRAINER, code="while True: pass"):
        examiner = Examiner(tmp_path, "r1", window_s=0.2)

        def computes() -> bool:
            return TRAINER in examiner.look().computing

        # It has told nothing of itself: it may still be reading its model.
        await until(computes)
        status = TrainingStatus(
            run_id="r1", state="running", step=0, max_steps=9, incarnation=1, updated_at=time.time()
        )
        ports = open_run(tmp_path, "r1", num_replicas=1)
        try:
            await ports.records.write([Write(key=training_key("r1"), value=encode(status), expected=0)])
        finally:
            ports.close()
        await until(lambda: not computes())
        await write_samples(tmp_path, sample(0, SampleState.REPORTED, reward=1.0))
        await until(computes)


async def test_whether_somebody_serves_the_deployment_is_seen_for_a_run_that_waits(tmp_path: Path) -> None:
    await make_run(tmp_path, status=RunStatus.QUEUED, stages=())
    assert not look(tmp_path).is_served
    with only_one(tmp_path / "locks" / "control.lock", "it is served"):
        assert look(tmp_path).is_served
    assert not look(tmp_path).is_served


async def test_commands_hold_wherever_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_run(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert look(Path(tmp_path.name)).root == str(tmp_path)


async def test_rewards_are_progress_and_invalid_samples_are_not(tmp_path: Path) -> None:
    await make_run(tmp_path)
    await write_samples(tmp_path, *(sample(number, SampleState.LEASED) for number in range(3)))
    examiner = Examiner(tmp_path, "r1", window_s=1.0)
    before = examiner.fingerprint()
    invalid = sample(0, SampleState.INVALID, reason=InvalidReason.ENV_ERROR, detail="no word list")
    # Asked for anew, as the scheduler does, and leased again.
    await write_samples(tmp_path, invalid, sample(1, SampleState.LEASED, attempt=2), sample(3, SampleState.REQUESTED))
    assert examiner.fingerprint() == before
    troubled = examiner.look().snapshot.samples.invalid
    assert troubled is not None and (troubled.sample_id, troubled.detail) == ("t_0", "no word list")
    await write_samples(tmp_path, sample(1, SampleState.REPORTED, reward=0.0))
    assert examiner.fingerprint() != before


async def test_a_recorded_call_is_progress(tmp_path: Path) -> None:
    await make_run(tmp_path)
    examiner = Examiner(tmp_path, "r1", window_s=1.0)
    before = examiner.fingerprint()
    call = Call(
        run_id="r1",
        purpose=Purpose.TRAIN,
        sample_id="t_0",
        call_id="t_0_0",
        attempt=1,
        parent=None,
        parent_digest="",
        choice=0,
        request_digest="",
        sampling=Sampling(),
        messages=[],
        reply={},
        token_ids=[],
        loss_mask=[],
        logprobs=[],
        version="0.0",
        finish_reason=FinishReason.STOP,
        created_at=time.time(),
    )
    ports = open_run(tmp_path, "r1", num_replicas=1)
    try:
        await ports.records.write([Write(key=call.key, value=encode(call), expected=0)])
        # News of an end without a reward.
        await ports.rollout_response.send([ended_message(sample(0, SampleState.INVALID, reason=InvalidReason.INFRA))])
    finally:
        ports.close()
    assert examiner.fingerprint() != before


async def test_a_batch_is_progress_when_it_is_recorded_and_when_it_is_applied(tmp_path: Path) -> None:
    await make_run(tmp_path)
    examiner = Examiner(tmp_path, "r1", window_s=1.0)
    batch = Batch(run_id="r1", step=1, groups=(("t_0", "t_1"),))
    seen = [examiner.look()]
    for state in (BatchState.RECORDED, BatchState.APPLIED):
        ports = open_run(tmp_path, "r1", num_replicas=1)
        try:
            await ports.records.write([Write(key=batch.key, value=encode(replace(batch, state=state)), expected=None)])
        finally:
            ports.close()
        seen.append(examiner.look())
    assert [look.snapshot.has_recorded_batch for look in seen] == [False, True, False]
    assert len({look.fingerprint for look in seen}) == 3


async def test_the_watchdog_finds_a_stall_and_ends_one_that_lasts(tmp_path: Path) -> None:
    await make_run(tmp_path)
    async with watching(tmp_path, 0.6) as check:
        assert await check.look() == []
        await until_found(check)
        (finding,) = await check.look()
        assert (finding.kind, finding.stage) == (AlertKind.RUN_STALLED, "SubmitTraining")
        assert "worker-0 is gone" in finding.summary and finding.command == f"turnmill doctor r1 --root {tmp_path}"
        with pytest.raises(StageFailed, match=r"no progress for .*: worker-0 is gone"):
            await until(partial(_raises_nothing, check))


async def test_a_machine_that_stood_still_is_no_stall(tmp_path: Path) -> None:
    """A container that is paused over night, or a machine that is too busy to give anybody a turn."""
    await make_run(tmp_path)
    async with watching(tmp_path, 2.0) as check:
        await asyncio.sleep(0.5)
        time.sleep(4.5)  # noqa: ASYNC251
        await asyncio.sleep(0.7)
        assert await check.look() == []
        check.check()
        await until_found(check)


async def test_what_moves_again_is_no_finding_any_more(tmp_path: Path) -> None:
    await make_run(tmp_path)
    await write_samples(tmp_path, sample(0, SampleState.LEASED))
    async with watching(tmp_path, 2.0) as check:
        await until_found(check)
        await write_samples(tmp_path, sample(0, SampleState.REPORTED, reward=1.0))
        await until_found(check, False)
        check.check()


async def test_a_watchdog_that_can_t_look_for_a_moment_goes_on(tmp_path: Path) -> None:
    """The deployment's records can't be read for a moment: no reason to end what is watched."""
    await make_run(tmp_path)
    database = tmp_path / "records/runs.db"
    content = database.read_bytes()
    database.write_bytes(b"damaged" * 1000)
    async with watching(tmp_path, 0.6) as check:
        await asyncio.sleep(0.8)
        check.check()
        assert await check.look() == []
        database.write_bytes(content)
        await until_found(check)
