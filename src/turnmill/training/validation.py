"""Held-out evaluations while a run trains: before its first step, and every `val_every` steps.

    step applied and served -> [due?] evaluate its version -> values of the step's metric -> the next step

All calls of an evaluation are of one version because no step is made until it is done: the metric that it belongs to is
written before the next batch is recorded. One that can't be played costs the run its figures and nothing else.
"""

import asyncio
import logging
import time
from typing import Protocol

from turnmill.config import Config
from turnmill.errors import BackendUnavailable, BudgetExceeded, Conflict, TurnmillError
from turnmill.records import Version

logger = logging.getLogger(__name__)
PREFIX = "val_"


class Evaluator(Protocol):
    """Who plays the held-out tasks."""

    async def evaluate(self, step: int, version: Version) -> dict[str, float]:
        """Figures of `version`, which is served, after `step` optimizer steps; what it played before is not repeated.

        Raises `TurnmillError`.
        """
        ...


class Validation:
    """Decides when, and sees to it that training goes on whatever comes of it."""

    def __init__(self, config: Config, evaluator: Evaluator | None, stop: asyncio.Event, run_id: str) -> None:
        """Without an `evaluator` there are no held-out tasks, and nothing is ever due."""
        self._every = config.val_every if evaluator is not None else 0
        self._evaluator = evaluator
        self._stop = stop
        self._run_id = run_id

    def is_due(self, step: int) -> bool:
        """Whether the weights after so many steps are evaluated."""
        return self._every > 0 and step % self._every == 0

    async def values(self, step: int, version: Version) -> dict[str, float]:
        """What the metric of `step` says of its evaluation; nothing where none is due, or the run was asked to stop."""
        if self._evaluator is None or not self.is_due(step) or self._stop.is_set():
            return {}
        begun = time.monotonic()
        try:
            found = await self._unless_stopped(self._evaluator, step, version)
        except (BackendUnavailable, Conflict):
            # Nothing else would work either: another trainer has the run, or its store is gone.
            raise
        except BudgetExceeded as error:
            # Training hears of it at its next request, and ends in order.
            logger.info("the evaluation of step %d ended early: %s", step, error, extra={"at": self._run_id})
            return {}
        except TurnmillError as error:
            logger.warning(
                "the evaluation of step %d failed, and training goes on: %s", step, error, extra={"at": self._run_id}
            )
            return {f"{PREFIX}failed": 1.0, f"{PREFIX}s": time.monotonic() - begun}
        if found is None:
            return {}
        logger.info(
            "step %d, held-out: solved %.3f, reward %.3f",
            step,
            found.get("solved", 0.0),
            found.get("reward_mean", 0.0),
            extra={"at": self._run_id},
        )
        return {f"{PREFIX}{name}": value for name, value in found.items()} | {f"{PREFIX}s": time.monotonic() - begun}

    async def _unless_stopped(self, evaluator: Evaluator, step: int, version: Version) -> dict[str, float] | None:
        """What it found; None when asked to stop before."""
        playing = asyncio.create_task(evaluator.evaluate(step, version), name=f"evaluate step {step}")
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        try:
            await asyncio.wait({playing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return playing.result() if playing.done() else None
        finally:
            for task in (playing, stopped):
                task.cancel()
            await asyncio.gather(playing, stopped, return_exceptions=True)
