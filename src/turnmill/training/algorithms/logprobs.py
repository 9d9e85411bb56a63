"""From logits to what the losses are made of: log-probs of tokens, entropies, and the KL estimate from samples."""

import torch
from torch import Tensor


def token_logprobs(logits_nv: Tensor, tokens_n: Tensor, temperature_n: Tensor) -> tuple[Tensor, Tensor]:
    """[N] log-probs of tokens and [N] entropies (nats) of their distributions softmax(logits / temperature)."""
    log_p_nv = torch.log_softmax(logits_nv / temperature_n[:, None], dim=-1)
    logprobs_n = log_p_nv.gather(1, tokens_n[:, None])[:, 0]
    entropy_n = -(log_p_nv.exp() * log_p_nv).sum(dim=-1)
    return logprobs_n, entropy_n


def k3(log_ratio_n: Tensor) -> Tensor:
    """Per-token estimate r - 1 - log r >= 0 of KL(q, p) from samples of q, given log r = log p - log q: [N] -> [N].

    Schulman 2020, "Approximating KL Divergence"; arXiv:2402.03300, equation 4, is this with q the policy and p the
    reference.
    """
    return torch.expm1(log_ratio_n) - log_ratio_n
