"""How rows are cut into forward passes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from turnmill.training.bundles import Bundle
from turnmill.training.microbatches import MAX_PADDING, collate, plan
from turnmill.training.samples import Row, Span


def make_row(length: int, *, prompt: Sequence[int] = (), first: int = 1) -> Row:
    """A row whose tokens from the end of the prompt (at least from `first`) on are trained."""
    start = max(first, len(prompt))
    token_ids = [*prompt, *(100 + i for i in range(length - len(prompt)))]
    mask = [int(t >= start) for t in range(length)]
    return Row(
        key="samples/run/train/s",
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=[-0.5 * m for m in mask],
        temperatures=[1.0] * length,
        spans=(Span(call_id="s_0", start=0, end=length, version="0.0"),),
    )


def rows_of(lengths: Sequence[int]) -> list[Row]:
    """Rows without anything in common that is worth sharing."""
    return [make_row(length) for length in lengths]


def alone(lengths: Sequence[int], max_positions: int) -> list[tuple[int, ...]]:
    """The rows of each pass, for a model that can't share."""
    passes = plan(rows_of(lengths), max_positions, is_sharing=False)
    assert all(len(bundles) == 1 and bundles[0].num_shared == 0 for bundles in passes)
    return [bundle.rows for (bundle,) in passes]


def num_positions(passes: Sequence[Sequence[Bundle]]) -> list[int]:
    return [sum(bundle.num_positions for bundle in bundles) for bundles in passes]


def test_rows_are_cut_longest_first_under_the_budget() -> None:
    assert alone([3, 9, 5, 9], 18) == [(1, 3), (2, 0)]
    assert alone([50, 2], 10) == [(0,), (1,)]
    assert alone([], 10) == []
    assert alone([4] * 5, 8) == [(0, 1), (2, 3), (4,)]


def test_what_the_budget_cuts_is_cut_evenly() -> None:
    assert [len(rows) for rows in alone([10] * 9, 40)] == [3, 3, 3]


@pytest.mark.parametrize("is_sharing", [False, True])
@pytest.mark.parametrize("shape", ["uniform", "two lengths", "all different", "one long", "equal", "prompts"])
@pytest.mark.parametrize("budget", [64, 4096, 16384])
def test_padding_stays_below_a_tenth_and_each_row_comes_once(shape: str, budget: int, is_sharing: bool) -> None:
    random = np.random.default_rng(0)
    lengths = {
        "uniform": [int(x) for x in random.integers(20, 500, size=200)],
        "two lengths": [20] * 50 + [300] * 3,
        "all different": [int(x) for x in random.permutation(400) + 2],
        "one long": [4000] + [9] * 7,
        "equal": [59] * 64,
        "prompts": [int(x) for x in random.integers(60, 200, size=100)],
    }[shape]
    prompts = [range(40 + 2 * (i % 5)) if shape == "prompts" else () for i in range(len(lengths))]
    rows = [make_row(length, prompt=prompt) for length, prompt in zip(lengths, prompts, strict=True)]
    passes = plan(rows, budget, is_sharing=is_sharing)
    bundles = [bundle for found in passes for bundle in found]
    assert sorted(i for bundle in bundles for i in bundle.rows) == list(range(len(lengths)))
    for found, positions in zip(passes, num_positions(passes), strict=True):
        assert positions <= budget or (len(found) == 1 and len(found[0].rows) == 1)
    padding = sum(b.num_shared + b.width - lengths[i] for b in bundles for i in b.rows)
    assert 0 <= padding <= MAX_PADDING * sum(num_positions(passes))
    assert all(b.width == lengths[b.rows[0]] - b.num_shared for b in bundles), "the longest row decides"
    assert any(b.num_shared for b in bundles) == (is_sharing and shape == "prompts" and budget > 64)


def test_short_rows_share_the_pass_of_a_longer_one_where_that_is_cheaper() -> None:
    """A pass costs as much as a hundred positions: ten of padding are no reason for one more."""
    assert alone([60] * 15 + [50], 8192) == [tuple(range(16))]
    assert len(alone([60] * 15 + [20] * 30, 8192)) == 2


def test_a_pass_stays_small_however_large_the_budget() -> None:
    assert [len(rows) for rows in alone([100] * 60, 100_000)] == [10] * 6


@pytest.mark.parametrize("is_sharing", [False, True])
def test_equal_rows_are_cut_in_the_same_way_each_time(is_sharing: bool) -> None:
    lengths = [int(x) for x in np.random.default_rng(1).integers(40, 160, size=64)]
    first, second = (
        plan([make_row(x, prompt=range(30)) for x in lengths], 8192, is_sharing=is_sharing) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("is_sharing", [False, True])
def test_a_long_list_of_rows_is_planned_quickly(is_sharing: bool) -> None:
    lengths = [int(x) for x in np.random.default_rng(2).integers(10, 400, size=5000)]
    passes = plan(rows_of(lengths), 16384, is_sharing=is_sharing)
    assert sum(len(bundle.rows) for bundles in passes for bundle in bundles) == 5000


# ---------------------------------------------------------------- shared prompts


def test_a_prompt_is_shared_but_for_its_last_token_which_every_row_reads_its_first_one_from() -> None:
    rows = [make_row(60, prompt=range(30)) for _ in range(8)]
    assert plan(rows, 8192, is_sharing=True) == [(Bundle(rows=tuple(range(8)), num_shared=29, width=31),)]


def test_bundles_of_several_prompts_share_a_pass() -> None:
    rows = [make_row(60, prompt=range(group, group + 30)) for group in range(3) for _ in range(8)]
    ((first, second, third),) = plan(rows, 8192, is_sharing=True)
    assert [first.rows, second.rows, third.rows] == [tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 24))]
    assert {bundle.num_shared for bundle in (first, second, third)} == {29}


def test_what_saves_next_to_nothing_is_not_shared() -> None:
    short = [make_row(60, prompt=range(5)) for _ in range(8)]
    single = [make_row(60, prompt=range(group, group + 50)) for group in range(8)]
    for rows in (short, single):
        assert [b.num_shared for bundles in plan(rows, 8192, is_sharing=True) for b in bundles] == [0]


def test_prompts_of_rows_too_long_for_a_mask_in_memory_are_not_shared() -> None:
    rows = [make_row(6000, prompt=range(1000)) for _ in range(2)]
    assert {b.num_shared for bundles in plan(rows, 8192, is_sharing=True) for b in bundles} == {0}


@pytest.mark.parametrize(("length", "num_prompt", "num_bundles"), [(1250, 1200, 1), (1100, 900, 4), (4050, 4001, 2)])
def test_a_prompt_longer_than_a_fast_pass_is_shared_as_far_as_the_budget_goes(
    length: int, num_prompt: int, num_bundles: int
) -> None:
    rows = [make_row(length, prompt=range(num_prompt)) for _ in range(8)]
    passes = plan(rows, 16384, is_sharing=True)
    assert [[bundle.num_shared for bundle in bundles] for bundles in passes] == [[num_prompt - 1]] * num_bundles
    assert {b.num_shared for bundles in plan(rows, length, is_sharing=True) for b in bundles} == {0}


def test_keys_of_a_long_prompt_are_not_copied_for_more_rows_than_the_budget_takes_whole() -> None:
    rows = [make_row(2002, prompt=range(2000)) for _ in range(100)]
    bundles = [bundle for bundles in plan(rows, 16384, is_sharing=True) for bundle in bundles]
    assert max(len(bundle.rows) for bundle in bundles) == 8


def test_one_long_row_leaves_the_passes_of_the_others_as_they_are() -> None:
    rows = [make_row(60, prompt=range(group, group + 30)) for group in range(64) for _ in range(8)]
    passes = plan([*rows, make_row(1500)], 8192, is_sharing=True)
    assert len(passes) - len(plan(rows, 8192, is_sharing=True)) <= 3


def test_thousands_of_rows_of_which_no_two_fit_into_a_pass_are_planned_quickly() -> None:
    assert len(plan(rows_of([520] * 5000), 16384, is_sharing=True)) == 5000


@pytest.mark.parametrize(("num_rows", "expected"), [(10, 1), (20, 2), (64, 6), (90, 8)])
def test_passes_come_out_even_in_number_and_size(num_rows: int, expected: int) -> None:
    """So that two or four threads are done at about the same time."""
    rows = [make_row(106, prompt=range(31)) for _ in range(num_rows)]
    sizes = num_positions(plan(rows, 8192, is_sharing=True))
    assert len(sizes) == expected
    assert max(sizes) - min(sizes) <= 76


def test_a_token_is_predicted_at_the_position_before_it_wherever_that_lies() -> None:
    rows = [make_row(33, prompt=range(30)), make_row(35, prompt=range(30)), make_row(4)]
    shared = Bundle(rows=(1, 0), num_shared=29, width=6)
    batch = collate(rows, [0, 3, 8], (shared, Bundle(rows=(2,), num_shared=0, width=4)))
    expected = [
        *range(29),
        *[29, 100, 101, 102, 103, 104],
        *[29, 100, 101, 102, 0, 0],
        *[100, 101, 102, 103],
    ]
    assert batch.ids_m.tolist() == expected
    assert batch.index_n.tolist() == [29, 30, 31, 32, 33, 35, 36, 37, 41, 42, 43]
    assert batch.rows_n.tolist() == [1] * 5 + [0] * 3 + [2] * 3
    assert batch.positions_n.tolist() == [30, 31, 32, 33, 34, 30, 31, 32, 1, 2, 3]
    assert batch.tokens_n.tolist() == [100, 101, 102, 103, 104, 100, 101, 102, 101, 102, 103]
    assert batch.flat_n.tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 8, 9, 10]
    some = batch.only(batch.rows_n == 0)
    assert some.tokens_n.tolist() == [100, 101, 102] and some.flat_n.tolist() == [0, 1, 2]
    assert torch.equal(some.ids_m, batch.ids_m)
    assert batch.num_padding == 2
    assert shared.places().tolist() == [*range(29), *range(29, 35), *range(29, 35)]
