"""Which task comes next: the data in file order epoch after epoch, or in a seeded shuffle of each epoch.

    position -> turn: the first task from there on that is to be played, with the position that it has

A position counts on over the epochs. Whoever draws goes on right behind the last turn taken, so that an order may pass
over tasks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from turnmill.records import Task


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
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = list(range(len(tasks)))

    def turn(self, position: int) -> Turn:
        """The first task to be played at `position` or behind it."""
        return Turn(position=position, task=self._task(position))

    def _task(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._tasks))
        if self._shuffle and epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[index]]
