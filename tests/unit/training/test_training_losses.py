"""Every loss, correction and aggregation against NumPy in float64, written from the formulas, gradients included.

What is differentiated in the tests is the loss as a function of the logits, by central differences. Where a paper stops
a gradient (the weight of CISPO, the mismatch weights), that factor is held at its value.

Axes: R samples, N tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from turnmill.config import Config, describe
from turnmill.training.algorithms.aggregation import divisor, token_weights
from turnmill.training.algorithms.logprobs import k3, token_logprobs
from turnmill.training.algorithms.losses import LOSSES, Bounds
from turnmill.training.algorithms.objective import LossTerms, Objective, TokenBatch, loss_terms

Array = npt.NDArray[np.float64]
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_mask")
AGGREGATIONS = ("token", "sequence", "constant")
MAX_LENGTH = 9
CAP = 1.5
PLAIN = Objective(loss_fn="ppo", bounds=Bounds(low=0.2, high=0.28), kl_coeff=0.0, ent_coeff=0.0)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def numeric_gradient(function: Callable[[Array], float], at: Array) -> Array:
    """Central differences."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        step = np.zeros_like(at)
        step[index] = 1e-6
        gradient[index] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


@dataclass(frozen=True, kw_only=True)
class Case:
    """Three samples of 4, 1 and 3 tokens."""

    logits_nv: Array
    tokens_n: list[int]
    samples_n: list[int]
    temperature_n: Array
    sampled_n: Array
    old_n: Array
    reference_n: Array
    advantages_n: Array


def make_case(seed: int) -> Case:
    """Log-probs far enough apart that each bound and each cap acts somewhere, and no token is near one of them."""
    random = np.random.default_rng(seed)
    samples = [0, 0, 0, 0, 1, 2, 2, 2]
    num = len(samples)
    logits, tokens = random.normal(size=(num, 5)), [int(t) for t in random.integers(0, 5, num)]
    temperature = random.choice([0.7, 1.0, 1.6], num)
    exact = np.array([math.log(softmax(logits[n] / temperature[n])[t]) for n, t in enumerate(tokens)])
    old = exact - random.choice([-0.6, -0.35, -0.1, 0.0, 0.1, 0.35, 0.6], num)
    return Case(
        logits_nv=logits,
        tokens_n=tokens,
        samples_n=samples,
        temperature_n=temperature,
        old_n=old,
        sampled_n=old - np.array([[0.7, -0.7, 0.2][s] for s in samples]) * random.choice([0.5, 1.0, 1.4], num),
        reference_n=exact + 0.3 * random.normal(size=num),
        advantages_n=random.normal(size=3)[samples],
    )


def logprobs_of(case: Case, logits: Array) -> Array:
    probabilities = [softmax(logits[n] / case.temperature_n[n]) for n in range(len(case.tokens_n))]
    return np.array([math.log(p[t]) for p, t in zip(probabilities, case.tokens_n, strict=True)])


def numpy_loss(case: Case, objective: Objective, aggregation: str, logits: Array) -> float:
    """The whole loss from its definition, sample by sample; where a gradient is stopped, at `case.logits_nv`."""
    policy, held = logprobs_of(case, logits), logprobs_of(case, case.logits_nv)
    old = case.sampled_n if objective.correction == "none" else case.old_n
    low, high = 1 - objective.bounds.low, 1 + objective.bounds.high
    num_samples, num_tokens = 3, len(case.tokens_n)
    total = 0.0
    for sample in range(num_samples):
        mine = [n for n in range(num_tokens) if case.samples_n[n] == sample]
        sample_ratio = math.exp(sum(policy[n] - old[n] for n in mine) / len(mine))
        drift = math.exp(sum(case.old_n[n] - case.sampled_n[n] for n in mine) / len(mine))
        terms = []
        for n in mine:
            advantage, ratio = case.advantages_n[n], math.exp(policy[n] - old[n])
            if objective.loss_fn == "gspo":
                ratio = sample_ratio
                if objective.correction.startswith("token"):
                    # GSPO-token: what weighs single tokens weighs their gradients.
                    held_ratio = math.exp(sum(held[m] - old[m] for m in mine) / len(mine))
                    ratio = held_ratio * math.exp(policy[n] - held[n])
            clipped = min(max(ratio, low), high)
            if objective.loss_fn == "importance_sampling":
                term = ratio * advantage
            elif objective.loss_fn == "cispo":
                term = min(max(math.exp(held[n] - old[n]), low), high) * advantage * policy[n]
            else:
                term = min(ratio * advantage, clipped * advantage)
            mismatch = math.exp(case.old_n[n] - case.sampled_n[n])
            weight = {
                "none": 1.0,
                "token_truncate": min(mismatch, objective.cap),
                "token_mask": mismatch if 1 / objective.cap <= mismatch <= objective.cap else 0.0,
                "sequence_mask": float(1 / objective.cap <= drift <= objective.cap),
            }[objective.correction]
            p = softmax(logits[n] / case.temperature_n[n])
            difference = case.reference_n[n] - policy[n]
            terms.append(
                weight * term
                + objective.ent_coeff * -sum(x * math.log(x) for x in p)
                - objective.kl_coeff * (math.exp(difference) - difference - 1)
            )
        if aggregation == "token":
            total += sum(terms) / num_tokens
        elif aggregation == "sequence":
            total += sum(terms) / len(mine) / num_samples
        else:
            total += sum(terms) / MAX_LENGTH / num_samples
    return -total


def sample_means(case: Case, values: Array) -> torch.Tensor:
    samples = np.array(case.samples_n)
    return tensor([values[samples == sample].mean() for sample in samples])


def terms_of(
    case: Case, objective: Objective, aggregation: str, logits_nv: torch.Tensor, part: slice = slice(None)
) -> LossTerms:
    """What the code under test gives for some of the tokens."""
    policy = logprobs_of(case, case.logits_nv)
    old = case.sampled_n if objective.correction == "none" else case.old_n
    lengths_s = tensor([4, 1, 3])
    weights_s = token_weights(aggregation, lengths_s, MAX_LENGTH)
    tokens = TokenBatch(
        sampled_n=tensor(case.sampled_n)[part],
        old_n=tensor(case.old_n)[part],
        advantages_n=tensor(case.advantages_n)[part],
        reference_n=tensor(case.reference_n)[part],
        weights_n=None if weights_s is None else weights_s[torch.tensor(case.samples_n)][part],
        sample_log_ratio_n=sample_means(case, policy - old)[part] if objective.loss_fn == "gspo" else None,
        sample_mismatch_n=(
            sample_means(case, case.old_n - case.sampled_n)[part] if objective.correction == "sequence_mask" else None
        ),
    )
    logprobs_n, entropy_n = token_logprobs(
        logits_nv[part], torch.tensor(case.tokens_n)[part], tensor(case.temperature_n)[part]
    )
    return loss_terms(logprobs_n, entropy_n, tokens, objective)


def gradient_of(loss: torch.Tensor, logits_nv: torch.Tensor) -> Array:
    (gradient,) = torch.autograd.grad(loss, logits_nv)
    result: Array = gradient.numpy()
    return result


def test_every_choice_of_the_parameters_has_its_golden_test() -> None:
    choices = {item.name: item.choices for item in describe()}
    assert set(choices["loss_fn"]) == set(LOSSES)
    assert choices["mismatch_correction"] == CORRECTIONS and choices["loss_aggregation"] == AGGREGATIONS
    config = Config(loss_fn="cispo", clip_ratio_low=0.1, mismatch_correction="token_mask", mismatch_cap=3.0)
    assert Objective.of(config) == Objective(
        loss_fn="cispo",
        bounds=Bounds(low=0.1, high=0.2),
        kl_coeff=0.0,
        ent_coeff=0.001,
        correction="token_mask",
        cap=3.0,
    )
    free = Objective.of(Config(loss_fn="importance_sampling", clip_ratio_low=0.1, mismatch_cap=3.0))
    ratio_n = tensor([1e-3, 1.0, 1e3])
    assert free.bounds.clip(ratio_n).tolist() == ratio_n.tolist() and free.cap == math.inf


@pytest.mark.parametrize(("loss_fn", "correction", "aggregation"), list(product(LOSSES, CORRECTIONS, AGGREGATIONS)))
def test_loss_and_gradient_are_those_of_the_formulas(loss_fn: str, correction: str, aggregation: str) -> None:
    objective = Objective(
        loss_fn=loss_fn,
        bounds=Bounds(low=0.2, high=0.28),
        kl_coeff=0.1,
        ent_coeff=0.05,
        correction=correction,
        cap=CAP,
    )
    for seed in range(3):
        case = make_case(seed)
        logits_nv = tensor(case.logits_nv).requires_grad_()
        loss = terms_of(case, objective, aggregation, logits_nv).loss / divisor(aggregation, len(case.tokens_n), 3)

        def function(x: Array, case: Case = case) -> float:
            return numpy_loss(case, objective, aggregation, x)

        assert loss.item() == pytest.approx(function(case.logits_nv), abs=1e-12)
        np.testing.assert_allclose(
            gradient_of(loss, logits_nv), numeric_gradient(function, case.logits_nv), atol=1e-8, err_msg=f"seed {seed}"
        )


@pytest.mark.parametrize(("loss_fn", "correction", "aggregation"), list(product(LOSSES, CORRECTIONS, AGGREGATIONS)))
def test_micro_batches_sum_to_the_batch_wherever_a_sample_is_cut(
    loss_fn: str, correction: str, aggregation: str
) -> None:
    objective = replace(PLAIN, loss_fn=loss_fn, correction=correction, cap=CAP, kl_coeff=0.1, ent_coeff=0.05)
    for seed in range(5):
        case = make_case(seed)
        logits_nv = tensor(case.logits_nv).requires_grad_()
        whole = terms_of(case, objective, aggregation, logits_nv)
        (at,) = np.random.default_rng(seed).integers(1, 8, 1)
        parts = [terms_of(case, objective, aggregation, logits_nv, part) for part in (slice(0, at), slice(at, None))]
        torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=1e-12, atol=1e-12)
        assert sum(int(part.num_clipped) for part in parts) == int(whole.num_clipped)
        assert max(float(part.ratio_max) for part in parts) == float(whole.ratio_max)
        summed = sum(gradient_of(part.loss, logits_nv) for part in parts)
        np.testing.assert_allclose(summed, gradient_of(whole.loss, logits_nv), atol=1e-12)


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
def test_the_clip_of_ppo_holds_back_only_what_went_far_enough_already(
    ratio: float, advantage: float, objective: float, gradient: float, is_clipped: bool
) -> None:
    logprobs = tensor([-1.0 + math.log(ratio)]).requires_grad_()
    tokens = TokenBatch(sampled_n=tensor([-1.0]), advantages_n=tensor([advantage]))
    terms = loss_terms(logprobs, torch.zeros_like(logprobs), tokens, PLAIN)
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    assert terms.loss.item() == pytest.approx(-objective, abs=1e-9)
    assert found.item() == pytest.approx(-gradient, abs=1e-9)
    assert int(terms.num_clipped) == is_clipped
    assert terms.ratio.item() == pytest.approx(ratio) and terms.ratio_max.item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient", "is_clipped"),
    [(1.0, 2.0, 2.0, False), (1.5, 1.0, 1.28, True), (0.5, -1.0, -0.8, True), (0.9, -1.0, -0.9, False)],
)
def test_the_clip_of_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, gradient: float, is_clipped: bool
) -> None:
    logprobs = tensor([-1.0 + math.log(ratio)]).requires_grad_()
    tokens = TokenBatch(sampled_n=tensor([-1.0]), advantages_n=tensor([advantage]))
    terms = loss_terms(logprobs, torch.zeros_like(logprobs), tokens, replace(PLAIN, loss_fn="cispo"))
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    assert found.item() == pytest.approx(-gradient, abs=1e-9)
    assert int(terms.num_clipped) == is_clipped


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_at_ratio_one_all_losses_have_the_gradient_of_reinforce(loss_fn: str) -> None:
    logprobs, advantages = tensor([-1.0, -0.3]).requires_grad_(), [1.5, -0.5]
    tokens = TokenBatch(sampled_n=logprobs.detach(), advantages_n=tensor(advantages))
    terms = loss_terms(logprobs, torch.zeros(2), tokens, replace(PLAIN, loss_fn=loss_fn))
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    assert (-found).tolist() == pytest.approx(advantages)


def test_without_log_probs_of_before_the_step_this_is_its_first_update_and_the_ratio_is_one() -> None:
    logprobs = tensor([-1.0, -0.3]).requires_grad_()
    tokens = TokenBatch(sampled_n=tensor([-1.4, -0.3]), advantages_n=tensor([1.0, 1.0]))
    terms = loss_terms(logprobs, torch.zeros(2), tokens, replace(PLAIN, correction="token_truncate", cap=1.2))
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    assert float(terms.ratio) == 2.0
    # exp(0.4) is cut off at the cap.
    assert (-found).tolist() == pytest.approx([1.2, 1.0])
    assert terms.num_corrected is not None and int(terms.num_corrected) == 1
    assert terms.kl.item() == pytest.approx(math.exp(0.4) - 1 - 0.4)


def test_a_masked_token_gives_no_gradient_but_that_of_kl_and_entropy() -> None:
    logprobs = tensor([-1.0]).requires_grad_()
    tokens = TokenBatch(
        sampled_n=tensor([-3.0]), advantages_n=tensor([1.0]), old_n=tensor([-1.0]), reference_n=tensor([-1.5])
    )
    masked = replace(PLAIN, correction="token_mask", cap=2.0, kl_coeff=0.1)
    terms = loss_terms(logprobs, torch.zeros(1), tokens, masked)
    (found,) = torch.autograd.grad(terms.loss, logprobs)
    # d/dx of 0.1 (exp(y - x) - 1 - (y - x)) with y - x = -0.5.
    assert found.item() == pytest.approx(0.1 * (1 - math.exp(-0.5)))


def test_tokens_count_alike_or_samples_do() -> None:
    # Three tokens of one sample (advantage 1), one of another (advantage -2), all at ratio 1.
    expected = {"token": -(3 - 2) / 4, "sequence": -(1 - 2) / 2, "constant": -(3 / 9 - 2 / 9) / 2}
    for aggregation, loss in expected.items():
        weights_s = token_weights(aggregation, tensor([3, 1]), MAX_LENGTH)
        tokens = TokenBatch(
            sampled_n=tensor([-1.0] * 4),
            advantages_n=tensor([1.0, 1.0, 1.0, -2.0]),
            weights_n=None if weights_s is None else weights_s[[0, 0, 0, 1]],
        )
        terms = loss_terms(tensor([-1.0] * 4), torch.zeros(4), tokens, PLAIN)
        assert terms.loss.item() / divisor(aggregation, 4, 2) == pytest.approx(loss)


def test_k3_is_the_formula_and_never_negative() -> None:
    expected = [math.exp(x) - 1 - x for x in (-0.7, 0.0, 0.4)]
    assert k3(tensor([-0.7, 0.0, 0.4])).tolist() == pytest.approx(expected, abs=1e-12)
    assert (k3(torch.linspace(-3, 3, 101)) >= 0).all()


def test_the_entropy_of_a_uniform_distribution_is_log_v() -> None:
    _, entropy = token_logprobs(torch.zeros(1, 8), torch.tensor([3]), torch.ones(1))
    assert entropy.item() == pytest.approx(math.log(8))


def test_the_numbers_beside_the_loss_are_sums_over_the_tokens() -> None:
    case = make_case(4)
    objective = replace(PLAIN, kl_coeff=0.1, ent_coeff=0.05)
    terms = terms_of(case, objective, "token", tensor(case.logits_nv).requires_grad_()).detached()
    policy = logprobs_of(case, case.logits_nv)
    ratios = np.exp(policy - case.sampled_n)
    assert terms.ratio.item() == pytest.approx(ratios.sum())
    assert terms.ratio_max.item() == pytest.approx(ratios.max())
    is_clipped = np.where(case.advantages_n > 0, ratios > 1.28, ratios < 0.8)
    assert int(terms.num_clipped) == is_clipped.sum() > 0
    assert terms.kl.item() == pytest.approx((ratios - 1 - np.log(ratios)).sum())
    difference = case.reference_n - policy
    assert terms.kl_reference is not None
    assert terms.kl_reference.item() == pytest.approx((np.exp(difference) - difference - 1).sum())
    probabilities = [softmax(row / t) for row, t in zip(case.logits_nv, case.temperature_n, strict=True)]
    assert terms.entropy.item() == pytest.approx(sum(-(p * np.log(p)).sum() for p in probabilities))
    assert terms.num_corrected is None and not terms.loss.requires_grad
