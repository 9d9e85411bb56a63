"""One look at a run from outside: its stores, its processes, its disk; what `turnmill.health` judges.

Needs no process of the run, changes nothing and waits for nobody: control may be stopped or gone, and the disk full.
What can't be read is said in the snapshot; all else is there all the same.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from turnmill.backends.embedded import ProcessInfo, holder_of, log_tail, look_at_pointer, process_info, role_processes
from turnmill.config import from_dict
from turnmill.errors import BackendUnavailable, RecordCorrupt
from turnmill.health.progress import COMPUTING_CORES, Fingerprint, stall_after
from turnmill.health.snapshot import (
    CONTROL,
    TRAINER,
    ProcessState,
    ProcessView,
    QueueView,
    SamplesView,
    Snapshot,
    Troubled,
    running_stage,
)
from turnmill.ports import BatchActivity, CallActivity, QueueActivity, QueueCounts, SampleActivity, Stored
from turnmill.records import (
    Baseline,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunStatus,
    SampleRecord,
    StageRecord,
    TrainingStatus,
    Version,
    baseline_key,
    decode,
    replica_key,
    training_key,
)
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.queues import queues_of
from turnmill.wiring.reading.runs import look_at_run

T = TypeVar("T")
# Between the looks of somebody who has not watched before: longer than the pause before a first restart.
BETWEEN_S = 1.0
# A process that was started so long after the last progress is not the first one of its name since then.
_LATE_S = 5.0
# In which control waits for others; in all others it works itself.
_WAITING_STAGES = ("StartGeneration", "StartRewardWorkers", "SubmitTraining", "Evaluate")


@dataclass(frozen=True, kw_only=True)
class _Stores:
    """What a run's stores say at one look."""

    run: Run
    queues: Mapping[str, QueueActivity]
    samples: SampleActivity
    calls: CallActivity
    replicas: Mapping[str, ReplicaStatus]
    training: TrainingStatus | None
    # The one that was played last.
    baseline: Baseline | None
    # The newest sample that ended without a reward.
    invalid: SampleRecord | None
    batches: BatchActivity
    num_training_writes: int
    pointer: tuple[Version, float] | None
    unreadable: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Look:
    """A snapshot, and what tells it from another one in which nothing more was achieved."""

    snapshot: Snapshot
    fingerprint: Fingerprint
    # Pids by name: see `health.progress`.
    computing: Mapping[str, int]


class Examiner:
    """Looks at one run again and again; what processes used in between is in the later looks."""

    def __init__(self, root: Path, run_id: str, *, window_s: float) -> None:
        """`window_s`: over at least half and at most twice of it is counted how busy a process is.

        Who waits has its moments too, in which news comes: in a short one a trainer that waits looks busy.
        """
        self._root = root.absolute()
        self._run_id = run_id
        self._folder = self._root / "runs" / run_id
        self._window_s = window_s
        backend = backend_of(self._root)
        self._reader = backend.reader(run_id)
        self._activity = backend.activity(run_id)
        # By pid, as seen earlier, oldest first.
        self._before: dict[int, list[ProcessInfo]] = {}

    def fingerprint(self) -> Fingerprint:
        """That of `look`, without a look at processes; raises `NotFound` where there is no such run."""
        return _fingerprint(self._stores())

    def look(self) -> Look:
        """Raises `NotFound` where there is no such run."""
        stores = self._stores()
        run = stores.run
        found = self._processes(run)
        processes = tuple(self._view(name, found.get(name)) for name in _needed(stores))
        self._remember(found.values())
        computing = _computing(stores, processes, found)
        now = time.time()
        last = _last_progress(stores)
        free_bytes, free_files = _free(self._folder)
        snapshot = Snapshot(
            run=run,
            root=str(self._root),
            at=now,
            idle_s=max(0.0, now - last),
            stall_after_s=stall_after(from_dict(run.config).stall_after_s, running_stage(run)),
            processes=processes,
            logs=self._logs(),
            queues={name: _queue_view(activity) for name, activity in stores.queues.items()},
            samples=_samples_view(stores.samples, stores.invalid),
            replicas=stores.replicas,
            current=stores.pointer[0] if stores.pointer else None,
            current_age_s=now - stores.pointer[1] if stores.pointer else None,
            has_recorded_batch=stores.batches.has_recorded,
            free_bytes=free_bytes,
            free_files=free_files,
            # Asking takes the lock for a moment, so it is asked only where the answer counts.
            is_served=run.status is not RunStatus.QUEUED or _is_served(self._root),
            unreadable=stores.unreadable,
        )
        # The first ones of their name since the last progress.
        first = {name: pid for name, pid in computing.items() if found[name].started_at <= last + _LATE_S}
        return Look(snapshot=snapshot, fingerprint=_fingerprint(stores), computing=first)

    # ------------------------------------------------------------ stores

    def _stores(self) -> _Stores:
        run = look_at_run(self._root, self._run_id)
        unreadable = list[str]()

        def read(look: Callable[[], T], otherwise: T) -> T:
            try:
                return look()
            except (BackendUnavailable, RecordCorrupt) as error:
                unreadable.append(str(error))
                return otherwise

        def stored(prefix: str) -> list[Stored]:
            return read(lambda: self._reader.records(prefix, limit=-1), [])

        def decoded(items: Iterable[Stored], kind: type[T]) -> list[T]:
            return [found for item in items if (found := read(partial(_decoded, item, kind), None)) is not None]

        training = stored(training_key(self._run_id))
        samples = read(self._activity.samples, SampleActivity())
        replicas = decoded(stored(replica_key(self._run_id, "")), ReplicaStatus)
        empty = QueueActivity(counts=QueueCounts(available=0, in_flight=0, delayed=0, dead=0, oldest_age_s=None))
        return _Stores(
            run=run,
            queues={name: read(partial(self._activity.queue, name), empty) for name in queues_of(run)},
            samples=samples,
            calls=read(self._activity.calls, CallActivity()),
            replicas={status.replica: status for status in replicas},
            training=next(iter(decoded(training, TrainingStatus)), None),
            baseline=next(iter(decoded(stored(baseline_key(self._run_id)), Baseline)), None),
            invalid=next(iter(decoded([samples.invalid] if samples.invalid else [], SampleRecord)), None),
            batches=read(self._activity.batches, BatchActivity()),
            num_training_writes=sum(item.version for item in training),
            pointer=read(lambda: look_at_pointer(self._folder / "weights"), None),
            unreadable=tuple(unreadable),
        )

    def _logs(self) -> dict[str, tuple[str, ...]]:
        found = {path.stem: log_tail(path) for path in sorted((self._folder / "logs").glob("*.log"))}
        # Of `turnmill up` there is one for all runs.
        return found if CONTROL in found else {**found, CONTROL: log_tail(self._root / "logs" / "control.log")}

    # ------------------------------------------------------------ processes

    def _processes(self, run: Run) -> dict[str, ProcessInfo]:
        found = role_processes(self._root, self._run_id)
        control = process_info(run.pid) if run.pid is not None and run.status is RunStatus.ACTIVE else None
        return found | ({CONTROL: control} if control is not None else {})

    def _view(self, name: str, info: ProcessInfo | None) -> ProcessView:
        if info is None:
            return ProcessView(name=name, state=ProcessState.GONE)
        state = ProcessState.STOPPED if info.is_stopped else ProcessState.ALIVE
        return ProcessView(name=name, state=state, pid=info.pid, cores=self._cores(info))

    def _cores(self, info: ProcessInfo) -> float | None:
        """How many it kept busy; None where it was not seen long enough."""
        for before in self._before.get(info.pid, ()):
            seconds = info.at_s - before.at_s
            if self._window_s / 2 <= seconds <= 2 * self._window_s:
                return (info.cpu_s - before.cpu_s) / seconds
        return None

    def _remember(self, found: Iterable[ProcessInfo]) -> None:
        self._before = {
            info.pid: [
                *(seen for seen in self._before.get(info.pid, ()) if info.at_s - seen.at_s <= self._window_s),
                info,
            ]
            for info in found
        }


def examine_anew(root: Path, run_id: str) -> Snapshot:
    """A snapshot by somebody who has not watched the run before; takes two `BETWEEN_S` for one that has not ended."""
    examiner = Examiner(root, run_id, window_s=BETWEEN_S)
    looks = [examiner.look()]
    if looks[0].snapshot.run.status not in (RunStatus.ACTIVE, RunStatus.INTERRUPTED):
        return looks[0].snapshot
    for _ in range(2):
        time.sleep(BETWEEN_S)
        looks.append(examiner.look())
    first, middle, last = looks
    # Gone in one look only: it is being started again, or has just died and will be.
    seen_before = {view.name: view for view in first.snapshot.processes if view.state is not ProcessState.GONE}
    processes = tuple(
        seen_before.get(view.name, view) if view.state is ProcessState.GONE else view
        for view in last.snapshot.processes
    )
    is_moving = last.fingerprint != first.fingerprint or bool(middle.computing.items() & last.computing.items())
    return replace(last.snapshot, processes=processes, idle_s=0.0 if is_moving else last.snapshot.idle_s)


# ---------------------------------------------------------------- what is needed, what was achieved


def _needed(stores: _Stores) -> list[str]:
    """The processes that the run needs now, by what its stages have started; control first."""
    run = stores.run
    stages = {stage.name: stage for stage in run.current_stages}
    if run.status not in (RunStatus.ACTIVE, RunStatus.INTERRUPTED) or "Teardown" in stages:
        started: list[str] = []
    else:
        handles = {name: stage.handle for name, stage in stages.items()}
        started = [
            *handles.get("StartGeneration", {}).get("replicas", []),
            *handles.get("StartRewardWorkers", {}).get("proxies", []),
            *handles.get("StartRewardWorkers", {}).get("workers", []),
        ]
        preflight = stages.get("Preflight")
        if preflight is not None and preflight.state == "running" and "role" in preflight.handle:
            started.append(preflight.handle["role"])
        training = stages.get("SubmitTraining")
        if training is not None and training.state == "running" and _may_train(stores, training):
            started.append(training.handle["trainer"])
    return [CONTROL, *started]


def _may_train(stores: _Stores, stage: StageRecord) -> bool:
    """Whether the stage has started the trainer by now: the baseline comes first (see `pipeline.baseline`)."""
    if "trainer" not in stage.handle:
        return False
    is_told = stores.training is not None and stores.training.incarnation > stage.handle.get("after_incarnation", 0)
    is_passed = stores.baseline is not None and stores.baseline.lets_train
    return is_told or is_passed or bool(stores.batches.row) or not from_dict(stores.run.config).baseline_rollouts


def _fingerprint(stores: _Stores) -> Fingerprint:
    current = stores.pointer[0] if stores.pointer else None
    return Fingerprint(
        stages=tuple((stage.name, stage.attempt, stage.state, len(stage.retries)) for stage in stores.run.stages),
        last_call=stores.calls.row,
        num_rewarded=stores.samples.num_rewarded,
        batches=(stores.batches.row, stores.batches.num_writes),
        num_training_writes=stores.num_training_writes,
        # A replica that was started again holds the base weights at first: it has achieved nothing yet.
        served=tuple(
            (name, str(status.version))
            for name, status in sorted(stores.replicas.items())
            if current is None or status.version == current
        ),
    )


def _last_progress(stores: _Stores) -> float:
    """Unix time of it, as far as the records are dated."""
    run = stores.run
    times = [run.created_at, run.resumed_at or 0.0, stores.calls.created_at or 0.0]
    times += [time for stage in run.stages for time in (stage.started_at, stage.ended_at or 0.0)]
    times += [stores.training.updated_at] if stores.training else []
    current = stores.pointer[0] if stores.pointer else None
    times += [stores.pointer[1]] if stores.pointer else []
    # One that was started again has achieved nothing yet.
    times += [
        status.changed_at
        for status in stores.replicas.values()
        if status.version == current and status.state is ReplicaState.SERVING
    ]
    return max(times)


def _computing(stores: _Stores, processes: tuple[ProcessView, ...], found: Mapping[str, ProcessInfo]) -> dict[str, int]:
    """Processes that compute what they tell of only when it is done: see `health.progress`."""
    stage, by_state = running_stage(stores.run), stores.samples.by_state
    has_open = bool(by_state.get("requested", 0) or by_state.get("leased", 0))

    def is_alone(view: ProcessView) -> bool:
        """What it does now is asked for by nobody who would notice that it takes too long."""
        if view.name == CONTROL:
            return stage not in _WAITING_STAGES
        if view.name == TRAINER:
            # Looking after many open samples keeps it busy, too, and is no progress.
            told_at = stores.training.updated_at if stores.training else 0.0
            return not has_open or stores.batches.has_recorded or told_at < found[view.name].started_at
        status = stores.replicas.get(view.name)
        is_loading = status is None or status.pid != view.pid or status.state is ReplicaState.LOADING
        return view.name.startswith("replica-") and is_loading

    return {
        view.name: view.pid
        for view in processes
        if view.pid is not None and (view.cores or 0.0) >= COMPUTING_CORES and is_alone(view)
    }


# ---------------------------------------------------------------- views


def _queue_view(activity: QueueActivity) -> QueueView:
    counts, received = activity.counts, activity.most_received
    return QueueView(
        available=counts.available,
        in_flight=counts.in_flight,
        delayed=counts.delayed,
        dead=counts.dead,
        oldest_age_s=counts.oldest_age_s,
        renewed_ago_s=activity.renewed_ago_s,
        most_received=received[0] if received else None,
        num_receives=received[1] if received else 0,
        num_often=activity.num_often,
    )


def _samples_view(activity: SampleActivity, invalid: SampleRecord | None) -> SamplesView:
    return SamplesView(
        by_state=dict(activity.by_state),
        invalid=Troubled(
            key=invalid.key,
            sample_id=invalid.sample_id,
            reason=str(invalid.reason),
            detail=invalid.detail,
        )
        if invalid
        else None,
    )


def _decoded(item: Stored, kind: type[T]) -> T:
    """Raises `RecordCorrupt` for a record that is none."""
    try:
        return decode(item.value, kind)
    except msgspec.DecodeError as error:
        raise RecordCorrupt(f"{item.key}: {error}") from error


def _is_served(root: Path) -> bool:
    """Whether a `turnmill up` has the deployment, as far as can be told."""
    try:
        return holder_of(root / "locks" / "control.lock") is not None
    except PermissionError:
        return True


def _free(folder: Path) -> tuple[int | None, int | None]:
    """Bytes and files that the disk has room for; None where the system does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None
