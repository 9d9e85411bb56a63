"""The diagnosis of groups without signal: each sentence for its case, with real numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from turnmill.config import Config
from turnmill.errors import NoProgress
from turnmill.records import TaskOutcome
from turnmill.training.task_statistics import TaskStatistics, outcome_of
from turnmill.training.useless import UselessGroups

WHY = "samples/r/train/t_0: env_error: no dictionary"


def group(
    task_id: str, rewards: Sequence[float], *, num_invalid: int = 0, num_truncated: int = 0, is_given_up: bool = False
) -> TaskOutcome:
    return outcome_of(
        task_id,
        0,
        rewards,
        num_invalid=num_invalid,
        num_truncated=num_truncated,
        threshold=1.0,
        has_signal=None if is_given_up else len(set(rewards)) > 1,
    )


def diagnosis(
    *found: TaskOutcome, config: Config | None = None, statistics: Mapping[str, TaskStatistics] | None = None
) -> str:
    useless = UselessGroups(config or Config(), statistics or {})
    for outcome in found:
        useless.count(outcome)
    return useless.diagnosis(WHY)


def test_tasks_that_are_too_hard() -> None:
    text = diagnosis(group("a", [0.0, 0.0]), group("b", [0.5, 0.5]), group("a", [0.0, 0.0]))
    assert text == (
        "In 3 groups no rollout passed and all earned the same (mean reward 0.166667, success_threshold 1): "
        "tasks a, b. These tasks are too hard for this model, or the reward does not tell good from bad: give "
        "partial credit, add easier tasks, or begin with a model that passes some of them."
    )


def test_tasks_that_were_passed_before_are_not_too_hard() -> None:
    known = TaskStatistics(task_id="a").after(group("a", [1.0, 1.0, 0.0]), 3)
    text = diagnosis(group("a", [0.0, 0.0]), statistics={"a": known})
    assert "But 2 of the 3 rollouts that this run has counted of it passed: the policy may have become worse." in text
    assert "lower lr, or with kl_coeff" in text and "too hard" not in text
    assert "kl_coeff" not in diagnosis(group("a", [0.0, 0.0]), statistics={"a": known}, config=Config(kl_coeff=0.1))


def test_tasks_of_which_few_were_passed_before_are_too_hard() -> None:
    known = TaskStatistics(task_id="a").after(group("a", [1.0, 1.0, 0.0]), 3)
    failed = [group("a", [0.0, 0.0]), group("b", [0.0, 0.0])]
    assert "too hard" in diagnosis(*failed, statistics={"a": known})
    for seldom in (replace(known, num_valid=30), replace(known, num_passed=1)):
        assert "too hard" in diagnosis(failed[0], statistics={"a": seldom})
    # Lately some passed as a whole.
    assert "become worse" not in diagnosis(failed[0], group("b", [1.0] * 2), statistics={"a": known})


def test_tasks_that_are_too_easy_with_the_first_few_by_name() -> None:
    text = diagnosis(*(group(f"t{i}", [1.0, 1.0]) for i in range(7)))
    assert text == (
        "In 7 groups every rollout passed: tasks t0, t1, t2, t3, t4 and 2 more. There is nothing to learn from these "
        "tasks: add harder ones, or let the reward tell a good solution from a better one."
    )


def test_tasks_that_fail_or_pass_as_a_whole() -> None:
    found = (group("a", [1.0, 1.0]), group("a", [0.0, 0.0]), group("b", [0.0, 0.0]))
    mixed = "Some fail and some pass as a whole (1 task did both): a number_generation above 8 makes"
    assert mixed in diagnosis(*found)
    assert "curriculum = pass_rate passes over tasks" in diagnosis(*found)
    assert "curriculum = pass_rate" not in diagnosis(*found, config=Config(curriculum="pass_rate"))


def test_conversations_that_are_cut_off() -> None:
    text = diagnosis(group("a", [0.0, 0.0], num_truncated=2), group("b", [0.0, 0.0], num_truncated=1))
    assert "3 of their 4 valid rollouts were cut off at max_length = 16384: raise it" in text


def test_conversations_that_are_cut_off_and_left_out() -> None:
    outcome = TaskOutcome(
        task_id="a",
        position=0,
        num_played=2,
        num_valid=2,
        num_passed=1,
        num_truncated=1,
        reward_sum=1.0,
        has_signal=False,
    )
    text = diagnosis(outcome, group("b", [0.0, 0.0]), config=Config(overlong="drop"))
    assert text.startswith("In 1 group no rollout passed and all earned the same")
    assert (
        "In 1 group conversations were cut off, which overlong = drop does not train, and the others do not differ, or "
        "there are none: task a. 1 of their 4 valid rollouts were cut off"
    ) in text
    assert "reward of the group" not in text


def test_rollouts_without_a_reward() -> None:
    text = diagnosis(group("a", [0.0], num_invalid=9, is_given_up=True), group("b", [0.0, 0.0], num_invalid=1))
    assert "Of the groups, 1 were given up, because too many of their rollouts were invalid." in text
    assert "10 of their 13 rollouts were invalid, which is the environment's or the infrastructure's fault" in text
    assert text.endswith(f"the last of all: {WHY}.")


def test_groups_that_only_the_reward_of_the_group_makes_equal() -> None:
    outcome = TaskOutcome(
        task_id="a", position=0, num_played=2, num_valid=2, num_passed=1, reward_sum=1.0, has_signal=False
    )
    assert diagnosis(outcome) == (
        "Of the groups, in 1 some passed by themselves, but with the reward of the group all were equal."
    )


def test_the_run_stops_at_the_limit_and_a_group_with_signal_begins_anew() -> None:
    useless = UselessGroups(Config(max_useless_groups=2), {})
    for rewards in ([0.0, 0.0], [1.0, 0.0], [0.0, 0.0]):
        useless.count(group("a", rewards))
        useless.check(WHY)
    useless.count(group("b", [1.0, 1.0]))
    with pytest.raises(NoProgress, match=r"^2 groups in a row without signal \(max_useless_groups = 2\)\. In 1 group "):
        useless.check(WHY)


def test_without_a_limit_nothing_is_stopped() -> None:
    useless = UselessGroups(Config(), {})
    for _ in range(1000):
        useless.count(group("a", [0.0, 0.0]))
    useless.check(WHY)
