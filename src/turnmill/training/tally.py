"""The numbers of one optimizer step: counted over all valid rollouts generated in it, before any filter.

Off policy rollouts of several steps are played at once: what counts for a step are those of the groups that its batch
considered. A step whose collection found no group with signal is collected again; its rollouts stay counted, so a
metric covers everything played since the previous step.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from statistics import fmean

from turnmill.records import DropReason, SampleRecord, Version
from turnmill.training.batcher import Drop
from turnmill.training.samples import TrainingSample
from turnmill.training.trainer import StepResult


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the metrics need of a valid rollout."""

    reward: float
    metrics: dict[str, float]
    # Tokens that the model sampled.
    num_sampled: int
    # Tokens of the longest path of the conversation.
    length: int
    # Optimizer steps between its oldest token and the weights to be trained.
    staleness: int
    # It ended because it filled `max_length`.
    is_truncated: bool = False


@dataclass(kw_only=True)
class Seconds:
    """Where the time of a step went."""

    # First request to batch closed; off policy, from the end of the batch before to that of this one.
    generate_s: float = 0.0
    # Part of it in which the trainer had nothing to do but wait.
    wait_s: float = 0.0
    # Reading and checking the batch's records, audit, gradients, update.
    train_s: float = 0.0
    # Storing the weights and pointing to them.
    publish_s: float = 0.0
    # Part of the last two in which rollouts went on: off policy all of it.
    overlap_s: float = 0.0


@dataclass(kw_only=True)
class Tally:
    """Collects one step."""

    rollouts: list[Rollout] = field(default_factory=list)
    num_invalid: int = 0
    num_empty_rounds: int = 0
    # Dropped after they were played, by reason.
    dropped: Counter[DropReason] = field(default_factory=Counter)
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def num_ended(self) -> int:
        return len(self.rollouts) + self.num_invalid

    @property
    def num_failed(self) -> int:
        """Of those that ended: without a reward, or in a group that could not be scored."""
        return self.num_invalid + self.dropped[DropReason.UNSCORED]

    def add(self, other: "Tally") -> None:
        """Count what another one counted of rollouts."""
        self.rollouts += other.rollouts
        self.num_invalid += other.num_invalid
        self.dropped.update(other.dropped)

    def drop(self, drops: Iterable[Drop]) -> None:
        """Count drops."""
        self.dropped.update(item.reason for item in drops)

    def values(self, *, threshold: float, num_trained: int) -> dict[str, float]:
        """The metric's values about rollouts."""
        values: dict[str, float] = {
            "num_generated": len(self.rollouts),
            "num_invalid": self.num_invalid,
            "num_trained": num_trained,
            "num_empty_rounds": self.num_empty_rounds,
            "invalid_share": self.num_failed / max(1, self.num_ended),
            "dropped_share": self.dropped.total() / max(1, len(self.rollouts)),
            **{f"dropped_{reason}": self.dropped[reason] for reason in DropReason if reason.is_of_rollout},
            **{item.name: getattr(self.seconds, item.name) for item in fields(Seconds)},
        }
        if not self.rollouts:
            return values
        rewards = [rollout.reward for rollout in self.rollouts]
        values |= {
            "reward_mean": fmean(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "solved": fmean(reward >= threshold for reward in rewards),
            "response_length_mean": fmean(rollout.num_sampled for rollout in self.rollouts),
            "conversation_length_mean": fmean(rollout.length for rollout in self.rollouts),
            "truncated_share": fmean(rollout.is_truncated for rollout in self.rollouts),
            "staleness": max(rollout.staleness for rollout in self.rollouts),
        }
        if self.seconds.generate_s > 0:
            num_sampled = sum(rollout.num_sampled for rollout in self.rollouts)
            values["tokens_per_s"] = num_sampled / self.seconds.generate_s
        return self._environment_means() | values

    def _environment_means(self) -> dict[str, float]:
        """`<name>_mean` of each metric that the environment reports, over the rollouts that report it."""
        names = sorted({name for rollout in self.rollouts for name in rollout.metrics})
        return {
            f"{name}_mean": fmean(rollout.metrics[name] for rollout in self.rollouts if name in rollout.metrics)
            for name in names
        }

    def describe(self) -> str:
        """For people who ask why nothing could be trained."""
        if not self.rollouts:
            return f"no valid rollout, {self.num_invalid} invalid"
        rewards = [rollout.reward for rollout in self.rollouts]
        num_truncated = sum(rollout.is_truncated for rollout in self.rollouts)
        return (
            f"{len(rewards)} valid rollouts with reward min {min(rewards):g}, mean {fmean(rewards):g}, "
            f"max {max(rewards):g}, {num_truncated} of them cut off at max_length; {self.num_invalid} invalid"
        )


def ages(samples: Iterable[TrainingSample], step: int, most: int) -> dict[str, float]:
    """The metric's values about the age of what step `step` trains: a conversation is as old as its oldest token.

    Off policy (`most` > 0), the share of each age too, in optimizer steps.
    """
    found = Counter(step - 1 - Version.parse(sample.versions[0]).n for sample in samples if sample.versions is not None)
    if not found:
        return {}
    total = found.total()
    values = {"staleness_mean": sum(age * num for age, num in found.items()) / total, "staleness_max": max(found)}
    shares = {f"staleness_share_{age}": found[age] / total for age in range(most + 1)} if most else {}
    return values | shares


def step_values(result: StepResult) -> dict[str, float]:
    """The metric's values about the optimizer step."""
    values = {item.name: getattr(result, item.name) for item in fields(StepResult)}
    values["num_trained_tokens"] = values.pop("num_tokens")
    return {name: float(value) for name, value in values.items() if value is not None}


def describe_invalid(sample: SampleRecord) -> str:
    """Why a sample has no reward."""
    return f"{sample.key}: {sample.reason}: {sample.detail or 'no detail given'}"
