"""The order of tasks: what is drawn at which position."""

import pytest

from turnmill.config import Config
from turnmill.records import Task
from turnmill.training.task_order import PassRateOrder, TaskOrder, order_of
from turnmill.training.task_statistics import TaskStatistics


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


def known(task_id: str, pass_rate: float, position: int = 0) -> TaskStatistics:
    return TaskStatistics(task_id=task_id, pass_rate=pass_rate, position=position)


def curriculum(
    tasks: list[Task], *statistics: TaskStatistics, revisit: int = 3, shuffle: bool = False
) -> PassRateOrder:
    table = {item.task_id: item for item in statistics}
    return PassRateOrder(tasks, table, seed=1, shuffle=shuffle, window=(0.1, 0.9), revisit=revisit)


def test_a_task_outside_of_the_window_is_passed_over_and_an_unknown_one_is_not(tasks: list[Task]) -> None:
    order = curriculum(tasks[:4], known("t0", 0.0), known("t1", 0.1), known("t2", 0.95))
    assert ids(order, 0, 4) == ["t1", "t3", "t1", "t3"]
    assert order.turn(2).position == 3


def test_a_task_outside_has_its_turn_again_some_epochs_after_its_last_one(tasks: list[Task]) -> None:
    order = curriculum(tasks[:2], known("t0", 0.0, position=2))
    assert ids(order, 4, 5) == ["t1", "t1", "t0", "t1", "t0"], "decided in epoch 1, due from epoch 4 on"
    assert order.turn(6).position == 7 and order.turn(8).position == 8


def test_a_group_that_was_given_up_says_nothing_about_the_pass_rate(tasks: list[Task]) -> None:
    order = curriculum(tasks[:2], TaskStatistics(task_id="t0", num_abandoned=5))
    assert ids(order, 0, 2) == ["t0", "t1"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_where_all_tasks_are_outside_they_are_taken_in_order_and_that_is_said_once(
    tasks: list[Task], caplog: pytest.LogCaptureFixture, shuffle: bool
) -> None:
    outside = [known(task.id, 0.0, position=40) for task in tasks]
    order = curriculum(tasks, *outside, revisit=10000, shuffle=shuffle)
    plain = TaskOrder(tasks, seed=1, shuffle=shuffle)
    assert ids(order, 47, 60) == ids(plain, 47, 60)
    assert [record.message for record in caplog.records] == [
        "curriculum: the pass rates of all 20 tasks are outside of 0.1 to 0.9; they are taken in order until one is "
        "within again, or is due"
    ]


def test_the_one_task_within_is_found_wherever_a_shuffle_puts_it(tasks: list[Task]) -> None:
    outside = [known(task.id, 1.0, position=0) for task in tasks if task.id != "t7"]
    order = curriculum(tasks, *outside, revisit=10000, shuffle=True)
    found = [order.turn(position) for position in range(200)]
    assert {turn.task.id for turn in found} == {"t7"}
    assert all(turn.position >= position for position, turn in enumerate(found))


def test_the_order_is_the_one_that_the_parameters_ask_for(tasks: list[Task]) -> None:
    statistics = {"t0": known("t0", 0.2)}
    assert ids(order_of(Config(), tasks, statistics), 0, 1) == ["t0"]
    within = Config(curriculum="pass_rate", curriculum_low=0.2, curriculum_high=0.2)
    assert ids(order_of(within, tasks, statistics), 0, 1) == ["t0"]
    above = Config(curriculum="pass_rate", curriculum_low=0.3)
    assert ids(order_of(above, tasks, statistics), 0, 1) == ["t1"]
    assert ids(order_of(Config(curriculum="none", curriculum_low=0.3), tasks, statistics), 0, 1) == ["t0"]
