"""`turnmill cancel`: a wish that is left in the records, since the process that has the run may be any one.

ask: QUEUED, or nobody has it -> CANCELLED at once;  ACTIVE -> a record -> the control process that has the run looks
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from turnmill.backends.embedded import open_root_records
from turnmill.errors import Conflict, InvalidInput
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import RecordStore, Write
from turnmill.records import Run, RunStatus, cancel_key, encode
from turnmill.wiring.reading import as_seen

# How often a control process looks.
_LOOK_S = 0.5


class Cancel:
    """Why a run is to end early: the process is stopped, or somebody cancelled the run."""

    def __init__(self, when_stopped: RunStatus) -> None:
        self.event = asyncio.Event()
        self._is_asked = False
        self._when_stopped = when_stopped

    def ask(self) -> None:
        self._is_asked = True
        self.event.set()

    def status(self) -> RunStatus:
        """Of the run when it has ended for that."""
        return RunStatus.CANCELLED if self._is_asked else self._when_stopped


@asynccontextmanager
async def cancellable(
    runs: RecordStore, run_id: str, stop: asyncio.Event, when_stopped: RunStatus
) -> AsyncIterator[Cancel]:
    """Set the event inside by `stop`, or when `turnmill cancel` asks for it; earlier wishes don't count."""
    await runs.write([Write(key=cancel_key(run_id), value=None, expected=None)])
    cancel = Cancel(when_stopped)

    async def watch() -> None:
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not cancel.event.is_set():
                if (await asyncio.wait({stopped}, timeout=_LOOK_S))[0]:
                    cancel.event.set()
                elif (await runs.get([cancel_key(run_id)]))[0] is not None:
                    cancel.ask()
        finally:
            stopped.cancel()

    watching = asyncio.create_task(watch(), name=f"cancel {run_id}")
    try:
        yield cancel
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def ask(root: Path, run_id: str) -> Run:
    """Cancel a run that nobody has, or ask the process that has it; the run as it is now.

    Raises `NotFound`, and `InvalidInput` for a run that has ended.
    """
    runs = open_root_records(root)
    try:
        while True:
            record = await RunRecord.open(runs, run_id)
            run = as_seen(record.run)
            if run.status is RunStatus.ACTIVE:
                wish = {"asked_at": time.time()}
                await runs.write([Write(key=cancel_key(run_id), value=encode(wish), expected=None)])
                return run
            if run.status is not RunStatus.INTERRUPTED and run.status.is_final:
                raise InvalidInput(f"run {run_id} has ended already: {run.status}")
            text = "cancelled by the user"
            try:
                await record.save(replace(record.run, status=RunStatus.CANCELLED, ended_at=time.time(), error=text))
            except Conflict:
                # It got its turn in this moment.
                continue
            return record.run
    finally:
        runs.close()
