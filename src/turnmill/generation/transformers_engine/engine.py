"""The slot engine: who sits in which slot, and what one step computes.

    submit -> slot (the conversation's own, or the longest unused) -> prefill of the new tokens -> decode ... -> result
                  (a beginning that another slot holds is copied)
                  ▲                                                                                               │
                  └────────────────────────── keep: the cache stays under the call's digest ◀──────────────────────┘

A pass takes the prefills of the calls that joined and one token of every running call together, and samples for all of
them at once; a call leaves at the step in which its end token is sampled. Work a step is a few array operations over
all rows; Python loops run per call and never per token, because tiny models are dominated by overhead.

Axes: S slots, B rows of a pass, T new tokens, P attended positions, V vocabulary, W sampled tokens of a call.
"""

from pathlib import Path

import numpy as np
import torch

from turnmill.errors import GenerationFailed
from turnmill.generation.engine import EngineCall, EngineResult
from turnmill.generation.transformers_engine.loading import model_fingerprint, replace_weights
from turnmill.generation.transformers_engine.openings import Openings
from turnmill.generation.transformers_engine.passes import Group, Ints, Row, SlotModel, group_of
from turnmill.generation.transformers_engine.sampling import draw, generator_of, uniforms
from turnmill.records import FinishReason, Version
from turnmill.weights import WEIGHTS_FILE, Lora

BASE_VERSION = Version(incarnation=0, n=0)

# Uniforms are drawn this many at a time.
_BLOCK = 32
# Most tokens of a row, and of all rows, in one pass: bounds the memory of the mask, and how long running calls wait.
_CHUNK_TOKENS = 1024
_PASS_TOKENS = 4096
# Padding that a group may carry rather than be split: a group costs attention about this many tokens of a tiny model.
_WASTED_TOKENS = 256


class TransformersEngine:
    """`StreamingEngine` on one process's CPU."""

    def __init__(
        self,
        folder: Path,
        *,
        num_slots: int = 64,
        max_length: int = 16384,
        dtype: torch.dtype = torch.float32,
        lora: Lora | None = None,
    ) -> None:
        """Load the base model, with the adapter that a run begins with, as version 0.0.

        Raises `InvalidInput` for a model that can't be served exactly.
        """
        self._model = SlotModel(folder, num_slots=num_slots, max_length=max_length, dtype=dtype, lora=lora)
        self._cache = self._model.cache
        self._version = BASE_VERSION
        self._max_length = self._model.max_length
        self.vocab_size = self._model.vocab_size
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
        # Slots whose calls a text may end.
        self._watched_s = np.zeros(num_slots, dtype=bool)
        self._calls: dict[int, EngineCall] = {}
        self._to_prefill: dict[int, Ints] = {}
        # Beginnings of conversations, and slots that hold them or will after their prefill.
        self._openings = Openings()
        # Slots without a running call, longest unused first.
        self._idle: dict[int, None] = dict.fromkeys(range(num_slots))
        self._slot_of_key: dict[str, int] = {}
        self._key_of_slot: dict[int, str] = {}
        # Ended calls whose caches were not named yet.
        self._slot_of_ended: dict[str, int] = {}
        self._ended_in_slot: dict[int, str] = {}

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
            if self._openings.begin(slot, feed):
                start, feed = len(feed) - 1, feed[-1:]
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
        self._watched_s[slot] = call.is_over is not None
        self._to_prefill[slot] = feed

    def keep(self, call_id: str, prefix_key: str) -> None:
        slot = self._slot_of_ended.pop(call_id, None)
        if slot is not None:
            self._drop_name(self._slot_of_key.get(prefix_key))
            self._slot_of_key[prefix_key] = slot
            self._key_of_slot[slot] = prefix_key

    def sampled(self, call_id: str, start: int) -> list[int]:
        slot = self._slot_of_running(call_id)
        ids: list[int] = [] if slot is None else self._out_ids_sw[slot, start : int(self._count_s[slot])].tolist()
        return ids

    def cancel(self, call_id: str) -> None:
        slot = self._slot_of_running(call_id)
        if slot is None:
            return
        del self._calls[slot]
        del self._generators[slot]
        self._running_s[slot] = False
        if self._to_prefill.pop(slot, None) is not None:
            # It holds a part of its beginning only.
            self._openings.drop(slot)
        self._idle[slot] = None

    def _slot_of_running(self, call_id: str) -> int | None:
        return next((slot for slot, call in self._calls.items() if call.call_id == call_id), None)

    def _check(self, call: EngineCall, feed: Ints, start: int) -> None:
        if not len(feed) or call.max_new_tokens < 1:
            raise GenerationFailed("invalid_request", "a call needs a token to go on from and room for one more")
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
        has_joined = bool(self._to_prefill)
        if self._calls:
            self._pass(results)
        while self._to_prefill:
            self._pass(results)
        if has_joined and not results:
            # So a call of one token and an end token is answered by the step that it joins.
            self._pass(results)
        return results

    def _pass(self, results: list[EngineResult]) -> None:
        """One token for each running call, and a part of what waits for its prefill, in one forward pass."""
        running_b = np.flatnonzero(self._running_s)
        groups = []
        if len(running_b):
            groups.append(
                Group(
                    slots_b=running_b,
                    ids_bt=self._last_id_s[running_b, None],
                    num_b=np.ones_like(running_b),
                    start_b=self._length_s[running_b],
                )
            )
        groups += self._prefill_groups(max(1, _PASS_TOKENS - len(running_b)))
        logits_bv = self._model.logits(groups)
        slots_b = np.concatenate([group.slots_b for group in groups])
        num_b = np.concatenate([group.num_b for group in groups])
        self._length_s[slots_b] += num_b
        unready = []
        for row in range(len(running_b), len(slots_b)):
            slot, num = int(slots_b[row]), int(num_b[row])
            feed = self._to_prefill.pop(slot)
            if num < len(feed):
                self._to_prefill[slot] = feed[num:]
                unready.append(row)
            else:
                self._running_s[slot] = True
        if unready:
            kept = np.delete(np.arange(len(slots_b)), unready)
            slots_b, logits_bv = slots_b[kept], logits_bv[torch.from_numpy(kept)]
        if len(slots_b):
            self._sample(slots_b, logits_bv, results)

    def _prefill_groups(self, num_tokens: int) -> list[Group]:
        """At most so many tokens of the calls that wait, those of similar length together."""
        rows: list[Row] = []
        for source, slots in self._openings.ready(self._to_prefill, self._length_s):
            num_shared = len(self._to_prefill[slots[0]]) - 1
            self._cache.copy(source, slots, num_shared)
            for slot in slots:
                # Its last token is computed for each call, because its logits are what the call samples from.
                self._length_s[slot] = num_shared
                self._to_prefill[slot] = self._to_prefill[slot][num_shared:]
        for slot, feed in self._to_prefill.items():
            if self._openings.waits(slot):
                continue
            num = min(len(feed), _CHUNK_TOKENS, num_tokens)
            if num < 1:
                break
            rows.append(Row(slot=slot, ids=feed[:num], start=int(self._length_s[slot])))
            num_tokens -= num
        rows.sort(key=lambda row: -len(row.ids))
        parts: list[list[Row]] = []
        wasted = 0
        for row in rows:
            wasted += len(parts[-1][0].ids) - len(row.ids) if parts else 0
            if parts and wasted <= _WASTED_TOKENS:
                parts[-1].append(row)
            else:
                parts.append([row])
                wasted = 0
        return [group_of(part) for part in parts]

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
        for row in np.flatnonzero(self._watched_s[rows_b] & ~has_stopped_b & ~is_broken_b).tolist():
            has_stopped_b[row] = self._is_over(int(rows_b[row]))
        is_full_b = counts_b + 1 >= self._limit_s[rows_b]
        for row in np.flatnonzero(has_stopped_b | is_full_b | is_broken_b).tolist():
            slot = int(rows_b[row])
            results.append(self._end(slot, stopped=bool(has_stopped_b[row]), broken=bool(is_broken_b[row])))

    def _is_over(self, slot: int) -> bool:
        is_over = self._calls[slot].is_over
        return is_over is not None and is_over(self._out_ids_sw[slot, : int(self._count_s[slot])].tolist())

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
            self._openings.drop(slot)
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
        replace_weights(self._model.replaceable(), folder / WEIGHTS_FILE)
        self._version = version
        self._forget_all()

    def fingerprint(self) -> str:
        return model_fingerprint(self._model.model)

    def _forget_all(self) -> None:
        for slot in list(self._idle):
            self._forget(slot)
            self._openings.drop(slot)
        self._length_s[:] = 0
        with torch.inference_mode():
            self._cache.clear()
