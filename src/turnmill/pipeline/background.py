"""Work of a stage that may take longer than a call should: reading whole files, copying a model.

poll -> begun, unless it is under way -> None | its result | what it raised, and then the next poll begins it anew
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# How long a poll waits for what may be done in a moment.
_MOMENT_S = 0.2


class Background:
    """Tasks of a control process, by name. Use it on one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def result_of(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """The result of `work` (never None), or None while it goes on; raises what it raised."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(work(), name=f"stage work {name}")
        task = self._tasks[name]
        await asyncio.wait({task}, timeout=_MOMENT_S)
        if not task.done():
            return None
        del self._tasks[name]
        found: T = task.result()
        return found

    async def close(self) -> None:
        """Cancel what is still under way; idempotent."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
