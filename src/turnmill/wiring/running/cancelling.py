"""`turnmill cancel`: a wish that is left in the records, since the process that has the run may be any one.

ask: QUEUED, or nobody has it -> CANCELLED at once;  ACTIVE -> a record -> the control process that has the run looks
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from turnmill.errors import BackendUnavailable, Conflict, InvalidInput
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import RecordStore, Write
from turnmill.records import Run, RunKind, RunStatus, cancel_key, encode
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import as_seen, until_left

logger = logging.getLogger(__name__)

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
                elif await _is_asked(runs, run_id):
                    cancel.ask()
        finally:
            stopped.cancel()

    watching = asyncio.create_task(watch(), name=f"cancel {run_id}")
    try:
        yield cancel
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _is_asked(runs: RecordStore, run_id: str) -> bool:
    """Records that can't be read right now must not make the run deaf to Ctrl-C: they are read again."""
    try:
        (stored,) = await runs.get([cancel_key(run_id)])
    except BackendUnavailable as error:
        logger.warning("whether run %s is to be cancelled can't be seen now: %s", run_id, error)
        return False
    return stored is not None


async def cancel(root: Path, run_id: str, *, asked: Callable[[], None]) -> Run:
    """End a run early, and wait until it has ended: whoever has it, and whatever happens to that process meanwhile.

    `asked` is called once the process that has the run was asked. Raises as `ask` does; a run that ends in another way
    in the meantime is no error.
    """
    run = await ask(root, run_id)
    if run.status is RunStatus.ACTIVE:
        asked()
    while run.status is RunStatus.ACTIVE:
        left = await until_left(root, run)
        if left.status.is_final and left.status is not RunStatus.INTERRUPTED:
            return left
        # It was stopped or killed before it saw the wish, so that the run would go on later.
        run = await ask(root, run_id)
    return run


async def heed(root: Path, run_id: str) -> Run | None:
    """Cancel a run that nobody has, if the process that had it last was asked to end it and did not come to that.

    None where nobody asked: the run may go on.
    """
    runs = backend_of(root).open_records()
    try:
        (wish,) = await runs.get([cancel_key(run_id)])
    finally:
        runs.close()
    return None if wish is None else await ask(root, run_id)


async def ask(root: Path, run_id: str) -> Run:
    """Cancel a run that nobody has, or ask the process that has it; the run as it is now.

    Raises `NotFound`, and `InvalidInput` for a run that has ended.
    """
    runs = backend_of(root).open_records()
    try:
        while True:
            record = await RunRecord.open(runs, run_id)
            run = as_seen(record.run)
            # One of an external trainer has no process that could be asked.
            if run.status is RunStatus.ACTIVE and run.kind is not RunKind.EXTERNAL:
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
