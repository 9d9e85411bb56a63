"""From groups to what one update trains: rows, and tensors over all of their trained tokens.

    groups -> rate: advantages -> cut -> minibatch: tensors -> passes pick their tokens by `flat_n`

All trained tokens lie one behind the other, sample by sample, row by row: so those of a sample, of a row and of a call
are each in one piece. Conversations that filled `max_length` are left out here, where the run says so.

Axes: S samples, C calls with trained tokens, K trained tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from turnmill.config import Config
from turnmill.training.algorithms import advantages
from turnmill.training.algorithms.aggregation import divisor, token_weights
from turnmill.training.samples import Row, Span, TrainingSample

Groups = Sequence[Sequence[TrainingSample]]


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A sample that is trained, and what its tokens are worth."""

    sample: TrainingSample
    # Those with trained tokens.
    rows: tuple[Row, ...]
    # Of each call of `rows` that has trained tokens, in their order.
    calls: tuple[tuple[Span, int], ...]
    # The same for all its tokens, or [C] one a call.
    advantages_c: Tensor


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one update trains."""

    rows: list[Row]
    # Of each row: where its trained tokens begin.
    starts: list[int]
    # Groups that were looked at, and samples with trained tokens.
    num_groups: int
    num_samples: int
    advantages_k: Tensor
    # See `aggregation`; None: all 1.
    weights_k: Tensor | None
    # Number of each token's sample.
    samples_k: Tensor
    # Whether the weights that the trainer holds sampled the token; None: all of them.
    is_current_k: Tensor | None
    # Log-probs that the ratio is against: the policy's before the step's first update, or, without a mismatch
    # correction, the sampler's. None where no passes were made for them.
    old_k: Tensor | None = None
    # Means over each token's sample, None where nothing needs them: log policy - log old, and log old - log sampled.
    log_ratio_k: Tensor | None = None
    mismatch_k: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.samples_k)

    def sampled_k(self) -> Tensor:
        """The sampler's log-probs."""
        rows = ((row.logprobs, row.loss_mask) for row in self.rows)
        return torch.tensor([x for logprobs, mask in rows for x, m in zip(logprobs, mask, strict=True) if m])

    def sample_means(self, values_k: Tensor) -> Tensor:
        """[K] the mean over all tokens of its sample, for each token."""
        zeros_s = torch.zeros(self.num_samples, dtype=torch.float64)
        sums_s = zeros_s.index_add(0, self.samples_k, values_k.double())
        lengths_s = torch.bincount(self.samples_k, minlength=self.num_samples)
        return (sums_s / lengths_s)[self.samples_k].to(values_k.dtype)


def rate(groups: Groups, config: Config) -> list[list[Rated]]:
    """The samples of each group that are trained, with their advantages.

    What is in the comparison must be all of the batch where the method is one of `advantages.WHOLE_BATCH`.
    """
    is_dropping, is_masking = config.overlong == "drop", config.overlong == "mask"
    compared = [[sample for sample in group if not (is_dropping and sample.is_overlong)] for group in groups]
    rows = [[tuple(row for row in sample.rows if row.num_trained) for sample in group] for group in compared]
    if config.advantage_method == advantages.PER_TURN:
        calls = [[_calls(sample_rows) for sample_rows in group] for group in rows]
        found = [
            _turn_advantages(group, of_calls, config.gamma) for group, of_calls in zip(compared, calls, strict=True)
        ]
    else:
        calls = [[() for _ in group] for group in rows]
        found = _sample_advantages(compared, rows, config.advantage_method)
    return [
        [
            Rated(sample=sample, rows=sample_rows, calls=sample_calls, advantages_c=advantages_c)
            for sample, sample_rows, sample_calls, advantages_c in zip(*columns, strict=True)
            if sample_rows and not (is_masking and sample.is_overlong)
        ]
        for columns in zip(compared, rows, calls, found, strict=True)
    ]


def minibatch(groups: Sequence[Sequence[Rated]], config: Config, version: str | None) -> Minibatch:
    """Lay out the tokens of rated groups; `version` is that of the weights that the trainer holds, None: any."""
    samples = list(chain.from_iterable(groups))
    rows = [row for rated in samples for row in rated.rows]
    of_rows = [row.num_trained for row in rows]
    lengths_s = torch.tensor([sum(row.num_trained for row in rated.rows) for rated in samples], dtype=torch.long)
    weights_s = token_weights(config.loss_aggregation, lengths_s.double(), config.max_length)
    is_current_k = None if version is None else _is_current(rows, version)
    return Minibatch(
        rows=rows,
        starts=[0, *accumulate(of_rows)][: len(rows)],
        num_groups=len(groups),
        num_samples=len(samples),
        advantages_k=torch.cat([torch.zeros(0), *map(_token_advantages, samples)]).float(),
        weights_k=None if weights_s is None else weights_s.float().repeat_interleave(lengths_s),
        samples_k=torch.arange(len(samples)).repeat_interleave(lengths_s),
        is_current_k=is_current_k,
    )


def loss_divisor(config: Config, num_tokens: int, num_samples: int) -> float:
    """What the summed loss of an update is divided by."""
    return divisor(config.loss_aggregation, num_tokens, num_samples) / config.loss_scale


def cut(groups: Sequence[Sequence[Rated]], num: int) -> list[Sequence[Sequence[Rated]]]:
    """At most `num` pieces of whole groups, in order, of about equal size; a pure function of the batch."""
    num = min(num, len(groups))
    ends = list(accumulate(len(groups) // num + (i < len(groups) % num) for i in range(num)))
    return [groups[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _sample_advantages(groups: Groups, rows: Sequence[Sequence[tuple[Row, ...]]], method: str) -> list[list[Tensor]]:
    """One number a sample, each with an axis of one."""
    rewards = [torch.tensor([sample.reward for sample in group], dtype=torch.float64) for group in groups]
    lengths = [
        torch.tensor([sum(row.num_trained for row in sample_rows) for sample_rows in group], dtype=torch.float64)
        for group in rows
    ]
    return [list(found_s[:, None]) for found_s in advantages.sample_advantages(method, rewards, lengths)]


def _turn_advantages(
    group: Sequence[TrainingSample], calls: Sequence[tuple[tuple[Span, int], ...]], gamma: float
) -> list[Tensor]:
    """One number a call with trained tokens.

    Turns are the calls that are trained or rewarded, in the order in which they were made; without a reward it is 0.
    """
    trained = [{span.call_id for span, _ in of_sample} for of_sample in calls]
    turns = [
        [call_id for call_id in sample.call_ids if call_id in due or call_id in sample.turn_rewards]
        for sample, due in zip(group, trained, strict=True)
    ]
    rewards_s = torch.tensor([sample.reward for sample in group], dtype=torch.float64)
    turn_rewards = [
        torch.tensor([sample.turn_rewards.get(call_id, 0.0) for call_id in of_sample], dtype=torch.float64)
        for sample, of_sample in zip(group, turns, strict=True)
    ]
    found = advantages.turn_advantages(rewards_s, turn_rewards, gamma)
    by_call = [dict(zip(of_sample, values_t, strict=True)) for of_sample, values_t in zip(turns, found, strict=True)]
    return [
        torch.tensor([values[span.call_id] for span, _ in of_sample], dtype=torch.float64)
        for of_sample, values in zip(calls, by_call, strict=True)
    ]


def _calls(rows: Sequence[Row]) -> tuple[tuple[Span, int], ...]:
    """The calls with trained tokens, and how many: row by row, as the tokens lie."""
    spans = ((span, sum(row.loss_mask[span.start : span.end])) for row in rows for span in row.spans)
    return tuple((span, num) for span, num in spans if num)


def _token_advantages(rated: Rated) -> Tensor:
    """The advantage of each trained token of a sample."""
    if len(rated.advantages_c) == 1:
        return rated.advantages_c.expand(sum(row.num_trained for row in rated.rows))
    return rated.advantages_c.repeat_interleave(torch.tensor([num for _, num in rated.calls]))


def _is_current(rows: Sequence[Row], version: str) -> Tensor:
    """Which trained tokens the weights of `version` sampled."""
    return torch.tensor([span.version == version for span, num in _calls(rows) for _ in range(num)], dtype=torch.bool)
