"""Weights for what sampler and trainer see differently: other kernels, another precision, older weights.

| name | weight w of a token, x = old / sampled | source |
|---|---|---|
| token_truncate | min(x, cap) | truncated importance sampling, arXiv:1802.01561 (IMPALA), 4.1; Yao et al. 2025 |
| token_mask | x within [1 / cap, cap], else 0 | IcePop, arXiv:2510.18855 (Ring-1T) |
| sequence_mask | 1 where the geometric mean of x over the sample is in [1 / cap, cap], else 0 | Liu et al. 2025 |

Yao et al.: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Liu et al.: "When Speed Kills
Stability: Demystifying RL Collapse from the Training-Inference Mismatch".

`sampled` is the sampler's probability of a token, `old` the policy's before the step's first update. With a correction
the ratio that a loss clips is policy / old, so that it says how far the step has gone, and w makes up for the rest
(decoupled PPO: arXiv:2110.00641; arXiv:2505.24298, AReaL, section 5.2). Without one the ratio is policy / sampled.

A weight has no gradient, and is of the policy's term alone: the KL term and the entropy bonus are not about what was
sampled better or worse. A masked token still counts where the loss is averaged, as in IcePop. Where published variants
differ: the masks here have the cap's inverse as their lower bound.
"""

import math

import torch
from torch import Tensor

# Its weight is one number for all tokens of a sample.
SEQUENCE_LEVEL = frozenset({"sequence_mask"})


def mismatch_weights(correction: str, log_ratio_n: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """[N] weights, and [N] whether a token was truncated or masked.

    `log_ratio_n` is log old - log sampled of each token; of those in `SEQUENCE_LEVEL` its mean over the token's sample.
    """
    ratio_n = log_ratio_n.exp()
    if correction == "token_truncate":
        return ratio_n.clamp(max=cap), ratio_n > cap
    is_out_n = log_ratio_n.abs() > math.log(cap)
    kept_n = ratio_n if correction == "token_mask" else torch.ones_like(ratio_n)
    return torch.where(is_out_n, 0.0, kept_n), is_out_n
