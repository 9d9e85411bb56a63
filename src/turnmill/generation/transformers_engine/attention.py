"""Attention over slots: one pass of the model covers tokens of many rows, and only attention tells the rows apart.

    tokens of all rows, one behind the other -> embeddings, norms, projections: one long row [1, N]
                                             -> attention: by segment, each row against its own slot

So prefills and decodes share a pass without padding, and a pass costs its overhead once. transformers calls `attend`
through its own interface for attention functions; the model's code is what it was.

Axes: N tokens of the pass, B rows of a segment, T new tokens a row, S slots, Q query heads, H key-value heads,
C positions of a slot, P attended positions, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from turnmill.errors import InvalidInput
from turnmill.generation.transformers_engine.cache import rows_of

ATTENTION = "turnmill_slots"
# Arguments of some architectures that change the scores: left to the function that knows them.
_SPECIAL = frozenset(("softcap", "position_bias", "s_aux"))
# Rows times heads from which two batches of products are faster than the fused kernel, which costs less to call.
_MANY_HEADS = 64


@dataclass(kw_only=True)
class Segment:
    """Rows that are computed together."""

    # Slots, ascending: a range that is read as a view, or numbers whose rows are copied.
    slots: slice | torch.Tensor
    num_rows: int
    # T: tokens of the longest row, to whose length the others are padded on the left.
    width: int
    # Where the segment's tokens lie in the pass.
    start: int
    end: int
    # P: the keys 0..P-1 of each slot are read.
    num_attended: int
    # [B, 1, T, P], 0 or -inf, to be added to the scores.
    mask: torch.Tensor
    # With padding: for each of B * T cells its token in the pass, and the cells that hold tokens. None without.
    cells: tuple[torch.Tensor, torch.Tensor] | None
    # `mask` with a copy for each key-value head, [B * H, 1, P], made when first needed.
    _mask_of_heads: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_of_heads(self, num_heads: int) -> torch.Tensor:
        mask = self._mask_of_heads.get(num_heads)
        if mask is None:
            mask = self.mask.expand(-1, num_heads, -1, -1).reshape(-1, 1, self.num_attended)
            self._mask_of_heads[num_heads] = mask
        return mask


def register() -> None:
    """Make the function known to transformers under its name; doing so again changes nothing."""
    AttentionInterface.register(ATTENTION, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Sequence[Segment] | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, N, Q, D] of the queries [1, Q, N, D] against a layer's whole storage `key`, `value` [S, H, C, D].

    `attention_mask` is always None: the segments bring their own. Raises `InvalidInput` where the model does not pass
    them on.
    """
    if segments is None:
        raise InvalidInput("this model does not hand keyword arguments down to attention")
    query_nqd = query[0].transpose(0, 1)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    is_plain = query.dtype is torch.float32 and _SPECIAL.isdisjoint(kwargs)
    outputs = []
    for segment in segments:
        keys = rows_of(key, segment.slots, segment.num_attended)
        values = rows_of(value, segment.slots, segment.num_attended)
        if segment.width == 1 and is_plain:
            outputs.append(_attend_one(query_nqd[segment.start : segment.end], keys, values, segment, scaling))
            continue
        cells = segment.cells
        part = query_nqd[segment.start : segment.end] if cells is None else query_nqd.index_select(0, cells[0])
        part_bqtd = part.reshape(segment.num_rows, segment.width, *part.shape[1:]).transpose(1, 2)
        output, _ = sdpa_attention_forward(
            module, part_bqtd, keys, values, segment.mask, scaling=scaling, is_causal=False, **kwargs
        )
        output = output.reshape(-1, *output.shape[2:])
        outputs.append(output if cells is None else output.index_select(0, cells[1]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend_one(
    query_bqd: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scaling: float
) -> torch.Tensor:
    """[B, Q, D] for one token a row; query heads that share a key-value head are the rows of one product."""
    num_rows, num_heads = keys.shape[:2]
    if num_rows * num_heads < _MANY_HEADS:
        grouped = query_bqd.reshape(num_rows, num_heads, -1, query_bqd.shape[-1])
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=segment.mask, scale=scaling)
        return output.reshape(num_rows, -1, output.shape[-1])
    query = query_bqd.reshape(num_rows * num_heads, -1, query_bqd.shape[-1])
    # Slots and heads lie at even distances, so this is a view even where the positions are cut off.
    scores = torch.baddbmm(segment.mask_of_heads(num_heads), query, keys.flatten(0, 1).transpose(1, 2), alpha=scaling)
    output = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    return output.view(num_rows, -1, output.shape[-1])
