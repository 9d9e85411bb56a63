"""What somebody who only looks at a deployment sees."""

import asyncio
import hashlib
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_root_records, open_run
from turnmill.errors import DataError, NotFound
from turnmill.pipeline.engine import RunRecord
from turnmill.records import Metric, Run, RunKind, RunStatus, StageRecord
from turnmill.wiring.reading.runs import as_seen, began, follow, list_runs, look_at_run, look_at_runs, read_validated

LINUX_ONLY = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


def active(run_id: str = "r1", **changes: object) -> Run:
    run = Run(
        run_id=run_id,
        cause="test",
        kind=RunKind.TRAIN,
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config={"max_steps": 2},
        sources={},
        data_path="tasks.jsonl",
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def test_a_run_of_a_living_process_is_active() -> None:
    assert as_seen(active()).status is RunStatus.ACTIVE


def test_a_run_whose_process_is_gone_is_interrupted() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    seen = as_seen(active(pid=child.pid))
    assert seen.status is RunStatus.INTERRUPTED and seen.status.is_final and "control process" in str(seen.error)


@LINUX_ONLY
def test_a_run_whose_process_ended_unnoticed_by_its_parent_is_interrupted() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    # Wait for its end, but leave it a zombie.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert as_seen(active(pid=child.pid)).status is RunStatus.INTERRUPTED
    finally:
        child.wait()


@LINUX_ONLY
def test_a_later_process_with_the_same_pid_is_not_the_runs() -> None:
    assert as_seen(active(pid_began=int(began(os.getpid()) or 0) - 1)).status is RunStatus.INTERRUPTED


@pytest.mark.parametrize("step_s", [3600.0, -3600.0], ids=["forward", "back"])
def test_a_run_whose_clock_was_set_since_it_began_is_active(step_s: float) -> None:
    assert as_seen(active(created_at=time.time() - step_s)).status is RunStatus.ACTIVE


def test_a_finished_run_stays_what_it_is() -> None:
    assert as_seen(active(status=RunStatus.FAILED, pid=2**22 + 1)).status is RunStatus.FAILED


async def test_runs_are_listed_oldest_first(tmp_path: Path) -> None:
    assert await list_runs(tmp_path) == look_at_runs(tmp_path) == []
    store = open_root_records(tmp_path)
    for run_id, at in (("b", 3.0), ("a", 5.0), ("c", 4.0)):
        await RunRecord.create(store, active(run_id, created_at=at, status=RunStatus.SUCCEEDED))
    store.close()
    assert [run.run_id for run in await list_runs(tmp_path)] == ["b", "c", "a"]
    assert look_at_runs(tmp_path) == await list_runs(tmp_path)


async def test_one_who_only_looks_sees_what_others_write_and_waits_for_no_lock(tmp_path: Path) -> None:
    store = open_root_records(tmp_path)
    await RunRecord.create(store, active("r1"))
    await RunRecord.create(store, active("r12"))
    holder = sqlite3.connect(tmp_path / "records" / "runs.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert look_at_run(tmp_path, "r1").run_id == "r1" and len(look_at_runs(tmp_path)) == 2
    holder.execute("COMMIT")
    holder.close()
    store.close()
    with pytest.raises(NotFound, match="r2"):
        look_at_run(tmp_path, "r2")


async def test_following_shows_each_change_and_ends_with_the_last_one(tmp_path: Path) -> None:
    store = open_root_records(tmp_path)
    record = await RunRecord.create(store, active())
    ports = open_run(tmp_path, "r1", num_replicas=0)
    seen: list[tuple[RunStatus, int]] = []
    async for run, metrics in follow(tmp_path, "r1"):
        seen.append((run.status, len(metrics)))
        if len(seen) == 1:
            await ports.metrics.write(Metric(run_id="r1", step=1, time=1.0, values={"reward_mean": 0.5}))
            await record.save(replace(record.run, status=RunStatus.SUCCEEDED))
    assert seen == [(RunStatus.ACTIVE, 0), (RunStatus.SUCCEEDED, 1)]
    ports.close()
    store.close()


async def test_following_stops_when_it_is_told(tmp_path: Path) -> None:
    store = open_root_records(tmp_path)
    await RunRecord.create(store, active())
    store.close()
    ended = asyncio.Event()
    num_seen = 0
    async for _ in follow(tmp_path, "r1", ended=ended):
        num_seen += 1
        ended.set()
    assert num_seen == 2, "once before, and once more for what happened up to the end"


async def test_following_an_unknown_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        async for _ in follow(tmp_path, "none"):
            pass


def test_no_file_is_played_or_trained_on_that_changed_after_it_was_validated(tmp_path: Path) -> None:
    """Both sides of an evaluation are of the same tasks, and the file may be anybody's."""
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "metadata": {"prompt": "go"}}\n')
    report = {"path": str(path), "rows": 1, "digest": hashlib.sha256(path.read_bytes()).hexdigest()}
    stage = StageRecord(name="ValidateData", state="done", started_at=1.0, result={"eval_data": report})
    run = active(stages=(stage,))
    assert [task.id for task in read_validated(run, path)] == ["a"]
    path.write_text('{"id": "b", "metadata": {"prompt": "go"}}\n')
    with pytest.raises(DataError, match="changed after it was validated"):
        read_validated(run, path)
    with pytest.raises(DataError, match="changed after it was validated"):
        read_validated(active(), path)
