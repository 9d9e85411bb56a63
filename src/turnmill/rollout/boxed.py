"""Plays leased rollouts in boxes: the environment's code is in another process, and nothing that it says is believed.

    LeasedRollout -> relay path, seat in a box -> Play -> Ended | deadline | BoxEnded -> checked RolloutResult
                                                                              '-> RolloutGivenBack

Who is to blame when a box comes to its end with several rollouts in it can mostly not be told. So those that may be
innocent are given back without a word, and are leased again, as after the death of a worker: what they said so far is
replayed. They are put together with fewer others each time, and at last a rollout has a box for itself: then it is
the one, and invalid.
"""

import asyncio
import logging
import time
from dataclasses import replace

from turnmill.conversation.client import LeasedRollout
from turnmill.conversation.http import HttpClient
from turnmill.errors import InvalidInput, RolloutGivenBack
from turnmill.records import InvalidReason, RolloutResult, Task, digest_of, encode
from turnmill.rollout.box.box import BoxEnded, LoadError
from turnmill.rollout.box.isolation import Settings, seen_from_outside
from turnmill.rollout.box.pool import BoxPool, Seat
from turnmill.rollout.box.relay import Relay, Watch
from turnmill.rollout.box.results import failed, refused, result_of

logger = logging.getLogger(__name__)
# Rollouts in a box at the second attempt; at the third one is alone.
_SECOND_SIZE, _ALONE_AT = 4, 3
_MOST_SUSPECTS = 256
# What an environment has for its cleaning up when a rollout is ended.
_GRACE_S = 5.0


class BoxedRunner:
    """Implements `rollout.runner.Runner`; `async with` starts its first box and ends all of them."""

    def __init__(
        self,
        settings: Settings,
        session: HttpClient,
        *,
        num_slots: int,
        max_attempts: int,
        training_timeout_s: float,
    ) -> None:
        """`num_slots`: rollouts that share a box. `training_timeout_s` bounds one, as its lease's deadline does."""
        self._settings = settings
        self._has_network = settings.has_network
        self._relay = Relay(session, call_timeout_s=settings.call_timeout_s)
        self._pool = BoxPool(settings, self._relay, shared_size=num_slots)
        self._num_slots = num_slots
        # Digests of the data of rollouts that ended their box, oldest first: others of that task may do so, too.
        self._suspects: dict[str, None] = {}
        self._max_attempts = max_attempts
        self._training_timeout_s = training_timeout_s

    async def __aenter__(self) -> "BoxedRunner":
        """Raises `InvalidInput` for an environment that does not load."""
        try:
            await self._pool.start()
        except LoadError as error:
            env, why = self._settings.found.choice.name, seen_from_outside(str(error), self._settings)
            raise InvalidInput(f"{env} can't be loaded in its box: {why}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._pool.close())

    async def run(self, leased: LeasedRollout) -> RolloutResult:
        limit_s = min(leased.deadline - time.time(), self._training_timeout_s)
        if limit_s <= 0:
            return refused(InvalidReason.INFRA, "the deadline was over before the rollout began")
        deadline = time.monotonic() + limit_s
        path, watch = self._relay.open(leased.base_url, deadline=deadline)
        try:
            async with asyncio.timeout(limit_s):
                seat = await self._pool.take(self._size(leased))
        except TimeoutError:
            self._relay.close(path)
            return refused(InvalidReason.INFRA, "the deadline was over before there was a process to play it in")
        except BaseException:
            self._relay.close(path)
            raise
        try:
            result = await self._play(leased, seat, path, watch, deadline)
        finally:
            self._relay.close(path)
            self._pool.leave(seat)
        if result.detail is not None:
            result = replace(result, detail=seen_from_outside(result.detail, self._settings))
        if result.reason is not None:
            logger.warning("rollout is invalid: %s: %s", result.reason, result.detail)
        return result

    def _size(self, leased: LeasedRollout) -> int | None:
        """With how many others it may share a box, itself included; None: with all."""
        if leased.attempt >= _ALONE_AT or (self._suspects and _digest(leased) in self._suspects):
            return 1
        if leased.attempt == 1:
            return None
        return 1 if leased.attempt >= self._max_attempts else min(_SECOND_SIZE, self._num_slots)

    def _suspect(self, leased: LeasedRollout) -> None:
        self._suspects[_digest(leased)] = None
        if len(self._suspects) > _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    async def _play(self, leased: LeasedRollout, seat: Seat, path: str, watch: Watch, deadline: float) -> RolloutResult:
        request = leased.request
        low, high = request.rewards["range"]
        task = Task(id=request.sample_id, metadata=request.data)
        limit_s = max(0.0, deadline - time.monotonic())
        try:
            playing = seat.box.play(task, path=path, limit_s=limit_s, reward_range=(low, high))
        except BoxEnded as error:
            raise RolloutGivenBack(f"its box had ended before it began: {error}") from error
        try:
            await asyncio.wait({playing.ended}, timeout=limit_s)
            is_late, num_pending = not playing.ended.done(), watch.num_pending
        finally:
            if not await seat.box.cancel(playing, grace_s=_GRACE_S):
                logger.warning("the environment does not end %s; its process gets nothing new", task.id)
                seat.box.abandon(playing)
        if is_late:
            if watch.failure is not None:
                return failed(watch.failure)
            reason = InvalidReason.INFRA if num_pending else InvalidReason.ENV_ERROR
            return refused(reason, f"TimeoutError: not done after {limit_s:.1f} s, {num_pending} calls pending")
        try:
            return result_of(playing.ended.result(), watch, (low, high), has_network=self._has_network)
        except BoxEnded as error:
            if watch.failure is not None:
                return failed(watch.failure)
            if error.is_own_fault:
                self._suspect(leased)
                return refused(InvalidReason.ENV_ERROR, f"the environment's process was ended: {error}")
            raise RolloutGivenBack(f"the process that it shared with others was ended: {error}") from error


def _digest(leased: LeasedRollout) -> str:
    """The same for all rollouts of a task."""
    return digest_of(encode(leased.request.data))
