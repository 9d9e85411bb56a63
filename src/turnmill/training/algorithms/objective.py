"""The whole loss of a micro-batch: policy term, entropy bonus, KL to the reference, each weighed and summed.

    loss = -sum over tokens of w_agg (w_mismatch J + ent_coeff H - kl_coeff k3(reference, policy))

Sums, not means: they are divided when it is known what the batch has (see `aggregation`).
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from turnmill.config import Config
from turnmill.training.algorithms import losses, mismatch
from turnmill.training.algorithms.logprobs import k3


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which loss, with which constants."""

    # One of `losses.LOSSES`.
    loss_fn: str
    bounds: losses.Bounds
    kl_coeff: float
    ent_coeff: float
    # One of `mismatch`, or none.
    correction: str = "none"
    cap: float = math.inf

    @classmethod
    def of(cls, config: Config) -> "Objective":
        """What a run is configured to minimise; a parameter that does nothing in it is not read."""
        is_bounded = config.loss_fn not in losses.UNBOUNDED
        is_corrected = config.mismatch_correction != "none"
        return cls(
            loss_fn=config.loss_fn,
            bounds=(
                losses.Bounds(low=config.clip_ratio_low, high=config.clip_ratio_high)
                if is_bounded
                else losses.NO_BOUNDS
            ),
            kl_coeff=config.kl_coeff,
            ent_coeff=config.ent_coeff,
            correction=config.mismatch_correction,
            cap=config.mismatch_cap if is_corrected else math.inf,
        )


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """What is known of the tokens of a micro-batch beside the policy's distributions. [N] each, without gradient."""

    sampled_n: Tensor
    # The policy's log-probs before the step's first update; None: this is the first one. Read with a correction only.
    old_n: Tensor | None = None
    advantages_n: Tensor
    # Of the reference; None without the KL term.
    reference_n: Tensor | None = None
    # `aggregation.token_weights`; None: all 1.
    weights_n: Tensor | None = None
    # Of each token's sample, for what is decided about samples: mean of log policy - log old, and of log old - log
    # sampled; None where nothing needs it.
    sample_log_ratio_n: Tensor | None = None
    sample_mismatch_n: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What one micro-batch adds to the batch: scalars, sums over its tokens."""

    # To be minimised; the only field with a gradient.
    loss: Tensor
    # Tokens whose ratio the bounds held back: with ppo and gspo they give no gradient.
    num_clipped: Tensor
    # Of policy / old.
    ratio: Tensor
    # The largest, no sum.
    ratio_max: Tensor
    # Tokens that the mismatch correction truncated or masked; None without one.
    num_corrected: Tensor | None
    # k3 estimate of KL(sampler, policy).
    kl: Tensor
    # k3 estimate of KL(policy, reference); None without a reference.
    kl_reference: Tensor | None
    entropy: Tensor
    advantage: Tensor
    # Of their squares.
    advantage_square: Tensor

    def detached(self) -> "LossTerms":
        """The numbers without what the gradient needs."""
        return replace(self, loss=self.loss.detach())


def loss_terms(logprobs_n: Tensor, entropy_n: Tensor, tokens: TokenBatch, objective: Objective) -> LossTerms:
    """The loss of one micro-batch, from the policy's log-probs of its tokens and the entropies where they were drawn.

    What decides about whole samples must come with `tokens`: `sample_log_ratio_n` for the losses in
    `losses.SEQUENCE_LEVEL` (unless this is the first update and the ratio 1), `sample_mismatch_n` for the corrections
    in `mismatch.SEQUENCE_LEVEL`.
    """
    old_n = _old(logprobs_n, tokens, objective)
    if tokens.sample_log_ratio_n is not None:
        ratio_n = losses.sequence_ratio(logprobs_n, tokens.sample_log_ratio_n)
    else:
        ratio_n = losses.token_ratio(logprobs_n, old_n)
    policy_n, is_clipped_n = losses.LOSSES[objective.loss_fn](
        ratio_n, logprobs_n, tokens.advantages_n, objective.bounds
    )
    num_corrected: Tensor | None = None
    if objective.correction != "none":
        log_n = tokens.sample_mismatch_n if tokens.sample_mismatch_n is not None else old_n - tokens.sampled_n
        correction_n, is_corrected_n = mismatch.mismatch_weights(objective.correction, log_n, objective.cap)
        policy_n = policy_n * correction_n
        num_corrected = is_corrected_n.sum()
    total_n = policy_n
    if objective.ent_coeff:
        total_n = total_n + objective.ent_coeff * entropy_n
    kl_reference: Tensor | None = None
    if tokens.reference_n is not None:
        kl_n = k3(tokens.reference_n - logprobs_n)
        total_n = total_n - objective.kl_coeff * kl_n
        kl_reference = kl_n.detach().sum()
    if tokens.weights_n is not None:
        total_n = total_n * tokens.weights_n
    ratio_n = ratio_n.detach()
    return LossTerms(
        loss=-total_n.sum(),
        num_clipped=is_clipped_n.sum(),
        ratio=ratio_n.sum(),
        ratio_max=ratio_n.max(),
        num_corrected=num_corrected,
        kl=k3((logprobs_n - tokens.sampled_n).detach()).sum(),
        kl_reference=kl_reference,
        entropy=entropy_n.detach().sum(),
        advantage=tokens.advantages_n.sum(),
        advantage_square=tokens.advantages_n.square().sum(),
    )


def _old(logprobs_n: Tensor, tokens: TokenBatch, objective: Objective) -> Tensor:
    """The log-probs that the ratio is against."""
    if objective.correction == "none":
        return tokens.sampled_n
    return logprobs_n.detach() if tokens.old_n is None else tokens.old_n
