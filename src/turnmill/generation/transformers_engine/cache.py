"""A KV cache with one row a slot, written in place, under an unchanged transformers model.

A forward pass covers some slots (a contiguous range, read as a view, or any set, read as a copy) at positions of their
own. Stale content is never cleared between calls: the attention mask hides every position that is not past or present.
One extra position behind the last takes the writes of padding and of slots that are only along for the ride.

Axes: B rows of the pass, S slots, H key-value heads, P positions (capacity + 1), T new tokens, D head dimension.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer as [S, H, P, D], allocated at a layer's first write with the shapes seen there.

    So head counts and dimensions are the model's own, layer by layer, whatever its configuration calls them.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        # Positions that can be attended to; writes at index `capacity` go nowhere.
        self.capacity = capacity
        self._layers_shpd: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._slots_b = torch.zeros(0, dtype=torch.long)
        self._positions_bt = torch.zeros(0, 0, dtype=torch.long)
        self._num_attended = 0
        self._flat_index: dict[int, torch.Tensor] = {}

    def select(self, slots_b: torch.Tensor, positions_bt: torch.Tensor, num_attended: int, *, is_range: bool) -> None:
        """Say what the next forward pass covers.

        `slots_b` ascends and is contiguous when `is_range`. New keys go to `positions_bt`; attention sees the first
        `num_attended` positions of each row.
        """
        self._rows = slice(int(slots_b[0]), int(slots_b[-1]) + 1) if is_range else slots_b
        self._slots_b = slots_b
        self._positions_bt = positions_bt
        self._num_attended = num_attended
        self._flat_index.clear()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [B, H, T, D]; what attention reads, [B, H, num_attended, D]."""
        keys_shpd, values_shpd = self._storage(layer_idx, key_states, value_states)
        index = self._index(key_states.shape[1])
        keys_shpd.view(-1, keys_shpd.shape[-1]).index_copy_(0, index, key_states.reshape(-1, keys_shpd.shape[-1]))
        values_shpd.view(-1, values_shpd.shape[-1]).index_copy_(
            0, index, value_states.reshape(-1, values_shpd.shape[-1])
        )
        if isinstance(self._rows, slice):
            return keys_shpd[self._rows, :, : self._num_attended], values_shpd[self._rows, :, : self._num_attended]
        return (
            keys_shpd[:, :, : self._num_attended].index_select(0, self._rows),
            values_shpd[:, :, : self._num_attended].index_select(0, self._rows),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length, so the engine always gives positions itself and no model needs this."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys that attention sees."""
        return self._num_attended, 0

    def grow(self, capacity: int) -> None:
        """More positions; the content stays."""
        for index, pair in self._layers_shpd.items():
            grown = tuple(old.new_zeros(*old.shape[:2], capacity + 1, old.shape[3]) for old in pair)
            for old, new in zip(pair, grown, strict=True):
                new[:, :, : self.capacity] = old[:, :, : self.capacity]
            self._layers_shpd[index] = (grown[0], grown[1])
        self.capacity = capacity

    def clear(self, slot: int | None = None) -> None:
        """Zero one slot or all. Needed only for content that is not finite: a masked weight of 0 times NaN is NaN."""
        for pair in self._layers_shpd.values():
            for tensor in pair:
                (tensor if slot is None else tensor[slot]).zero_()

    def _storage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._layers_shpd.get(layer)
        if pair is None:
            pair = (self._empty(keys), self._empty(values))
            self._layers_shpd[layer] = pair
        return pair

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.num_slots, like.shape[1], self.capacity + 1, like.shape[3])

    def _index(self, num_heads: int) -> torch.Tensor:
        """Row numbers in a layer seen as [S * H * P, D], in the order of [B, H, T]; one for all layers of a pass."""
        index = self._flat_index.get(num_heads)
        if index is None:
            heads_bh = self._slots_b[:, None] * num_heads + torch.arange(num_heads)
            index = (heads_bh[:, :, None] * (self.capacity + 1) + self._positions_bt[:, None, :]).reshape(-1)
            self._flat_index[num_heads] = index
        return index
