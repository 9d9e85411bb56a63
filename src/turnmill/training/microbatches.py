"""How rows become forward passes: those with the same prompt together, sorted by length, cut where it costs least.

    rows -> families -> bundles -> passes -> collate -> MicroBatch

The plan is a pure function of the rows, so that a recorded batch is always cut in the same way.

Axes: M positions of a pass, N trained tokens of it, K trained tokens of all rows.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from turnmill.training.bundles import Bundle
from turnmill.training.samples import Row

# Most padding of a plan, as a share of its positions.
MAX_PADDING = 0.1
# What one more pass forward and backward costs, in positions: 3 to 4 ms against 25 to 35 us a position for the shipped
# model. For larger models it is less, and then padding is avoided a little less than it could be.
_PASS_POSITIONS = 128.0
# The same for one more bundle in a pass: its attention is called by itself, everything else is not.
_BUNDLE_POSITIONS = 64.0
# Larger passes are slower than two of half the size, however large the budget: what they work on leaves the caches. For
# the shipped model 1024 to 4096 positions are equal within noise, for one of a million parameters 2048 are 7 % faster
# than 11 000. And small ones keep all threads busy to the end of a batch.
_FAST_POSITIONS = 1024
# Rows that are at most this much shorter than the longest of them are never told apart: so the search stays short.
_SAME_LENGTH = 0.04
# Positions that a prompt must save to be shared.
_WORTH_SHARING = 128
# Most scores of a row whose attention needs a mask in memory, which sharing does.
_MASK_CELLS = 2**24


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One pass and its trained tokens."""

    bundles: tuple[Bundle, ...]
    # [M], bundle by bundle.
    ids_m: Tensor
    # Of each trained token: where in the pass it is predicted, its row and its position in that row.
    index_n: Tensor
    rows_n: Tensor
    positions_n: Tensor
    tokens_n: Tensor
    sampled_n: Tensor
    temperature_n: Tensor
    # Where it is among the trained tokens of all rows, row by row.
    flat_n: Tensor
    # Of the M positions.
    num_padding: int

    def picked(self, values_k: Tensor | None) -> Tensor | None:
        """Of something that is known of all trained tokens, what is about those of this pass."""
        return None if values_k is None else values_k[self.flat_n]

    def only(self, kept_n: Tensor) -> "MicroBatch":
        """The same pass, with those of its trained tokens where `kept_n` is true."""
        names = ("index_n", "rows_n", "positions_n", "tokens_n", "sampled_n", "temperature_n", "flat_n")
        return replace(self, **{name: getattr(self, name)[kept_n] for name in names})


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Rows that begin with the same `num_shared` tokens, longest first."""

    num_shared: int
    rows: list[int]


def plan(rows: Sequence[Row], max_positions: int, *, is_sharing: bool) -> list[tuple[Bundle, ...]]:
    """Passes of at most `max_positions` positions each; a row longer than that is alone in one.

    With `is_sharing`, prompts are shared where that pays, and a pass may have several bundles; without, each pass is
    one bundle of whole rows. As few passes as pay, but never more than `MAX_PADDING`. Ties keep their order.
    """
    fast = min(max_positions, _FAST_POSITIONS)
    lengths = [len(row.token_ids) for row in rows]
    by_length = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    families = _families(rows, by_length) if is_sharing else [_Family(num_shared=0, rows=by_length)]
    size = _even_size(families, lengths, fast) if is_sharing else fast
    each = _BUNDLE_POSITIONS if is_sharing else _PASS_POSITIONS
    weight = 1.0
    while True:
        bundles = [bundle for family in families for bundle in _cut(family, lengths, size, max_positions, weight, each)]
        num_positions = sum(bundle.num_positions for bundle in bundles)
        if sum(_padding(bundle, lengths) for bundle in bundles) <= MAX_PADDING * num_positions:
            return _packed(bundles, fast) if is_sharing else [(bundle,) for bundle in bundles]
        # Ends: where a cut costs next to nothing, each run is cut off from the others, and none is worth 10 %.
        weight /= 2


def _padding(bundle: Bundle, lengths: Sequence[int]) -> int:
    return sum(bundle.num_shared + bundle.width - lengths[i] for i in bundle.rows)


def _families(rows: Sequence[Row], order: Sequence[int]) -> list[_Family]:
    """Rows by prompt; those whose prompt is not worth sharing are one family that shares nothing."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index in order:
        row = rows[index]
        # Without its last token: what is read off there differs from row to row.
        by_prompt.setdefault(tuple(row.token_ids[: row.loss_mask.index(1) - 1]), []).append(index)
    families, others = [], []
    for prompt, members in by_prompt.items():
        longest = len(rows[members[0]].token_ids)
        is_small = longest * (longest - len(prompt)) <= _MASK_CELLS
        if len(prompt) * (len(members) - 1) >= _WORTH_SHARING and is_small:
            families.append(_Family(num_shared=len(prompt), rows=members))
        else:
            others += members
    if others:
        families.append(_Family(num_shared=0, rows=sorted(others, key=lambda i: (-len(rows[i].token_ids), i))))
    return families


def _even_size(families: Sequence[_Family], lengths: Sequence[int], max_positions: int) -> int:
    """Most positions of a bundle, so that passes come out about equal and even in number: threads share them."""
    total = sum(f.num_shared + sum(lengths[i] - f.num_shared for i in f.rows) for f in families)
    num_passes = -(-total // max_positions)
    num_passes += num_passes % 2 if num_passes > 1 else 0
    longest = max((lengths[i] for family in families for i in family.rows), default=0)
    return min(max_positions, -(-total // max(1, num_passes)) + longest)


def _most_rows(width: int, num_shared: int, size: int, max_positions: int) -> int:
    """Rows of `width` positions that a bundle of `size` takes; behind a long prompt, half as many as without one.

    With a long prompt a bundle may be larger than `size`: to compute the prompt again costs more. Attention copies the
    keys of the prompt for each row, so they are bounded as if the rows were whole.
    """
    room = max(size - num_shared, min(size // 2, max_positions - num_shared))
    return max(1, min(room // width, max_positions // (num_shared + width)))


def _cut(
    family: _Family, lengths: Sequence[int], size: int, max_positions: int, weight: float, each: float
) -> list[Bundle]:
    """The cheapest cuts between runs: dynamic programming over how many runs are cut already.

    A bundle costs `weight` times `each` and its prompt, beside its positions.
    """
    num_shared = family.num_shared
    own = [lengths[i] - num_shared for i in family.rows]
    runs = _runs(own)
    each = weight * (each + num_shared)
    num_runs = len(runs) - 1
    cost, begin = [0.0] + [float("inf")] * num_runs, [0] * (num_runs + 1)
    for first in range(num_runs):
        width = own[runs[first]]
        per_bundle = _most_rows(width, num_shared, size, max_positions)
        for last in range(first + 1, num_runs + 1):
            num_rows = runs[last] - runs[first]
            found = cost[first] + width * num_rows + each * -(-num_rows // per_bundle)
            if found < cost[last]:
                cost[last], begin[last] = found, first
    bundles: list[Bundle] = []
    last = num_runs
    while last:
        start, end = runs[begin[last]], runs[last]
        per_bundle = _most_rows(own[start], num_shared, size, max_positions)
        slices = _even(family.rows[start:end], per_bundle)
        bundles = [*(_bundle(rows, num_shared, lengths) for rows in slices), *bundles]
        last = begin[last]
    return bundles


def _bundle(rows: tuple[int, ...], num_shared: int, lengths: Sequence[int]) -> Bundle:
    if len(rows) == 1:
        # With whom?
        num_shared = 0
    return Bundle(rows=rows, num_shared=num_shared, width=lengths[rows[0]] - num_shared)


def _runs(lengths: Sequence[int]) -> list[int]:
    """Where rows of about one length begin, and the end; `lengths` descend."""
    starts: list[int] = []
    for index, length in enumerate(lengths):
        if not starts or length < (1 - _SAME_LENGTH) * lengths[starts[-1]]:
            starts.append(index)
    return [*starts, len(lengths)]


def _even(rows: Sequence[int], per_pass: int) -> list[tuple[int, ...]]:
    """As few slices of at most `per_pass` rows as there can be, of nearly equal size."""
    num = -(-len(rows) // per_pass)
    ends = list(accumulate(len(rows) // num + (i < len(rows) % num) for i in range(num)))
    return [tuple(rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _packed(bundles: Sequence[Bundle], max_positions: int) -> list[tuple[Bundle, ...]]:
    """Passes of about equal size: the largest bundle that is left goes to the emptiest pass (Graham, 1969).

    A bundle of more than `max_positions` is alone in a pass.
    """
    num_passes = -(-sum(bundle.num_positions for bundle in bundles) // max_positions)
    num_passes += num_passes % 2 if num_passes > 1 else 0
    order = sorted(range(len(bundles)), key=lambda i: (-bundles[i].num_positions, i))
    while True:
        passes: list[list[int]] = [[] for _ in range(min(num_passes, len(bundles)))]
        sizes = [(0, number) for number in range(len(passes))]
        for index in order:
            size, number = heapq.heappop(sizes)
            passes[number].append(index)
            heapq.heappush(sizes, (size + bundles[index].num_positions, number))
        if all(found <= max_positions or len(passes[number]) == 1 for found, number in sizes):
            return [tuple(bundles[i] for i in sorted(members)) for members in passes]
        # One by one would take half a minute where thousands of bundles are just too large for two in a pass.
        num_passes += max(1, num_passes // 16)


def collate(rows: Sequence[Row], starts: Sequence[int], bundles: tuple[Bundle, ...]) -> MicroBatch:
    """Tensors of a pass; `starts` says where each row's trained tokens begin among those of all rows."""
    ids: list[int] = []
    where: list[tuple[int, int, int]] = []
    tokens: list[int] = []
    values: list[tuple[float, float]] = []
    flat: list[int] = []
    num_padding = 0
    for bundle in bundles:
        shared = bundle.num_shared
        ids += rows[bundle.rows[0]].token_ids[:shared]
        for i in bundle.rows:
            row = rows[i]
            padding = shared + bundle.width - len(row.token_ids)
            num_padding += padding
            trained = [t for t, mask in enumerate(row.loss_mask) if mask]
            # A token is predicted at the position before it.
            start = len(ids) - shared - 1
            where += [(start + t, i, t) for t in trained]
            tokens += [row.token_ids[t] for t in trained]
            values += [(row.logprobs[t], row.temperatures[t]) for t in trained]
            flat += range(starts[i], starts[i] + len(trained))
            ids += row.token_ids[shared:] + [0] * padding
    index_n, rows_n, positions_n = torch.tensor(where).unbind(1)
    sampled_n, temperature_n = torch.tensor(values).unbind(1)
    return MicroBatch(
        bundles=bundles,
        ids_m=torch.tensor(ids),
        index_n=index_n,
        rows_n=rows_n,
        positions_n=positions_n,
        tokens_n=torch.tensor(tokens),
        sampled_n=sampled_n,
        temperature_n=temperature_n,
        flat_n=torch.tensor(flat),
        num_padding=num_padding,
    )
