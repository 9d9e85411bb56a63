"""Which task comes next: the data in file order epoch after epoch, or in a seeded shuffle of each epoch.

    position -> turn: the first task from there on that is to be played, with the position that it has

A position counts on over the epochs. Whoever draws goes on right behind the last turn taken, so that an order may pass
over tasks.

`curriculum = pass_rate` passes over the tasks of which there is nothing to learn now. A task whose pass rate so far is
outside of the window from `curriculum_low` to `curriculum_high` gets its next turn `curriculum_revisit` epochs after
the last one: the policy changes, and what it failed at may have become just right. The dynamic sampling of DAPO (arXiv
2503.14476, section 3.2) drops what had no signal after it was played, as the batcher does; to pass over it before saves
its rollouts (see the curriculum and prioritized sampling of Kimi k1.5, arXiv 2501.12599, section 2.3.4).
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnmill.config import Config
from turnmill.records import Task
from turnmill.training.task_statistics import TaskStatistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A task at its place in the endless sequence."""

    position: int
    task: Task


class TaskOrder:
    """The endless sequence of tasks."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool) -> None:
        if not tasks:
            raise ValueError("no tasks")
        self.tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        # By epoch, of shuffled ones: that of the last position asked for, and the one before it.
        self._shuffled: dict[int, list[int]] = {}

    def turn(self, position: int) -> Turn:
        """The first task to be played at `position` or behind it."""
        return self.at(position)

    def at(self, position: int) -> Turn:
        """The task at `position`."""
        epoch, index = divmod(position, len(self.tasks))
        return Turn(position=position, task=self.tasks[self._order(epoch)[index] if self._shuffle else index])

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._shuffled:
            order = list(range(len(self.tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            # Who looks ahead into the next epoch comes back to this one.
            self._shuffled = {known: self._shuffled[known] for known in self._shuffled if known == epoch - 1}
            self._shuffled[epoch] = order
        return self._shuffled[epoch]


class PassRateOrder(TaskOrder):
    """Passes over tasks that are too hard or too easy now, as far as `statistics` know; an unknown one has its turn."""

    def __init__(
        self,
        tasks: Sequence[Task],
        statistics: Mapping[str, TaskStatistics],
        *,
        seed: int,
        shuffle: bool,
        window: tuple[float, float],
        revisit: int,
    ) -> None:
        """`statistics` are those of the owner, who changes them between batches; `revisit` is in epochs."""
        super().__init__(tasks, seed=seed, shuffle=shuffle)
        self._statistics = statistics
        self._window = window
        self._revisit = revisit
        self._is_told = False

    def turn(self, position: int) -> Turn:
        """The first task at `position` or behind it that is not passed over; the one at `position` if all are."""
        # The rest of this epoch and the next one: all tasks have a place there.
        for ahead in range(2 * len(self.tasks) - position % len(self.tasks)):
            turn = self.at(position + ahead)
            if not self._is_passed_over(turn):
                return turn
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "curriculum: the pass rates of all %d tasks are outside of %g to %g; they are taken in order until one "
                "is within again, or is due",
                len(self.tasks),
                *self._window,
            )
        return self.at(position)

    def _is_passed_over(self, turn: Turn) -> bool:
        known = self._statistics.get(turn.task.id)
        if known is None or known.pass_rate is None or known.position is None:
            return False
        low, high = self._window
        if low <= known.pass_rate <= high:
            return False
        num_tasks = len(self.tasks)
        return turn.position // num_tasks - known.position // num_tasks < self._revisit


def order_of(config: Config, tasks: Sequence[Task], statistics: Mapping[str, TaskStatistics]) -> TaskOrder:
    """The order that `config` asks for."""
    if config.curriculum == "none":
        return TaskOrder(tasks, seed=config.seed, shuffle=config.shuffle)
    return PassRateOrder(
        tasks,
        statistics,
        seed=config.seed,
        shuffle=config.shuffle,
        window=(config.curriculum_low, config.curriculum_high),
        revisit=config.curriculum_revisit,
    )
