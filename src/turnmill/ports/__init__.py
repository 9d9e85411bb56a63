"""What Turnmill needs from a backend, written for the weakest one. Each port has one contract suite (tests/contracts).

Everything may be called from several processes at once. Every method may raise `BackendUnavailable` after the adapter's
own retries (each adapter is the only retry owner for its service). Nothing here may be lost by SIGKILL of the caller
once the call has returned, unless the text says so.
"""

from turnmill.ports.backend import (
    GENERATE_REQUEST,
    Backend,
    BatchActivity,
    CallActivity,
    QueueActivity,
    RootRecords,
    RunActivity,
    RunReader,
    SampleActivity,
    queue_names,
)
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
from turnmill.ports.run import RunPorts
from turnmill.ports.stores import (
    BlobInfo,
    BlobStore,
    FolderStore,
    ListedBlob,
    ModelStore,
    RecordStore,
    Stored,
    StoredModel,
    WeightStore,
    Write,
)
from turnmill.ports.telling import MetricSink, Notifier

__all__ = [
    "GENERATE_REQUEST",
    "Backend",
    "BatchActivity",
    "BlobInfo",
    "BlobStore",
    "CallActivity",
    "Count",
    "DeadLetter",
    "FolderStore",
    "Launcher",
    "Leased",
    "ListedBlob",
    "Message",
    "MetricSink",
    "ModelStore",
    "Notifier",
    "Outbox",
    "Queue",
    "QueueActivity",
    "QueueAdmin",
    "QueueCounts",
    "RecordStore",
    "RoleSpec",
    "RoleStatus",
    "RootRecords",
    "RunActivity",
    "RunInfra",
    "RunPorts",
    "RunReader",
    "SampleActivity",
    "Stored",
    "StoredModel",
    "WeightStore",
    "WorkQueue",
    "Write",
    "queue_names",
]
