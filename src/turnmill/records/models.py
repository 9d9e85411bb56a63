"""Published models: what was decided about them, what they consist of, and which one is the latest."""

from dataclasses import dataclass
from typing import Any

from turnmill.records.keys import latest_model_key
from turnmill.records.training import Version


@dataclass(frozen=True, kw_only=True)
class TaskChange:
    """A held-out task before and after training: valid rollouts, how many were solved, and their mean reward."""

    task_id: str
    num_before: int
    num_after: int
    solved_before: int
    solved_after: int
    reward_before: float
    reward_after: float

    def gain(self, metric: str) -> float:
        """After less before, of the share that was solved, or of the mean reward."""
        if metric == "reward":
            return self.reward_after - self.reward_before
        return self.solved_after / self.num_after - self.solved_before / self.num_before


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Whether a trained model is published, by what it did on held-out tasks before and after training."""

    # The parameter `promotion`.
    rule: str
    is_published: bool
    # For people.
    reason: str
    # The parameter `promotion_metric`.
    metric: str = "solved"
    # Of that metric, after training less before, with its 95 % interval. None without held-out tasks; an interval of
    # rewards also with fewer than six of them.
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    # Rollouts of each side.
    num_pairs: int = 0
    # Tasks by how they changed, and those that went worse, the worst first: at most twenty of them.
    num_better: int = 0
    num_worse: int = 0
    worse: tuple[TaskChange, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file of a published model."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """One version of a run's model; its content never changes."""

    run_id: str
    version: Version
    # `weights.fingerprint` of what was trained: the model's tensors, or base and adapter before they were merged.
    digest: str
    env: str
    base_model: str
    published_at: float
    promotion: Promotion
    # By path within the model, without the manifest that holds this record.
    files: dict[str, ModelFile]

    @property
    def name(self) -> str:
        """Where it lies below the deployment's models."""
        return f"{self.run_id}/{self.version}"


@dataclass(frozen=True, kw_only=True)
class LatestModel:
    """The model published last of those that come from one base model and one environment."""

    env: str
    base_model: str
    run_id: str
    version: Version
    digest: str
    published_at: float

    @property
    def key(self) -> str:
        return latest_model_key(self.env, self.base_model)

    @classmethod
    def of(cls, model: PublishedModel) -> "LatestModel":
        values: dict[str, Any] = {name: getattr(model, name) for name in cls.__dataclass_fields__}
        return cls(**values)
