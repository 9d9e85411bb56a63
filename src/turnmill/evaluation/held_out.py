"""Held-out evaluation of one version: every task the same number of times, with fixed seeds.

    earlier rollouts of that version -> tasks that lack some -> sample requests -> ended samples -> figures

What was played before counts: by a process that died in the middle, or in a shorter evaluation of the same weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from turnmill.evaluation.intervals import wilson
from turnmill.evaluation.playing import Progress, Ration, RolloutSource, play
from turnmill.evaluation.statistics import (
    Estimate,
    mean_of_tasks,
    pass_at_k,
    pass_hat_k,
    powers_up_to,
    share_of_tasks,
)
from turnmill.records import SampleRecord, Task


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Valid rollouts of one task."""

    task_id: str
    num_rollouts: int
    num_solved: int
    reward_mean: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found. Shares are over valid rollouts; others were played again."""

    # Weights that sampled all of it.
    version: str
    # 0: greedy.
    temperature: float
    num_tasks: int
    num_valid: int
    # Without a reward.
    num_invalid: int
    # With a token of other weights.
    num_stale: int = 0
    # Share of rollouts with reward >= success_threshold.
    solved: float
    # 95 % interval of `solved`, for these tasks.
    solved_low: float
    solved_high: float
    reward_mean: float
    # 95 % interval of the mean over tasks, for tasks like these; None where there are too few.
    reward_low: float | None
    reward_high: float | None
    # By k, for tasks like these: at least one of k rollouts solves a task, and all of k do.
    pass_at: dict[str, Estimate]
    pass_hat: dict[str, Estimate]
    # Means of what the environment reports.
    metrics: dict[str, float]
    # By task id.
    tasks: dict[str, TaskResult]


class History(Protocol):
    """What the records say of the rollouts of a version."""

    async def earlier(self, group_prefix: str, version: str) -> list[SampleRecord]:
        """Valid rollouts of groups that begin so, sampled by `version` alone, as they were asked for."""
        ...

    async def is_whole(self, sample: SampleRecord, version: str) -> bool:
        """Whether all its tokens are of `version`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is evaluated, and how."""

    # For people.
    name: str
    # Weights that play; their rollouts are found again by it.
    version: str
    # At least so many, in whole passes over the tasks; greedy, one pass.
    num_rollouts: int
    # A rollout is solved at this reward.
    threshold: float
    temperature: float

    def passes(self, num_tasks: int) -> int:
        """Over all tasks; greedy, a second one would only say the same again and make the intervals too narrow."""
        return math.ceil(self.num_rollouts / num_tasks) if self.temperature else 1

    @property
    def group_prefix(self) -> str:
        """Groups of different weights are never mixed."""
        return f"v{self.version}/"


async def evaluate(
    tasks: Sequence[Task],
    rollouts: RolloutSource,
    terms: Terms,
    *,
    history: History | None = None,
    progress: Progress | None = None,
    ration: Ration | None = None,
) -> Evaluation:
    """Play each task ceil(num_rollouts / num_tasks) times, greedily once, and average.

    An invalid rollout, and one that other weights took part in, is played again; raises `NoProgress` once more are lost
    so than were asked for.
    """
    passes = terms.passes(len(tasks))
    earlier = _first_of_each(await history.earlier(terms.group_prefix, terms.version) if history else [], tasks, passes)
    wanted = [task for i in range(passes) for task in tasks if i >= len(earlier[task.id])]
    progress = progress or Progress()
    kept = [sample for samples in earlier.values() for sample in samples]
    progress.num_wanted += len(kept)
    progress.num_done += len(kept)

    async def accept(sample: SampleRecord) -> bool:
        return history is None or await history.is_whole(sample, terms.version)

    played = await play(
        wanted, rollouts, name=terms.name, groups=terms.group_prefix, progress=progress, ration=ration, accept=accept
    )
    return summarise([*kept, *played.valid], terms, num_invalid=played.num_invalid, num_stale=played.num_refused)


def _first_of_each(samples: Sequence[SampleRecord], tasks: Sequence[Task], most: int) -> dict[str, list[SampleRecord]]:
    """At most so many of each task, the first ones: which those are was settled before anybody knew their rewards."""
    found: dict[str, list[SampleRecord]] = {task.id: [] for task in tasks}
    for sample in samples:
        if sample.task_id in found and len(found[sample.task_id]) < most:
            found[sample.task_id].append(sample)
    return found


def summarise(valid: Sequence[SampleRecord], terms: Terms, *, num_invalid: int = 0, num_stale: int = 0) -> Evaluation:
    """Figures of `valid`, at least one."""
    rewards = [sample.reward for sample in valid if sample.reward is not None]
    solved = sum(reward >= terms.threshold for reward in rewards) / len(rewards)
    low, high = wilson(solved, len(rewards))
    names = sorted({name for sample in valid for name in sample.metrics})
    tasks = _by_task(valid, terms.threshold)
    reward = mean_of_tasks([task.reward_mean for task in tasks.values()])
    ks = powers_up_to(min(task.num_rollouts for task in tasks.values()))
    return Evaluation(
        version=terms.version,
        temperature=terms.temperature,
        num_tasks=len(tasks),
        num_valid=len(rewards),
        num_invalid=num_invalid,
        num_stale=num_stale,
        solved=solved,
        solved_low=low,
        solved_high=high,
        reward_mean=fmean(rewards),
        reward_low=reward.low,
        reward_high=reward.high,
        pass_at={str(k): _over_tasks(tasks, k, is_all=False) for k in ks},
        pass_hat={str(k): _over_tasks(tasks, k, is_all=True) for k in ks},
        metrics={name: fmean(s.metrics.get(name, 0.0) for s in valid) for name in names},
        tasks=tasks,
    )


def _by_task(valid: Sequence[SampleRecord], threshold: float) -> dict[str, TaskResult]:
    rewards: dict[str, list[float]] = {}
    for sample in valid:
        if sample.reward is not None:
            rewards.setdefault(sample.task_id, []).append(sample.reward)
    return {
        task_id: TaskResult(
            task_id=task_id,
            num_rollouts=len(found),
            num_solved=sum(reward >= threshold for reward in found),
            reward_mean=fmean(found),
        )
        for task_id, found in sorted(rewards.items())
    }


def _over_tasks(tasks: Mapping[str, TaskResult], k: int, *, is_all: bool) -> Estimate:
    chance = pass_hat_k if is_all else pass_at_k
    shares = [chance(task.num_rollouts, task.num_solved, k) for task in tasks.values()]
    return share_of_tasks(shares, sum(task.num_rollouts for task in tasks.values()))
