"""GRPO on one page: pure tensors, no model, no I/O.

    advantages   group-relative rewards                                    arXiv:2402.03300 (DeepSeekMath), section 4.1
    clip         of the probability ratio, with a bound of its own up      arXiv:2503.14476 (DAPO), section 3.1
    loss         averaged over tokens of the whole batch, not of a sample  arXiv:2503.14476 (DAPO), section 3.3
    KL           the k3 estimator                                          arXiv:2402.03300, equation 4; Schulman 2020,
                                                                           "Approximating KL Divergence"

Every sampled token weighs the same, and each one is in exactly one row: how a conversation branched changes nothing.

Axes: G groups, S samples of a group, N sampled tokens of one micro-batch (flat), V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Added to the standard deviation of a group's rewards.
ADVANTAGE_EPS = 1e-4


def group_advantages(rewards_gs: Tensor) -> Tensor:
    """[G, S] rewards -> [G, S] advantages (r - mean) / (std + 1e-4) within each group; std is the sample's (S - 1)."""
    mean_g1 = rewards_gs.mean(dim=-1, keepdim=True)
    std_g1 = rewards_gs.std(dim=-1, keepdim=True)
    return (rewards_gs - mean_g1) / (std_g1 + ADVANTAGE_EPS)


def token_logprobs(logits_nv: Tensor, tokens_n: Tensor, temperature_n: Tensor) -> tuple[Tensor, Tensor]:
    """[N] log-probs of tokens and [N] entropies (nats) of their distributions softmax(logits / temperature)."""
    log_p_nv = torch.log_softmax(logits_nv / temperature_n[:, None], dim=-1)
    logprobs_n = log_p_nv.gather(1, tokens_n[:, None])[:, 0]
    entropy_n = -(log_p_nv.exp() * log_p_nv).sum(dim=-1)
    return logprobs_n, entropy_n


def k3(log_ratio_n: Tensor) -> Tensor:
    """Per-token estimate r - 1 - log r >= 0 of KL(q, p) from samples of q, given log r = log p - log q: [N] -> [N]."""
    return torch.expm1(log_ratio_n) - log_ratio_n


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The constants of the loss."""

    # The ratio is clipped to [1 - clip_low, 1 + clip_high].
    clip_low: float
    clip_high: float
    kl_coeff: float
    ent_coeff: float


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What one micro-batch adds to the batch: sums over its tokens divided by the tokens of the batch. Scalars."""

    # To be minimised; the only field with a gradient.
    loss: Tensor
    # Share of tokens whose clipped term is the smaller one, so that they give no gradient.
    clip_fraction: Tensor
    # k3 estimate of KL(sampler, policy).
    kl: Tensor
    # k3 estimate of KL(policy, reference); None without a reference.
    kl_reference: Tensor | None
    entropy: Tensor

    def detached(self) -> "LossTerms":
        """The numbers without what the gradient needs."""
        return replace(self, loss=self.loss.detach())


def token_loss(
    *,
    logprobs_n: Tensor,
    sampled_n: Tensor,
    advantages_n: Tensor,
    entropy_n: Tensor,
    reference_n: Tensor | None,
    num_tokens: int,
    weights: LossWeights,
) -> LossTerms:
    """Loss of one micro-batch, -sum(min(r A, clip(r) A) + ent H - kl k3) / num_tokens, r = exp(policy - sampler).

    `num_tokens` counts the trained tokens of the whole batch, so that the gradients of micro-batches sum to the
    gradient of the batch, however it was cut. With 1, sums are what comes out, to be divided when the batch is known.
    """
    log_ratio_n = logprobs_n - sampled_n
    ratio_n = log_ratio_n.exp()
    plain_n = ratio_n * advantages_n
    clipped_n = ratio_n.clamp(1 - weights.clip_low, 1 + weights.clip_high) * advantages_n
    objective_n = torch.minimum(plain_n, clipped_n)
    if weights.ent_coeff:
        objective_n = objective_n + weights.ent_coeff * entropy_n
    kl_reference: Tensor | None = None
    if reference_n is not None:
        kl_n = k3(reference_n - logprobs_n)
        objective_n = objective_n - weights.kl_coeff * kl_n
        kl_reference = kl_n.detach().sum() / num_tokens
    return LossTerms(
        loss=-objective_n.sum() / num_tokens,
        clip_fraction=(clipped_n < plain_n).sum() / num_tokens,
        kl=k3(log_ratio_n.detach()).sum() / num_tokens,
        kl_reference=kl_reference,
        entropy=entropy_n.detach().sum() / num_tokens,
    )
