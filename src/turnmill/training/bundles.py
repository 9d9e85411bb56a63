"""Rows that begin alike share those tokens in a pass: laid out one behind the other, told apart by attention only.

    one bundle:  [ shared tokens P | row 0: T | row 1: T | ... ]        a pass: bundle | bundle | ...
    attention:   the shared tokens see themselves, a row sees them and itself

The samples of a group have the same prompt, and causal attention gives its tokens the same keys, values and gradients
in every row; so they are computed once, and their gradients are the sums that they would have been. transformers calls
`attend` through its own interface for attention functions; the model's code is what it was.

Axes: M positions of a pass, B rows of a bundle, P shared positions, T positions of a row behind them, Q query heads,
H key-value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "turnmill_bundles"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Rows that lie one behind the other in a pass, each right-padded to T, behind what all of them begin with."""

    # Numbers of the rows, longest first.
    rows: tuple[int, ...]
    # P; with 0 the rows are whole.
    num_shared: int
    # T.
    width: int

    @property
    def num_positions(self) -> int:
        return self.num_shared + len(self.rows) * self.width

    def places(self) -> Tensor:
        """[P + B * T] place of each position in its row, 0 being the row's first."""
        own = torch.arange(self.num_shared, self.num_shared + self.width)
        return torch.cat([torch.arange(self.num_shared), own.repeat(len(self.rows))])

    def mask(self) -> Tensor | None:
        """[1, 1, T, P + T] of a row's scores, 0 or -inf; None where plain causal attention is meant."""
        if not self.num_shared:
            return None
        hidden = torch.full((self.width, self.num_shared + self.width), float("-inf"))
        return hidden.triu_(self.num_shared + 1)[None, None]


def register() -> None:
    """Make the function known to transformers under its name; doing so again changes nothing."""
    AttentionInterface.register(ATTENTION, attend)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bundles: Sequence[tuple[Bundle, Tensor | None]] | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, M, Q, D] of one pass of bundles, each with its mask: queries [1, Q, M, D], keys and values [1, H, M, D].

    Without bundles it is plain causal attention over rows [B, Q, T, D], which may be padded on the right only;
    `attention_mask` is None in either case.
    """
    if bundles is None:
        return _sdpa(module, query, key, value, None, scaling), None
    sizes = [size for bundle, _ in bundles for size in (bundle.num_shared, len(bundle.rows) * bundle.width)]
    # Split, not sliced: the gradient of a slice is as large as what it was cut from.
    queries, keys, values = (torch.split(tensor[0], sizes, dim=1) for tensor in (query, key, value))
    outputs: list[Tensor] = []
    for number, (bundle, mask) in enumerate(bundles):
        own_query, own_key, own_value = (_rows(part[2 * number + 1], bundle) for part in (queries, keys, values))
        if mask is None:
            output = _sdpa(module, own_query, own_key, own_value, None, scaling)
        else:
            first_key, first_value = keys[2 * number][None], values[2 * number][None]
            first = _sdpa(module, queries[2 * number][None], first_key, first_value, None, scaling)
            outputs.append(first[0])
            seen_key, seen_value = _behind(first_key, own_key), _behind(first_value, own_value)
            output = _sdpa(module, own_query, seen_key, seen_value, mask, scaling)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None], None


def _rows(part_hnd: Tensor, bundle: Bundle) -> Tensor:
    """[B, H, T, D] of [H, B * T, D]."""
    num_heads, _, size = part_hnd.shape
    return part_hnd.view(num_heads, len(bundle.rows), bundle.width, size).transpose(0, 1)


def _behind(first: Tensor, own: Tensor) -> Tensor:
    """[B, H, P + T, D] of [1, H, P, D], which all rows share, and [B, H, T, D]."""
    return torch.cat([first.expand(len(own), -1, -1, -1), own], dim=2)


def _sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """[B, T, Q, D]; causal without a mask."""
    output: Tensor
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=mask is None)
    return output
