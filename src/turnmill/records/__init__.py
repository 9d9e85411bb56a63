"""What flows through Turnmill, in the order of the flow. Frozen records; times are Unix seconds.

    Task -> RolloutRequest -> GenerateRequest -> Call -> GenerateResponse -> RolloutResponse -> Batch -> WeightVersion

Ids print as paths (`run/purpose/sample/attempt/call`); they are opaque: never parsed. The sample record is the truth,
messages carry the news. Encode with `encode`, decode with `decode`: JSON, unknown keys are ignored by readers.
"""

from turnmill.records.calls import Call, GenerateRequest, GenerateResponse, Sampling
from turnmill.records.codec import PROTOCOL_VERSION, decode, digest_of, encode
from turnmill.records.keys import (
    RUN_PREFIX,
    batch_prefix,
    call_key,
    call_prefix,
    dead_letter_key,
    replica_key,
    run_key,
    sample_key,
    sample_prefix,
    secret_key,
    segment,
    training_key,
    worker_key,
)
from turnmill.records.outcomes import (
    DropReason,
    FinishReason,
    InvalidReason,
    Purpose,
    RunKind,
    RunStatus,
    SampleState,
    StopReason,
)
from turnmill.records.rollouts import (
    DeadSample,
    Reply,
    RolloutRequest,
    RolloutResponse,
    RolloutResult,
    SampleRecord,
    Task,
)
from turnmill.records.runs import Run, StageRecord
from turnmill.records.training import (
    Batch,
    BatchState,
    Metric,
    Progress,
    ReplicaStatus,
    TrainingStatus,
    Version,
    WeightVersion,
    WorkerStatus,
)
from turnmill.records.uploads import Cause, Upload

__all__ = [
    "PROTOCOL_VERSION",
    "RUN_PREFIX",
    "Batch",
    "BatchState",
    "Call",
    "Cause",
    "DeadSample",
    "DropReason",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "InvalidReason",
    "Metric",
    "Progress",
    "Purpose",
    "ReplicaStatus",
    "Reply",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutResult",
    "Run",
    "RunKind",
    "RunStatus",
    "SampleRecord",
    "SampleState",
    "Sampling",
    "StageRecord",
    "StopReason",
    "Task",
    "TrainingStatus",
    "Upload",
    "Version",
    "WeightVersion",
    "WorkerStatus",
    "batch_prefix",
    "call_key",
    "call_prefix",
    "dead_letter_key",
    "decode",
    "digest_of",
    "encode",
    "replica_key",
    "run_key",
    "sample_key",
    "sample_prefix",
    "secret_key",
    "segment",
    "training_key",
    "worker_key",
]
