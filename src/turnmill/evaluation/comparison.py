"""Two versions on the same tasks, task by task.

The differences of the single tasks are what is compared: most of what makes a mean vary is which tasks are hard, and
that is the same on both sides (E. Miller, arXiv:2411.00640, section 4, on paired differences of evaluations).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from turnmill.evaluation.held_out import TaskResult
from turnmill.evaluation.statistics import Estimate, mean_of_tasks
from turnmill.records import TaskChange

# Of the tasks that went worse: the record of a run holds no long lists.
MOST_TOLD = 20


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the tasks went, after less before."""

    # Mean difference of the tasks' mean rewards.
    reward: Estimate
    num_better: int
    num_same: int
    num_worse: int
    # Those that went worse, the worst first; the first ones of them.
    worse: tuple[TaskChange, ...]


def compare(before: Mapping[str, TaskResult], after: Mapping[str, TaskResult], *, by: str = "solved") -> Comparison:
    """Of the tasks that both played; `by` says what better is, the share that is solved or the mean reward."""
    changes = changes_of(before, after)
    gains = [change.gain(by) for change in changes]
    worse = sorted((change for change in changes if change.gain(by) < 0), key=lambda change: change.gain(by))
    return Comparison(
        reward=mean_of_tasks([change.reward_after - change.reward_before for change in changes]),
        num_better=sum(gain > 0 for gain in gains),
        num_same=sum(gain == 0 for gain in gains),
        num_worse=len(worse),
        worse=tuple(worse[:MOST_TOLD]),
    )


def changes_of(before: Mapping[str, TaskResult], after: Mapping[str, TaskResult]) -> list[TaskChange]:
    """By task id, of the tasks that both played."""
    return [
        TaskChange(
            task_id=task_id,
            num_before=before[task_id].num_rollouts,
            num_after=after[task_id].num_rollouts,
            solved_before=before[task_id].num_solved,
            solved_after=after[task_id].num_solved,
            reward_before=before[task_id].reward_mean,
            reward_after=after[task_id].reward_mean,
        )
        for task_id in sorted(before.keys() & after.keys())
    ]
