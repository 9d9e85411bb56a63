"""What flows through Turnmill, in the order of the flow. Frozen records; times are Unix seconds.

    Task -> RolloutRequest -> GenerateRequest -> Call -> GenerateResponse -> RolloutResponse -> Batch -> WeightVersion

Ids print as paths (`run/purpose/sample/attempt/call`); they are opaque: never parsed. The sample record is the truth,
messages carry the news. Encode with `encode`, decode with `decode`: JSON, unknown keys are ignored by readers.
"""

import hashlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
PROTOCOL_VERSION = "v0"


def encode(record: object) -> bytes:
    """The stored and sent form of a record: compact JSON in field order."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """The record of type `kind`; raises `msgspec.ValidationError` naming the field that does not fit."""
    return msgspec.json.decode(data, type=kind)


def digest_of(*parts: bytes) -> str:
    """32 hex digits over length-prefixed parts (BLAKE2b, 16 bytes)."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


# ---------------------------------------------------------------- outcomes


class Purpose(StrEnum):
    """What a sample is for; only TRAIN is ever batched."""

    TRAIN = "train"
    BASELINE = "baseline"
    EVAL = "eval"


class SampleState(StrEnum):
    """REQUESTED -> LEASED -> REPORTED | INVALID; REPORTED -> BATCHED -> TRAINED; any but TRAINED -> DROPPED."""

    REQUESTED = "requested"
    LEASED = "leased"
    REPORTED = "reported"
    INVALID = "invalid"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"

    @property
    def is_open(self) -> bool:
        """A worker may still report it."""
        return self in (SampleState.REQUESTED, SampleState.LEASED)


class DropReason(StrEnum):
    """Why a sample, although played, is not trained."""

    NO_SIGNAL = "no_signal"
    STALE = "stale"
    SURPLUS = "surplus"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"


class InvalidReason(StrEnum):
    """Why a sample has no reward: never the policy's fault."""

    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    INFRA = "infra"


class StopReason(StrEnum):
    """How a valid conversation ended."""

    END_OF_CONVERSATION = "end_of_conversation"
    MAX_TURNS = "max_turns"
    MAX_LENGTH = "max_length"


class RunStatus(StrEnum):
    """Where a run is."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self is not RunStatus.ACTIVE


class RunKind(StrEnum):
    """Which stages a run has."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why a call stopped sampling (OpenAI names)."""

    STOP = "stop"
    LENGTH = "length"


# ---------------------------------------------------------------- tasks and rollouts


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the data."""

    id: str
    # The row's `metadata`, passed through as is (prompt, answer?, task?, info?).
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Scheduler -> worker: play one sample (v0 fields first, ours after)."""

    sample_id: str
    # ISO 8601, UTC.
    timestamp: str
    # Most tokens of one conversation, prompt included.
    max_length: int
    # {"range": [low, high]}
    rewards: dict[str, list[float]]
    # The task's metadata.
    data: dict[str, Any]
    version: str = PROTOCOL_VERSION
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN


@dataclass(frozen=True, kw_only=True)
class RolloutResponse:
    """Proxy -> trainer: a sample ended; the sample record holds the truth."""

    sample_id: str
    stop_reason: str
    # {"aggregate_score": float | None}; None only together with `reason`.
    rewards: dict[str, float | None]
    version: str = PROTOCOL_VERSION
    reason: InvalidReason | None = None
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The model's answer to one call, as an environment sees it."""

    # {"role": "assistant", "content": ...}: goes into the conversation as it is.
    message: dict[str, Any]
    finish_reason: FinishReason
    # Token counts by their OpenAI names (prompt_tokens, completion_tokens, total_tokens).
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """The text of the message, "" where it has none."""
        return self.message.get("content") or ""


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """Runner -> worker -> proxy: how an attempt ended. Either a reward or the reason why there is none."""

    reward: float | None = None
    reason: InvalidReason | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # None where the conversation did not come to an end.
    stop_reason: StopReason | None = None
    # Text for people: what went wrong.
    detail: str | None = None

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.reason is None):
            raise ValueError("a rollout result has a reward or a reason, and never both")


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One rollout of a task and everything that was decided about it."""

    run_id: str
    purpose: Purpose
    # `<task>_<g>`; g counts up over the whole run and is never reused.
    sample_id: str
    task_id: str
    # Samples whose rewards are compared share it.
    group_id: str
    state: SampleState
    created_at: float
    # What the worker is given.
    request: RolloutRequest
    # Past this the scheduler ends the sample as INVALID(infra); it covers all attempts.
    deadline: float
    # 1 for the first lease; 0 before.
    attempt: int = 0
    # SHA-256 hex of the attempt's secrets; None before the first lease.
    chat_secret_hash: str | None = None
    report_secret_hash: str | None = None
    lease_token_hash: str | None = None
    # Opaque receipt of the leased queue message.
    receipt: str | None = None
    # The c of the attempt's first own call; earlier attempts never reuse it.
    first_call: int = 0
    # Every c handed out so far is below it (reserved in ranges, so that a restarted proxy reuses none).
    call_bound: int = 0
    # None until REPORTED, and None for INVALID.
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str | None = None
    # Call ids that the reporting attempt consumed, own or replayed, in order of first use.
    calls: tuple[str, ...] = ()
    reason: InvalidReason | None = None
    # Text for people: what went wrong.
    detail: str | None = None
    drop_reason: DropReason | None = None
    # Optimizer step that it is batched in.
    step: int | None = None
    # Digest over identity, attempt, reward, metrics and calls, written with REPORTED.
    report_digest: str | None = None

    @property
    def key(self) -> str:
        return sample_key(self.run_id, self.purpose, self.sample_id)

    @property
    def is_valid(self) -> bool:
        """It was played to an end that the policy caused, and scored."""
        return self.reward is not None

    def expected_report_digest(self) -> str:
        """What `report_digest` must be; a difference means that the stored record was altered."""
        return digest_of(
            self.key.encode(),
            encode([self.attempt, self.reward, self.metrics, self.stop_reason, self.calls]),
        )


@dataclass(frozen=True, kw_only=True)
class DeadSample:
    """A dead letter about a sample: no attempt brought it to an end."""

    run_id: str
    purpose: Purpose
    sample_id: str
    # Leases that were used up.
    num_attempts: int
    # Text for people: what went wrong.
    detail: str
    dead_at: float
    request: RolloutRequest

    @property
    def key(self) -> str:
        return dead_letter_key(self.run_id, f"{self.purpose}/{self.sample_id}")


# ---------------------------------------------------------------- calls


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the log-prob of a token is log-softmax(logits / temperature) over the full vocabulary."""

    temperature: float = 1.0
    # 0: no limit.
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 4096
    stop: tuple[str, ...] = ()

    @property
    def is_trainable(self) -> bool:
        """Tokens drawn greedily or from a truncated support can't be trained (loss mask 0)."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1.0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Proxy -> replica: one call."""

    sample_id: str
    # The call id `<sample>_<c>`.
    step_id: str
    # With a parent: only the messages after the parent's reply. Without: the whole conversation.
    messages: list[dict[str, Any]]
    version: str = PROTOCOL_VERSION
    # Call whose tokens this one continues; None starts a conversation.
    parent: str | None = None
    tools: list[dict[str, Any]] | None = None
    sampling: Sampling = Sampling()
    # Delivery epoch: a deliberate re-send has the next one.
    epoch: int = 0
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN
    attempt: int = 1
    # Digest of messages, tools and sampling (replay compares it).
    request_digest: str = ""
    # Most tokens of the conversation, prompt included.
    max_length: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One generation, as a delta on its parent: tokens are append-only along the path of parents.

    `token_ids` = the rendered new messages (mask 0) followed by what was sampled (mask 1). Axes: T positions.
    """

    run_id: str
    purpose: Purpose
    sample_id: str
    call_id: str
    # Attempt that made it.
    attempt: int
    parent: str | None
    # Digest of the parent, "" without one: a chain over the whole conversation.
    parent_digest: str
    # Index among `n` choices.
    choice: int
    request_digest: str
    sampling: Sampling
    # New input messages of this call and the assistant's reply.
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    token_ids: list[int]
    # 1 exactly on sampled tokens that may be trained, the end-of-turn token included.
    loss_mask: list[int]
    # Log-prob of each sampled token, for the last len(logprobs) positions of token_ids.
    logprobs: list[float]
    # Weights that sampled it.
    version: str
    finish_reason: FinishReason
    created_at: float
    digest: str = ""

    @property
    def key(self) -> str:
        return call_key(self.run_id, self.purpose, self.sample_id, self.call_id)

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    def expected_digest(self) -> str:
        return digest_of(encode(replace(self, digest="")))

    def sealed(self) -> "Call":
        """A copy that carries its digest."""
        return replace(self, digest=self.expected_digest())


@dataclass(frozen=True, kw_only=True)
class GenerateResponse:
    """Replica -> proxy: the call is recorded (a wake-up), or failed with `error`."""

    sample_id: str
    step_id: str
    # {"choices": [{message, finish_reason, logprobs{content[{token: "token_id:N", logprob}]}}], "serving_model_num"}
    data: dict[str, Any] | None = None
    finish_reason: str | None = None
    version: str = PROTOCOL_VERSION
    # {"code": ..., "message": ...}
    error: dict[str, str] | None = None
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN


# ---------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True, order=True)
class Version:
    """Weights: n counts optimizer steps, `incarnation` the trainer processes of the run. 0.0 is the base model."""

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        incarnation, n = text.split(".")
        return cls(incarnation=int(incarnation), n=int(n))


@dataclass(frozen=True, kw_only=True)
class WeightVersion:
    """Published weights."""

    version: Version
    # `weights.fingerprint` of the tensors.
    digest: str
    # Folder or URI that holds `model.safetensors`.
    location: str


class BatchState(StrEnum):
    """A batch is recorded before its step and applied by one compare-and-set."""

    RECORDED = "recorded"
    APPLIED = "applied"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one optimizer step, in order, group by group."""

    run_id: str
    step: int
    # One tuple of sample ids a group.
    groups: tuple[tuple[str, ...], ...]
    state: BatchState = BatchState.RECORDED
    # Version made by the step and its weight digest; None until APPLIED.
    version: Version | None = None
    digest: str | None = None

    @property
    def key(self) -> str:
        return f"batches/{self.run_id}/{self.step:08d}"

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(sample_id for group in self.groups for sample_id in group)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Numbers of one optimizer step, over all valid rollouts generated in it."""

    run_id: str
    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainingStatus:
    """Where the trainer is; written by the trainer, read by the pipeline and the CLI."""

    run_id: str
    # running | succeeded | failed | cancelled
    state: str
    step: int
    max_steps: int
    incarnation: int
    updated_at: float
    error: str | None = None
    # Folder of the final checkpoint.
    checkpoint: str | None = None
    # Version that the final checkpoint holds.
    version: Version | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """What a replica serves; written by the replica at each weight swap."""

    run_id: str
    replica: str
    version: Version
    # Weight fingerprints that this replica computed from its own memory, by version text; the last few.
    fingerprints: dict[str, str]
    updated_at: float
    pid: int


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker that asked the proxy for work; written by the proxy at the worker's first lease."""

    run_id: str
    worker: str
    since: float

    @property
    def key(self) -> str:
        return worker_key(self.run_id, self.worker)


# ---------------------------------------------------------------- runs


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
    error: str | None = None
    num_retries: int = 0


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
    eval_path: str | None = None
    ended_at: float | None = None
    error: str | None = None
    stages: tuple[StageRecord, ...] = ()
    # SHA-256 hex of the token that this run's workers show.
    worker_token_hash: str | None = None
    # Pid of the control process.
    pid: int | None = None

    @property
    def key(self) -> str:
        return run_key(self.run_id)


# ---------------------------------------------------------------- record keys (the first two segments are a partition)


def segment(text: str) -> str:
    """An id as one segment of a key: a slash of its own would make the key ambiguous."""
    return text.replace("%", "%25").replace("/", "%2F")


RUN_PREFIX = "runs/all/"


def run_key(run_id: str) -> str:
    return f"{RUN_PREFIX}{run_id}"


def sample_prefix(run_id: str, purpose: Purpose) -> str:
    return f"samples/{run_id}/{purpose}/"


def sample_key(run_id: str, purpose: Purpose, sample_id: str) -> str:
    return f"{sample_prefix(run_id, purpose)}{segment(sample_id)}"


def call_prefix(run_id: str, purpose: Purpose, sample_id: str) -> str:
    return f"calls/{run_id}/{purpose}/{segment(sample_id)}/"


def call_key(run_id: str, purpose: Purpose, sample_id: str, call_id: str) -> str:
    return f"{call_prefix(run_id, purpose, sample_id)}{segment(call_id)}"


def secret_key(run_id: str, secret_hash: str) -> str:
    """Points from the hash of a chat or report secret to the key of its sample."""
    return f"secrets/{run_id}/{secret_hash}"


def training_key(run_id: str) -> str:
    return f"training/{run_id}/status"


def replica_key(run_id: str, replica: str) -> str:
    return f"replicas/{run_id}/{replica}"


def worker_key(run_id: str, worker: str) -> str:
    return f"workers/{run_id}/{worker}"


def dead_letter_key(run_id: str, name: str) -> str:
    return f"dead_letters/{run_id}/{name}"
