"""The simplest loop over the stage table: start, poll until done, record; then the next; Teardown whatever happens.

    Run(ACTIVE) -> [start -> poll* -> StageRecord(done)]* -> Run(SUCCEEDED)
                         any failure, time-out or cancel -> Teardown -> Run(FAILED | CANCELLED)

Consumes: the stage table and a run record. Waits for: a poll that says done, or the cancel event.
Produces: the run record with its history; it is written before and after each stage.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from turnmill.errors import Cancelled, Conflict, Duplicate, NotFound, StageFailed, TurnmillError
from turnmill.pipeline.stage import Done, Handle, Stage, StageContext
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import Run, RunStatus, StageRecord, decode, encode, run_key

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2


class RunRecord:
    """The run record of one control process, its only writer: each change is a compare-and-set."""

    def __init__(self, store: RecordStore, run: Run, version: int) -> None:
        self._store = store
        self._version = version
        self.run = run

    @classmethod
    async def create(cls, store: RecordStore, run: Run) -> "RunRecord":
        """Raises `Conflict` if the run id is taken."""
        record = cls(store, run, 0)
        await record._write(run)
        return record

    @classmethod
    async def open(cls, store: RecordStore, run_id: str) -> "RunRecord":
        """The record of a run whose control process is gone; raises `NotFound`."""
        stored = await _stored_run(store, run_id)
        return cls(store, decode(stored.value, Run), stored.version)

    async def save(self, run: Run) -> None:
        """Raises `Conflict` if another process wrote the record."""
        await self._write(run)

    async def _write(self, run: Run) -> None:
        (applied,) = await self._store.write([Write(key=run.key, value=encode(run), expected=self._version)])
        if not applied:
            raise Conflict(f"run {run.run_id} was changed by another process")
        self._version += 1
        self.run = run

    async def stage(self, record: StageRecord) -> None:
        """Put `record` in the history, in place of the earlier entry of its name and attempt."""
        same = (record.name, record.attempt)
        others = tuple(item for item in self.run.stages if (item.name, item.attempt) != same)
        await self.save(replace(self.run, stages=(*others, record)))


async def load_run(store: RecordStore, run_id: str) -> Run:
    """Raises `NotFound`."""
    return decode((await _stored_run(store, run_id)).value, Run)


async def _stored_run(store: RecordStore, run_id: str) -> Stored:
    (stored,) = await store.get([run_key(run_id)])
    if stored is None:
        raise NotFound(f"there is no run {run_id!r}")
    return stored


async def walk(
    ctx: StageContext,
    stages: Sequence[Stage],
    record: RunRecord,
    cancel: asyncio.Event,
    *,
    when_cancelled: Callable[[], RunStatus] = lambda: RunStatus.CANCELLED,
) -> tuple[Run, TurnmillError | None]:
    """Walk the table to its end; the run record is final afterwards. Returns it with what went wrong, if anything.

    `when_cancelled` says which status cancelling leads to: a run that goes on later waits for its turn again.

    An error that is not a `TurnmillError` is a defect: Teardown runs, then it is raised.
    """
    failure: TurnmillError | None = None
    defect: Exception | None = None
    for stage in stages:
        if (failure or defect) and not stage.always:
            continue
        try:
            await _walk_stage(ctx, stage, record, asyncio.Event() if stage.always else cancel)
        except (Cancelled, Duplicate) as error:
            logger.info("stage %s: %s", stage.name, error, extra={"at": record.run.run_id})
            failure = failure or error
        except TurnmillError as error:
            logger.error("stage %s failed: %s", stage.name, error, extra={"at": record.run.run_id})
            failure = failure or error
        except Exception as error:
            logger.exception("stage %s hit a defect", stage.name, extra={"at": record.run.run_id})
            defect = defect or error
    if isinstance(failure, Cancelled):
        status = when_cancelled()
    elif isinstance(failure, Duplicate):
        status = RunStatus.DUPLICATE
    else:
        status = RunStatus.FAILED if failure or defect else RunStatus.SUCCEEDED
    error_text = str(failure or defect) if (failure or defect) and status.is_final else None
    ended_at = time.time() if status.is_final else None
    duplicate_of = failure.run_id if isinstance(failure, Duplicate) else None
    ended = replace(record.run, status=status, ended_at=ended_at, error=error_text, duplicate_of=duplicate_of)
    await record.save(ended)
    if defect is not None:
        raise defect
    return record.run, failure


async def _walk_stage(ctx: StageContext, stage: Stage, record: RunRecord, cancel: asyncio.Event) -> None:
    entry = StageRecord(name=stage.name, state="running", started_at=time.time(), attempt=record.run.attempt)
    await record.stage(entry)
    logger.info("stage %s starts", stage.name, extra={"at": record.run.run_id})
    try:
        async with asyncio.timeout(stage.timeout_s(ctx.config)):
            num_retries, handle = await _start(ctx, stage, cancel)
            entry = replace(entry, handle=handle, num_retries=num_retries)
            await record.stage(entry)
            done = await _poll(ctx, stage, handle, cancel)
    except TimeoutError as error:
        text = f"{stage.name} did not end within {stage.timeout_s(ctx.config):.0f} s"
        await record.stage(replace(entry, state="failed", ended_at=time.time(), error=text))
        raise StageFailed(text) from error
    except Exception as error:
        text = str(error) or type(error).__name__
        await record.stage(replace(entry, state="failed", ended_at=time.time(), error=text))
        raise
    await record.stage(replace(entry, state="done", ended_at=time.time(), result=done.result))


async def _start(ctx: StageContext, stage: Stage, cancel: asyncio.Event) -> tuple[int, Handle]:
    num_retries = 0
    while True:
        if cancel.is_set():
            raise Cancelled("cancelled by the user")
        try:
            return num_retries, await stage.start(ctx)
        except stage.retry.errors as error:
            if num_retries >= stage.retry.max_retries:
                raise
            delay = stage.retry.first_delay_s * 2**num_retries * random.uniform(0.5, 1.5)
            num_retries += 1
            logger.warning("stage %s: %s; again in %.1f s", stage.name, error, delay)
            await _pause(cancel, delay)


async def _poll(ctx: StageContext, stage: Stage, handle: Handle, cancel: asyncio.Event) -> Done:
    started, told = time.monotonic(), False
    while True:
        if not stage.always:
            ctx.check()
        outcome = await stage.poll(ctx, handle)
        if isinstance(outcome, Done):
            return outcome
        if not told and time.monotonic() - started > stage.expected_s:
            told = True
            logger.warning(
                "stage %s takes longer than the expected %.0f s: %s", stage.name, stage.expected_s, outcome.detail
            )
        await _pause(cancel, POLL_INTERVAL_S)


async def _pause(cancel: asyncio.Event, seconds: float) -> None:
    """Wait, but no longer than until the user cancels; raises `Cancelled` then."""
    try:
        await asyncio.wait_for(cancel.wait(), timeout=seconds)
    except TimeoutError:
        return
    raise Cancelled("cancelled by the user")
