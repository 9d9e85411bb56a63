"""What Turnmill needs from a backend, written for the weakest one. Each port has one contract suite (tests/contracts).

Everything may be called from several processes at once. Every method may raise `BackendUnavailable` after the adapter's
own retries (each adapter is the only retry owner for its service). Nothing here may be lost by SIGKILL of the caller
once the call has returned, unless the text says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnmill.ports.processes import Launcher, RoleSpec, RoleStatus, RunInfra
from turnmill.ports.queues import (
    Count,
    DeadLetter,
    Leased,
    Message,
    Outbox,
    Queue,
    QueueAdmin,
    QueueCounts,
    WorkQueue,
)
from turnmill.ports.stores import (
    BlobInfo,
    BlobStore,
    ModelStore,
    RecordStore,
    Stored,
    StoredModel,
    WeightStore,
    Write,
)
from turnmill.ports.telling import MetricSink, Notifier

__all__ = [
    "BlobInfo",
    "BlobStore",
    "Count",
    "DeadLetter",
    "Launcher",
    "Leased",
    "Message",
    "MetricSink",
    "ModelStore",
    "Notifier",
    "Outbox",
    "Queue",
    "QueueAdmin",
    "QueueCounts",
    "RecordStore",
    "RoleSpec",
    "RoleStatus",
    "RunInfra",
    "RunPorts",
    "Stored",
    "StoredModel",
    "WeightStore",
    "WorkQueue",
    "Write",
]


@dataclass(frozen=True, kw_only=True)
class RunPorts:
    """Everything that a role needs of one run."""

    # The deployment's store: `runs/...`.
    runs: RecordStore
    # The run's own store: samples, calls, batches, statuses.
    records: RecordStore
    blobs: BlobStore
    weights: WeightStore
    # The deployment's.
    models: ModelStore
    metrics: MetricSink
    rollout_request: Queue
    rollout_response: Queue
    # One queue a replica, by index.
    generate_request: Sequence[Queue]
    generate_response: Queue
    # Call records, and generate_response.
    answers: Outbox
    infra: RunInfra
    # Releases files, threads and wake-ups; idempotent.
    close: Callable[[], None]
