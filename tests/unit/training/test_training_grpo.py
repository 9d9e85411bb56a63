"""GRPO against numbers worked out by hand and by NumPy code that shares nothing with the code under test."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from turnmill.training.grpo import LossTerms, LossWeights, group_advantages, k3, token_logprobs, token_loss

Array = npt.NDArray[np.float64]
PLAIN = LossWeights(clip_low=0.2, clip_high=0.28, kl_coeff=0.0, ent_coeff=0.0)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    logprobs: torch.Tensor, sampled: object, advantages: object, *, num_tokens: int, weights: LossWeights = PLAIN
) -> LossTerms:
    return token_loss(
        logprobs_n=logprobs,
        sampled_n=tensor(sampled),
        advantages_n=tensor(advantages),
        entropy_n=torch.zeros_like(logprobs),
        reference_n=None,
        num_tokens=num_tokens,
        weights=weights,
    )


def test_one_winner_of_four_gets_three_times_the_advantage_that_the_losers_lose() -> None:
    # mean 1/4; deviations 3/4 and -1/4; sample variance (9/16 + 3/16) / 3 = 1/4, so std = 1/2.
    advantages = group_advantages(tensor([[1.0, 0.0, 0.0, 0.0]]))
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert advantages.tolist()[0] == pytest.approx(expected, abs=1e-12)


def test_each_group_is_normalised_by_itself() -> None:
    # second group: mean 2, std sqrt((1 + 0 + 1) / 2) = 1.
    advantages = group_advantages(tensor([[0.0, 0.0, 3.0], [1.0, 2.0, 3.0]]))
    assert advantages.tolist()[1] == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001], abs=1e-12)
    # first group: mean 1, std sqrt((1 + 1 + 4) / 2) = sqrt 3.
    root = math.sqrt(3) + 1e-4
    assert advantages.tolist()[0] == pytest.approx([-1 / root, -1 / root, 2 / root], abs=1e-12)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    assert group_advantages(tensor([[0.7] * 8])).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "gradient", "is_clipped"),
    [
        (1.0, 2.0, 2.0, 2.0, False),
        (1.2, 1.0, 1.2, 1.2, False),
        (1.5, 1.0, 1.28, 0.0, True),
        (0.5, 1.0, 0.5, 0.5, False),
        (0.5, -1.0, -0.8, 0.0, True),
        (0.9, -1.0, -0.9, -0.9, False),
        (1.5, -1.0, -1.5, -1.5, False),
    ],
)
def test_the_clip_holds_back_only_what_went_far_enough_already(
    ratio: float, advantage: float, objective: float, gradient: float, is_clipped: bool
) -> None:
    logprobs = tensor([-1.0 + math.log(ratio)]).requires_grad_()
    terms = loss_of(logprobs, [-1.0], [advantage], num_tokens=1)
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert terms.loss.item() == pytest.approx(-objective, abs=1e-9)
    assert logprobs.grad.item() == pytest.approx(-gradient, abs=1e-9)
    assert terms.clip_fraction.item() == (1.0 if is_clipped else 0.0)


def test_tokens_count_alike_whatever_the_length_of_their_sample() -> None:
    # Three tokens of one sample (advantage 1), one of another (advantage -2), all at ratio 1: -(3 - 2) / 4.
    terms = loss_of(tensor([-1.0] * 4), [-1.0] * 4, [1.0, 1.0, 1.0, -2.0], num_tokens=4)
    assert terms.loss.item() == pytest.approx(-0.25)


def test_k3_is_the_formula_and_never_negative() -> None:
    log_ratio = tensor([-0.7, 0.0, 0.4])
    expected = [math.exp(x) - 1 - x for x in (-0.7, 0.0, 0.4)]
    assert k3(log_ratio).tolist() == pytest.approx(expected, abs=1e-12)
    assert (k3(torch.linspace(-3, 3, 101)) >= 0).all()


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def numpy_loss(
    logits: Array, tokens: list[int], sampled: Array, reference: Array, advantages: Array, temperature: Array
) -> float:
    """The whole loss, token by token, from its definition: clip 0.2 / 0.28, KL 0.1, entropy 0.05."""
    total = 0.0
    for n, token in enumerate(tokens):
        p = softmax(logits[n] / temperature[n])
        logprob = math.log(p[token])
        ratio = math.exp(logprob - sampled[n])
        clipped = min(max(ratio, 0.8), 1.28)
        total += min(ratio * advantages[n], clipped * advantages[n])
        difference = reference[n] - logprob
        total -= 0.1 * (math.exp(difference) - difference - 1)
        total += 0.05 * -sum(x * math.log(x) for x in p)
    return -total / 11


def numeric_gradient(function: Callable[[Array], float], at: Array) -> Array:
    """Central differences."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        step = np.zeros_like(at)
        step[index] = 1e-6
        gradient[index] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


def test_loss_and_gradient_equal_numpy_with_clip_kl_entropy_and_temperature() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(size=(6, 5))
    tokens = [0, 3, 2, 2, 4, 1]
    temperature = np.array([1.0, 0.7, 1.0, 1.3, 1.0, 2.0])
    exact = np.array([math.log(softmax(logits[n] / temperature[n])[t]) for n, t in enumerate(tokens)])
    sampled = exact + np.array([0.0, 0.5, -0.5, 0.1, -0.6, 0.4])
    reference = exact + random.normal(size=6) * 0.3
    advantages = np.array([1.0, -1.5, 2.0, 0.3, -0.2, 0.9])

    def function(x: Array) -> float:
        return numpy_loss(x, tokens, sampled, reference, advantages, temperature)

    logits_nv = torch.tensor(logits, requires_grad=True)
    logprobs_n, entropy_n = token_logprobs(logits_nv, torch.tensor(tokens), torch.tensor(temperature))
    terms = token_loss(
        logprobs_n=logprobs_n,
        sampled_n=torch.tensor(sampled),
        advantages_n=torch.tensor(advantages),
        entropy_n=entropy_n,
        reference_n=torch.tensor(reference),
        num_tokens=11,
        weights=LossWeights(clip_low=0.2, clip_high=0.28, kl_coeff=0.1, ent_coeff=0.05),
    )
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert logits_nv.grad is not None
    assert logprobs_n.tolist() == pytest.approx(exact.tolist(), abs=1e-12)
    assert terms.loss.item() == pytest.approx(function(logits), abs=1e-12)
    np.testing.assert_allclose(logits_nv.grad.numpy(), numeric_gradient(function, logits), atol=1e-8)
    # Clipped: token 1 (ratio e^-0.5, A < 0), token 2 (e^0.5, A > 0). Not: token 4 (e^0.6 with A < 0) and 5 (A > 0).
    assert terms.clip_fraction.item() == pytest.approx(2 / 11)
    assert terms.kl_reference is not None
    difference = reference - exact
    assert terms.kl_reference.item() == pytest.approx(float((np.exp(difference) - difference - 1).sum()) / 11)
    entropies = [-sum(x * math.log(x) for x in softmax(logits[n] / temperature[n])) for n in range(6)]
    assert terms.entropy.item() == pytest.approx(sum(entropies) / 11)


def test_the_entropy_of_a_uniform_distribution_is_log_v() -> None:
    _, entropy = token_logprobs(torch.zeros(1, 8), torch.tensor([3]), torch.ones(1))
    assert entropy.item() == pytest.approx(math.log(8))


def test_micro_batches_sum_to_the_gradient_of_the_batch() -> None:
    whole, cut = (tensor([-1.0, -0.4, -2.0]).requires_grad_() for _ in range(2))
    sampled, advantages = [-1.1, -0.5, -1.0], [1.0, -1.0, 0.5]
    loss_of(whole, sampled, advantages, num_tokens=3).loss.backward()  # type: ignore[no-untyped-call]
    for part in (slice(0, 1), slice(1, 3)):
        loss = loss_of(cut[part], sampled[part], advantages[part], num_tokens=3).loss
        loss.backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None and cut.grad is not None
    assert torch.equal(whole.grad, cut.grad)
