"""Plays one leased rollout: task in, result out, the model only by its base_url.

    LeasedRollout -> play_scored (environment, under the deadline) -> RolloutResult

A wall-clock deadline is never the policy's fault: the result is INFRA when a call was pending, else ENV_ERROR.
"""

import asyncio
import time
from typing import Any, Protocol

from turnmill.conversation.client import ChatClient, LeasedRollout
from turnmill.conversation.http import HttpClient
from turnmill.environment.base import Environment
from turnmill.environment.boundary import WatchedChat, invalid, play_scored
from turnmill.errors import LeaseLost
from turnmill.records import InvalidReason, RolloutResult, Task

# The proxy ends a call at `call_timeout_s`; the client waits this much longer for it to say so.
_CALL_MARGIN_S = 30.0


class Runner(Protocol):
    """Runs environments."""

    async def run(self, leased: LeasedRollout) -> RolloutResult:
        """Play one attempt. What the environment does wrong is in the result.

        Raises `LeaseLost` when the proxy says that the attempt is no longer current. A cancellation ends the
        environment's code first.
        """
        ...


class InProcessRunner:
    """Runs a built-in environment in the worker's own process."""

    def __init__(
        self,
        environment: Environment,
        session: HttpClient,
        *,
        call_timeout_s: float,
        training_timeout_s: float,
    ) -> None:
        """`training_timeout_s` bounds a rollout, as the deadline of its lease does: the earlier one counts."""
        self._environment = environment
        self._session = session
        self._call_timeout_s = call_timeout_s
        self._training_timeout_s = training_timeout_s

    async def run(self, leased: LeasedRollout) -> RolloutResult:
        request = leased.request
        task = Task(id=request.sample_id, metadata=request.data)
        limit_s = min(leased.deadline - time.time(), self._training_timeout_s)
        if limit_s <= 0:
            return invalid(InvalidReason.INFRA, TimeoutError("the deadline was over before the rollout began"), task)
        client = ChatClient(
            self._session,
            leased.base_url,
            timeout_s=self._call_timeout_s + _CALL_MARGIN_S,
            deadline=time.monotonic() + limit_s,
        )
        chat = WatchedChat(client)
        low, high = request.rewards["range"]
        playing = asyncio.create_task(
            play_scored(self._environment, task, chat, reward_range=(low, high)), name=f"play {request.sample_id}"
        )
        try:
            await asyncio.wait({playing}, timeout=limit_s)
            is_late, num_pending = not playing.done(), chat.num_pending
        finally:
            await _end(playing)
        if isinstance(chat.failure, LeaseLost):
            raise chat.failure
        if is_late:
            late = TimeoutError(f"not done after {limit_s:.1f} s, {num_pending} calls pending")
            return invalid(InvalidReason.INFRA if num_pending else InvalidReason.ENV_ERROR, late, task)
        if playing.cancelled():
            return invalid(InvalidReason.ENV_ERROR, RuntimeError("the environment cancelled its own task"), task)
        return playing.result()


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel `task`, wait until its code has ended, and look at its error, so that none is reported as unseen."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
