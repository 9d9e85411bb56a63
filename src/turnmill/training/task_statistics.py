"""What is known of each task: how often it was played, how often passed, and whether that taught anything.

    groups decided -> batch closed: counted, and what is new goes into its record -> a later process counts it

What a batch counts stays out of sight until the batch is closed: the tasks that it draws depend on the batches before
it alone, and never on which conversation ended first. A process that begins with the records of the run's batches
knows the same, to the last bit, as the one that made them.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from turnmill.records import Batch, TaskOutcome

FILE = "tasks.json"
# Of the newest group in the moving average of a task's pass rate: one group in which all fail takes a task that passed
# half of the time down to a quarter, four of them below 1/20.
_NEWEST = 0.5


@dataclass(frozen=True, kw_only=True)
class TaskStatistics:
    """One task over all of its decided groups."""

    task_id: str
    # Rollouts that ended; with a reward; that passed; that were cut off at `max_length`.
    num_played: int = 0
    num_valid: int = 0
    num_passed: int = 0
    num_truncated: int = 0
    reward_sum: float = 0.0
    # Groups with differing rewards, with equal ones, and given up for invalid rollouts.
    num_signal: int = 0
    num_no_signal: int = 0
    num_abandoned: int = 0
    # Moving average over the groups with or without signal, the newest weighs half; None before the first.
    pass_rate: float | None = None
    # Place in the data of the newest of these groups; None before the first.
    position: int | None = None
    # Of the newest group: the optimizer step that it was played for.
    step: int = 0

    @property
    def reward_mean(self) -> float | None:
        """Of all valid rollouts; None without any."""
        return self.reward_sum / self.num_valid if self.num_valid else None

    def after(self, outcome: TaskOutcome, step: int) -> "TaskStatistics":
        """With one more group."""
        counted = replace(
            self,
            num_played=self.num_played + outcome.num_played,
            num_valid=self.num_valid + outcome.num_valid,
            num_passed=self.num_passed + outcome.num_passed,
            num_truncated=self.num_truncated + outcome.num_truncated,
            reward_sum=self.reward_sum + outcome.reward_sum,
            step=step,
        )
        if outcome.has_signal is None:
            return replace(counted, num_abandoned=self.num_abandoned + 1)
        rate = outcome.num_passed / outcome.num_valid
        known = rate if self.pass_rate is None else self.pass_rate
        return replace(
            counted,
            num_signal=self.num_signal + outcome.has_signal,
            num_no_signal=self.num_no_signal + (not outcome.has_signal),
            pass_rate=known + _NEWEST * (rate - known),
            position=outcome.position,
        )

    def as_object(self) -> dict[str, Any]:
        """As files and `--json` show it."""
        return asdict(self) | {"reward_mean": self.reward_mean}


@dataclass(kw_only=True)
class TaskTable:
    """The statistics of a run's tasks, and what of them the next record has to keep."""

    # By task id, of closed batches.
    statistics: dict[str, TaskStatistics] = field(default_factory=dict)
    # Since the batch that was recorded before, in the order in which they were counted.
    outcomes: tuple[TaskOutcome, ...] = ()
    # Optimizer steps whose batches were closed.
    num_steps: int = 0
    _is_recorded: bool = True

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> "TaskTable":
        """As it was when the last of these, by step from 1, was recorded."""
        table = cls()
        for batch in batches:
            table.add(batch)
        return table

    def add(self, batch: Batch) -> None:
        """What the record of the next batch says."""
        self.num_steps = batch.step
        self.outcomes = batch.progress.outcomes
        self._count(batch.progress.outcomes, batch.step)

    def close(self, decided: Iterable[TaskOutcome], *, has_batch: bool) -> None:
        """A batch is closed whose groups were `decided`.

        Without `has_batch` nothing is recorded of it, and its step is collected again.
        """
        # By their place in the data: which conversation ended first is of no account.
        found = tuple(sorted(decided, key=lambda outcome: outcome.position))
        self.outcomes = found if self._is_recorded else (*self.outcomes, *found)
        self._is_recorded = has_batch
        self._count(found, self.num_steps + 1)
        self.num_steps += has_batch

    def _count(self, outcomes: Sequence[TaskOutcome], step: int) -> None:
        for outcome in outcomes:
            known = self.statistics.get(outcome.task_id, TaskStatistics(task_id=outcome.task_id))
            self.statistics[outcome.task_id] = known.after(outcome, step)


def write_statistics(statistics: Mapping[str, TaskStatistics], folder: Path) -> None:
    """Write `tasks.json`, one task a line by its id, into an existing folder."""
    rows = [json.dumps(statistics[task_id].as_object()) for task_id in sorted(statistics)]
    (folder / FILE).write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def outcome_of(
    task_id: str,
    position: int,
    rewards: Sequence[float],
    *,
    num_invalid: int,
    num_truncated: int,
    threshold: float,
    has_signal: bool | None,
) -> TaskOutcome:
    """What a decided group with these `rewards` says of its task."""
    return TaskOutcome(
        task_id=task_id,
        position=position,
        num_played=len(rewards) + num_invalid,
        num_valid=len(rewards),
        num_passed=sum(reward >= threshold for reward in rewards),
        num_truncated=num_truncated,
        reward_sum=math.fsum(rewards),
        has_signal=has_signal,
    )
