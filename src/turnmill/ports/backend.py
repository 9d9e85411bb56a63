"""Where a deployment keeps what lasts: its records, the ports of each run, and what those see of it who only look.

    Backend -> open_records, open_run   for roles, on an event loop
            -> look_at_records, reader, activity   for readers

Readers change nothing, lock nothing and need no process of the run. Their methods block: from an event loop they are
called in a thread. All raise `BackendUnavailable` for what can't be read, `RecordCorrupt` for what is damaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from turnmill.ports.queues import DeadLetter, QueueCounts
from turnmill.ports.run import RunPorts
from turnmill.ports.stores import RecordStore, Stored
from turnmill.records import Metric, Purpose, SampleState

GENERATE_REQUEST = "generate_request"


def queue_names(num_replicas: int | None) -> list[str]:
    """The queues of a run: `generate_request` is one a replica; None: one, as a foreign generator has it."""
    asked = [GENERATE_REQUEST] if num_replicas is None else [f"{GENERATE_REQUEST}-{i}" for i in range(num_replicas)]
    return ["rollout_request", "rollout_response", *asked, "generate_response"]


# ---------------------------------------------------------------- what is seen


@dataclass(frozen=True, kw_only=True)
class QueueActivity:
    """A queue's counts, and how its consumers treat it as far as the backend can tell."""

    counts: QueueCounts
    # Seconds since a lease that holds was taken or renewed last; None where nothing is leased, or where it is unknown.
    renewed_ago_s: float | None = None
    # Group and number of receives of the message that was received most often, leased ones included; None without one,
    # or where it is unknown.
    most_received: tuple[str, int] | None = None
    # Messages that were received so often that it is no accident; 0 where it is unknown.
    num_often: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleActivity:
    """The samples that were asked for last; all of them where the backend has no order of writing."""

    by_state: Mapping[str, int] = field(default_factory=dict)
    num_rewarded: int = 0
    # The newest one that ended without a reward.
    invalid: Stored | None = None


@dataclass(frozen=True, kw_only=True)
class CallActivity:
    """The newest call that is recorded."""

    # Grows with each call (or each few of them) that is recorded.
    row: int = 0
    # None where it is unknown.
    created_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class BatchActivity:
    """The batches that were recorded last."""

    # Grows with each batch.
    row: int = 0
    num_writes: int = 0
    # One of them is recorded and not applied.
    has_recorded: bool = False


# ---------------------------------------------------------------- who looks


class RunReader(Protocol):
    """What one run has stored."""

    def records(self, prefix: str, *, after: str = "", limit: int) -> list[Stored]:
        """The first `limit` (all where it is negative) whose key starts with `prefix`, behind a key, by key."""
        ...

    def counts(self, queue: str) -> QueueCounts:
        """Of the queue of this name; all zero for one that is not there yet, or no more."""
        ...

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """Of the queue of this name, oldest first; looking does not count as receiving them."""
        ...

    def samples(self) -> dict[tuple[Purpose, SampleState], int]:
        """How many samples are in which state; reads all of them."""
        ...

    def metrics(self) -> list[Metric]:
        """By step, as they were written."""
        ...


class RunActivity(Protocol):
    """What one run's stores say about whether it moves."""

    def queue(self, name: str) -> QueueActivity: ...

    def samples(self) -> SampleActivity: ...

    def calls(self) -> CallActivity: ...

    def batches(self) -> BatchActivity: ...

    def steps_mark(self) -> object:
        """Cheaper than reading the steps: equal to the one before only if no step was recorded in between."""
        ...


class RootRecords(RecordStore, Protocol):
    """The deployment's records, opened."""

    def close(self) -> None:
        """Idempotent."""
        ...


class Backend(Protocol):
    """One deployment on one kind of services. Making one opens nothing."""

    @property
    def hosts_proxy(self) -> bool:
        """Whether control serves the proxy; else a process of its own does, once the run's queues are there."""
        ...

    def open_records(self) -> RootRecords:
        """The deployment's records (`runs/...`); close them."""
        ...

    def open_run(self, run_id: str, *, num_replicas: int) -> RunPorts:
        """The ports of a run, with `num_replicas` generate_request queues; close them.

        Raises `InvalidInput` for an id that no run can have, or where the deployment is not there.
        """
        ...

    def look_at_records(self, prefix: str) -> list[Stored]:
        """The deployment's records whose key starts with `prefix`, by key."""
        ...

    def reader(self, run_id: str) -> RunReader:
        """Raises `InvalidInput` for an id that no run can have."""
        ...

    def activity(self, run_id: str) -> RunActivity:
        """Keep it for the next look: what can't be dated is dated by when it was first seen."""
        ...
