"""Forward passes: which tokens of which slots go in, the logits behind each row's last token come out.

    packed: groups -> one row of all tokens -> model, attention by segment -> logits
    padded: each group -> [B, T] with padding on the left -> model with a mask -> logits, group by group

Packed is for models that call attention through transformers' interface for it; padded is for the others. Both are
compared with plain forward passes before the first call is served.

Axes: B rows of a group, T tokens of its longest row, N tokens of a pass, P attended positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from turnmill.errors import InvalidInput
from turnmill.generation.transformers_engine.attention import ATTENTION, Segment, register
from turnmill.generation.transformers_engine.cache import SlotCache
from turnmill.generation.transformers_engine.linear import use_switching_linear
from turnmill.generation.transformers_engine.loading import forward_keywords, load_model, usable_length
from turnmill.weights import Lora

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_FIRST_CAPACITY = 256
_CHECKED_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that one pass computes together, of about equal numbers of tokens."""

    # Slots, ascending.
    slots_b: Ints
    # [B, T], padded on the left.
    ids_bt: Ints
    # Tokens of each row, 1 to T, and the position of the first.
    num_b: Ints
    start_b: Ints

    def offsets(self) -> tuple[Ints, Bools | None]:
        """(positions, whether a token is there), both [B, T]; padding is at position 0, which every slot has.

        The latter is None without padding.
        """
        width = self.ids_bt.shape[1]
        if width == 1:
            return self.start_b[:, None], None
        offset_bt = np.arange(width) - (width - self.num_b)[:, None]
        is_real_bt = offset_bt >= 0
        if is_real_bt.all():
            return self.start_b[:, None] + offset_bt, None
        return np.where(is_real_bt, self.start_b[:, None] + offset_bt, 0), is_real_bt

    def rows(self) -> slice | torch.Tensor:
        """The slots as a range, if they are one."""
        low, high = int(self.slots_b[0]), int(self.slots_b[-1]) + 1
        return slice(low, high) if high - low == len(self.slots_b) else torch.from_numpy(self.slots_b)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens of one slot for one pass."""

    slot: int
    ids: Ints
    # Position of the first.
    start: int


def group_of(rows: Sequence[Row]) -> Group:
    """At least one row, each of at least one token."""
    rows = sorted(rows, key=lambda row: row.slot)
    width = max(len(row.ids) for row in rows)
    ids_bt = np.zeros((len(rows), width), dtype=np.int64)
    for ids_t, row in zip(ids_bt, rows, strict=True):
        ids_t[width - len(row.ids) :] = row.ids
    return Group(
        slots_b=np.array([row.slot for row in rows], dtype=np.int64),
        ids_bt=ids_bt,
        num_b=np.array([len(row.ids) for row in rows], dtype=np.int64),
        start_b=np.array([row.start for row in rows], dtype=np.int64),
    )


class SlotModel:
    """A model of transformers and the cache under it; position p of a slot attends to positions 0..p of that slot."""

    def __init__(
        self, folder: Path, *, num_slots: int, max_length: int, dtype: torch.dtype, lora: Lora | None = None
    ) -> None:
        """Raises `InvalidInput` for a model that can't be served exactly, or can't have this adapter."""
        self.model = load_model(folder, dtype)
        self._lora = lora
        if lora is not None:
            # Imports peft.
            from turnmill.generation.transformers_engine.adapters import inject

            inject(self.model, lora)
        self.max_length = usable_length(self.model.config, max_length)
        # The logits' width, padding of the vocabulary included.
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.cache = SlotCache(num_slots, min(_FIRST_CAPACITY, self.max_length))
        self._cache_name, self._can_choose = forward_keywords(self.model)
        self._zero = torch.zeros((), dtype=dtype)
        self._hidden = torch.full((), float("-inf"), dtype=dtype)
        # Whether all groups go in one pass, rather than each in its own.
        self.is_packed = False
        self._choose()

    def replaceable(self) -> dict[str, torch.Tensor]:
        """What a weight version holds, by the names that it has there: all weights, or those of the adapter."""
        if self._lora is None:
            return dict(self.model.state_dict())
        from turnmill.generation.transformers_engine.adapters import adapter_tensors

        return adapter_tensors(self.model)

    def logits(self, groups: Sequence[Group]) -> torch.Tensor:
        """[rows of all groups, V], in their order."""
        if self.is_packed:
            return self._packed(groups)
        return torch.cat([self._padded(group) for group in groups])

    def _padded(self, group: Group) -> torch.Tensor:
        positions_bt, is_real_bt = group.offsets()
        slots_n = group.slots_b.repeat(positions_bt.shape[1])
        written_bt = positions_bt if is_real_bt is None else np.where(is_real_bt, positions_bt, self.cache.capacity)
        num_attended = int(positions_bt.max()) + 1
        self.cache.select(
            torch.from_numpy(slots_n), torch.from_numpy(written_bt.reshape(-1)), (group.rows(), num_attended)
        )
        output = self.model(
            input_ids=torch.from_numpy(group.ids_bt),
            attention_mask=self._mask(positions_bt, num_attended),
            position_ids=torch.from_numpy(positions_bt),
            use_cache=True,
            **{self._cache_name: self.cache},
            **({"logits_to_keep": 1} if self._can_choose else {}),
        )
        logits_bv: torch.Tensor = output.logits[:, -1]
        return logits_bv

    def _packed(self, groups: Sequence[Group]) -> torch.Tensor:
        segments, ids, positions, slots = [], [], [], []
        start = 0
        for group in groups:
            positions_bt, is_real_bt = group.offsets()
            num_attended = int((group.start_b + group.num_b).max())
            ids.append(group.ids_bt.reshape(-1) if is_real_bt is None else group.ids_bt[is_real_bt])
            positions.append(positions_bt.reshape(-1) if is_real_bt is None else positions_bt[is_real_bt])
            slots.append(group.slots_b.repeat(group.num_b))
            end = start + len(ids[-1])
            segments.append(
                Segment(
                    slots=group.rows(),
                    num_rows=len(group.slots_b),
                    width=group.ids_bt.shape[1],
                    start=start,
                    end=end,
                    num_attended=num_attended,
                    mask=self._mask(positions_bt, num_attended),
                    cells=None if is_real_bt is None else _cells(is_real_bt, start),
                )
            )
            start = end
        positions_n = torch.from_numpy(np.concatenate(positions))
        num_b = np.concatenate([group.num_b for group in groups])
        # 0 asks for the logits of all.
        kept: torch.Tensor | int = torch.from_numpy(num_b.cumsum() - 1) if len(num_b) < start else 0
        self.cache.select(torch.from_numpy(np.concatenate(slots)), positions_n, None)
        output = self.model(
            input_ids=torch.from_numpy(np.concatenate(ids))[None],
            position_ids=positions_n[None],
            use_cache=True,
            segments=segments,
            **{self._cache_name: self.cache},
            **({"logits_to_keep": kept} if self._can_choose else {}),
        )
        logits_bv: torch.Tensor = output.logits[0]
        return logits_bv if self._can_choose or len(num_b) == start else logits_bv[kept]

    def _mask(self, positions_bt: Ints, num_attended: int) -> torch.Tensor:
        """[B, 1, T, P], to be added to attention's scores."""
        visible_btp = torch.arange(num_attended) <= torch.from_numpy(positions_bt)[:, :, None]
        return torch.where(visible_btp, self._zero, self._hidden)[:, None]

    # ------------------------------------------------------------ the check at the start

    @torch.inference_mode()
    def _choose(self) -> None:
        """Packed if that is exact with this model, else padded.

        An architecture that ignores positions, mask or cache would otherwise sample wrong tokens in silence.
        """
        num = min(_CHECKED_TOKENS, self.max_length)
        paths = [np.arange(num) % self.vocab_size, np.arange(num)[::-1] * 3 % self.vocab_size]
        plain = [
            self.model(input_ids=torch.from_numpy(path.copy())[None], use_cache=False).logits[0].float()
            for path in paths
        ]
        use_switching_linear(self.model)
        original = self.model.config._attn_implementation
        if original == "sdpa" and getattr(self.model, "_supports_attention_backend", False):
            register()
            self.model.set_attn_implementation(ATTENTION)
            self.is_packed = True
            try:
                self._check_exactness(paths, plain)
            except InvalidInput:
                self.model.set_attn_implementation(original)
                self.is_packed = False
            else:
                return
        self._check_exactness(paths, plain)

    def _check_exactness(self, paths: Sequence[Ints], plain: Sequence[torch.Tensor]) -> None:
        """Run paths through slots in unequal parts, padded in one group, in a group each, and token by token."""
        slots = sorted({0, self.cache.num_slots - 1})
        done = dict.fromkeys(slots, 0)
        differences = []
        for twelfths, is_one_group in (((5, 3), True), ((10, 4), True), ((11, 11), False), ((12, 12), True)):
            rows = []
            for slot, path, share in zip(slots, paths, twelfths, strict=False):
                end = len(path) * share // 12
                if end > done[slot]:
                    rows.append(Row(slot=slot, ids=path[done[slot] : end], start=done[slot]))
                    done[slot] = end
            groups = [group_of(rows)] if is_one_group else [group_of([row]) for row in rows]
            for row, logits_v in zip(rows, self.logits(groups) if rows else (), strict=True):
                expected_v = plain[slots.index(row.slot)][done[row.slot] - 1]
                differences.append(float((expected_v - logits_v.float()).abs().max()))
        self.cache.clear()
        # Written so that NaN fails.
        bound = 1e-2 * max(1.0, max(float(logits_tv.abs().max()) for logits_tv in plain))
        if not all(difference <= bound for difference in differences):
            raise InvalidInput(
                f"this model can't be served with slots: its logits differ by {max(differences):.3g} from plain ones"
            )


def _cells(is_real_bt: Bools, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(for each cell its token, the cells with tokens): padding stands for the row's first token, and is dropped."""
    is_real = is_real_bt.reshape(-1)
    tokens = np.maximum(is_real.cumsum() - 1, 0) + start
    return torch.from_numpy(tokens), torch.from_numpy(np.flatnonzero(is_real))
