"""How rows become forward passes: sorted by length, cut where it costs least, right-padded.

    lengths -> plan -> collate -> MicroBatch

The plan is a pure function of the lengths, so that a recorded batch is always cut in the same way.

Axes: B rows of a micro-batch, T positions, N trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from turnmill.training.samples import Row

# Most padding of a plan, as a share of its positions.
MAX_PADDING = 0.1
# What one more pass forward and backward costs, in positions: 3 to 4 ms against 25 to 35 us a position for the shipped
# model. For larger models it is less, and then padding is avoided a little less than it could be.
_PASS_POSITIONS = 128.0
# Larger passes are slower than two of half the size, however large the budget: what they work on leaves the caches. For
# the shipped model 1024 to 4096 positions are equal within noise, for one of a million parameters 2048 are 7 % faster.
_FAST_POSITIONS = 2048
# Rows that are at most this much shorter than the longest of them are never told apart: so the search stays short.
_SAME_LENGTH = 0.04


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Right-padded rows and their trained tokens."""

    # Which of the rows, in order.
    rows: tuple[int, ...]
    ids_bt: Tensor
    # Row and position of each trained token, ascending.
    rows_n: Tensor
    positions_n: Tensor
    tokens_n: Tensor
    sampled_n: Tensor
    temperature_n: Tensor
    advantages_n: Tensor


def plan(lengths: Sequence[int], max_positions: int) -> list[tuple[int, ...]]:
    """Indices of rows, longest first, cut into micro-batches of at most `max_positions` padded positions each.

    A row longer than that is alone. As few passes as pay, but never more than `MAX_PADDING`. Ties keep their order.
    """
    max_positions = min(max_positions, _FAST_POSITIONS)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    runs = _runs([lengths[i] for i in order])
    pass_positions = _PASS_POSITIONS
    while True:
        batches = _cut(order, lengths, runs, max_positions, pass_positions)
        num_positions = sum(lengths[batch[0]] * len(batch) for batch in batches)
        if num_positions - sum(lengths) <= MAX_PADDING * num_positions:
            return batches
        # Ends: where a pass costs next to nothing, each run is cut off from the others, and none is worth 10 %.
        pass_positions /= 2


def _runs(lengths: Sequence[int]) -> list[int]:
    """Where rows of about one length begin, and the end; `lengths` descend."""
    starts: list[int] = []
    for index, length in enumerate(lengths):
        if not starts or length < (1 - _SAME_LENGTH) * lengths[starts[-1]]:
            starts.append(index)
    return [*starts, len(lengths)]


def _cut(
    order: Sequence[int], lengths: Sequence[int], runs: Sequence[int], max_positions: int, pass_positions: float
) -> list[tuple[int, ...]]:
    """The cheapest cuts between runs: dynamic programming over how many runs are cut already."""
    num_runs = len(runs) - 1
    cost, begin = [0.0] + [float("inf")] * num_runs, [0] * (num_runs + 1)
    for first in range(num_runs):
        width = lengths[order[runs[first]]]
        per_pass = max(1, max_positions // width)
        for last in range(first + 1, num_runs + 1):
            num_rows = runs[last] - runs[first]
            found = cost[first] + width * num_rows + pass_positions * -(-num_rows // per_pass)
            if found < cost[last]:
                cost[last], begin[last] = found, first
    batches: list[tuple[int, ...]] = []
    last = num_runs
    while last:
        rows = order[runs[begin[last]] : runs[last]]
        batches = [*_even(rows, max(1, max_positions // lengths[rows[0]])), *batches]
        last = begin[last]
    return batches


def _even(rows: Sequence[int], per_pass: int) -> list[tuple[int, ...]]:
    """As few slices of at most `per_pass` rows as there can be, of nearly equal size."""
    num = -(-len(rows) // per_pass)
    ends = list(accumulate(len(rows) // num + (i < len(rows) % num) for i in range(num)))
    return [tuple(rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def collate(rows: Sequence[Row], advantages: Sequence[float], picked: tuple[int, ...]) -> MicroBatch:
    """Tensors of the rows `picked`; a row's advantage counts for each of its trained tokens."""
    width = max(len(rows[i].token_ids) for i in picked)
    ids: list[list[int]] = []
    where: list[tuple[int, int]] = []
    tokens: list[int] = []
    values: list[tuple[float, float, float]] = []
    for b, i in enumerate(picked):
        row = rows[i]
        ids.append(row.token_ids + [0] * (width - len(row.token_ids)))
        trained = [t for t, mask in enumerate(row.loss_mask) if mask]
        where += [(b, t) for t in trained]
        tokens += [row.token_ids[t] for t in trained]
        values += [(row.logprobs[t], row.temperatures[t], advantages[i]) for t in trained]
    rows_n, positions_n = torch.tensor(where).unbind(1)
    sampled_n, temperature_n, advantages_n = torch.tensor(values).unbind(1)
    return MicroBatch(
        rows=picked,
        ids_bt=torch.tensor(ids),
        rows_n=rows_n,
        positions_n=positions_n,
        tokens_n=torch.tensor(tokens),
        sampled_n=sampled_n,
        temperature_n=temperature_n,
        advantages_n=advantages_n,
    )
