"""How rows are cut into forward passes."""

import numpy as np
import pytest

from turnmill.training.microbatches import MAX_PADDING, plan


def num_positions(lengths: list[int], batches: list[tuple[int, ...]]) -> int:
    return sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)


def test_rows_are_cut_longest_first_under_the_budget() -> None:
    assert plan([3, 9, 5, 9], 18) == [(1, 3), (2, 0)]
    assert plan([50, 2], 10) == [(0,), (1,)]
    assert plan([], 10) == []
    assert plan([4] * 5, 8) == [(0, 1), (2, 3), (4,)]


def test_what_the_budget_cuts_is_cut_evenly() -> None:
    assert [len(batch) for batch in plan([10] * 9, 40)] == [3, 3, 3]


@pytest.mark.parametrize("shape", ["uniform", "two lengths", "all different", "one long", "equal"])
@pytest.mark.parametrize("budget", [64, 4096, 16384])
def test_padding_stays_below_a_tenth_and_each_row_comes_once(shape: str, budget: int) -> None:
    random = np.random.default_rng(0)
    lengths = {
        "uniform": [int(x) for x in random.integers(20, 500, size=200)],
        "two lengths": [20] * 50 + [300] * 3,
        "all different": [int(x) for x in random.permutation(400) + 2],
        "one long": [4000] + [9] * 7,
        "equal": [59] * 64,
    }[shape]
    batches = plan(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget for batch in batches)
    positions = num_positions(lengths, batches)
    assert positions - sum(lengths) <= MAX_PADDING * positions


def test_short_rows_share_the_pass_of_a_longer_one_where_that_is_cheaper() -> None:
    """A pass costs as much as a hundred positions: ten of padding are no reason for one more."""
    assert plan([60] * 30 + [50], 8192) == [tuple(range(31))]
    assert len(plan([60] * 30 + [20] * 30, 8192)) == 2


def test_a_pass_stays_small_however_large_the_budget() -> None:
    assert [len(batch) for batch in plan([100] * 60, 100_000)] == [20, 20, 20]


def test_equal_lengths_are_cut_in_the_same_way_each_time() -> None:
    lengths = [int(x) for x in np.random.default_rng(1).integers(10, 160, size=64)]
    assert plan(lengths, 8192) == plan(list(lengths), 8192)


def test_a_long_list_of_lengths_is_planned_quickly() -> None:
    lengths = [int(x) for x in np.random.default_rng(2).integers(10, 16384, size=5000)]
    assert sum(len(batch) for batch in plan(lengths, 16384)) == 5000
