"""The order of tasks: what is drawn at which position."""

import pytest

from turnmill.records import Task
from turnmill.training.task_order import TaskOrder


def ids(order: TaskOrder, start: int, num: int) -> list[str]:
    """The next tasks from a position on, each drawn right behind the one before."""
    found, position = [], start
    for _ in range(num):
        turn = order.turn(position)
        found.append(turn.task.id)
        position = turn.position + 1
    return found


def test_tasks_come_in_file_order_again_and_again(tasks: list[Task]) -> None:
    order = TaskOrder(tasks[:3], seed=0, shuffle=False)
    assert ids(order, 0, 7) == ["t0", "t1", "t2", "t0", "t1", "t2", "t0"]
    assert order.turn(4).position == 4


def test_shuffled_epochs_are_seeded_complete_and_different(tasks: list[Task]) -> None:
    order, again = (TaskOrder(tasks, seed=5, shuffle=True) for _ in range(2))
    first, second = (ids(order, start, 20) for start in (0, 20))
    assert sorted(first) == sorted(second) == sorted(task.id for task in tasks)
    assert first != second
    assert [again.turn(i).task.id for i in (25, 3, 25)] == [second[5], first[3], second[5]]
    assert ids(TaskOrder(tasks, seed=6, shuffle=True), 0, 20) != first


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        TaskOrder([], seed=0, shuffle=False)
