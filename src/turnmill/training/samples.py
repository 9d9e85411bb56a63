"""From stored records to training rows, checked on the way: what does not match its digest is never trained.

    SampleRecord + its Calls -> checks -> tree of calls -> one Row a branch

A conversation may branch. Each path from a first call to one behind which nothing is trained is one row, and a token
that several paths share has loss mask 1 only in the first of them. Of the choices of one request only those are trained
that the conversation went on from. Axes: T positions of a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn, TypeVar

import msgspec

from turnmill.errors import RecordCorrupt
from turnmill.ports import Stored
from turnmill.records import Call, SampleRecord, Version, decode

Keyed = TypeVar("Keyed", SampleRecord, Call)


@dataclass(frozen=True, kw_only=True)
class Span:
    """The part of a row that one call made: positions [start, end)."""

    call_id: str
    start: int
    end: int
    # Weights that sampled it.
    version: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence of a forward pass."""

    # Key of its sample.
    key: str
    token_ids: list[int]
    # 1 on the sampled tokens that this row trains; never on position 0, which nothing predicts.
    loss_mask: list[int]
    # Sampler's log-prob where the mask is 1, else 0.
    logprobs: list[float]
    # Sampling temperature of each token where the mask is 1, else 1.
    temperatures: list[float]
    # In order, gapless.
    spans: tuple[Span, ...]

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)

    @cached_property
    def trained_versions(self) -> frozenset[str]:
        """Those that sampled its trained tokens."""
        return frozenset(span.version for span in self.spans if any(self.loss_mask[span.start : span.end]))

    def only(self, version: str) -> "Row":
        """Cut behind the last trained token of `version`, and with no others trained."""
        if self.trained_versions == {version} and self.loss_mask[-1]:
            return self
        mask = [0] * len(self.token_ids)
        for span in self.spans:
            if span.version == version:
                mask[span.start : span.end] = self.loss_mask[span.start : span.end]
        end = len(mask) - mask[::-1].index(1)
        return replace(
            self,
            token_ids=self.token_ids[:end],
            loss_mask=mask[:end],
            logprobs=self.logprobs[:end],
            temperatures=self.temperatures[:end],
        )

    def span_at(self, position: int) -> Span:
        """The call that made the token at `position`."""
        return next(span for span in self.spans if span.start <= position < span.end)


@dataclass(frozen=True, kw_only=True)
class TrainingSample:
    """A checked sample as the trainer takes it."""

    key: str
    reward: float
    rows: tuple[Row, ...]
    # The calls that it consumed, in the order in which they were made.
    call_ids: tuple[str, ...] = ()
    # What single calls are worth, by call id.
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    # It ended because it filled `max_length`.
    is_overlong: bool = False
    # Of the report that the reward is from; None: of no record.
    report_digest: str | None = None

    @cached_property
    def versions(self) -> tuple[str, str] | None:
        """The oldest and the newest one that sampled its trained tokens; None where nothing is trained."""
        texts = {text for row in self.rows for text in row.trained_versions}
        found = sorted(texts, key=lambda text: Version.parse(text).n)
        return (found[0], found[-1]) if found else None


def stored_record(stored: Stored | None, key: str, kind: type[Keyed]) -> Keyed:
    """Decode what is stored under `key`; raises `RecordCorrupt` if it is missing, unreadable or another's record."""
    if stored is None:
        raise RecordCorrupt(f"{key}: the record is missing")
    try:
        record = decode(stored.value, kind)
    except msgspec.MsgspecError as error:
        raise RecordCorrupt(f"{key}: the record can't be read: {error}") from error
    _same(key, "key", key, record.key)
    return record


def check_sample(sample: SampleRecord) -> None:
    """Raise `RecordCorrupt` unless identity, reward, metrics and calls are those that were reported."""
    key = sample.key
    request = sample.request
    _same(key, "request.sample_id", sample.sample_id, request.sample_id)
    _same(key, "request.run_id", sample.run_id, request.run_id)
    _same(key, "request.purpose", str(sample.purpose), str(request.purpose))
    _same(key, "report_digest", sample.expected_report_digest(), sample.report_digest)


def rows_of(sample: SampleRecord, calls: Sequence[Call]) -> list[Row]:
    """The training rows of a valid sample; `calls` are those that `sample.calls` names, in its order.

    Raises `RecordCorrupt` with key, field, expected and found value at the first mismatch.
    """
    check_sample(sample)
    _same(sample.key, "calls", list(sample.calls), [call.call_id for call in calls])
    by_id: dict[str, Call] = {}
    for call in calls:
        _check_call(sample, call, by_id)
        by_id[call.call_id] = call
    due = trained_ids(calls)
    paths = [_path(call, by_id) for call in calls if call.call_id in due]
    inner = {call.call_id for path in paths for call in path[:-1]}
    return [_row(sample, path, due) for path in paths if path[-1].call_id not in inner]


def trained_ids(calls: Sequence[Call]) -> set[str]:
    """Those of the calls that a sample consumed whose tokens are trained.

    Of the choices of one request only those that the conversation went on from: the reward tells nothing about others.
    """
    parents = {call.parent for call in calls}
    return {
        call.call_id for call in calls if any(call.loss_mask) and (call.num_choices == 1 or call.call_id in parents)
    }


def training_sample(sample: SampleRecord, calls: Sequence[Call]) -> TrainingSample:
    """A sample with a reward as the trainer takes it; raises `RecordCorrupt` (see `rows_of`)."""
    rows = tuple(rows_of(sample, calls))
    reward = sample.trained_reward
    if reward is None:
        _mismatch(sample.key, "reward", "a number", None)
    return TrainingSample(
        key=sample.key,
        reward=reward,
        rows=rows,
        call_ids=sample.calls,
        turn_rewards=sample.turn_rewards,
        is_overlong=sample.is_truncated,
        report_digest=sample.report_digest,
    )


def _check_call(sample: SampleRecord, call: Call, earlier: dict[str, Call]) -> None:
    """`earlier` are the calls consumed before this one: a parent is always among them."""
    key = call.key
    _same(key, "run_id", sample.run_id, call.run_id)
    _same(key, "purpose", str(sample.purpose), str(call.purpose))
    _same(key, "sample_id", sample.sample_id, call.sample_id)
    if call.call_id in earlier:
        _mismatch(key, "calls", "each call once", f"{call.call_id} twice")
    _same(key, "digest", call.expected_digest(), call.digest)
    if call.parent is None:
        _same(key, "parent_digest", "", call.parent_digest)
    elif call.parent not in earlier:
        _mismatch(key, "parent", f"one of the calls consumed before: {list(earlier)}", call.parent)
    else:
        _same(key, "parent_digest", earlier[call.parent].digest, call.parent_digest)
    check_mask(call)


def check_mask(call: Call) -> None:
    """Raise `RecordCorrupt` unless the mask is 1 only on sampled positions, on all of them or on none.

    Tokens drawn greedily or from a truncated support are never trained. A sampled token needs something before it.
    """
    key, num_sampled = call.key, call.num_sampled
    _same(key, "length of loss_mask", len(call.token_ids), len(call.loss_mask))
    if num_sampled > len(call.token_ids):
        _mismatch(key, "length of logprobs", f"at most {len(call.token_ids)}", num_sampled)
    new = len(call.token_ids) - num_sampled
    unmasked = [0] * len(call.token_ids)
    allowed = [unmasked, [0] * new + [1] * num_sampled] if call.sampling.is_trainable else [unmasked]
    if call.loss_mask not in allowed:
        _mismatch(key, "loss_mask", allowed[-1], call.loss_mask)
    if call.parent is None and new == 0 and any(call.loss_mask):
        _mismatch(key, "token_ids", "a prompt before the sampled tokens", "none")
    for value in call.logprobs:
        # A log-prob may pass 0 by float noise only.
        if not math.isfinite(value) or value > 1e-5:
            _mismatch(key, "logprobs", "finite numbers <= 0", value)


def _path(last: Call, by_id: dict[str, Call]) -> list[Call]:
    """From the first call of the conversation to `last`."""
    path = [last]
    while path[-1].parent is not None:
        path.append(by_id[path[-1].parent])
    return path[::-1]


def _row(sample: SampleRecord, path: Sequence[Call], due: set[str]) -> Row:
    """Concatenate a path; calls in `due` are trained here and taken out of it, the others are context."""
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    spans = []
    for call in path:
        start, size = len(token_ids), len(call.token_ids)
        token_ids += call.token_ids
        if call.call_id in due:
            new = size - call.num_sampled
            loss_mask += call.loss_mask
            logprobs += [0.0] * new + call.logprobs
            temperatures += [1.0] * new + [call.sampling.temperature] * call.num_sampled
            due.remove(call.call_id)
        else:
            loss_mask += [0] * size
            logprobs += [0.0] * size
            temperatures += [1.0] * size
        spans.append(Span(call_id=call.call_id, start=start, end=start + size, version=call.version))
    return Row(
        key=sample.key,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        temperatures=temperatures,
        spans=tuple(spans),
    )


def _same(key: str, field: str, expected: object, found: object) -> None:
    if expected != found:
        _mismatch(key, field, expected, found)


def _mismatch(key: str, field: str, expected: object, found: object) -> NoReturn:
    raise RecordCorrupt(f"{key}: {field}: expected {expected!r}, found {found!r}")
