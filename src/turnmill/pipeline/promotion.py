"""Whether a trained model is published: its held-out results against those of its base, task by task.

Both played the same tasks equally often, so a pair is one rollout of a task by each. Most of what makes a share vary is
which tasks are hard, and that is the same on both sides: the interval of the difference takes it out by correlation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnmill.records import Promotion, TaskChange

# By task id: how many rollouts were solved, of how many.
Counts = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """How pairs of rollouts went; not whole numbers where a task is played more than once."""

    both: float
    # Solved by the base only.
    lost: float
    # Solved by the trained model only.
    gained: float
    neither: float

    @property
    def num(self) -> float:
        return self.both + self.lost + self.gained + self.neither

    @property
    def correlation(self) -> float:
        """Phi of the fourfold table, positive values with Newcombe's continuity correction; 0 where it has no sense."""
        product = (
            (self.both + self.gained)
            * (self.lost + self.neither)
            * (self.both + self.lost)
            * (self.gained + self.neither)
        )
        if product == 0:
            return 0.0
        difference = self.both * self.neither - self.gained * self.lost
        if difference > 0:
            difference = max(0.0, difference - self.num / 2)
        return difference / math.sqrt(product)


def pair(before: Counts, after: Counts) -> Pairs:
    """The mean over all ways to pair the rollouts of each task, which have no order of their own."""
    both = lost = gained = neither = 0.0
    for task_id, (base, num) in before.items():
        trained = after[task_id][0]
        both += base * trained / num
        lost += base * (num - trained) / num
        gained += (num - base) * trained / num
        neither += (num - base) * (num - trained) / num
    return Pairs(both=both, lost=lost, gained=gained, neither=neither)


def difference_interval(pairs: Pairs, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float]:
    """95 % interval of share(after) - share(before); the shares come with their Wilson intervals.

    Method 10 of R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on
    paired data, Statistics in Medicine 17 (1998), 2635-2650: with shares a and b, intervals (la, ua) and (lb, ub),

        low  = a - b - sqrt((a - la)^2 - 2 phi (a - la) (ub - b) + (ub - b)^2)
        high = a - b + sqrt((ua - a)^2 - 2 phi (ua - a) (b - lb) + (b - lb)^2)
    """

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * pairs.correlation * one * other + other**2))

    difference = after["solved"] - before["solved"]
    low = difference - reach(after["solved"] - after["solved_low"], before["solved_high"] - before["solved"])
    high = difference + reach(after["solved_high"] - after["solved"], before["solved"] - before["solved_low"])
    return low, high


def worse_lines(promotion: Mapping[str, Any]) -> list[str]:
    """The held-out tasks that went worse, a line each, the worst first; nothing where none did."""
    tasks = promotion.get("worse", ())
    if not tasks:
        return []
    rows = [
        (
            str(task["task_id"]),
            f"{task['solved_before']} of {task['num_before']}",
            f"{task['solved_after']} of {task['num_after']}",
            f"{task['reward_before']:.3f}",
            f"{task['reward_after']:.3f}",
        )
        for task in tasks
    ]
    head = ("task", "solved before", "after", "mean reward before", "after")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    left_out = promotion["num_worse"] - len(rows)
    return [
        f"{promotion['num_worse']} held-out tasks went worse, {promotion['num_better']} better:",
        *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)),
        *([f"  and {left_out} more"] if left_out else []),
    ]


def decide(rule: str, evaluations: Mapping[str, Mapping[str, Any]], metric: str = "solved") -> Promotion:
    """By the parameters `promotion` and `promotion_metric`, and what Evaluate recorded, `pairs` and `comparison`
    included; nothing without held-out tasks.
    """
    if "after" not in evaluations:
        is_published = rule != "better"
        reason = "not evaluated: there are no held-out tasks" + ("" if is_published else ", and it must be better")
        return Promotion(rule=rule, is_published=is_published, reason=reason, metric=metric)
    after = evaluations["after"]
    change = _change(evaluations["before"], after, metric)
    # Without an interval nothing is shown.
    is_better = change.low is not None and change.low > 0
    is_worse = change.high is not None and change.high < 0
    is_published = {"not_worse": not is_worse, "better": is_better, "always": True}[rule]
    finding = "better than" if is_better else "worse than" if is_worse else "not told apart from"
    what = " by their mean reward" if metric == "reward" else ""
    comparison = after.get("comparison", {})
    return Promotion(
        rule=rule,
        is_published=is_published,
        reason=f"{finding} its base on held-out tasks{what}: {change.text}",
        metric=metric,
        difference=change.difference,
        low=change.low,
        high=change.high,
        num_pairs=after["num_valid"],
        num_better=comparison.get("num_better", 0),
        num_worse=comparison.get("num_worse", 0),
        worse=tuple(TaskChange(**task) for task in comparison.get("worse", ())),
    )


@dataclass(frozen=True, kw_only=True)
class _Change:
    """After less before, with its 95 % interval; None where there are too few tasks for one."""

    difference: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.difference:+.3f} (too few tasks for a 95 % interval)"
        return f"{self.difference:+.3f} (95 % interval {self.low:+.3f} to {self.high:+.3f})"


def _change(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> _Change:
    if metric == "reward":
        # Of the tasks' differences: see `evaluation.statistics.mean_of_tasks`.
        reward = after["comparison"]["reward"]
        return _Change(difference=reward["value"], low=reward["low"], high=reward["high"])
    low, high = difference_interval(Pairs(**after["pairs"]), before, after)
    return _Change(difference=after["solved"] - before["solved"], low=low, high=high)
