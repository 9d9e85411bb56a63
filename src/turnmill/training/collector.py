"""Plays rollouts and cuts them into batches.

    builder.draw -> rollouts.request -> rollouts.ended -> read calls -> builder.end -> rollouts.drop -> ... -> Collected
                                            builder.certain -> ahead: gradients meanwhile

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| pump | slots, ended samples | the next end | rollouts, `go_on`, `stop` | closed batches, drops, the tally |

On policy the pump asks for nothing between the end of a batch and `go_on`, which says that the replicas are pointed to
the weights that the batch made; what is still being played then ends and is counted, beside the optimizer step. Off
policy it goes on all the time, as far as there are slots: what steps made and replicas serve meanwhile gives them back.

The gradients of a batch are made ahead with the weights that will make its step: from `update_made` of the step before
on, never across an update. Its older tokens are audited from the moment when it is closed, whatever steps are made.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from turnmill.budget import Allowance
from turnmill.config import Config
from turnmill.ports import RecordStore
from turnmill.records import Call, DropReason, SampleRecord
from turnmill.training.ahead import Ahead
from turnmill.training.algorithms.advantages import PER_TURN
from turnmill.training.batcher import BatchBuilder, Drop
from turnmill.training.collected import Collected, RolloutSource
from turnmill.training.played import load_calls, oldest_version, rollout_of
from turnmill.training.samples import TrainingSample, check_sample, training_sample
from turnmill.training.scoring import GroupScoring
from turnmill.training.served import Served
from turnmill.training.stale_audit import StaleTokens
from turnmill.training.tally import Tally, describe_invalid

logger = logging.getLogger(__name__)
# How often the records of the replicas are looked at while slots wait for a version to be served: nobody is told of it.
_LOOK_S = 0.1
# Of the older tokens in the groups of the batch of a step.
Audit = Callable[[Sequence[Sequence[TrainingSample]], int], Coroutine[Any, Any, StaleTokens]]


class Collector:
    """The pump of one trainer process: `start` it, and `close` it."""

    def __init__(
        self,
        records: RecordStore,
        rollouts: RolloutSource,
        builder: BatchBuilder,
        ahead: Ahead,
        audit: Audit | None,
        config: Config,
        stop: asyncio.Event,
        allowance: Allowance,
        served: Served,
    ) -> None:
        self._records = records
        self._rollouts = rollouts
        self.builder = builder
        self._ahead = ahead
        self._audit = audit
        self._audits: set[asyncio.Task[StaleTokens]] = set()
        self._config = config
        self._stop = stop
        self._allowance = allowance
        self._served = served
        # None: no reward depends on other samples.
        self._scoring = GroupScoring(records, rollouts, config.number_generation) if config.group_rewards else None
        # What counts for the next step: on policy everything that ends before it is made, off policy what was played of
        # the groups of its batch, whenever that was. Those of groups that are not closed yet, by group.
        self._tally = Tally()
        self._of_groups: dict[str, Tally] = {}
        # Of the samples that ended with a reward and are in no batch yet.
        self._group_of: dict[str, str] = {}
        # Why the most recent invalid sample has no reward.
        self.last_invalid = ""
        # Optimizer steps made, as far as replicas are pointed to them; and those whose update is made.
        self._num_steps = self._num_updates = builder.step - 1
        # By id, with a reward and in no batch yet, and the calls that they consumed.
        self._played: dict[str, tuple[SampleRecord, list[Call]]] = {}
        # What `ahead` was told of: groups that the open batch is certain to have.
        self._offered: list[list[TrainingSample]] = []
        # Batches whose turn has not come.
        self._closed: deque[Collected] = deque()
        # On policy, between the end of a batch and `go_on`.
        self._is_paused = False
        # Since when the batch is being generated, and the counters at the end of the one before.
        self._begun = time.monotonic()
        self._num_ended = self._num_failed = 0
        # Since when the trainer has had nothing to do but wait; None: it has.
        self._idle_since: float | None = None
        self._pump: asyncio.Task[None] | None = None
        # Why nothing more is played; None: it is.
        self._closing: DropReason | None = None
        # For the pump: there may be more to ask for. For those who wait for it: something ended.
        self._woken, self._moved = asyncio.Event(), asyncio.Event()

    # ------------------------------------------------------------ for the loop

    def start(self) -> None:
        """Begin to play."""
        self._pump = asyncio.create_task(self._run(), name="pump of rollouts")

    async def next(self, beside: asyncio.Task[None] | None = None) -> Collected | None:
        """The next batch, its gradients on their way (see `Ahead`); None when asked to stop, also if one is decided.

        None, too, when the allowance is used up: what is in flight then ends, and is trained if that decides batches.
        Raises what the pump or `beside` ends with, if that comes first.
        """
        await self._until(lambda: bool(self._closed), beside)
        if self._stop.is_set() or not self._closed:
            await self._ahead.abandon()
            return None
        collected = self._closed.popleft()
        collected.num_early = self._ahead.num_begun
        rest = collected.groups[collected.num_offered :]
        collected.parts = self._ahead.complete(rest, is_alone=self.builder.num_in_flight == 0)
        return collected

    async def update_made(self) -> None:
        """The weights of the step made last are in the trainer.

        On policy what no batch has a place for any more is played to its end, and counted, before this returns.
        """
        if not self._config.is_async:
            await self._until(lambda: not self.builder.leaving)
            self._tally = Tally()
        self._num_updates += 1
        if self._closed:
            self._ahead.offer(self._closed[0].groups)
            self._closed[0].num_offered = len(self._closed[0].groups)
        else:
            self._offer()

    def go_on(self, num_steps: int) -> None:
        """Replicas are pointed to the weights that `num_steps` steps made."""
        self._num_steps = num_steps
        if self._is_paused:
            self._is_paused = False
            self._begun = time.monotonic()
        self._woken.set()

    async def close(self, reason: DropReason) -> None:
        """End the pump; what was requested and is in no batch is dropped, and what was computed of it forgotten."""
        self._closing = reason
        self._woken.set()
        if self._pump is not None:
            # What it ended with was told to whoever waited for it; nobody waits for more.
            await asyncio.gather(self._pump, return_exceptions=True)
        try:
            await self._give_up(reason)
        finally:
            # Of the batch whose step failed before it asked for what was found.
            audits = list(self._audits)
            for task in audits:
                task.cancel()
            await asyncio.gather(*audits, return_exceptions=True)
            await self._ahead.abandon()

    def abort(self) -> None:
        """Leave everything as it is."""
        for task in (self._pump, *self._audits):
            if task is not None:
                task.cancel()

    async def _until(self, is_there: Callable[[], bool], beside: asyncio.Task[None] | None = None) -> None:
        """Wait for what the pump brings, or for its end; raises what it or `beside` ended with."""
        if self._pump is None:
            raise RuntimeError("the collector was not started")
        self._idle_since = time.monotonic()
        while not is_there() and not self._pump.done():
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait(), name="wait for the pump")
            others = {self._pump} if beside is None else {self._pump, beside}
            await asyncio.wait({moved, *others}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            await asyncio.wait({moved})
            if beside is not None and beside.done():
                beside.result()
                beside = None
        self._idle_since = None
        if self._pump.done():
            self._pump.result()

    # ------------------------------------------------------------ pump

    async def _run(self) -> None:
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        try:
            while True:
                if self._stop.is_set():
                    await self._give_up(DropReason.CANCELLED)
                    return
                if self._closing is not None:
                    return
                if not await self._request():
                    # Batches that were closed before are trained.
                    await self._drop(self.builder.cancel(DropReason.BUDGET), is_counted=False)
                    return
                # What ended just before `stop` belongs to what is about to be given up as a whole.
                if (ended := await self._wait(stopped)) and not self._stop.is_set():
                    await self._take(ended)
                    self.builder.useless.check(self.last_invalid)
                    while self.builder.is_closed:
                        await self._close_batch()
                    self._offer()
                self._moved.set()
        finally:
            stopped.cancel()

    async def _request(self) -> bool:
        """False: nothing more may be asked for, and with nothing being played no batch would ever be closed."""
        if self._is_paused or self.builder.step > self._config.max_steps:
            return True
        if await self._allowance.look():
            return self.builder.num_in_flight > 0
        if self._is_waiting:
            oldest = await self._served.look(self._num_steps)
            self.builder.extend(min(oldest + self._config.max_staleness + 1, self._config.max_steps))
        draws = self.builder.draw()
        if draws:
            ids = await self._rollouts.request([(draw.task, draw.group_id) for draw in draws])
            self.builder.bind(draws, ids)
        return True

    @property
    def _is_waiting(self) -> bool:
        """Slots may come back as soon as replicas serve a version that they are pointed to."""
        most = min(self._num_steps + self._config.max_staleness + 1, self._config.max_steps)
        return self.builder.is_waiting and self.builder.horizon < most

    async def _wait(self, stopped: asyncio.Task[bool]) -> list[SampleRecord]:
        """The samples that ended, none where something else is news."""
        begun = time.monotonic()
        ended = asyncio.create_task(self._rollouts.ended(), name="wait for ended samples")
        woken = asyncio.create_task(self._woken.wait(), name="wait for slots")
        timeout = _LOOK_S if self._is_waiting else None
        try:
            await asyncio.wait({ended, stopped, woken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            woken.cancel()
            await asyncio.wait({ended, woken})
        self._woken.clear()
        if self._idle_since is not None:
            self._tally.seconds.wait_s += time.monotonic() - max(begun, self._idle_since)
        return [] if ended.cancelled() else ended.result()

    def _offer(self) -> None:
        """Tell of the groups that have become certain, if the weights are there that will make their step."""
        # When the batch is closed, the rest may take all cores.
        if self._closed or self.builder.step != self._num_updates + 1:
            return
        certain = self.builder.certain[len(self._offered) :]
        if certain:
            groups = self._ready(certain)
            self._offered += groups
            self._ahead.offer(groups)

    def _ready(self, groups: Sequence[Sequence[str]]) -> list[list[TrainingSample]]:
        """Groups as they are trained; only these are checked as a whole."""
        return [[training_sample(*self._played[sample_id]) for sample_id in group] for group in groups]

    async def _close_batch(self) -> None:
        closed = self.builder.close()
        offered, self._offered = self._offered, []
        now = time.monotonic()
        self._tally.seconds.generate_s += now - self._begun
        for group_id in self._of_groups.keys() - self.builder.group_ids:
            self._tally.add(self._of_groups.pop(group_id))
        groups = [*offered, *self._ready(closed.groups[len(offered) :])]
        self._closed.append(
            Collected(
                closed=closed,
                groups=groups,
                progress=self.builder.progress,
                tally=self._tally,
                num_offered=len(offered),
                num_ended=self._num_ended,
                num_failed=self._num_failed,
                stale=self._begin_audit(groups, closed.step),
            )
        )
        if closed.groups and self._config.is_async:
            self._tally = Tally()
        self._is_paused, self._begun = not self._config.is_async, now
        self._num_ended = self._num_failed = 0
        for sample_id in (sample_id for group in closed.groups for sample_id in group):
            del self._played[sample_id], self._group_of[sample_id]
        self._moved.set()
        await self._drop(closed.drops)
        await self._let_go()

    def _begin_audit(self, groups: Sequence[Sequence[TrainingSample]], step: int) -> asyncio.Task[StaleTokens] | None:
        if self._audit is None or not groups:
            return None
        task = asyncio.create_task(self._audit(groups, step), name=f"audit for step {step}")
        self._audits.add(task)
        task.add_done_callback(self._audited)
        return task

    def _audited(self, task: asyncio.Task[StaleTokens]) -> None:
        self._audits.discard(task)
        if not task.cancelled():
            # What it ended with is for the step to tell, if there is one.
            task.exception()

    async def _give_up(self, reason: DropReason) -> None:
        """Drop everything that was requested and whose batch's turn has not come."""
        drops = self.builder.cancel(reason)
        while self._closed:
            collected = self._closed.popleft()
            if collected.stale is not None:
                collected.stale.cancel()
            groups = collected.closed.groups
            drops += [Drop(sample_id=sample_id, reason=reason) for group in groups for sample_id in group]
        self._played, self._offered = {}, []
        if self._scoring is not None:
            await self._scoring.clear()
        await self._drop(drops, is_counted=False)

    # ------------------------------------------------------------ ended samples

    async def _take(self, ended: Sequence[SampleRecord]) -> None:
        """Count the samples and let the builder decide about them."""
        mine = [s for s in ended if self.builder.owns(s.sample_id) or s.sample_id in self.builder.leaving]
        valid = [sample for sample in mine if sample.is_valid]
        for sample in valid:
            check_sample(sample)
        calls = dict(zip([s.sample_id for s in valid], await load_calls(self._records, valid), strict=True))
        drops: list[Drop] = []
        self._num_ended += len(mine)
        for sample in mine:
            tally = self._tally_of(sample.group_id)
            if sample.reward is None:
                tally.num_invalid += 1
                self._num_failed += 1
                self.last_invalid = describe_invalid(sample)
                logger.warning("no reward: %s", self.last_invalid, extra={"at": sample.key})
                drops += self._end(sample.sample_id, None)
                continue
            self._group_of[sample.sample_id] = sample.group_id
            played = sample, calls[sample.sample_id]
            tally.rollouts.append(rollout_of(sample, sample.reward, played[1], self._num_steps))
            stale = self._is_stale(sample.sample_id, played[1])
            if self._scoring is not None and self.builder.owns(sample.sample_id) and not stale:
                await self._scoring.hold(*played)
                continue
            if self.builder.owns(sample.sample_id) and not stale:
                self._keep(*played)
            drops += self._end(sample.sample_id, sample.reward, stale=stale, is_truncated=sample.is_truncated)
        await self._drop(drops)
        for sample in ended:
            await self._score(sample)
        await self._let_go()

    def _is_stale(self, sample_id: str, calls: Sequence[Call]) -> bool:
        """Whether a token of it would be too old in the last step that it can be in."""
        oldest = oldest_version(calls)
        if oldest is None or not self.builder.owns(sample_id):
            return False
        return self.builder.latest_step(sample_id) - 1 - oldest > self._config.max_staleness

    def _end(
        self, sample_id: str, reward: float | None, *, stale: bool = False, is_truncated: bool = False
    ) -> list[Drop]:
        """Tell the builder, which has a place for the sample's group or has not any more."""
        if sample_id in self.builder.leaving:
            return self.builder.leave(sample_id, reward)
        return self.builder.end(sample_id, reward, stale=stale, is_truncated=is_truncated)

    def _keep(self, sample: SampleRecord, calls: list[Call]) -> None:
        """It may be trained."""
        self._played[sample.sample_id] = (sample, calls)
        if self._config.advantage_method == PER_TURN and self.builder.owns(sample.sample_id):
            rewards = [sample.turn_rewards.get(call_id, 0.0) for call_id in sample.calls]
            self.builder.tell_turns(sample.sample_id, rewards)

    async def _score(self, ended: SampleRecord) -> None:
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
                    is_truncated=sample.is_truncated,
                )
            else:
                self._num_failed += 1
                drops.append(Drop(sample_id=sample.sample_id, reason=DropReason.UNSCORED))
                # One of them too many, and the rest of the group is leaving.
                drops += self._end(sample.sample_id, None)
        await self._drop(drops)

    async def _let_go(self) -> None:
        """Held samples that no batch has a place for any more have ended."""
        if self._scoring is None:
            return
        leaving = self._scoring.held(self.builder.leaving)
        await self._scoring.give_up([sample.sample_id for sample in leaving])
        drops = [drop for sample in leaving for drop in self.builder.leave(sample.sample_id, sample.reward)]
        await self._drop(drops)

    def _tally_of(self, group_id: str) -> Tally:
        return self._of_groups.setdefault(group_id, Tally()) if self._config.is_async else self._tally

    async def _drop(self, drops: Sequence[Drop], *, is_counted: bool = True) -> None:
        for drop in drops:
            if is_counted:
                self._tally_of(self._group_of.pop(drop.sample_id, "")).drop([drop])
            self._played.pop(drop.sample_id, None)
        for reason in DropReason:
            ids = [drop.sample_id for drop in drops if drop.reason is reason]
            if ids:
                await self._rollouts.drop(ids, reason)
