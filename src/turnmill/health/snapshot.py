"""A run as one look at it shows: what its stores say, and what its processes do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from turnmill.records import ReplicaStatus, Run, RunStatus, Version

CONTROL, TRAINER, PROXY = "control", "trainer", "proxy"


class ProcessState(StrEnum):
    """What the system says of a process."""

    ALIVE = "alive"
    # By SIGSTOP or a debugger: it is there and does nothing.
    STOPPED = "stopped"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """A process that the run needs now."""

    name: str
    state: ProcessState
    # None for one that is gone.
    pid: int | None = None
    # Cores that it kept busy since the look before; None where there was none, or it is another process by now.
    cores: float | None = None


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """One queue."""

    # Can be received now, those included whose lease ran out.
    available: int = 0
    in_flight: int = 0
    delayed: int = 0
    dead: int = 0
    oldest_age_s: float | None = None
    # Seconds since a lease was taken or renewed; None where nothing is leased.
    renewed_ago_s: float | None = None
    # The message that was received most often, by its group: the id of its sample or call.
    most_received: str | None = None
    num_receives: int = 0
    # Messages that were received so often that it is no accident.
    num_often: int = 0

    @property
    def num_open(self) -> int:
        return self.available + self.in_flight + self.delayed


@dataclass(frozen=True, kw_only=True)
class Troubled:
    """A sample that ended without a reward."""

    # Of its record.
    key: str
    sample_id: str
    reason: str
    # Text for people: what went wrong.
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class SamplesView:
    """The samples that were asked for last."""

    by_state: Mapping[str, int] = field(default_factory=dict)
    # The newest one without a reward.
    invalid: Troubled | None = None

    @property
    def num_open(self) -> int:
        return self.by_state.get("requested", 0) + self.by_state.get("leased", 0)


def running_stage(run: Run) -> str | None:
    """The stage that is being walked; None before the first, between two and after the last."""
    running = [stage.name for stage in run.current_stages if stage.state == "running"]
    return running[-1] if running else None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that the rules know."""

    run: Run
    root: str
    # Unix seconds.
    at: float
    # Seconds without progress, and after how many the run is stalled; see `progress`.
    idle_s: float
    stall_after_s: float
    # Processes that the run needs now, control first.
    processes: tuple[ProcessView, ...] = ()
    # The last lines of each log, by the name of its process, oldest first.
    logs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # generate_request of each replica as `generate_request-<index>`.
    queues: Mapping[str, QueueView] = field(default_factory=dict)
    samples: SamplesView = SamplesView()
    # What each replica says of itself, by its name.
    replicas: Mapping[str, ReplicaStatus] = field(default_factory=dict)
    # The version pointed to, and for how long.
    current: Version | None = None
    current_age_s: float | None = None
    # The trainer has written down a batch that it has not applied.
    has_recorded_batch: bool = False
    # What is left of the disk that holds the run; None where it can't be told.
    free_bytes: int | None = None
    free_files: int | None = None
    # A `turnmill up` serves the deployment: runs that wait get their turn.
    is_served: bool = True
    # What could not be looked at, and why.
    unreadable: tuple[str, ...] = ()

    @property
    def is_stalled(self) -> bool:
        return self.run.status is RunStatus.ACTIVE and self.idle_s >= self.stall_after_s

    @property
    def stage(self) -> str | None:
        """That is being walked; None before the first and after the last."""
        return running_stage(self.run)

    def process(self, name: str) -> ProcessView | None:
        return next((process for process in self.processes if process.name == name), None)
