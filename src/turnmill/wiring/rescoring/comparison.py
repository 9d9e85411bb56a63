"""Old rewards against new ones: pure, without records and without an environment.

Rescored, one a conversation -> pairs of rewards -> means, interval of the difference, passes, signal of groups, tasks
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

from turnmill.evaluation.statistics import student_quantile
from turnmill.records import InvalidReason, SampleRecord

_MOST_CHANGED = 10


class Verdict(StrEnum):
    """What became of a conversation that was played again."""

    # The environment went the stored way, to an end and a reward.
    RESCORED = "rescored"
    # It asked the model something that it was not asked then.
    DIVERGED = "diverged"
    # It failed, or its reward did.
    INVALID = "invalid"


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """One conversation, then and now."""

    sample: SampleRecord
    verdict: Verdict
    # Its own reward now; None unless it was rescored.
    reward: float | None = None
    # What its group adds now; None where its group was not scored anew.
    group_reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    # Why it has no reward now; None unless it is invalid.
    reason: InvalidReason | None = None
    # Text for people: what differs, or what went wrong.
    detail: str | None = None
    # The request of the rollout, from 1, that was never played; None unless it diverged.
    turn: int | None = None
    # Stored calls that the environment asked for again, and all of them.
    num_calls: int = 0
    num_stored_calls: int = 0

    @property
    def new(self) -> float | None:
        """The reward now, with what the group adds where that was scored anew."""
        return None if self.reward is None else self.reward + (self.group_reward or 0.0)

    @property
    def old(self) -> float | None:
        """The reward then; what its group added is left out where it was not scored anew, so that like meets like."""
        return self.sample.trained_reward if self.group_reward is not None else self.sample.reward

    @property
    def change(self) -> float | None:
        """None where there is no reward then or now."""
        return None if self.new is None or self.old is None else self.new - self.old

    def as_object(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "sample_id": self.sample.sample_id,
            "purpose": self.sample.purpose.value,
            "task_id": self.sample.task_id,
            "group_id": self.sample.group_id,
            "step": self.sample.step,
            "verdict": self.verdict.value,
            "old": self.old,
            "new": self.new,
            "change": self.change,
            "old_reason": self.sample.reason,
            "reason": self.reason,
            "turn": self.turn,
            "detail": self.detail,
            "num_calls": self.num_calls,
            "num_stored_calls": self.num_stored_calls,
            "old_metrics": dict(self.sample.metrics),
            "metrics": dict(self.metrics),
            "turn_rewards": dict(self.turn_rewards),
        }


@dataclass(frozen=True, kw_only=True)
class TaskRewards:
    """The conversations of one task that have a reward then and now."""

    task_id: str
    num: int
    old: float
    new: float


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Groups all of whose conversations have a reward then and now: whether their rewards differ among each other."""

    num: int
    old: int
    new: int
    gained: int
    lost: int
    # Groups of which a conversation diverged, is invalid or was left out: not counted above.
    num_incomplete: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is different over the conversations that have a reward then and now; None where there are too few."""

    num_played: int
    num_rescored: int
    num_diverged: int
    # By reason.
    invalid: Mapping[str, int]
    # Conversations that had no reward then and have one now.
    num_repaired: int
    # Of those, all figures below are.
    num_pairs: int
    num_changed: int
    old_mean: float | None
    new_mean: float | None
    difference: float | None
    # 95 % interval of the difference.
    low: float | None
    high: float | None
    # Pearson's, of rewards then and now; None where one of them does not vary.
    correlation: float | None
    success_threshold: float
    old_pass_rate: float | None
    new_pass_rate: float | None
    signal: Signal
    tasks: Sequence[TaskRewards]
    # Largest change first.
    most_changed: Sequence[str]


def compare(rescored: Sequence[Rescored], *, success_threshold: float, group_sizes: Mapping[str, int]) -> Comparison:
    """`group_sizes`: how many conversations with a reward each group has, those that were not played again included."""
    pairs = [each for each in rescored if each.change is not None]
    old, new = [_given(each.old) for each in pairs], [_given(each.new) for each in pairs]
    changes = [_given(each.change) for each in pairs]
    by_task: dict[str, list[Rescored]] = {}
    for each in pairs:
        by_task.setdefault(each.sample.task_id, []).append(each)
    interval = difference_interval([[_given(each.change) for each in members] for members in by_task.values()])
    invalid = [each.reason or InvalidReason.INFRA for each in rescored if each.verdict is Verdict.INVALID]
    largest = sorted((each for each in pairs if each.change), key=lambda each: -abs(_given(each.change)))
    return Comparison(
        num_played=len(rescored),
        num_rescored=sum(each.verdict is Verdict.RESCORED for each in rescored),
        num_diverged=sum(each.verdict is Verdict.DIVERGED for each in rescored),
        invalid={reason.value: invalid.count(reason) for reason in InvalidReason if reason in invalid},
        num_repaired=sum(each.new is not None and each.old is None for each in rescored),
        num_pairs=len(pairs),
        num_changed=sum(change != 0.0 for change in changes),
        old_mean=fmean(old) if old else None,
        new_mean=fmean(new) if new else None,
        difference=fmean(changes) if changes else None,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        correlation=correlation(old, new),
        success_threshold=success_threshold,
        old_pass_rate=fmean(value >= success_threshold for value in old) if old else None,
        new_pass_rate=fmean(value >= success_threshold for value in new) if new else None,
        signal=_signal(pairs, group_sizes),
        tasks=[
            TaskRewards(
                task_id=task_id,
                num=len(members),
                old=fmean(_given(each.old) for each in members),
                new=fmean(_given(each.new) for each in members),
            )
            for task_id, members in sorted(by_task.items())
        ],
        most_changed=[each.sample.sample_id for each in largest[:_MOST_CHANGED]],
    )


def difference_interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % interval of the mean of paired differences, which are alike within a cluster: a task.

    With m clusters, n differences d and their mean, the variance of the mean is estimated as

        m / (m - 1) * sum over clusters of (sum of (d - mean) in it)^2 / n^2

    (K.-Y. Liang, S. L. Zeger, Longitudinal data analysis using generalized linear models, Biometrika 73 (1986), 13-22),
    and the interval is that of Student's t with m - 1 degrees of freedom. Of one cluster each difference stands for
    itself: the interval is about further conversations of that task. None for fewer than two differences.
    """
    if len(clusters) == 1:
        clusters = [[difference] for difference in clusters[0]]
    num = sum(map(len, clusters))
    if num < 2:
        return None
    mean = fmean(difference for cluster in clusters for difference in cluster)
    squares = math.fsum(math.fsum(difference - mean for difference in cluster) ** 2 for cluster in clusters)
    degrees = len(clusters) - 1
    reach = student_quantile(degrees) * math.sqrt((degrees + 1) / degrees * squares) / num
    return mean - reach, mean + reach


def correlation(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Pearson's; None where there are fewer than two pairs, or one side does not vary."""
    if len(old) < 2 or len(set(old)) == 1 or len(set(new)) == 1:
        return None
    old_mean, new_mean = fmean(old), fmean(new)
    both = math.fsum((one - old_mean) * (other - new_mean) for one, other in zip(old, new, strict=True))
    spread = math.fsum((one - old_mean) ** 2 for one in old) * math.fsum((other - new_mean) ** 2 for other in new)
    # Rounding must not lead outside of what it can be.
    return max(-1.0, min(1.0, both / math.sqrt(spread)))


def _signal(pairs: Sequence[Rescored], group_sizes: Mapping[str, int]) -> Signal:
    groups: dict[str, list[Rescored]] = {group_id: [] for group_id, size in group_sizes.items() if size > 1}
    for each in pairs:
        if each.sample.group_id in groups:
            groups[each.sample.group_id].append(each)
    whole = [members for group_id, members in groups.items() if len(members) == group_sizes[group_id]]
    had = [len({each.old for each in members}) > 1 for members in whole]
    has = [len({each.new for each in members}) > 1 for members in whole]
    return Signal(
        num=len(whole),
        old=sum(had),
        new=sum(has),
        gained=sum(now and not then for then, now in zip(had, has, strict=True)),
        lost=sum(then and not now for then, now in zip(had, has, strict=True)),
        num_incomplete=len(groups) - len(whole),
    )


def _given(value: float | None) -> float:
    assert value is not None
    return value
