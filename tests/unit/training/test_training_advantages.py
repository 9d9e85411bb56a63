"""Each advantage method against NumPy, written from its formula, and what must not change it."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from turnmill.config import Config, describe
from turnmill.training.algorithms.advantages import (
    METHODS,
    PER_TURN,
    discounted_returns,
    sample_advantages,
    turn_advantages,
)

Array = npt.NDArray[np.float64]
SEEDS = range(25)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rewards_and_lengths(seed: int, *, sizes: tuple[int, ...] = (4, 4, 7, 2)) -> tuple[list[Array], list[Array]]:
    """Groups of several sizes; rewards of few values in every second seed, so that some are equal."""
    random = np.random.default_rng(seed)
    draw: Callable[[int], Array] = (
        (lambda size: random.integers(0, 3, size) / 2.0) if seed % 2 else (lambda size: random.normal(size=size))
    )
    return [draw(size) for size in sizes], [random.integers(1, 50, size).astype(np.float64) for size in sizes]


def found(method: str, rewards: list[Array], lengths: list[Array]) -> list[Array]:
    result = sample_advantages(method, [tensor(r) for r in rewards], [tensor(x) for x in lengths])
    return [advantages_s.numpy() for advantages_s in result]


# ---------------------------------------------------------------- the formulas, sample by sample


def numpy_group_based(rewards: list[Array], lengths: list[Array]) -> list[Array]:
    return [
        np.array(
            [
                (r - group.mean()) / (math.sqrt(((group - group.mean()) ** 2).sum() / (len(group) - 1)) + 1e-4)
                for r in group
            ]
        )
        for group in rewards
    ]


def numpy_no_std(rewards: list[Array], lengths: list[Array]) -> list[Array]:
    return [np.array([r - sum(group) / len(group) for r in group]) for group in rewards]


def numpy_rloo(rewards: list[Array], lengths: list[Array]) -> list[Array]:
    return [np.array([r - np.delete(group, i).mean() for i, r in enumerate(group)]) for group in rewards]


def numpy_reinforce_pp_baseline(rewards: list[Array], lengths: list[Array]) -> list[Array]:
    centred = [group - group.mean() for group in rewards]
    return [group / (np.concatenate(centred).std(ddof=1) + 1e-4) for group in centred]


def numpy_opo(rewards: list[Array], lengths: list[Array]) -> list[Array]:
    return [
        np.array([r - np.dot(of_group, group) / of_group.sum() for r in group])
        for group, of_group in zip(rewards, lengths, strict=True)
    ]


def numpy_passk(rewards: list[Array], lengths: list[Array]) -> list[Array]:
    """The definition: what max(all) loses without the sample."""
    return [np.array([group.max() - np.delete(group, i).max() for i in range(len(group))]) for group in rewards]


GOLDEN = {
    "group_based": numpy_group_based,
    "group_based_no_std": numpy_no_std,
    "rloo": numpy_rloo,
    "reinforce_pp_baseline": numpy_reinforce_pp_baseline,
    "opo": numpy_opo,
    "grpo_passk": numpy_passk,
}


def numpy_turn_advantages(rewards: Array, turns: list[list[float]], gamma: float) -> list[list[float]]:
    """From the definition: the outcome's comparison plus that of the discounted return at the same turn."""

    def compared(value: float, values: list[float]) -> float:
        if len(values) < 2:
            return 0.0
        return float((value - np.mean(values)) / (np.std(values, ddof=1) + 1e-4))

    returns = [[sum(gamma ** (t - k) * of[t] for t in range(k, len(of))) for k in range(len(of))] for of in turns]
    return [
        [
            compared(float(rewards[s]), rewards.tolist()) + compared(value, [of[k] for of in returns if len(of) > k])
            for k, value in enumerate(of_sample)
        ]
        for s, of_sample in enumerate(returns)
    ]


def test_every_method_of_the_parameter_is_there_and_has_its_golden_test() -> None:
    [parameter] = [item for item in describe() if item.name == "advantage_method"]
    assert set(parameter.choices) == {*METHODS, PER_TURN} == {*GOLDEN, PER_TURN}
    assert Config().advantage_method == "group_based"


@pytest.mark.parametrize("method", GOLDEN)
def test_a_method_is_its_formula(method: str) -> None:
    for seed in SEEDS:
        rewards, lengths = rewards_and_lengths(seed)
        for mine, expected in zip(found(method, rewards, lengths), GOLDEN[method](rewards, lengths), strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-12, err_msg=f"seed {seed}")


def test_numbers_worked_out_by_hand() -> None:
    rewards, lengths = [np.array([1.0, 0.0, 0.0, 0.5])], [np.array([1.0, 1.0, 4.0, 2.0])]
    # Mean 3/8; squared deviations 25/64 + 9/64 + 9/64 + 1/64 = 44/64, a third of it 11/48.
    std = math.sqrt(11 / 48)
    assert found("group_based", rewards, lengths)[0].tolist() == pytest.approx(
        [x / (std + 1e-4) for x in (5 / 8, -3 / 8, -3 / 8, 1 / 8)]
    )
    # Means of the others: 1/6, 1/2, 1/2, 1/3.
    assert found("rloo", rewards, lengths)[0].tolist() == pytest.approx([5 / 6, -1 / 2, -1 / 2, 1 / 6])
    # Baseline (1 + 0 + 0 + 1) / 8.
    assert found("opo", rewards, lengths)[0].tolist() == pytest.approx([0.75, -0.25, -0.25, 0.25])
    assert found("grpo_passk", rewards, lengths)[0].tolist() == [0.5, 0.0, 0.0, 0.0]
    assert found("grpo_passk", [np.array([1.0, 1.0, 0.0])], [np.ones(3)])[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", GOLDEN)
def test_adding_the_same_to_all_rewards_changes_nothing(method: str) -> None:
    for seed in SEEDS:
        rewards, lengths = rewards_and_lengths(seed)
        for mine, shifted in zip(
            found(method, rewards, lengths), found(method, [r + 3.7 for r in rewards], lengths), strict=True
        ):
            np.testing.assert_allclose(mine, shifted, atol=1e-11)


@pytest.mark.parametrize("method", GOLDEN)
def test_larger_rewards_scale_the_advantages_or_not_at_all(method: str) -> None:
    factor = 1.0 if method in ("group_based", "reinforce_pp_baseline") else 5.0
    for seed in SEEDS:
        rewards, lengths = rewards_and_lengths(seed)
        for mine, scaled in zip(
            found(method, rewards, lengths), found(method, [5 * r for r in rewards], lengths), strict=True
        ):
            # 1e-4 beside a std, which may be small in a group of two.
            np.testing.assert_allclose(scaled, factor * mine, rtol=5e-2, atol=1e-11)


@pytest.mark.parametrize("method", GOLDEN)
def test_the_order_of_samples_and_groups_means_nothing(method: str) -> None:
    for seed in SEEDS:
        random = np.random.default_rng(1000 + seed)
        rewards, lengths = rewards_and_lengths(seed)
        # Ties of the best would leave open which of them leads.
        groups = random.permutation(len(rewards))
        inner = [random.permutation(len(group)) for group in rewards]
        plain = found(method, rewards, lengths)
        moved = found(method, [rewards[g][inner[g]] for g in groups], [lengths[g][inner[g]] for g in groups])
        for g, mine in zip(groups, moved, strict=True):
            np.testing.assert_allclose(mine, plain[g][inner[g]], atol=1e-12)


@pytest.mark.parametrize("method", [name for name in GOLDEN if name != "reinforce_pp_baseline"])
def test_a_group_is_compared_with_itself_alone(method: str) -> None:
    for seed in SEEDS:
        rewards, lengths = rewards_and_lengths(seed)
        alone = found(method, rewards[2:3], lengths[2:3])[0]
        np.testing.assert_array_equal(found(method, rewards, lengths)[2], alone)


@pytest.mark.parametrize("method", [name for name in GOLDEN if name != "opo"])
def test_lengths_matter_to_the_optimal_baseline_alone(method: str) -> None:
    rewards, lengths = rewards_and_lengths(3)
    for mine, other in zip(
        found(method, rewards, lengths), found(method, rewards, [x[::-1] * 2 for x in lengths]), strict=True
    ):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("method", GOLDEN)
def test_where_nothing_can_be_compared_nothing_is_better(method: str) -> None:
    rewards = [np.array([0.7]), np.zeros(0), np.array([0.3, 0.3, 0.3])]
    lone, nobody, equal = found(method, rewards, [np.ones(1), np.zeros(0), np.ones(3)])
    assert lone.tolist() == [0.0] and nobody.tolist() == []
    assert np.abs(equal).max() < 1e-9
    assert found(method, rewards[:1], [np.ones(1)])[0].tolist() == [0.0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_turn_advantages_are_the_outcome_plus_the_return_compared_at_the_same_turn(gamma: float) -> None:
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        rewards = random.integers(0, 3, 5) / 2.0
        turns = [random.normal(size=random.integers(1, 6)).tolist() for _ in rewards]
        mine = turn_advantages(tensor(rewards), [tensor(of) for of in turns], gamma)
        for of_sample, expected in zip(mine, numpy_turn_advantages(rewards, turns, gamma), strict=True):
            np.testing.assert_allclose(of_sample.numpy(), expected, atol=1e-11)


def test_turn_advantages_worked_out_by_hand() -> None:
    assert discounted_returns(tensor([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]
    first, second = turn_advantages(tensor([1.0, 0.0]), [tensor([0.0, 2.0, 7.0]), tensor([3.0, 0.0])], 0.0)
    # Of two values, each is half their difference from the mean; the std is their difference over sqrt 2.
    outcome = 0.5 / (math.sqrt(0.5) + 1e-4)
    turn_0, turn_1 = 1.5 / (3 * math.sqrt(0.5) + 1e-4), 1.0 / (2 * math.sqrt(0.5) + 1e-4)
    # Nobody else had a third turn: the outcome alone.
    assert first.tolist() == pytest.approx([outcome - turn_0, outcome + turn_1, outcome])
    assert second.tolist() == pytest.approx([-outcome + turn_0, -outcome - turn_1])


def test_turns_without_differing_rewards_leave_the_comparison_of_outcomes() -> None:
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        rewards = random.normal(size=4)
        turns = [torch.zeros(int(n), dtype=torch.float64) for n in random.integers(1, 5, 4)]
        [expected] = found("group_based", [rewards], [np.ones(4)])
        for of_sample, outcome in zip(turn_advantages(tensor(rewards), turns, 0.9), expected, strict=True):
            np.testing.assert_allclose(of_sample.numpy(), outcome, atol=1e-12)


def test_turn_advantages_do_not_change_with_the_size_of_turn_rewards_or_what_is_added_to_outcomes() -> None:
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        rewards, turns = tensor(random.normal(size=4)), [tensor(random.normal(size=3)) for _ in range(4)]
        plain = turn_advantages(rewards, turns, 0.5)
        for mine, other in zip(plain, turn_advantages(rewards + 2, [7 * of for of in turns], 0.5), strict=True):
            np.testing.assert_allclose(other.numpy(), mine.numpy(), rtol=5e-3, atol=1e-3)
