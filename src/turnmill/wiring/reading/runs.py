"""What the records of a deployment say. Nothing here writes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from turnmill.backends.embedded import process_lives
from turnmill.errors import NotFound, TurnmillError
from turnmill.intake.dataset import read_tasks
from turnmill.pipeline.engine import load_run
from turnmill.ports import RunPorts
from turnmill.records import (
    RUN_PREFIX,
    Baseline,
    Metric,
    ReplicaStatus,
    Run,
    RunStatus,
    Task,
    TrainingStatus,
    baseline_key,
    decode,
    replica_key,
    run_key,
    training_key,
)
from turnmill.wiring.backend import backend_of

FOLLOW_INTERVAL_S = 0.5
# Reading may take this share of the time, however long a run's history is: control has conversations to serve.
READING_SHARE = 0.05


def as_seen(run: Run) -> Run:
    """The run as its record says, or interrupted where it is active and its control process is gone."""
    if run.status is not RunStatus.ACTIVE or run.pid is None or _lives(run.pid, run.pid_began):
        return run
    error = f"its control process ended without finishing the run; `turnmill resume {run.run_id}` goes on with it"
    return replace(run, status=RunStatus.INTERRUPTED, error=error)


def began(pid: int) -> int | None:
    """When a process began, in clock ticks after the machine's start: a date would change when the clock is set.

    None for one that has ended, even if its parent has not asked how yet, and where there is no /proc.
    """
    try:
        # After the name, which may hold anything: state, then 18 fields, then the start (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _lives(pid: int, since: int | None) -> bool:
    """Whether the process that had this pid and began then still runs; any one with this pid, where that is unknown."""
    if Path("/proc/self/stat").exists():
        found = began(pid)
        return found is not None and since in (None, found)
    return process_lives(pid)


def look_at_runs(root: Path) -> list[Run]:
    """All runs of a deployment, oldest first; reads as one who leaves no trace and waits for nobody."""
    found = [as_seen(decode(item.value, Run)) for item in backend_of(root).look_at_records(RUN_PREFIX)]
    return sorted(found, key=lambda run: run.created_at)


def look_at_run(root: Path, run_id: str) -> Run:
    """As `look_at_runs`; raises `NotFound`."""
    for item in backend_of(root).look_at_records(run_key(run_id)):
        if item.key == run_key(run_id):
            return as_seen(decode(item.value, Run))
    raise NotFound(f"there is no run {run_id!r}")


async def list_runs(root: Path) -> list[Run]:
    """As `look_at_runs`, for code on an event loop."""
    return await asyncio.to_thread(look_at_runs, root)


def look_at_steps(root: Path, run_id: str, *, first: int = 1) -> list[Metric]:
    """As `read_metrics`, as one who leaves no trace and waits for nobody."""
    status = look_at_training(root, run_id)
    return _counted(backend_of(root).reader(run_id).metrics(), status, first)


def _counted(found: Sequence[Metric], status: TrainingStatus | None, first: int) -> list[Metric]:
    """Those from the step `first` to where the trainer is: later ones were given up. Step 0 is before the first one."""
    return [metric for metric in found if first <= metric.step and (status is None or metric.step <= status.step)]


def listed_steps(root: Path, run_id: str) -> tuple[list[Metric], str | None]:
    """As `look_at_steps`, for a list of runs: one whose files are damaged has no steps, and why; it hides no other."""
    try:
        return look_at_steps(root, run_id), None
    except TurnmillError as error:
        return [], str(error)


class SeenSteps:
    """`look_at_steps` again and again: they are only read when one may have been written."""

    def __init__(self, root: Path, run_id: str, *, first: int = 1) -> None:
        """`first` 0: with what was evaluated before the first step."""
        self._root = root
        self._run_id = run_id
        self._first = first
        self._activity = backend_of(root).activity(run_id)
        self._seen: object = None
        self._metrics: list[Metric] = []

    def look(self) -> list[Metric]:
        """The metrics of the run by step, as they are now."""
        # Before reading: what is written meanwhile is read the next time.
        seen = self._activity.steps_mark()
        if seen != self._seen:
            self._metrics = look_at_steps(self._root, self._run_id, first=self._first)
            self._seen = seen
        return self._metrics


def look_at_training(root: Path, run_id: str) -> TrainingStatus | None:
    """What the trainer of a run says of itself; None before there was one."""
    for item in backend_of(root).reader(run_id).records(training_key(run_id), limit=1):
        if item.key == training_key(run_id):
            return decode(item.value, TrainingStatus)
    return None


def look_at_replicas(root: Path, run_id: str) -> list[ReplicaStatus]:
    """What the replicas of a run say of themselves, by name; none of one that was not started."""
    found = backend_of(root).reader(run_id).records(replica_key(run_id, ""), limit=-1)
    return [decode(item.value, ReplicaStatus) for item in found]


async def read_metrics(root: Path, run_id: str, *, first: int = 1) -> list[Metric]:
    """The metrics of a run by optimizer step; from `first` 0 on, with what was evaluated before them."""
    ports = backend_of(root).open_run(run_id, num_replicas=0)
    try:
        return await metrics_so_far(ports, run_id, first=first)
    finally:
        ports.close()


async def read_baseline(root: Path, run_id: str) -> Baseline | None:
    """The baseline that was played last, None where none was."""
    ports = backend_of(root).open_run(run_id, num_replicas=0)
    try:
        (stored,) = await ports.records.get([baseline_key(run_id)])
        return decode(stored.value, Baseline) if stored else None
    finally:
        ports.close()


async def metrics_so_far(ports: RunPorts, run_id: str, *, first: int = 1) -> list[Metric]:
    """Without those of steps that were given up: behind the step where the trainer is."""
    metrics = await ports.metrics.read(run_id)
    if not metrics:
        return []
    (stored,) = await ports.records.get([training_key(run_id)])
    return _counted(metrics, decode(stored.value, TrainingStatus) if stored else None, first)


async def follow(
    root: Path, run_id: str, *, ended: asyncio.Event | None = None
) -> AsyncIterator[tuple[Run, list[Metric]]]:
    """A run and its metrics, at once and again about twice a second until the run is final or `ended` is set.

    The last pair is how it ended. Raises `NotFound`.
    """
    ended = ended or asyncio.Event()
    ports = backend_of(root).open_run(run_id, num_replicas=0)
    try:
        while True:
            last, before = ended.is_set(), time.monotonic()
            run = as_seen(await load_run(ports.runs, run_id))
            metrics = await metrics_so_far(ports, run_id)
            reading_s = time.monotonic() - before
            yield run, metrics
            if last or run.status.is_final:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(FOLLOW_INTERVAL_S, reading_s / READING_SHARE))
    finally:
        ports.close()


async def until_ended(root: Path, run_id: str) -> Run:
    """The run, once it is final."""
    async for run, _ in follow(root, run_id):
        last = run
    return last


async def until_left(root: Path, run: Run) -> Run:
    """The run, once the process that has it in `run` has it no more: it has ended, waits again, or is another's."""
    async for seen, _ in follow(root, run.run_id):
        if seen.status is not RunStatus.ACTIVE or _owner_of(seen) != _owner_of(run):
            return seen
    return seen


def _owner_of(run: Run) -> tuple[object, ...]:
    return run.attempt, run.pid, run.pid_began


def read_validated(run: Run, path: Path) -> list[Task]:
    """The tasks of a file of this attempt; raises `DataError` unless it still is the one that was validated."""
    reports = {stage.name: stage.result for stage in run.current_stages}.get("ValidateData", {})
    digests = [report["digest"] for report in reports.values() if report["path"] == str(path)]
    return read_tasks(path, digest=digests[0] if digests else "")
