"""Gradients of groups that are certain to be in the batch, made while other conversations are still being played.

    offer ... offer -> complete -> wait           each group is made once, in the order of the batch
              abandon                             nothing of them is left

One task at a time works on the groups offered; what comes meanwhile waits for it. It consumes groups, waits for a
thread in which torch computes, is unblocked by `offer` and `complete`, and produces sums in the trainer. The rest of a
batch is begun at once beside what that task still works on, and added behind it. How the groups
were cut into parts depends on the clock, so the parts are told before the step and belong into its record. Weights must
not change from the first `offer` to the end of `wait`: they change in steps only, and no batch is collected meanwhile.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from turnmill.config import Config
from turnmill.training.samples import TrainingSample
from turnmill.training.trainer import Trainer, threads_alone

Group = Sequence[TrainingSample]
# A part is closed once it holds this many positions: so that much for all threads is left when the batch closes, and
# little is lost to the passes of small parts.
_PART_POSITIONS = 1024


class Ahead:
    """The gradients of one batch after the other."""

    def __init__(self, trainer: Trainer, config: Config) -> None:
        self._trainer = trainer
        self._threads = config.torch_threads
        self._threads_alone = threads_alone(config)
        # Of the trainer's weights, whose tokens alone are audited here; None: all are.
        self.version: str | None = None
        self._waiting: list[Group] = []
        self._parts: list[int] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def num_begun(self) -> int:
        """Groups whose gradients are made, or being made."""
        return sum(self._parts)

    def offer(self, groups: Sequence[Group]) -> None:
        """Groups that will be in the batch, right after those offered before; raises what an earlier one ended with.

        Where gradients take the whole batch, they wait for `complete`.
        """
        self._waiting += groups
        if not self._trainer.is_incremental:
            return
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._waiting and self._task is None:
            self._task = asyncio.create_task(self._work(), name="gradients ahead")

    def complete(self, groups: Sequence[Group], *, is_alone: bool) -> tuple[int, ...]:
        """The last groups of the batch; how many groups each part holds. If nothing else runs, they take all cores."""
        rest, self._waiting = [*self._waiting, *groups], []
        if rest:
            threads = self._threads_alone if is_alone else self._threads
            self._parts.append(len(rest))
            self._task = asyncio.create_task(self._work_off(self._task, rest, threads), name="gradients of the rest")
        parts, self._parts = tuple(self._parts), []
        return parts

    async def wait(self) -> None:
        """Until every group is made; raises what that ended with."""
        task, self._task = self._task, None
        if task is not None:
            await task

    async def abandon(self) -> None:
        """Forget what was offered since the last `complete`, and its gradients."""
        self._waiting, self._parts = [], []
        try:
            await self.wait()
        finally:
            self._trainer.abandon()

    async def _work(self) -> None:
        while self._waiting:
            part: list[Group] = []
            num_positions = 0
            while self._waiting and num_positions < _PART_POSITIONS:
                part.append(self._waiting.pop(0))
                num_positions += sum(len(row.token_ids) for sample in part[-1] for row in sample.rows)
            self._parts.append(len(part))
            await asyncio.to_thread(self._trainer.accumulate, part, self._threads, version=self.version)

    async def _work_off(self, before: asyncio.Task[None] | None, rest: Sequence[Group], threads: int) -> None:
        # What the groups before end with.
        added: Future[None] = Future()
        if before is None:
            added.set_result(None)
        else:
            before.add_done_callback(partial(_hand_over, added))
        try:
            await asyncio.to_thread(self._trainer.accumulate, rest, threads, version=self.version, after=added.result)
        finally:
            if before is not None:
                # Whatever the rest ended with: nothing is being added any more.
                await asyncio.wait([before])


def _hand_over(future: "Future[None]", task: "asyncio.Task[None]") -> None:
    """Let threads wait for a task."""
    if task.cancelled():
        future.cancel()
        return
    error = task.exception()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
