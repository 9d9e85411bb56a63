"""All ports of one run, together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnmill.ports.processes import RunInfra
from turnmill.ports.queues import Outbox, Queue
from turnmill.ports.stores import BlobStore, FolderStore, ModelStore, RecordStore, WeightStore
from turnmill.ports.telling import MetricSink


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
    # Where checkpoints are kept beside the trainer's own folder; None where that folder lasts.
    checkpoints: FolderStore | None = None
