"""What those see of a run on AWS who only look: from any thread, without an event loop.

    RunReader    records, messages in the queues, samples by state, metrics
    RunActivity  whether it moves

What SQS does not tell stays unknown: the age of the oldest message, how many were ever sent, which one was received
most often, when a lease was renewed. Samples and batches have no order of writing in DynamoDB: samples are read whole
(1 000 of them are about 1 MB, so 125 read units), at most a twentieth of the time; of the batches only the latest.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from turnmill.backends.aws.metrics import metric_of
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.run_records import RunRecords
from turnmill.errors import NotFound, RecordCorrupt
from turnmill.ports import BatchActivity, CallActivity, DeadLetter, QueueActivity, QueueCounts, SampleActivity, Stored
from turnmill.records import (
    BatchState,
    Metric,
    Purpose,
    SampleState,
    batch_prefix,
    decode,
    metric_prefix,
    sample_prefix,
    token_count_prefix,
    training_key,
)

# Dead letters of one queue that are shown.
MOST_LETTERS = 1000
_PAGE = 1000
_NOTHING = QueueCounts(available=0, in_flight=0, delayed=0, dead=0)
# Batches are only written while they are new; later writes (given up for an earlier step) are by who has the run.
_LAST_BATCHES = 16
# Reading samples may take this share of the time.
_SAMPLES_SHARE = 0.05

T = TypeVar("T")
OpenQueue = Callable[[str], SqsQueue]


class _SampleHead(msgspec.Struct, frozen=True):
    """What of a sample is counted; the rest of its record is not decoded."""

    purpose: Purpose
    state: SampleState
    created_at: float
    reward: float | None = None


class _BatchHead(msgspec.Struct, frozen=True):
    state: BatchState


class AwsRunReader:
    """Implements `ports.RunReader`."""

    def __init__(self, records: RunRecords, open_queue: OpenQueue, run_id: str) -> None:
        self._records = records
        self._open_queue = open_queue
        self._run_id = run_id

    def records(self, prefix: str, *, after: str = "", limit: int) -> list[Stored]:
        """See `ports.RunReader.records`."""
        found: list[Stored] = []
        while limit < 0 or len(found) < limit:
            wanted = _PAGE if limit < 0 else min(_PAGE, limit - len(found))
            page = self._records.scan_now(prefix, after=after, limit=wanted)
            found += page
            if len(page) < wanted:
                break
            after = page[-1].key
        return found

    def counts(self, queue: str) -> QueueCounts:
        """See `ports.RunReader.counts`; approximate."""
        try:
            return self._open_queue(queue).counts_now()
        except NotFound:
            return _NOTHING

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """See `ports.RunReader.dead_letters`; at most `MOST_LETTERS`."""
        try:
            return self._open_queue(queue).dead_letters_now(MOST_LETTERS)
        except NotFound:
            return []

    def samples(self) -> dict[tuple[Purpose, SampleState], int]:
        """See `ports.RunReader.samples`."""
        return dict(Counter((head.purpose, head.state) for _, head in _samples(self, self._run_id)))

    def metrics(self) -> list[Metric]:
        """See `ports.RunReader.metrics`."""
        return [metric_of(item) for item in self.records(metric_prefix(self._run_id), limit=-1)]


@dataclass(kw_only=True)
class _SeenSamples:
    """What was read of the samples, and for how long that will do (monotonic clock)."""

    activity: SampleActivity
    until: float


class AwsRunActivity:
    """Implements `ports.RunActivity`."""

    def __init__(self, reader: AwsRunReader, run_id: str) -> None:
        self._reader = reader
        self._run_id = run_id
        self._samples: _SeenSamples | None = None
        # Tokens that were sampled, and when it was seen that there are more of them (Unix seconds).
        self._calls: CallActivity | None = None
        # Batches before the last ones: how many, how often they were written, and the key of the last one.
        self._early_batches = (0, 0, "")
        self._last_metric = ""

    def queue(self, name: str) -> QueueActivity:
        """See `ports.RunActivity.queue`: the counts are all that SQS tells."""
        return QueueActivity(counts=self._reader.counts(name))

    def samples(self) -> SampleActivity:
        """See `ports.RunActivity.samples`: all of them."""
        began = time.monotonic()
        if self._samples is None or began >= self._samples.until:
            activity = self._read_samples()
            read_s = time.monotonic() - began
            self._samples = _SeenSamples(activity=activity, until=began + read_s / _SAMPLES_SHARE)
        return self._samples.activity

    def calls(self) -> CallActivity:
        """See `ports.RunActivity.calls`: by the counters of sampled tokens, which are written with the calls."""
        counters = self._reader.records(token_count_prefix(self._run_id), limit=-1)
        num_tokens = sum(int(item.value) for item in counters)
        if self._calls is None or self._calls.row != num_tokens:
            # Of the first look nobody knows how old it is.
            created_at = None if self._calls is None else time.time()
            self._calls = CallActivity(row=num_tokens, created_at=created_at)
        return self._calls

    def batches(self) -> BatchActivity:
        """See `ports.RunActivity.batches`."""
        num_early, num_early_writes, after = self._early_batches
        last = self._reader.records(batch_prefix(self._run_id), after=after, limit=-1)
        activity = BatchActivity(
            row=num_early + len(last),
            num_writes=num_early_writes + sum(item.version for item in last),
            has_recorded=any(_decoded(item, _BatchHead).state is BatchState.RECORDED for item in last[-_LAST_BATCHES:]),
        )
        if settled := last[:-_LAST_BATCHES]:
            num_writes = num_early_writes + sum(item.version for item in settled)
            self._early_batches = num_early + len(settled), num_writes, settled[-1].key
        return activity

    def steps_mark(self) -> object:
        """See `ports.RunActivity.steps_mark`: the trainer's status is written at each step, a metric once a step."""
        status = self._reader.records(training_key(self._run_id), limit=1)
        metrics = self._reader.records(metric_prefix(self._run_id), after=self._last_metric, limit=-1)
        if metrics:
            self._last_metric = metrics[-1].key
        return [item.version for item in status], self._last_metric

    def _read_samples(self) -> SampleActivity:
        by_state: Counter[str] = Counter()
        num_rewarded, newest = 0, 0.0
        invalid: Stored | None = None
        for item, head in _samples(self._reader, self._run_id):
            by_state[head.state] += 1
            num_rewarded += head.reward is not None
            if head.state is SampleState.INVALID and head.created_at >= newest:
                newest, invalid = head.created_at, item
        return SampleActivity(by_state=dict(by_state), num_rewarded=num_rewarded, invalid=invalid)


def _samples(reader: AwsRunReader, run_id: str) -> Iterator[tuple[Stored, _SampleHead]]:
    for purpose in Purpose:
        for item in reader.records(sample_prefix(run_id, purpose), limit=-1):
            yield item, _decoded(item, _SampleHead)


def _decoded(item: Stored, kind: type[T]) -> T:
    try:
        return decode(item.value, kind)
    except msgspec.DecodeError as error:
        raise RecordCorrupt(f"{item.key}: {error}") from error
