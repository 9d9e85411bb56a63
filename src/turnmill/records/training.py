"""Weight versions, batches, metrics, and where each process is."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from turnmill.records.keys import batch_prefix, worker_key


@dataclass(frozen=True, kw_only=True, order=True)
class Version:
    """Weights: n counts optimizer steps, `incarnation` the trainer processes of the run. 0.0 is the base model."""

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> "Version":
        incarnation, n = text.split(".")
        return Version(incarnation=int(incarnation), n=int(n))


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
class TaskOutcome:
    """One decided group of a task."""

    task_id: str
    # Of the group in the data; counts on over the epochs.
    position: int
    # Rollouts that ended, those without a reward included.
    num_played: int
    # Of them, with a reward; at least `success_threshold`; cut off at `max_length`.
    num_valid: int
    num_passed: int
    num_truncated: int = 0
    # Of the valid ones.
    reward_sum: float
    # None: too many were invalid, and the group was given up.
    has_signal: bool | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where in the data a trainer is, and what it has learned about the tasks."""

    # Position in the data of the first group of the next batch.
    position: int = 0
    # Decided groups that had signal, and all of them; older ones count less.
    seen_signal: float = 0.0
    seen_groups: float = 0.0
    # Groups decided since the batch before, in the order in which they count (see `training.task_statistics`).
    outcomes: tuple[TaskOutcome, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one optimizer step, in order, group by group.

    Of the records of one step at most one is not SUPERSEDED: that one counts.
    """

    run_id: str
    step: int
    # Trainer process that recorded it.
    incarnation: int = 1
    # One tuple of sample ids a group.
    groups: tuple[tuple[str, ...], ...]
    # In order, how many groups each part held whose gradients were made together; none: all at once. It decides about
    # the last bits of the weights.
    parts: tuple[int, ...] = ()
    # After the batch.
    progress: Progress = Progress()
    # About everything that was generated for it (until it was closed, while it is RECORDED): what its metric says,
    # should its trainer die before it is written.
    values: dict[str, float] = field(default_factory=dict)
    state: BatchState = BatchState.RECORDED
    # Version made by the step and its weight digest; None until APPLIED.
    version: Version | None = None
    digest: str | None = None

    @property
    def key(self) -> str:
        return f"{batch_prefix(self.run_id)}{self.step:08d}.{self.incarnation}"

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(sample_id for group in self.groups for sample_id in group)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Numbers of one optimizer step, over all valid rollouts generated in it."""

    run_id: str
    step: int
    # Of its batch.
    incarnation: int = 1
    time: float
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainingStatus:
    """Where the trainer is; written by the trainer, read by the pipeline and the CLI."""

    run_id: str
    # running | succeeded | failed | cancelled | exhausted (its budget of tokens is used up)
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
class WorkerStatus:
    """A worker that asked the proxy for work; written by the proxy at the worker's first lease."""

    run_id: str
    worker: str
    since: float

    @property
    def key(self) -> str:
        return worker_key(self.run_id, self.worker)
