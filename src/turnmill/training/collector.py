"""Plays until a batch is decided.

    builder.draw -> rollouts.request -> rollouts.ended -> read calls -> builder.end -> rollouts.drop -> ... -> Collected
                                            builder.certain -> ahead: gradients meanwhile
        -> drain: what is still being played ends and is counted, beside the optimizer step

Consumes ended samples; waits for the next one, for `stop` or for the failure of what is done beside; unblocked by the
rollout source; produces one closed batch, its samples as they are trained, and the tally of everything played for it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnmill.budget import Allowance
from turnmill.config import Config
from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore, Stored
from turnmill.records import Call, DropReason, SampleRecord, StopReason, Task, Version, call_key
from turnmill.training.ahead import Ahead
from turnmill.training.algorithms.advantages import PER_TURN
from turnmill.training.batcher import BatchBuilder, Closed, Drop
from turnmill.training.samples import TrainingSample, check_sample, stored_record, trained_ids, training_sample
from turnmill.training.scoring import GroupScoring
from turnmill.training.tally import Rollout, Tally, describe_invalid

logger = logging.getLogger(__name__)
# Records read at once.
_PAGE = 500


class RolloutSource(Protocol):
    """The slice of the scheduler that training uses; started and closed by its owner."""

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        """Have a sample played for each (task, group id); the new sample ids, in order."""
        ...

    async def ended(self) -> list[SampleRecord]:
        """Wait for requested samples that are REPORTED or INVALID and were not returned yet; at least one."""
        ...

    async def drop(self, sample_ids: Sequence[str], reason: DropReason) -> None:
        """Write DROPPED with the reason, open samples or ended ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A closed batch; its gradients are on their way (see `Ahead`)."""

    closed: Closed
    # As they were read and checked, group by group.
    groups: list[list[TrainingSample]]
    parts: tuple[int, ...]
    # Groups whose gradients were begun before the batch was closed.
    num_early: int


class Collector:
    """Collects one batch after another from a rollout source."""

    def __init__(
        self,
        records: RecordStore,
        rollouts: RolloutSource,
        builder: BatchBuilder,
        ahead: Ahead,
        config: Config,
        stop: asyncio.Event,
        allowance: Allowance,
    ) -> None:
        self._records = records
        self._rollouts = rollouts
        self.builder = builder
        self._ahead = ahead
        self._config = config
        self._stop = stop
        self._allowance = allowance
        # None: no reward depends on other samples.
        self._scoring = GroupScoring(records, rollouts, config.number_generation) if config.group_rewards else None
        # Why the most recent invalid sample has no reward.
        self.last_invalid = ""
        # By id, of the batch being collected: with a reward and not dropped, and the calls that they consumed.
        self._played: dict[str, tuple[SampleRecord, list[Call]]] = {}
        # What `ahead` was told of: groups that the batch is certain to have.
        self._groups: list[list[TrainingSample]] = []
        self._beside: asyncio.Task[None] | None = None

    async def collect(self, tally: Tally, num_steps: int, beside: asyncio.Task[None] | None = None) -> Collected | None:
        """Play until the batch after `num_steps` optimizer steps is decided; None when asked to stop before that.

        None, too, when the allowance is used up: what is being played then ends, and is trained if that decides the
        batch, so that at most one batch is generated beyond it.

        Raises what `beside` ends with, if that comes first.
        """
        self._beside = beside
        begun = time.monotonic()
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        try:
            while not self.builder.is_closed:
                if not await self._request():
                    await self.cancel(DropReason.BUDGET)
                    return None
                ended = await self._next_ended(stopped, tally)
                if ended is None:
                    await self.cancel()
                    return None
                await self._take(ended, tally, num_steps)
                self.builder.useless.check(self.last_invalid)
                self._offer()
        finally:
            stopped.cancel()
        tally.seconds.generate_s += time.monotonic() - begun
        return await self._close(tally)

    def _offer(self) -> None:
        """Tell of the groups that have become certain."""
        certain = self.builder.certain[len(self._groups) :]
        # When the batch is closed, the rest may take all cores.
        if certain and not self.builder.is_closed:
            groups = self._ready(certain)
            self._groups += groups
            self._ahead.offer(groups)

    def _ready(self, groups: Sequence[Sequence[str]]) -> list[list[TrainingSample]]:
        """Groups as they are trained; only these are checked as a whole."""
        return [[training_sample(*self._played[sample_id]) for sample_id in group] for group in groups]

    async def _close(self, tally: Tally) -> Collected:
        closed = self.builder.close()
        rest = self._ready(closed.groups[len(self._groups) :])
        groups = [*self._groups, *rest]
        num_early = self._ahead.num_begun
        parts = self._ahead.complete(rest, is_alone=not self.builder.leaving)
        self._played, self._groups = {}, []
        await self._drop(closed.drops, tally)
        return Collected(closed=closed, groups=groups, parts=parts, num_early=num_early)

    async def drain(self, tally: Tally, num_steps: int) -> None:
        """Count the samples that no batch has a place for as they end; all are dropped when asked to stop."""
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        try:
            await self._let_go(tally)
            while self.builder.leaving:
                ended = await self._next_ended(stopped, tally)
                if ended is None:
                    await self._drop(self.builder.cancel(), Tally())
                    return
                await self._take(ended, tally, num_steps)
        finally:
            stopped.cancel()

    async def cancel(self, reason: DropReason = DropReason.CANCELLED) -> None:
        """Drop everything that was requested and is not in a batch, and what was computed of it."""
        self._played, self._groups = {}, []
        try:
            if self._scoring is not None:
                await self._scoring.clear()
            await self._drop(self.builder.cancel(reason), Tally())
        finally:
            await self._ahead.abandon()

    async def _request(self) -> bool:
        """False: nothing more may be asked for, and with nothing being played the batch would stay open for ever."""
        if await self._allowance.look():
            return self.builder.num_in_flight > 0
        draws = self.builder.draw()
        if draws:
            ids = await self._rollouts.request([(draw.task, draw.group_id) for draw in draws])
            self.builder.bind(draws, ids)
        return True

    async def _next_ended(self, stopped: asyncio.Task[bool], tally: Tally) -> list[SampleRecord] | None:
        begun = time.monotonic()
        ended = asyncio.create_task(self._rollouts.ended(), name="wait for ended samples")
        try:
            while not ended.done() and not stopped.done():
                beside = {self._beside} if self._beside is not None else set()
                await asyncio.wait({ended, stopped, *beside}, return_when=asyncio.FIRST_COMPLETED)
                if self._beside is not None and self._beside.done():
                    done, self._beside = self._beside, None
                    done.result()
        finally:
            if not ended.done():
                ended.cancel()
            await asyncio.wait({ended})
        tally.seconds.wait_s += time.monotonic() - begun
        if self._stop.is_set() and (ended.cancelled() or ended.exception() is None):
            # Samples that ended just now belong to the batch that is about to be cancelled as a whole.
            return None
        return await ended

    async def _take(self, ended: Sequence[SampleRecord], tally: Tally, num_steps: int) -> None:
        """Count the samples and let the builder decide about them."""
        mine = [sample for sample in ended if self._is_ours(sample.sample_id)]
        valid = [sample for sample in mine if sample.is_valid]
        for sample in valid:
            check_sample(sample)
        calls = dict(zip([s.sample_id for s in valid], await load_calls(self._records, valid), strict=True))
        drops: list[Drop] = []
        for sample in mine:
            stale = False
            if sample.reward is None:
                tally.num_invalid += 1
                self.last_invalid = describe_invalid(sample)
                logger.warning("no reward: %s", self.last_invalid, extra={"at": sample.key})
            else:
                rollout = _rollout(sample, sample.reward, calls[sample.sample_id], num_steps)
                tally.rollouts.append(rollout)
                stale = rollout.staleness > self._config.max_staleness
            if sample.sample_id in self.builder.leaving:
                drops += self.builder.leave(sample.sample_id, sample.reward)
            elif self._scoring is not None and sample.reward is not None and not stale:
                await self._scoring.hold(sample, calls[sample.sample_id])
            else:
                if sample.reward is not None and not stale:
                    self._keep(sample, calls[sample.sample_id])
                is_truncated = sample.stop_reason == StopReason.MAX_LENGTH
                drops += self.builder.end(sample.sample_id, sample.reward, stale=stale, is_truncated=is_truncated)
        await self._drop(drops, tally)
        for sample in ended:
            await self._score(sample, tally)
        await self._let_go(tally)

    def _keep(self, sample: SampleRecord, calls: list[Call]) -> None:
        """It may be trained."""
        self._played[sample.sample_id] = (sample, calls)
        if self._config.advantage_method == PER_TURN and self.builder.owns(sample.sample_id):
            rewards = [sample.turn_rewards.get(call_id, 0.0) for call_id in sample.calls]
            self.builder.tell_turns(sample.sample_id, rewards)

    async def _score(self, ended: SampleRecord, tally: Tally) -> None:
        """Let the builder decide about a group whose request ended; any other sample is none of it."""
        if self._scoring is None or not self._scoring.owns(ended.sample_id):
            return
        scored = await self._scoring.end(ended)
        if scored is None:
            return
        drops: list[Drop] = []
        if scored.failure is not None:
            self.last_invalid = describe_invalid(scored.failure)
        for sample, calls in scored.members:
            if scored.failure is None:
                self._keep(sample, calls)
                drops += self.builder.end(
                    sample.sample_id,
                    sample.trained_reward,
                    own_reward=sample.reward,
                    is_truncated=sample.stop_reason == StopReason.MAX_LENGTH,
                )
            else:
                drops.append(Drop(sample_id=sample.sample_id, reason=DropReason.UNSCORED))
                # One of them too many, and the rest of the group is leaving.
                is_leaving = sample.sample_id in self.builder.leaving
                end = self.builder.leave if is_leaving else self.builder.end
                drops += end(sample.sample_id, None)
        await self._drop(drops, tally)

    async def _let_go(self, tally: Tally) -> None:
        """Held samples that no batch has a place for any more have ended."""
        if self._scoring is None:
            return
        leaving = self._scoring.held(self.builder.leaving)
        await self._scoring.give_up([sample.sample_id for sample in leaving])
        drops = [drop for sample in leaving for drop in self.builder.leave(sample.sample_id, sample.reward)]
        await self._drop(drops, tally)

    def _is_ours(self, sample_id: str) -> bool:
        return self.builder.owns(sample_id) or sample_id in self.builder.leaving

    async def _drop(self, drops: Sequence[Drop], tally: Tally) -> None:
        tally.drop(drops)
        for drop in drops:
            self._played.pop(drop.sample_id, None)
        for reason in DropReason:
            ids = [drop.sample_id for drop in drops if drop.reason is reason]
            if ids:
                await self._rollouts.drop(ids, reason)


async def get_all(records: RecordStore, keys: Sequence[str]) -> list[Stored | None]:
    """One entry a key, in order, read in pages."""
    found: list[Stored | None] = []
    for start in range(0, len(keys), _PAGE):
        found += await records.get(keys[start : start + _PAGE])
    return found


async def load_calls(records: RecordStore, samples: Sequence[SampleRecord]) -> list[list[Call]]:
    """The calls that each sample consumed, in its order; raises `RecordCorrupt` for a missing or unreadable one."""
    keys = [
        call_key(sample.run_id, sample.purpose, sample.sample_id, call_id)
        for sample in samples
        for call_id in sample.calls
    ]
    found = iter(await get_all(records, keys))
    key = iter(keys)
    return [[stored_record(next(found), next(key), Call) for _ in sample.calls] for sample in samples]


def _rollout(sample: SampleRecord, reward: float, calls: Sequence[Call], num_steps: int) -> Rollout:
    """What the metrics need; `calls` come in order of first use, so a parent's length is known before its child's."""
    lengths: dict[str | None, int] = {None: 0}
    trained = trained_ids(calls)
    oldest = num_steps
    for call in calls:
        if call.parent not in lengths:
            raise RecordCorrupt(f"{call.key}: parent: expected one of {list(lengths)}, found {call.parent!r}")
        lengths[call.call_id] = lengths[call.parent] + len(call.token_ids)
        if call.call_id in trained:
            oldest = min(oldest, Version.parse(call.version).n)
    return Rollout(
        reward=reward,
        metrics=sample.metrics,
        num_sampled=sum(call.num_sampled for call in calls),
        length=max(lengths.values()),
        staleness=num_steps - oldest,
        is_truncated=sample.stop_reason == StopReason.MAX_LENGTH,
    )
