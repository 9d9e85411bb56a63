"""The policy losses: what is to be maximised for each token, given its advantage A and its ratio policy / old.

| name | objective of a token | paper |
|---|---|---|
| ppo | min(r A, clip(r) A) | arXiv:1707.06347 (PPO), equation 7; two bounds: arXiv:2503.14476 (DAPO), section 3.1 |
| cispo | sg(clip(r)) A log policy | arXiv:2506.13585 (MiniMax-M1), equations 4 and 5 |
| importance_sampling | r A | policy gradient with the ratio as importance weight, nothing clipped |
| gspo | min(s A, clip(s) A), s the ratio of the whole sample | arXiv:2507.18071 (GSPO), equations 5 and 7 |

clip(x) holds x within [1 - clip_ratio_low, 1 + clip_ratio_high], sg stops the gradient.

Where published variants differ: MiniMax-M1 trains CISPO with no lower bound, which is `clip_ratio_low` = 1 here; its
tokens keep a gradient when they are clipped. PPO's "dual clip" (a third bound for A < 0) is not used. GSPO's sample
ratio is the geometric mean of its tokens' ratios, so it stays much nearer to 1 than theirs, and the bounds that its
authors use are two orders of magnitude narrower (3e-4 and 4e-4). It has the form of the paper's GSPO-token (equations
13 and 14), which tokens give one by one, in whatever passes they are: where the tokens of a sample have one advantage
and one weight, that is GSPO's gradient; what is about single tokens (advantages of turns, mismatch weights) weighs
theirs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Their ratio is one number for all tokens of a sample, so it takes the log-probs of all of them.
SEQUENCE_LEVEL = frozenset({"gspo"})


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    def clip(self, ratio_n: Tensor) -> Tensor:
        return ratio_n.clamp(1 - self.low, 1 + self.high)


# Holds nothing back.
NO_BOUNDS = Bounds(low=1.0, high=math.inf)
# Losses that never ask for bounds.
UNBOUNDED = frozenset({"importance_sampling"})

# [N] ratios, [N] log-probs of the policy, [N] advantages, bounds -> [N] objectives, [N] whether the bounds acted.
Loss = Callable[[Tensor, Tensor, Tensor, Bounds], tuple[Tensor, Tensor]]


def token_ratio(logprobs_n: Tensor, old_n: Tensor) -> Tensor:
    """policy / old of each token."""
    return (logprobs_n - old_n).exp()


def sequence_ratio(logprobs_n: Tensor, sample_log_ratio_n: Tensor) -> Tensor:
    """The ratio of each token's sample, with the gradient of the token: sg(s) policy / sg(policy).

    `sample_log_ratio_n` is log s, the mean of log policy - log old over all trained tokens of the sample, for each
    token; without gradient, as they may be in other passes. Summed over the sample and divided by its length, the
    gradient is that of s.
    """
    return sample_log_ratio_n.exp() * (logprobs_n - logprobs_n.detach()).exp()


def ppo(ratio_n: Tensor, logprobs_n: Tensor, advantages_n: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A): no gradient where the policy has gone far enough already."""
    plain_n = ratio_n * advantages_n
    clipped_n = bounds.clip(ratio_n) * advantages_n
    return torch.minimum(plain_n, clipped_n), clipped_n < plain_n


def cispo(ratio_n: Tensor, logprobs_n: Tensor, advantages_n: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """sg(clip(r)) A log policy: the weight of a token is clipped, its gradient never vanishes."""
    ratio_n = ratio_n.detach()
    clipped_n = bounds.clip(ratio_n)
    return clipped_n * advantages_n * logprobs_n, clipped_n != ratio_n


def importance_sampling(
    ratio_n: Tensor, logprobs_n: Tensor, advantages_n: Tensor, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """r A: unbiased, and of large variance where the ratio is large."""
    return ratio_n * advantages_n, torch.zeros_like(ratio_n, dtype=torch.bool)


LOSSES: dict[str, Loss] = {
    "ppo": ppo,
    "cispo": cispo,
    "importance_sampling": importance_sampling,
    "gspo": ppo,
}
