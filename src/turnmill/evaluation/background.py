"""Evaluations beside everything else that a control process does."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnmill.evaluation.comparison import compare
from turnmill.evaluation.held_out import Evaluation
from turnmill.evaluation.playing import Progress
from turnmill.records import Baseline, Purpose, Version

BASE_VERSION = Version(incarnation=0, n=0)
# Plays one file, given a name, the file, what for, with which weights, and where to tell how far it is.
Player = Callable[[str, Path, Purpose, Version, Progress], Coroutine[Any, Any, Evaluation | Baseline]]


class BackgroundEvaluations:
    """Evaluations, and the baseline, as tasks of this process, by name."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._tasks: dict[str, asyncio.Task[Evaluation | Baseline]] = {}
        self._progress: dict[str, Progress] = {}

    async def start(
        self, name: str, path: Path, purpose: Purpose = Purpose.EVAL, version: Version = BASE_VERSION
    ) -> None:
        """Begin it, unless it was begun before."""
        if name not in self._tasks:
            self._progress[name] = Progress()
            playing = self._player(name, path, purpose, version, self._progress[name])
            self._tasks[name] = asyncio.create_task(playing, name=f"evaluate-{name}")

    def poll(self, name: str) -> dict[str, Any] | None:
        """Its result as plain data, or None while it goes on; raises what ended it, once: then it may be begun anew."""
        task = self._tasks[name]
        if not task.done():
            return None
        if task.exception() is not None:
            del self._tasks[name]
        return asdict(task.result())

    def compare(self, before: str, after: str, *, by: str) -> dict[str, Any]:
        """How the tasks of two evaluations that are done went, as plain data."""
        found = [task.result() for task in (self._tasks[before], self._tasks[after])]
        first, second = (one.tasks for one in found if isinstance(one, Evaluation))
        return asdict(compare(first, second, by=by))

    def progress(self, name: str) -> str:
        """How far it is, for people."""
        return str(self._progress[name])

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
