"""Held-out evaluation: every task the same number of times, at the run's sampling parameters, with fixed seeds.

tasks x passes -> sample requests -> ended samples -> solve rate over all valid rollouts
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turnmill.evaluation.intervals import wilson
from turnmill.evaluation.playing import Progress, Ration, RolloutSource, play
from turnmill.records import SampleRecord, Task


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found. Shares are over valid rollouts; invalid ones were played again."""

    num_tasks: int
    num_valid: int
    num_invalid: int
    # Share of rollouts with reward >= success_threshold.
    solved: float
    # 95 % interval of `solved`.
    solved_low: float
    solved_high: float
    reward_mean: float
    metrics: dict[str, float]
    # By task id: how many of its rollouts were solved, of how many.
    by_task: dict[str, tuple[int, int]]


async def evaluate(
    tasks: Sequence[Task],
    rollouts: RolloutSource,
    *,
    name: str,
    num_rollouts: int,
    threshold: float,
    progress: Progress | None = None,
    ration: Ration | None = None,
) -> Evaluation:
    """Play each task ceil(num_rollouts / num_tasks) times and average.

    An invalid rollout is played again; raises `NoProgress` once more are invalid than were asked for.
    """
    passes = math.ceil(num_rollouts / len(tasks))
    wanted = [task for _ in range(passes) for task in tasks]
    valid, num_invalid = await play(wanted, rollouts, name=name, progress=progress or Progress(), ration=ration)
    return summarise(valid, num_tasks=len(tasks), num_invalid=num_invalid, threshold=threshold)


def summarise(valid: Sequence[SampleRecord], *, num_tasks: int, num_invalid: int, threshold: float) -> Evaluation:
    """Means over `valid`, at least one."""
    rewards = [sample.reward for sample in valid if sample.reward is not None]
    solved = sum(reward >= threshold for reward in rewards) / len(rewards)
    low, high = wilson(solved, len(rewards))
    names = sorted({name for sample in valid for name in sample.metrics})
    by_task: dict[str, tuple[int, int]] = {}
    for sample in valid:
        num_solved, num = by_task.get(sample.task_id, (0, 0))
        is_solved = sample.reward is not None and sample.reward >= threshold
        by_task[sample.task_id] = (num_solved + is_solved, num + 1)
    return Evaluation(
        num_tasks=num_tasks,
        num_valid=len(rewards),
        num_invalid=num_invalid,
        solved=solved,
        solved_low=low,
        solved_high=high,
        reward_mean=sum(rewards) / len(rewards),
        metrics={name: sum(s.metrics.get(name, 0.0) for s in valid) / len(valid) for name in names},
        by_task=by_task,
    )
