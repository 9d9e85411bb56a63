"""Drawing tokens: inverse CDF with one uniform a token from a counter-based generator of the call's own.

The uniforms of a call follow from its seed alone, so what it samples depends on its batch only through float noise.

Axes: B rows, V vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch

from turnmill.records import digest_of

# Below 1 by more than the rounding of a float64 sum, so that the inverse CDF never runs past the last possible token.
_LARGEST_UNIFORM = 1.0 - 2.0**-40


def generator_of(seed_parts: tuple[str, ...]) -> np.random.Generator:
    """The call's generator: Philox keyed by a 128-bit hash of the parts."""
    key = int(digest_of(*(part.encode() for part in seed_parts)), 16)
    return np.random.Generator(np.random.Philox(key=key))


def uniforms(generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """The next `count` uniforms; drawing them in blocks of another size gives the same numbers."""
    return np.minimum(generator.random(count), _LARGEST_UNIFORM)


def draw(
    logits_bv: torch.Tensor,
    temperature_b: torch.Tensor,
    uniform_b: torch.Tensor,
    restricted: list[tuple[int, float, int, float]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-softmax(logits / temperature) over the full vocabulary, both [B].

    `restricted` lists the rows that do not draw from the full support: (row, temperature, top_k, top_p); temperature 0
    takes the most likely token. Such rows have temperature 1 in `temperature_b` when theirs is 0.
    """
    logprobs_bv = torch.log_softmax(logits_bv.float() / temperature_b[:, None], dim=-1)
    weights_bv = logprobs_bv.exp()
    for row, temperature, top_k, top_p in restricted:
        weights_bv[row] = _restrict(weights_bv[row], temperature, top_k, top_p)
    sums_bv = torch.cumsum(weights_bv, dim=-1, dtype=torch.float64)
    targets_b1 = (uniform_b * sums_bv[:, -1])[:, None]
    # The first index whose sum exceeds the target: it has weight > 0. NaN rows run past the end, hence the clamp.
    tokens_b1 = torch.searchsorted(sums_bv, targets_b1, right=True).clamp_(max=logits_bv.shape[-1] - 1)
    return tokens_b1[:, 0], logprobs_bv.gather(-1, tokens_b1)[:, 0]


def _restrict(weights_v: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The weights outside of the support set to 0: the k largest, then the fewest that together reach top_p."""
    if temperature == 0:
        top_k = 1
    num = min(top_k or len(weights_v), len(weights_v))
    # Stable, so that among equals the lowest id wins, as argmax has it.
    order = torch.argsort(weights_v, descending=True, stable=True)[:num]
    if top_p < 1.0:
        before = torch.cumsum(weights_v[order], 0) - weights_v[order]
        order = order[before < top_p * weights_v[order].sum()]
    kept = torch.zeros_like(weights_v)
    kept[order] = weights_v[order]
    return kept
