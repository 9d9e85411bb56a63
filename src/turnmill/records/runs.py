"""Runs and the history of their stages."""

from dataclasses import dataclass, field
from typing import Any

from turnmill.records.keys import clock_prefix, run_key
from turnmill.records.outcomes import ErrorClass, RunKind, RunStatus


@dataclass(frozen=True, kw_only=True)
class StageRetry:
    """A try at a stage's start, or at one of its polls, that failed and was followed by another one."""

    # When it failed.
    at: float
    error: str
    error_class: ErrorClass


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """One entry of a run's history."""

    name: str
    # running | done | failed
    state: str
    started_at: float
    ended_at: float | None = None
    handle: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    # What goes on, for people; at most a second old. Empty once it is done.
    detail: str = ""
    error: str | None = None
    error_class: ErrorClass | None = None
    # Tries that failed before the ones that count.
    retries: tuple[StageRetry, ...] = ()
    # Of the run: its stages are walked again when it is resumed.
    attempt: int = 1


@dataclass(frozen=True, kw_only=True)
class RunClock:
    """How long a control process has had a run; written by it again and again."""

    run_id: str
    attempt: int
    began_at: float
    # Up to the last time that it was written, by a clock that nobody sets.
    seconds: float

    @property
    def key(self) -> str:
        return f"{clock_prefix(self.run_id)}{self.attempt:06d}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: at most one per cause."""

    run_id: str
    # What started it (a CLI call is a cause of its own each time).
    cause: str
    status: RunStatus
    created_at: float
    kind: RunKind = RunKind.TRAIN
    # Parameter values and where each came from.
    config: dict[str, Any]
    sources: dict[str, str]
    # None for an evaluation alone.
    data_path: str | None
    # Key of the upload that it is made of; None for one that was begun by hand, which nobody else goes on with.
    upload: str | None = None
    # The version of it that was taken; None for a run that does an earlier one again.
    upload_version: str | None = None
    # Why the upload can't be trained, found before anything was begun: its sidecar is wrong.
    refused: str | None = None
    # The run that this one does again from its beginning, and the last run that does this one again.
    retry_of: str | None = None
    retried_as: str | None = None
    # The run with the same content, for a duplicate.
    duplicate_of: str | None = None
    eval_path: str | None = None
    ended_at: float | None = None
    error: str | None = None
    # Of all attempts, in the order in which they began.
    stages: tuple[StageRecord, ...] = ()
    # 1, and one more each time it is resumed.
    attempt: int = 1
    # When the last attempt began; None for the first one, which began when the run was created.
    resumed_at: float | None = None
    # SHA-256 hex of the token that this run's workers show.
    worker_token_hash: str | None = None
    # Pid of the control process.
    pid: int | None = None
    # When that process began, in clock ticks after the machine's start; None where the system does not say.
    pid_began: int | None = None
    # What it was expected to take when it began (`budget.Forecast`); None where nobody asked.
    forecast: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        return run_key(self.run_id)

    @property
    def current_stages(self) -> tuple[StageRecord, ...]:
        """Of the last attempt."""
        return tuple(stage for stage in self.stages if stage.attempt == self.attempt)
