"""From groups to the tensors of an update: advantages, weights and samples of every trained token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from turnmill.config import Config
from turnmill.records import Call, SampleRecord
from turnmill.training.minibatches import Minibatch, cut, loss_divisor, minibatch, rate
from turnmill.training.samples import Row, Span, TrainingSample, training_sample

CONFIG = Config(number_generation=2, global_batch_size=4, max_length=50)


def make_row(*calls: tuple[str, int, int], version: str = "0.0") -> Row:
    """Calls (id, new tokens, trained tokens), one behind the other."""
    mask: list[int] = []
    spans: list[Span] = []
    for call_id, num_new, num_trained in calls:
        mask += [0] * num_new + [1] * num_trained
        spans.append(Span(call_id=call_id, start=len(mask) - num_new - num_trained, end=len(mask), version=version))
    return Row(
        key="key",
        token_ids=list(range(7, 7 + len(mask))),
        loss_mask=mask,
        logprobs=[-0.1 * t if m else 0.0 for t, m in enumerate(mask)],
        temperatures=[1.0] * len(mask),
        spans=tuple(spans),
    )


def make_sample(
    reward: float,
    *rows: Row,
    is_overlong: bool = False,
    call_ids: Sequence[str] = (),
    turn_rewards: Mapping[str, float] = {},
) -> TrainingSample:
    rows = rows or (make_row(("a", 2, 1)),)
    return TrainingSample(
        key="key",
        reward=reward,
        rows=rows,
        is_overlong=is_overlong,
        call_ids=tuple(call_ids),
        turn_rewards=turn_rewards,
    )


def laid_out(groups: Sequence[Sequence[TrainingSample]], version: str | None = None, **changes: object) -> Minibatch:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return minibatch(rate(groups, config), config, version)


TWO_BRANCHES = (make_row(("a", 2, 3), ("b", 1, 0)), make_row(("a", 5, 0), ("c", 2, 1)))


def test_tokens_lie_sample_by_sample_and_row_by_row() -> None:
    batch = laid_out([[make_sample(1.0, *TWO_BRANCHES), make_sample(0.0)]], advantage_method="group_based_no_std")
    assert batch.starts == [0, 3, 4] and len(batch.rows) == 3
    assert batch.samples_k.tolist() == [0, 0, 0, 0, 1]
    assert batch.advantages_k.tolist() == [0.5] * 4 + [-0.5]
    assert batch.sampled_k().tolist() == pytest.approx([-0.2, -0.3, -0.4, -0.7, -0.2])
    assert batch.weights_k is None and batch.is_current_k is None
    assert (batch.num_groups, batch.num_samples, batch.num_tokens) == (1, 2, 5)


def test_weights_and_means_are_those_of_a_whole_sample_whatever_its_rows() -> None:
    groups = [[make_sample(1.0, *TWO_BRANCHES), make_sample(0.0)]]
    sequence = laid_out(groups, loss_aggregation="sequence").weights_k
    constant = laid_out(groups, loss_aggregation="constant").weights_k
    assert sequence is not None and sequence.tolist() == [0.25] * 4 + [1.0]
    assert constant is not None and constant.tolist() == pytest.approx([0.02] * 5)
    means = laid_out(groups).sample_means(torch.tensor([1.0, 2.0, 3.0, 6.0, 9.0]))
    assert means.tolist() == [3.0] * 4 + [9.0] and means.dtype == torch.float32


def test_the_divisor_counts_tokens_or_samples_and_takes_the_scale() -> None:
    assert loss_divisor(CONFIG, 10, 4) == 10
    assert loss_divisor(replace(CONFIG, loss_aggregation="sequence"), 10, 4) == 4
    assert loss_divisor(replace(CONFIG, loss_aggregation="constant", loss_scale=0.5), 10, 4) == 8


def test_rows_and_samples_without_a_trained_token_are_compared_and_not_laid_out() -> None:
    nothing = make_row(("z", 4, 0))
    batch = laid_out(
        [[make_sample(1.0, nothing, make_row(("a", 2, 1))), make_sample(0.0, nothing)]],
        advantage_method="group_based_no_std",
    )
    assert (batch.num_samples, len(batch.rows), batch.advantages_k.tolist()) == (1, 1, [0.5])


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        # Mean 1: all three are compared and trained.
        ("score", [2.0, -1.0, -1.0]),
        # Compared and not trained.
        ("mask", [-1.0, -1.0]),
        # The other two have equal rewards.
        ("drop", [0.0, 0.0]),
    ],
)
def test_conversations_that_filled_their_length_are_scored_masked_or_dropped(
    overlong: str, expected: list[float]
) -> None:
    group = [make_sample(3.0, is_overlong=True), make_sample(0.0), make_sample(0.0)]
    batch = laid_out([group], advantage_method="group_based_no_std", overlong=overlong)
    assert batch.advantages_k.tolist() == expected


def test_groups_keep_their_own_size_when_some_are_dropped() -> None:
    groups = [
        [make_sample(1.0), make_sample(0.0), make_sample(5.0, is_overlong=True)],
        [make_sample(9.0, is_overlong=True), make_sample(2.0), make_sample(7.0, is_overlong=True)],
        [make_sample(1.0), make_sample(2.0), make_sample(6.0)],
    ]
    batch = laid_out(groups, advantage_method="group_based_no_std", overlong="drop")
    # Of the second group one is left, which nothing can be said about.
    assert batch.advantages_k.tolist() == [0.5, -0.5, 0.0, -2.0, -1.0, 3.0]
    assert (batch.num_groups, batch.num_samples) == (3, 6)


def test_all_of_a_batch_decides_about_the_scale_of_reinforce_pp_baseline() -> None:
    groups = [[make_sample(1.0), make_sample(0.0)], [make_sample(4.0), make_sample(0.0)]]
    rated = rate(groups, replace(CONFIG, advantage_method="reinforce_pp_baseline"))
    first, second = (minibatch(part, CONFIG, None) for part in cut(rated, 2))
    # Centred 0.5, -0.5, 2, -2: std sqrt(8.5 / 3).
    std = (8.5 / 3) ** 0.5 + 1e-4
    assert first.advantages_k.tolist() == pytest.approx([0.5 / std, -0.5 / std])
    assert second.advantages_k.tolist() == pytest.approx([2 / std, -2 / std])


@pytest.mark.parametrize(("num", "expected"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (9, [1] * 5)])
def test_minibatches_are_whole_groups_in_order_and_of_about_equal_size(num: int, expected: list[int]) -> None:
    rated = rate([[make_sample(float(g + s)) for s in range(2)] for g in range(5)], CONFIG)
    parts = cut(rated, num)
    assert [len(part) for part in parts] == expected
    assert [group for part in parts for group in part] == rated


def test_each_turn_has_an_advantage_of_its_own_wherever_its_tokens_lie() -> None:
    # Made in the order a, b, c; the row of b and c comes last, and b is not trained but rewarded.
    rows = (make_row(("a", 2, 2), ("c", 1, 1)), make_row(("a", 4, 0), ("b", 2, 0)))
    first = make_sample(1.0, *rows, call_ids="abc", turn_rewards={"a": 0.0, "b": 1.0, "c": 5.0})
    # Of this sample the first turn is trained and not rewarded, the second both, the third neither.
    second = make_sample(1.0, make_row(("x", 1, 1), ("y", 1, 2)), call_ids="xyz", turn_rewards={"y": 3.0, "gone": 9.0})
    batch = laid_out([[first, second]], advantage_method="group_based_per_turn", gamma=0.0)
    # Turn 1: equal; turn 2: 1 against 3, of which only y is trained; turn 3: only the first sample has one.
    half = 1.0 / (2**0.5 + 1e-4)
    assert batch.advantages_k.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, half, half])


def test_tokens_of_other_versions_are_told_apart() -> None:
    mixed = replace(
        make_row(("a", 2, 2), ("b", 1, 1)),
        spans=(
            Span(call_id="a", start=0, end=4, version="1.3"),
            Span(call_id="b", start=4, end=6, version="1.4"),
        ),
    )
    is_current = laid_out([[make_sample(1.0, mixed), make_sample(0.0, make_row(("a", 1, 1)))]], "1.4").is_current_k
    assert is_current is not None and is_current.tolist() == [False, False, True, False]


def test_the_order_of_the_calls_comes_from_the_record(
    call_of: Callable[..., Call], sample_of: Callable[..., SampleRecord]
) -> None:
    first = call_of("t_0", 0)
    calls = [first, call_of("t_0", 1, first), call_of("t_0", 2)]
    assert training_sample(sample_of("t_0", calls), calls).call_ids == ("t_0_0", "t_0_1", "t_0_2")
