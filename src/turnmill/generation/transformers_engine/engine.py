"""The slot engine: who sits in which slot, and what one step computes.

    submit -> slot (the conversation's own, or the longest unused) -> prefill of the new tokens -> decode ... -> result
                  ▲                                                                                               │
                  └────────────────────────── keep: the cache stays under the call's digest ◀──────────────────────┘

A step first prefills every call that joined, grouped by length, then decodes one token of every running call, so a call
leaves at the step in which its end token is sampled. Work a step is a few array operations over all rows; Python loops
run per call and never per token, because tiny models are dominated by overhead.

Axes: S slots, B rows of a pass, T new tokens, P attended positions, V vocabulary, W sampled tokens of a call.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from turnmill.errors import GenerationFailed, InvalidInput
from turnmill.generation.engine import EngineCall, EngineResult
from turnmill.generation.transformers_engine.cache import SlotCache
from turnmill.generation.transformers_engine.loading import (
    forward_keywords,
    load_model,
    model_fingerprint,
    replace_weights,
    usable_length,
)
from turnmill.generation.transformers_engine.sampling import draw, generator_of, uniforms
from turnmill.records import FinishReason, Version

Ints = npt.NDArray[np.int64]
BASE_VERSION = Version(incarnation=0, n=0)

# Uniforms are drawn this many at a time.
_BLOCK = 32
# Most tokens of a row, and of all rows with their padding, in one prefill pass: bounds the memory of the mask.
_CHUNK_TOKENS = 1024
_PASS_TOKENS = 4096
# Padding that a prefill pass may carry rather than be split: a pass costs about this many tokens of a tiny model.
_WASTED_TOKENS = 256
# Decode a range of slots as a view if at least this share of it runs, else copy the rows that do.
_DENSE_SHARE = 0.5
_FIRST_CAPACITY = 256


class TransformersEngine:
    """`Engine` on one process's CPU."""

    def __init__(
        self, folder: Path, *, num_slots: int = 64, max_length: int = 16384, dtype: torch.dtype = torch.float32
    ) -> None:
        """Load the base model as version 0.0; raises `InvalidInput` for a model that can't be served exactly."""
        self._model = load_model(folder, dtype)
        self._version = BASE_VERSION
        self._max_length = usable_length(self._model.config, max_length)
        self._cache_name, self._last_only = forward_keywords(self._model)
        # The logits' width, padding of the vocabulary included.
        self.vocab_size: int = self._model.get_output_embeddings().weight.shape[0]
        self._cache = SlotCache(num_slots, min(_FIRST_CAPACITY, self._max_length))
        self._zero = torch.zeros((), dtype=dtype)
        self._hidden = torch.full((), float("-inf"), dtype=dtype)
        # Per slot: positions in the cache, last sampled token (not in the cache yet), sampled and allowed tokens.
        self._length_s: Ints = np.zeros(num_slots, dtype=np.int64)
        self._last_id_s: Ints = np.zeros(num_slots, dtype=np.int64)
        self._count_s: Ints = np.zeros(num_slots, dtype=np.int64)
        self._limit_s: Ints = np.zeros(num_slots, dtype=np.int64)
        self._running_s = np.zeros(num_slots, dtype=bool)
        self._temperature_s = np.ones(num_slots, dtype=np.float32)
        self._restricted_s = np.zeros(num_slots, dtype=bool)
        self._uniform_sw = np.zeros((num_slots, _BLOCK))
        self._out_ids_sw: Ints = np.zeros((num_slots, _BLOCK), dtype=np.int64)
        self._out_logprobs_sw = np.zeros((num_slots, _BLOCK), dtype=np.float32)
        # End tokens as rows of booleans, one row for each distinct set.
        self._end_sets: dict[frozenset[int], int] = {}
        self._ends_ev = np.zeros((0, self.vocab_size), dtype=bool)
        self._end_set_s: Ints = np.zeros(num_slots, dtype=np.int64)
        self._generators: dict[int, np.random.Generator] = {}
        self._calls: dict[int, EngineCall] = {}
        self._to_prefill: dict[int, Ints] = {}
        # Slots without a running call, longest unused first.
        self._idle: dict[int, None] = dict.fromkeys(range(num_slots))
        self._slot_of_key: dict[str, int] = {}
        self._key_of_slot: dict[int, str] = {}
        # Ended calls whose caches were not named yet.
        self._slot_of_ended: dict[str, int] = {}
        self._ended_in_slot: dict[int, str] = {}
        self._check_exactness()

    @property
    def version(self) -> Version:
        return self._version

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def num_running(self) -> int:
        return len(self._calls)

    @property
    def num_free(self) -> int:
        return len(self._idle)

    # ------------------------------------------------------------ slots

    def held_length(self, prefix_key: str) -> int | None:
        slot = self._slot_of_key.get(prefix_key)
        return None if slot is None else int(self._length_s[slot]) + 1

    def submit(self, call: EngineCall) -> None:
        slot = self._slot_of_key.get(call.prefix_key) if call.prefix_key is not None else None
        if slot is not None:
            feed = np.array([self._last_id_s[slot], *call.new_ids], dtype=np.int64)
        elif call.prefix_key is not None and call.context_ids is None:
            raise GenerationFailed("missing_context", f"the cache of {call.call_id}'s conversation is not held")
        else:
            feed = np.array([*(call.context_ids or ()), *call.new_ids], dtype=np.int64)
        start = 0 if slot is None else int(self._length_s[slot])
        self._check(call, feed, start)
        if slot is None:
            if not self._idle:
                raise GenerationFailed("no_free_slot", "all slots run; ask num_free before submitting")
            slot = next(iter(self._idle))
        self._forget(slot)
        del self._idle[slot]
        self._reserve(start + len(feed) + call.max_new_tokens, call.max_new_tokens)
        self._length_s[slot] = start
        self._count_s[slot] = 0
        self._limit_s[slot] = call.max_new_tokens
        sampling = call.sampling
        self._temperature_s[slot] = sampling.temperature or 1.0
        self._restricted_s[slot] = not sampling.is_trainable
        self._end_set_s[slot] = self._end_set(call.end_ids)
        self._generators[slot] = generator_of(call.seed_parts)
        self._calls[slot] = call
        self._to_prefill[slot] = feed

    def keep(self, call_id: str, prefix_key: str) -> None:
        slot = self._slot_of_ended.pop(call_id, None)
        if slot is not None:
            self._drop_name(self._slot_of_key.get(prefix_key))
            self._slot_of_key[prefix_key] = slot
            self._key_of_slot[slot] = prefix_key

    def _check(self, call: EngineCall, feed: Ints, start: int) -> None:
        if not len(call.new_ids) or call.max_new_tokens < 1:
            raise GenerationFailed("invalid_request", "a call needs at least one new token and room for one more")
        if start + len(feed) + call.max_new_tokens > self._max_length:
            raise GenerationFailed(
                "context_length_exceeded",
                f"{start + len(feed)} tokens and {call.max_new_tokens} new ones exceed {self._max_length}",
            )
        if feed.min() < 0 or feed.max() >= self.vocab_size:
            raise GenerationFailed("invalid_request", f"token ids must be in 0..{self.vocab_size - 1}")

    def _forget(self, slot: int) -> None:
        """The idle slot's content has no name any more, neither a kept one nor that of its ended call."""
        self._drop_name(slot)
        self._slot_of_ended.pop(self._ended_in_slot.pop(slot, ""), None)

    def _drop_name(self, slot: int | None) -> None:
        if slot is not None and slot in self._key_of_slot:
            del self._slot_of_key[self._key_of_slot.pop(slot)]

    def _reserve(self, num_positions: int, num_sampled: int) -> None:
        """Grow caches and output buffers by doubling, at most to `max_length`."""
        if num_positions > self._cache.capacity:
            with torch.inference_mode():
                self._cache.grow(min(self._max_length, max(num_positions, 2 * self._cache.capacity)))
        width = self._out_ids_sw.shape[1]
        if num_sampled > width:
            extra = ((0, 0), (0, max(num_sampled, 2 * width) - width))
            self._out_ids_sw = np.pad(self._out_ids_sw, extra)
            self._out_logprobs_sw = np.pad(self._out_logprobs_sw, extra)

    def _end_set(self, end_ids: frozenset[int]) -> int:
        index = self._end_sets.get(end_ids)
        if index is None:
            row = np.zeros((1, self.vocab_size), dtype=bool)
            row[0, [token for token in end_ids if 0 <= token < self.vocab_size]] = True
            index = self._end_sets[end_ids] = len(self._end_sets)
            self._ends_ev = np.concatenate([self._ends_ev, row])
        return index

    # ------------------------------------------------------------ steps

    @torch.inference_mode()
    def step(self) -> list[EngineResult]:
        results: list[EngineResult] = []
        while self._to_prefill:
            for slots in self._prefill_groups():
                self._prefill(slots, results)
        rows_b = np.flatnonzero(self._running_s)
        if len(rows_b):
            logits_bv = self._decode(rows_b)
            self._length_s[rows_b] += 1
            self._sample(rows_b, logits_bv, results)
        return results

    def _prefill_groups(self) -> list[list[int]]:
        """Waiting slots by number of tokens, longest first, in passes of bounded size and bounded padding."""
        groups: list[list[int]] = []
        longest = wasted = 0
        for slot, feed in sorted(self._to_prefill.items(), key=lambda item: -len(item[1])):
            num = min(len(feed), _CHUNK_TOKENS)
            wasted += longest - num
            if groups and wasted <= _WASTED_TOKENS and (len(groups[-1]) + 1) * longest <= _PASS_TOKENS:
                groups[-1].append(slot)
            else:
                groups.append([slot])
                longest, wasted = num, 0
        return groups

    def _prefill(self, slots: Sequence[int], results: list[EngineResult]) -> None:
        """Feed each slot its tokens, or its next chunk of them; sample for those that are through.

        Rows are padded on the left: their last tokens line up, so the model computes one column of logits. Padding
        attends to position 0 and is written to the spare position.
        """
        rows_b = np.array(sorted(slots), dtype=np.int64)
        feeds = [self._to_prefill[slot] for slot in rows_b.tolist()]
        num_b = np.array([min(len(feed), _CHUNK_TOKENS) for feed in feeds], dtype=np.int64)
        width = int(num_b.max())
        ids_bt = np.zeros((len(rows_b), width), dtype=np.int64)
        for row, (feed, num) in enumerate(zip(feeds, num_b.tolist(), strict=True)):
            ids_bt[row, width - num :] = feed[:num]
        offset_bt = np.arange(width) - (width - num_b)[:, None]
        is_real_bt = offset_bt >= 0
        position_bt = np.where(is_real_bt, self._length_s[rows_b][:, None] + offset_bt, 0)
        write_bt = np.where(is_real_bt, position_bt, self._cache.capacity)
        is_range = int(rows_b[-1] - rows_b[0]) + 1 == len(rows_b)
        logits_bv = self._forward(rows_b, ids_bt, position_bt, write_bt, is_range)
        self._length_s[rows_b] += num_b
        ready = []
        for row, (slot, feed, num) in enumerate(zip(rows_b.tolist(), feeds, num_b.tolist(), strict=True)):
            if num < len(feed):
                self._to_prefill[slot] = feed[num:]
            else:
                del self._to_prefill[slot]
                ready.append(row)
        if ready:
            self._running_s[rows_b[ready]] = True
            self._sample(rows_b[ready], logits_bv if len(ready) == len(rows_b) else logits_bv[ready], results)

    def _decode(self, rows_b: Ints) -> torch.Tensor:
        """Logits [B, V] after one more token of each row.

        Slots inside of the range that do not run are computed too: they write at their own next position, which their
        next real token overwrites.
        """
        low, high = int(rows_b[0]), int(rows_b[-1]) + 1
        if len(rows_b) < _DENSE_SHARE * (high - low):
            positions_b1 = self._length_s[rows_b][:, None]
            return self._forward(rows_b, self._last_id_s[rows_b][:, None], positions_b1, positions_b1, False)
        positions_b1 = self._length_s[low:high, None]
        attended = int(self._length_s[rows_b].max()) + 1
        logits = self._forward(
            np.arange(low, high), self._last_id_s[low:high, None], positions_b1, positions_b1, True, attended
        )
        return logits if len(rows_b) == high - low else logits[torch.from_numpy(rows_b - low)]

    def _forward(
        self, rows_b: Ints, ids_bt: Ints, position_bt: Ints, write_bt: Ints, is_range: bool, attended: int = 0
    ) -> torch.Tensor:
        """Logits [B, V] of the last column. Position p attends to positions 0..p of its own slot."""
        attended = attended or int(position_bt.max()) + 1
        positions_bt = torch.from_numpy(position_bt)
        self._cache.select(torch.from_numpy(rows_b), torch.from_numpy(write_bt), attended, is_range=is_range)
        visible_b1tp = (torch.arange(attended) <= positions_bt[:, :, None])[:, None]
        output = self._model(
            input_ids=torch.from_numpy(ids_bt),
            attention_mask=torch.where(visible_b1tp, self._zero, self._hidden),
            position_ids=positions_bt,
            use_cache=True,
            **{self._cache_name: self._cache},
            **self._last_only,
        )
        logits_bv: torch.Tensor = output.logits[:, -1]
        return logits_bv

    def _sample(self, rows_b: Ints, logits_bv: torch.Tensor, results: list[EngineResult]) -> None:
        """Draw one token for each of these slots and end the calls that are through."""
        counts_b = self._count_s[rows_b]
        column_b = counts_b % _BLOCK
        for slot in rows_b[column_b == 0].tolist():
            self._uniform_sw[slot] = uniforms(self._generators[slot], _BLOCK)
        tokens, logprobs = draw(
            logits_bv,
            torch.from_numpy(self._temperature_s[rows_b]),
            torch.from_numpy(self._uniform_sw[rows_b, column_b]),
            self._restrictions(rows_b),
        )
        tokens_b, logprobs_b = tokens.numpy(), logprobs.numpy()
        self._out_ids_sw[rows_b, counts_b] = tokens_b
        self._out_logprobs_sw[rows_b, counts_b] = logprobs_b
        self._last_id_s[rows_b] = tokens_b
        self._count_s[rows_b] = counts_b + 1
        is_broken_b = ~np.isfinite(logprobs_b)
        has_stopped_b = self._ends_ev[self._end_set_s[rows_b], tokens_b]
        is_full_b = counts_b + 1 >= self._limit_s[rows_b]
        for row in np.flatnonzero(has_stopped_b | is_full_b | is_broken_b).tolist():
            slot = int(rows_b[row])
            results.append(self._end(slot, stopped=bool(has_stopped_b[row]), broken=bool(is_broken_b[row])))

    def _restrictions(self, rows_b: Ints) -> list[tuple[int, float, int, float]]:
        """(row, temperature, top_k, top_p) of the rows that do not draw from the full support."""
        found = []
        for row in np.flatnonzero(self._restricted_s[rows_b]).tolist():
            sampling = self._calls[int(rows_b[row])].sampling
            found.append((row, sampling.temperature, sampling.top_k, sampling.top_p))
        return found

    def _end(self, slot: int, *, stopped: bool, broken: bool) -> EngineResult:
        call = self._calls.pop(slot)
        num = int(self._count_s[slot])
        self._running_s[slot] = False
        self._generators.pop(slot)
        self._idle[slot] = None
        if broken:
            self._cache.clear(slot)
            num -= 1
        else:
            self._slot_of_ended[call.call_id] = slot
            self._ended_in_slot[slot] = call.call_id
        return EngineResult(
            call_id=call.call_id,
            token_ids=self._out_ids_sw[slot, :num].tolist(),
            logprobs=self._out_logprobs_sw[slot, :num].tolist(),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            error="the model's logits are not finite" if broken else None,
        )

    # ------------------------------------------------------------ weights

    def load(self, folder: Path, version: Version) -> None:
        if self._calls:
            raise GenerationFailed("busy", f"{len(self._calls)} calls run; weights are replaced only when none does")
        replace_weights(self._model, folder)
        self._version = version
        self._forget_all()

    def fingerprint(self) -> str:
        return model_fingerprint(self._model)

    def _forget_all(self) -> None:
        for slot in list(self._idle):
            self._forget(slot)
        self._length_s[:] = 0
        with torch.inference_mode():
            self._cache.clear()

    @torch.inference_mode()
    def _check_exactness(self) -> None:
        """Compare two passes through the slots with one plain pass: an architecture that ignores positions, mask or
        cache would otherwise sample wrong tokens in silence."""
        num = min(12, self._max_length)
        ids_1t = np.arange(num)[None] % self.vocab_size
        position_1t = np.arange(num)[None]
        slot = np.zeros(1, dtype=np.int64)
        plain_v = self._model(input_ids=torch.from_numpy(ids_1t), use_cache=False).logits[0, -1].float()
        for part in (slice(0, num - num // 2), slice(num - num // 2, num)):
            positions = position_1t[:, part].copy()
            slots_v = self._forward(slot, ids_1t[:, part].copy(), positions, positions, True)[0].float()
        worst = float((plain_v - slots_v).abs().max())
        if not worst <= 1e-2 * max(1.0, float(plain_v.abs().max())):
            raise InvalidInput(
                f"this model can't be served with slots: its logits differ by {worst:.3g} from plain ones"
            )
        self._forget_all()
