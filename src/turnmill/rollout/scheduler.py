"""Asks for rollouts and tells when they ended. Records are the truth; the queues carry the news.

    request -> sample record REQUESTED -> rollout_request -> worker -> sample record ended -> rollout_response -> ended

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| listen | rollout_response | a message | the proxy | ended samples |
| rescan | records of open samples | `RESCAN_S` | the clock | ends whose news was lost; INVALID past the deadline |

A sample is past its deadline only when no other one has ended for as long either: with more samples than slots, waiting
for a slot takes longer than playing.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec

from turnmill.config import Config
from turnmill.conversation.history import checked_sample, dead_sample, failed_by_infra, write_samples
from turnmill.errors import Conflict, NotFound, TurnmillError
from turnmill.ports import Leased, Message, RecordStore, WorkQueue
from turnmill.records import (
    REWARD_RANGE,
    DropReason,
    Purpose,
    RolloutRequest,
    RolloutResponse,
    SampleRecord,
    SampleState,
    Task,
    decode,
    encode,
    sample_key,
    sample_prefix,
)
from turnmill.rollout.news import News

logger = logging.getLogger(__name__)
BATCH_SIZE = 256
PAGE_SIZE = 1000
WAIT_S = 20.0
RESCAN_S = 2.0
# Seconds past all attempts of a sample before it is given up here: the proxy's word comes first.
DEADLINE_MARGIN_S = 60.0


@dataclass(kw_only=True)
class SchedulerCounts:
    """What happened so far."""

    num_requested: int = 0
    # Ends that were told by a message, and that were found by looking at the records.
    num_told: int = 0
    num_found: int = 0
    # Samples that were given up past their deadline.
    num_expired: int = 0
    # Messages about samples that this scheduler did not ask for, or knew about already.
    num_ignored: int = 0


class Scheduler:
    """The samples of one run and purpose: `start`, then `request` and `ended` in turn, at last `close`.

    Ends of samples that an earlier process had asked for are not told: the records say what became of them.
    """

    def __init__(
        self,
        records: RecordStore,
        rollout_request: WorkQueue,
        rollout_response: News,
        run_id: str,
        purpose: Purpose,
        config: Config,
        *,
        reward_range: tuple[float, float] = REWARD_RANGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rollout_response` is the queue itself for a scheduler that is alone, and its `Inbox` beside another one.

        `clock` gives seconds that only go up: setting the wall clock must give no sample up.
        """
        self.counts = SchedulerCounts()
        self._records = records
        self._requests = rollout_request
        self._responses = rollout_response
        self._run_id = run_id
        self._purpose = purpose
        self._config = config
        self._reward_range = reward_range
        # By task: the next g.
        self._next_g: dict[str, int] = {}
        self._clock = clock
        # Sample ids that were asked for and did not end yet, and when, by `clock`.
        self._open: dict[str, float] = {}
        # Ended and not yet returned.
        self._ended: dict[str, SampleRecord] = {}
        self._has_news = asyncio.Event()
        self._has_open = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # Longest time from a worker's taking a sample to its end, all attempts together.
        self._patience_s = config.max_attempts * (config.training_timeout + config.worker_lease_s) + DEADLINE_MARGIN_S
        # By `clock`: when a sample ended last.
        self._last_end = -math.inf

    @property
    def num_open(self) -> int:
        """Samples that were asked for and neither ended nor were dropped."""
        return len(self._open)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Count on from the samples that are recorded, and begin to listen."""
        prefix, after = sample_prefix(self._run_id, self._purpose), ""
        while True:
            page = await self._records.scan(prefix, after=after, limit=PAGE_SIZE)
            for stored in page:
                task_id = checked_sample(stored).task_id
                self._next_g[task_id] = self._next_g.get(task_id, 0) + 1
            if len(page) < PAGE_SIZE:
                break
            after = page[-1].key
        for name, job in (("listen", self._listen()), ("rescan", self._rescan())):
            task = asyncio.create_task(job, name=f"scheduler-{name}")
            # Whoever waits for news must hear of a task that ended, too.
            task.add_done_callback(lambda _: self._has_news.set())
            self._tasks.append(task)

    async def close(self) -> None:
        """Stop listening; idempotent. What is open stays open in the records."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    # ------------------------------------------------------------ requests

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        """Ask for one rollout for each (task, group id); returns the sample ids in that order.

        The records are written before the messages: a message without a record would be dropped as foreign.
        """
        samples = [self._new_sample(task, group_id) for task, group_id in wanted]
        if not samples:
            return []
        # Open before they are written: an end could be told before `write` is heard of.
        self._open.update(dict.fromkeys((sample.sample_id for sample in samples), self._clock()))
        self._has_open.set()
        written = await write_samples(self._records, [(sample, 0) for sample in samples])
        taken = [sample.sample_id for sample, ok in zip(samples, written, strict=True) if not ok]
        if taken:
            raise Conflict(f"samples {', '.join(taken[:5])} exist already: two schedulers ask for {self._purpose}")
        await self._requests.send(
            [
                Message(body=encode(sample.request), group=sample.sample_id, dedup_id=f"{sample.key}#0")
                for sample in samples
            ]
        )
        self.counts.num_requested += len(samples)
        return [sample.sample_id for sample in samples]

    def _new_sample(self, task: Task, group_id: str) -> SampleRecord:
        g = self._next_g.get(task.id, 0)
        self._next_g[task.id] = g + 1
        now = time.time()
        config = self._config
        request = RolloutRequest(
            sample_id=f"{task.id}_{g}",
            timestamp=datetime.fromtimestamp(now, UTC).isoformat(),
            max_length=config.max_length,
            rewards={"range": list(self._reward_range)},
            data=task.metadata,
            run_id=self._run_id,
            purpose=self._purpose,
        )
        return SampleRecord(
            run_id=self._run_id,
            purpose=self._purpose,
            sample_id=request.sample_id,
            task_id=task.id,
            group_id=group_id,
            state=SampleState.REQUESTED,
            created_at=now,
            request=request,
            deadline=now + self._patience_s,
        )

    # ------------------------------------------------------------ ends

    async def ended(self) -> list[SampleRecord]:
        """The samples that ended (REPORTED or INVALID) since the last call; waits for at least one.

        Raises what ended a background task, and `TurnmillError` when the scheduler is not running.
        """
        while True:
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.result()
                    raise TurnmillError(f"{task.get_name()} returned early")
            if not self._tasks or any(task.done() for task in self._tasks):
                raise TurnmillError("the scheduler is not running")
            if self._ended:
                samples = list(self._ended.values())
                self._ended.clear()
                return samples
            self._has_news.clear()
            await self._has_news.wait()

    async def drop(self, sample_ids: Sequence[str], reason: DropReason) -> None:
        """Mark samples as not to be trained. An open one is taken from its worker: a late report gets refused.

        Ended as INVALID or dropped before, a sample stays as it is. Raises `Conflict` for one that is in a batch and
        `NotFound` for an unknown one.
        """
        waiting = list(dict.fromkeys(sample_ids))
        while waiting:
            stored = await self._records.get([self._key(sample_id) for sample_id in waiting])
            changes: list[tuple[SampleRecord, int]] = []
            for sample_id, record in zip(waiting, stored, strict=True):
                if record is None:
                    raise NotFound(f"sample {sample_id} has no record")
                sample = checked_sample(record)
                if sample.state in (SampleState.BATCHED, SampleState.TRAINED):
                    raise Conflict(f"sample {sample_id} is {sample.state} and can't be dropped")
                if sample.state.is_open or sample.state is SampleState.REPORTED:
                    changes.append((replace(sample, state=SampleState.DROPPED, drop_reason=reason), record.version))
            written = await write_samples(self._records, changes) if changes else []
            # Reported or leased in between: look again.
            waiting = [sample.sample_id for (sample, _), ok in zip(changes, written, strict=True) if not ok]
        for sample_id in sample_ids:
            self._ended.pop(sample_id, None)
            self._close(sample_id)

    def _key(self, sample_id: str) -> str:
        return sample_key(self._run_id, self._purpose, sample_id)

    def _close(self, sample_id: str) -> None:
        self._open.pop(sample_id, None)
        if not self._open:
            self._has_open.clear()

    async def _take(self, sample_ids: Sequence[str]) -> int:
        """Read the records of samples; those that ended are news. How many."""
        num_ended = 0
        now = self._clock()
        expired: list[tuple[SampleRecord, int]] = []
        stored = await self._records.get([self._key(sample_id) for sample_id in sample_ids]) if sample_ids else []
        for record in stored:
            # A record that is not written yet is being asked for right now.
            if record is None:
                continue
            sample = checked_sample(record)
            if sample.sample_id not in self._open:
                continue
            if sample.state.is_open:
                # While others end, a late one may still be waiting for a free slot of a worker.
                if now - max(self._open[sample.sample_id], self._last_end) > self._patience_s:
                    expired.append((sample, record.version))
                continue
            self._close(sample.sample_id)
            self._last_end = self._clock()
            if sample.state in (SampleState.REPORTED, SampleState.INVALID):
                self._ended[sample.sample_id] = sample
                num_ended += 1
        if num_ended:
            self._has_news.set()
        if expired:
            await self._expire(expired)
        return num_ended

    async def _expire(self, expired: Sequence[tuple[SampleRecord, int]]) -> None:
        detail = "no attempt ended before the deadline of the sample: no worker took it, or none gave it back"
        failed = [(failed_by_infra(sample, detail), version) for sample, version in expired]
        written = await write_samples(self._records, failed)
        # The next look at the records finds those that were ended by somebody else in between.
        samples = [sample for (sample, _), ok in zip(failed, written, strict=True) if ok]
        if samples:
            await self._records.write([dead_sample(sample) for sample in samples])
        for sample in samples:
            logger.error("%s", detail, extra={"at": sample.key})
            self.counts.num_expired += 1
            self._close(sample.sample_id)
            self._ended[sample.sample_id] = sample
            self._has_news.set()

    # ------------------------------------------------------------ tasks

    async def _listen(self) -> None:
        while True:
            messages = await self._responses.take(max_messages=BATCH_SIZE, wait_s=WAIT_S)
            if messages:
                self.counts.num_told += await self._take(self._wanted(messages))

    def _wanted(self, messages: Sequence[Leased]) -> list[str]:
        """Ids of the open samples that messages tell about."""
        sample_ids: list[str] = []
        for message in messages:
            try:
                response = decode(message.body, RolloutResponse)
            except msgspec.DecodeError as error:
                logger.error("a message in rollout_response is unreadable and was dropped: %s", error)
                continue
            is_mine = response.run_id == self._run_id and response.purpose == self._purpose
            if is_mine and response.sample_id in self._open:
                sample_ids.append(response.sample_id)
            else:
                self.counts.num_ignored += 1
        return sample_ids

    async def _rescan(self) -> None:
        while True:
            await self._has_open.wait()
            await asyncio.sleep(RESCAN_S)
            sample_ids = list(self._open)
            for start in range(0, len(sample_ids), BATCH_SIZE):
                self.counts.num_found += await self._take(sample_ids[start : start + BATCH_SIZE])
