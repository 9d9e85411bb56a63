"""Figures of tasks that are played several times, each against a computation of another kind."""

import random
from itertools import combinations, product
from statistics import fmean

import pytest

from turnmill.evaluation.statistics import (
    mean_of_tasks,
    pass_at_k,
    pass_hat_k,
    powers_up_to,
    share_of_tasks,
    student_quantile,
)


@pytest.mark.parametrize(("num", "num_solved"), [(1, 0), (1, 1), (4, 1), (6, 3), (7, 7), (8, 2), (9, 0)])
def test_pass_at_k_and_pass_hat_k_are_the_shares_of_all_ways_to_choose_k_rollouts(num: int, num_solved: int) -> None:
    rollouts = [True] * num_solved + [False] * (num - num_solved)
    for k in range(1, num + 1):
        chosen = list(combinations(rollouts, k))
        assert pass_at_k(num, num_solved, k) == pytest.approx(fmean(any(some) for some in chosen))
        assert pass_hat_k(num, num_solved, k) == pytest.approx(fmean(all(some) for some in chosen))
    assert pass_at_k(num, num_solved, 1) == pytest.approx(num_solved / num) == pass_hat_k(num, num_solved, 1)


def test_both_are_unbiased() -> None:
    """Over all outcomes of five rollouts that each solve the task with chance 0.3."""
    chance, num = 0.3, 5
    for k in (1, 2, 4):
        at = hat = 0.0
        for outcome in product((0, 1), repeat=num):
            solved = sum(outcome)
            weight = chance**solved * (1 - chance) ** (num - solved)
            at += weight * pass_at_k(num, solved, k)
            hat += weight * pass_hat_k(num, solved, k)
        assert at == pytest.approx(1 - (1 - chance) ** k) and hat == pytest.approx(chance**k)


def test_the_k_are_powers_of_two_up_to_the_rollouts_of_a_task() -> None:
    assert [powers_up_to(num) for num in (1, 2, 3, 4, 7, 8, 9)] == [
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4],
        [1, 2, 4, 8],
        [1, 2, 4, 8],
    ]


@pytest.mark.parametrize(
    ("degrees", "published"),
    # The table of Student's distribution, as it is printed everywhere.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045), (60, 2.000), (120, 1.980)],
)
def test_students_quantile_is_that_of_the_tables(degrees: int, published: float) -> None:
    assert student_quantile(degrees) == pytest.approx(published, abs=6e-4)


def test_the_quantile_has_no_step_where_its_formula_changes() -> None:
    assert student_quantile(100) > student_quantile(101) > student_quantile(102)
    assert student_quantile(100) - student_quantile(101) == pytest.approx(
        student_quantile(101) - student_quantile(102), rel=0.05
    )


# ---------------------------------------------------------------- shares


def test_rollouts_of_one_task_do_not_count_as_rollouts_of_as_many_tasks() -> None:
    alike = share_of_tasks([1.0] * 10 + [0.0] * 10, 400)
    mixed = share_of_tasks([0.4, 0.6] * 10, 400)
    assert alike.value == mixed.value == 0.5
    assert alike.low is not None and alike.high is not None and mixed.low is not None and mixed.high is not None
    assert alike.high - alike.low > 3 * (mixed.high - mixed.low)


def test_tasks_that_all_went_the_same_way_make_nothing_certain() -> None:
    always = share_of_tasks([1.0] * 20, 400)
    assert always.low is not None and always.low == pytest.approx(0.8389, abs=1e-4) and always.high == 1.0
    never = share_of_tasks([0.0] * 20, 400)
    assert never.high == pytest.approx(1 - always.low) and never.low == 0.0
    one = share_of_tasks([1.0], 64)
    assert one.low is not None and one.low < 0.25


@pytest.mark.parametrize(("num_tasks", "spread"), [(10, (0.1, 0.9)), (40, (0.0, 0.6)), (100, (0.5, 0.5))])
def test_the_interval_holds_the_share_of_tasks_like_these_as_often_as_it_says(
    num_tasks: int, spread: tuple[float, float]
) -> None:
    """Tasks drawn anew each time, four rollouts of each."""
    numbers = random.Random(7)
    truth, num_held, num_series = fmean(spread), 0, 600
    for _ in range(num_series):
        shares = []
        for _ in range(num_tasks):
            chance = numbers.uniform(*spread)
            shares.append(sum(numbers.random() < chance for _ in range(4)) / 4)
        found = share_of_tasks(shares, 4 * num_tasks)
        num_held += found.low is not None and found.high is not None and found.low <= truth <= found.high
    # Three standard errors below 95 %.
    assert num_held / num_series >= 0.95 - 3 * 0.0089


# ---------------------------------------------------------------- means


def sign_flip_rejects(values: list[float], centre: float) -> bool:
    """Fisher's test that the values are symmetric about `centre`, at 5 % two-sided, by all ways to flip signs."""
    differences = [value - centre for value in values]
    seen = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=8)]
    return sum(one >= seen - 1e-12 for one in sums) / len(sums) <= 0.05


def test_the_interval_of_a_mean_is_the_test_of_flipped_signs_turned_around() -> None:
    numbers = random.Random(3)
    values = [numbers.gauss(0.1, 0.4) for _ in range(8)]
    found = mean_of_tasks(values)
    assert found.low is not None and found.high is not None and found.value == pytest.approx(fmean(values))
    for inside in (found.low + 1e-6, found.value, found.high - 1e-6):
        assert not sign_flip_rejects(values, inside)
    for outside in (found.low - 0.05, found.high + 0.05):
        assert sign_flip_rejects(values, outside)


def test_fewer_than_six_tasks_have_no_interval_however_much_they_agree() -> None:
    few = mean_of_tasks([-0.5] * 5)
    assert (few.value, few.low, few.high) == (-0.5, None, None)
    assert mean_of_tasks([-0.5] * 6).high == -0.5
    six = mean_of_tasks([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert (six.low, six.high) == (0.1, 0.6), "of six, the least and the greatest"


@pytest.mark.parametrize("num_tasks", [6, 12, 60])
def test_the_interval_of_a_mean_holds_it_as_often_as_it_says(num_tasks: int) -> None:
    numbers = random.Random(11)
    num_held, num_series = 0, 300
    for _ in range(num_series):
        found = mean_of_tasks([numbers.choice((-0.5, 0.0, 0.25)) + numbers.gauss(0, 0.2) for _ in range(num_tasks)])
        num_held += found.low is not None and found.high is not None and found.low <= -0.25 / 3 <= found.high
    assert num_held / num_series >= 0.95 - 3 * 0.0126


def test_the_same_rollouts_give_the_same_interval() -> None:
    values = [i / 7 % 1 for i in range(100)]
    assert mean_of_tasks(values) == mean_of_tasks(values)
