"""A KV cache with one row a slot, written in place, under an unchanged transformers model.

A forward pass writes the keys and values of its tokens wherever each one belongs. What it reads is either the whole
storage, of which attention takes its rows itself, or the rows of some slots cut off behind a position: a range as a
view, any other set as a copy. Stale content is never cleared between calls: the attention mask hides every position
that is not past or present. One extra position behind the last takes the writes of padding.

Axes: B rows of the pass, S slots, H key-value heads, C positions (capacity + 1), T new tokens a row, N = B * T, D head
dimension.
"""

import math
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer as [S, H, C, D], allocated at a layer's first write with the shapes seen there.

    So head counts and dimensions are the model's own, layer by layer, whatever its configuration calls them.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        # Positions that can be attended to; writes at index `capacity` go nowhere.
        self.capacity = capacity
        self._layers_shcd: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots_n = torch.zeros(0, dtype=torch.long)
        self._positions_n = torch.zeros(0, dtype=torch.long)
        self._read: tuple[slice | torch.Tensor, int] | None = None
        self._flat_index: dict[int, torch.Tensor] = {}

    def select(
        self, slots_n: torch.Tensor, positions_n: torch.Tensor, read: tuple[slice | torch.Tensor, int] | None
    ) -> None:
        """Say where the next pass writes its tokens, row by row, and what it reads.

        `read` is (slots, number of positions), or None for the whole storage.
        """
        self._slots_n = slots_n
        self._positions_n = positions_n
        self._read = read
        self._flat_index.clear()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [B, H, T, D]; what attention reads, [B, H, attended, D] or [S, H, C, D]."""
        keys_shcd, values_shcd = self._storage(layer_idx, key_states, value_states)
        index = self._index(key_states.shape[1])
        for storage, states in ((keys_shcd, key_states), (values_shcd, value_states)):
            # Models hold the heads of a token together in memory, so token by token is mostly no copy.
            rows = states.transpose(1, 2).reshape(-1, states.shape[-1])
            storage.view(-1, storage.shape[-1]).index_copy_(0, index, rows)
        if self._read is None:
            return keys_shcd, values_shcd
        return rows_of(keys_shcd, *self._read), rows_of(values_shcd, *self._read)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length, so the engine always gives positions itself and no model needs this."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys that attention sees."""
        return self.capacity if self._read is None else self._read[1], 0

    def grow(self, capacity: int) -> None:
        """More positions; the content stays."""
        for index, pair in self._layers_shcd.items():
            grown = tuple(_zeros((*old.shape[:2], capacity + 1, old.shape[3]), old.dtype) for old in pair)
            for old, new in zip(pair, grown, strict=True):
                new[:, :, : self.capacity] = old[:, :, : self.capacity]
            self._layers_shcd[index] = (grown[0], grown[1])
        self.capacity = capacity

    def copy(self, source: int, slots: list[int], num_positions: int) -> None:
        """Give `slots` the first positions of `source`."""
        index_b = torch.tensor(slots)
        for pair in self._layers_shcd.values():
            for storage in pair:
                storage[index_b, :, :num_positions] = storage[source, :, :num_positions]

    def clear(self, slot: int | None = None) -> None:
        """Zero one slot or all. Needed only for content that is not finite: a masked weight of 0 times NaN is NaN."""
        for pair in self._layers_shcd.values():
            for tensor in pair:
                (tensor if slot is None else tensor[slot]).zero_()

    def _storage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._layers_shcd.get(layer)
        if pair is None:
            pair = (self._empty(keys), self._empty(values))
            self._layers_shcd[layer] = pair
        return pair

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return _zeros((self.num_slots, like.shape[1], self.capacity + 1, like.shape[3]), like.dtype)

    def _index(self, num_heads: int) -> torch.Tensor:
        """Row numbers in a layer seen as [S * H * C, D], in the order of [N, H]; one for all layers of a pass."""
        index = self._flat_index.get(num_heads)
        if index is None:
            heads_nh = self._slots_n[:, None] * num_heads + torch.arange(num_heads)
            index = (heads_nh * (self.capacity + 1) + self._positions_n[:, None]).reshape(-1)
            self._flat_index[num_heads] = index
        return index


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory from numpy, which asks for huge pages where torch does not: one pass touches thousands of rows far apart,
    more than the processor holds addresses of small pages."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def rows_of(storage_shcd: torch.Tensor, slots: slice | torch.Tensor, num_attended: int) -> torch.Tensor:
    """[B, H, num_attended, D]: a view of a range of slots, a copy of others."""
    if isinstance(slots, slice):
        return storage_shcd[slots, :, :num_attended]
    return storage_shcd[:, :, :num_attended].index_select(0, slots)
