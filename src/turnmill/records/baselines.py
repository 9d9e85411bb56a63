"""What the base model can do on the tasks that it is going to be trained on."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turnmill.records.keys import baseline_key


class BaselineVerdict(StrEnum):
    """Whether there is something to learn from: rollouts that pass beside others that do not."""

    SIGNAL = "signal"
    # None passed.
    TOO_HARD = "too_hard"
    # All passed.
    TOO_EASY = "too_easy"


@dataclass(frozen=True, kw_only=True)
class TaskBaseline:
    """Rollouts of one task."""

    task_id: str
    num_rollouts: int
    num_passed: int
    # 95 % interval of the task's pass rate.
    low: float
    high: float
    reward_mean: float


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Rollouts of the base model before the first step; none of them is trained. A pass: reward >= `threshold`."""

    run_id: str
    # Attempt of the run that played it.
    attempt: int
    verdict: BaselineVerdict
    # The parameter `ignore_baseline`: the run trains whatever the verdict is.
    is_ignored: bool
    threshold: float
    num_rollouts: int
    num_passed: int
    # Rollouts without a reward, which were played again.
    num_invalid: int
    # 95 % interval of the pass rate.
    low: float
    high: float
    # Of all rollouts; `num_rewards` counts the different ones.
    reward_min: float
    reward_mean: float
    reward_max: float
    num_rewards: int
    tasks: tuple[TaskBaseline, ...]

    @property
    def key(self) -> str:
        return baseline_key(self.run_id)

    @property
    def lets_train(self) -> bool:
        """The run may go on to its first step."""
        return self.is_ignored or self.verdict is BaselineVerdict.SIGNAL

    @property
    def pass_rate(self) -> float:
        return self.num_passed / self.num_rollouts

    def figures(self) -> dict[str, Any]:
        """All of it but the single tasks, of which the histogram tells, as JSON."""
        return {
            "verdict": self.verdict.value,
            "is_ignored": self.is_ignored,
            "threshold": self.threshold,
            "num_rollouts": self.num_rollouts,
            "num_tasks": len(self.tasks),
            "num_passed": self.num_passed,
            "num_invalid": self.num_invalid,
            "pass_rate": self.pass_rate,
            "low": self.low,
            "high": self.high,
            "reward_min": self.reward_min,
            "reward_mean": self.reward_mean,
            "reward_max": self.reward_max,
            "num_rewards": self.num_rewards,
            "histogram": self.histogram(),
        }

    def histogram(self) -> dict[str, int]:
        """How many tasks have which pass rate: never, in four ranges between, and always."""
        counts = dict.fromkeys(("0", "0-25", "25-50", "50-75", "75-100", "100"), 0)
        for task in self.tasks:
            counts[_range_of(task.num_passed, task.num_rollouts)] += 1
        return counts


def _range_of(num_passed: int, num: int) -> str:
    """Per cent; a range holds its upper end, but none of them holds 0 or 100."""
    if num_passed in (0, num):
        return "0" if num_passed == 0 else "100"
    upper = next(upper for upper in (25, 50, 75, 100) if 100 * num_passed <= upper * num)
    return f"{upper - 25}-{upper}"
