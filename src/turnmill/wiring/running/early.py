"""Bad data is told while a run waits: whoever uploaded it need not wait for a slot to hear of it.

QUEUED without a slot -> the same look at its rows as in ValidateData, one run at a time -> is it bad?

Nothing is recorded: a run that is bad gets its turn at once, and its ValidateData says what is wrong.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from turnmill.config import from_dict
from turnmill.errors import TurnmillError
from turnmill.intake.reports import RefusedData
from turnmill.records import Run
from turnmill.wiring.running.control import validate_data

logger = logging.getLogger(__name__)


class EarlyChecks:
    """Looks at runs that wait; `found_bad` is called when one of them turns out to be bad."""

    def __init__(self, root: Path, found_bad: Callable[[], None]) -> None:
        self._root = root
        self._found_bad = found_bad
        self._bad: set[str] = set()
        # By run id; kept when done, so that nothing is looked at twice.
        self._looks: dict[str, asyncio.Task[None]] = {}
        # Reading takes a core: one at a time leaves the others to those that run.
        self._one = asyncio.Lock()

    def is_bad(self, run_id: str) -> bool:
        """Whether it was found bad so far."""
        return run_id in self._bad

    def look(self, run: Run) -> None:
        """Look at it in the background, if nobody has."""
        if run.run_id not in self._looks and not run.stages:
            self._looks[run.run_id] = asyncio.create_task(self._look(run), name=f"early look at {run.run_id}")

    async def close(self) -> None:
        """Give up what is being looked at; idempotent."""
        for task in self._looks.values():
            task.cancel()
        await asyncio.gather(*self._looks.values(), return_exceptions=True)

    async def _look(self, run: Run) -> None:
        paths = [Path(path) for path in (run.data_path, run.eval_path) if path is not None]
        try:
            async with self._one:
                for path in paths:
                    await validate_data(self._root, from_dict(run.config), path)
        except RefusedData:
            self._bad.add(run.run_id)
            self._found_bad()
        except (TurnmillError, OSError) as error:
            # It is told when the run gets its turn, by the stage whose business it is.
            logger.info("run %s can't be looked at before its turn: %s", run.run_id, error, extra={"at": run.run_id})
