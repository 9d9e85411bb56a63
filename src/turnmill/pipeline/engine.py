"""The simplest loop over the stage table: start, poll until done, record; then the next; Teardown whatever happens.

    Run(ACTIVE) -> [start -> poll* -> StageRecord(done)]* -> Run(SUCCEEDED)
                         any failure, time-out or cancel -> Teardown -> Run(FAILED | CANCELLED)

Consumes: the stage table and a run record. Waits for: a poll that says done, or the cancel event.
Produces: the run record with its history; it is written before and after each stage.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from turnmill import failpoints
from turnmill.errors import BackendUnavailable, Cancelled, Conflict, Duplicate, NotFound, StageTimeout, TurnmillError
from turnmill.pipeline.failures import classify, text_of
from turnmill.pipeline.stage import Done, Handle, Stage, StageContext
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import ErrorClass, Run, RunStatus, StageRecord, StageRetry, decode, encode, run_key
from turnmill.telemetry import log_as_stage

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_INTERVAL_S = 0.2
# Seconds between two notes of what goes on in a stage.
_TELL_S = 1.0
# In the history of a stage, the last ones: a store that is shaky for hours must not fill the record.
_MOST_RETRIES = 50
# Failpoints of each stage, `<stage>-<point>`, in order.
POINTS = ("entered", "started", "handed", "finished", "done")


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
    failure: TurnmillError | None = None,
) -> tuple[Run, TurnmillError | None]:
    """Walk the table to its end; the run record is final afterwards. Returns it with what went wrong, if anything.

    `when_cancelled` says which status cancelling leads to: a run that goes on later waits for its turn again.
    `failure` has ended the run already: only what always runs is left of it.

    An error that is not a `TurnmillError` is a defect: Teardown runs, then it is raised.
    """
    defect: Exception | None = None
    for stage in stages:
        if (failure or defect) and not stage.always:
            continue
        try:
            with log_as_stage(stage.name):
                await _StageWalk(ctx, stage, record, asyncio.Event() if stage.always else cancel).walk()
        except TurnmillError as error:
            failure = failure or error
        except Exception as error:
            defect = defect or error
    if isinstance(failure, Cancelled):
        status = when_cancelled()
    elif isinstance(failure, Duplicate):
        status = RunStatus.DUPLICATE
    else:
        status = RunStatus.FAILED if failure or defect else RunStatus.SUCCEEDED
    ended_by = failure or defect
    error_text = text_of(ended_by) if ended_by is not None and status.is_final else None
    ended_at = time.time() if status.is_final else None
    duplicate_of = failure.run_id if isinstance(failure, Duplicate) else None
    ended = replace(record.run, status=status, ended_at=ended_at, error=error_text, duplicate_of=duplicate_of)
    await record.save(ended)
    if defect is not None:
        raise defect
    return record.run, failure


class _StageWalk:
    """One stage of one attempt, from its start to the end; the history says at each moment how far it is."""

    def __init__(self, ctx: StageContext, stage: Stage, record: RunRecord, cancel: asyncio.Event) -> None:
        self._ctx = ctx
        self._stage = stage
        self._record = record
        self._cancel = cancel
        self._told_at = -_TELL_S
        self._entry = StageRecord(name=stage.name, state="running", started_at=time.time(), attempt=record.run.attempt)

    async def walk(self) -> None:
        """Raises what ends the stage early, `StageTimeout` when its time is over."""
        await self._note()
        self._hit("entered")
        self._log(logging.INFO, "starts")
        limit_s = self._stage.timeout_s(self._ctx.config)
        try:
            async with asyncio.timeout(limit_s) as limit:
                handle = await self._tried(self._start)
                self._hit("started")
                await self._note(handle=handle)
                self._hit("handed")
                done = await self._poll()
                self._hit("finished")
        except TimeoutError as error:
            if not limit.expired():
                await self._fail(error)
                raise
            late = StageTimeout(f"{self._stage.name} did not end within {limit_s:.0f} s")
            await self._fail(late)
            raise late from error
        except Exception as error:
            await self._fail(error)
            raise
        self._log(logging.INFO, "is done after %.1f s", time.time() - self._entry.started_at)
        await self._note(state="done", ended_at=time.time(), result=done.result, detail="")
        self._hit("done")

    def _hit(self, point: str) -> None:
        """A moment at which the history and what was done differ in another way than at the one before."""
        failpoints.hit(f"{self._stage.name}-{point}")

    async def _tried(self, call: Callable[[], Awaitable[T]]) -> T:
        """What it returns, after as many tries as the stage allows."""
        retry = self._stage.retry
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + retry.max_retries),
            wait=wait_random_exponential(multiplier=retry.first_delay_s, max=retry.max_delay_s),
            retry=retry_if_exception(lambda error: classify(error) in retry.classes),
            before_sleep=self._note_retry,
            sleep=partial(_pause, self._cancel),
            reraise=True,
        )
        return await retrying(call)

    async def _start(self) -> Handle:
        if self._cancel.is_set():
            raise Cancelled("cancelled by the user")
        return await self._stage.start(self._ctx)

    async def _note_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is None:
            return
        self._log(logging.WARNING, "failed and tries again in %.1f s: %s", state.upcoming_sleep, error)
        retry = StageRetry(at=time.time(), error=text_of(error), error_class=classify(error))
        try:
            await self._note(retries=(*self._entry.retries, retry)[-_MOST_RETRIES:])
        except BackendUnavailable as unavailable:
            # What failed may be the records themselves; the log has it, and the next note tells both.
            self._log(logging.WARNING, "can't record that it tries again: %s", unavailable)

    async def _poll(self) -> Done:
        while True:
            if not self._stage.always:
                self._ctx.check()
            # Each poll has all tries again: what passes by in an hour of training must not add up.
            outcome = await self._tried(partial(self._stage.poll, self._ctx, self._entry.handle))
            if isinstance(outcome, Done):
                return outcome
            await self._tell(outcome.detail)
            await _pause(self._cancel, POLL_INTERVAL_S)

    async def _tell(self, detail: str) -> None:
        """Keep what goes on for those who look, at most once a second."""
        now = time.monotonic()
        if detail == self._entry.detail or now - self._told_at < _TELL_S:
            return
        self._told_at = now
        try:
            await self._note(detail=detail)
        except BackendUnavailable as error:
            # Nothing depends on it; the next one may be kept.
            self._log(logging.WARNING, "can't record that %s: %s", detail, error)

    async def _fail(self, error: Exception) -> None:
        """Said in the log before the history says that the stage ended: `turnmill logs --stage` shows it."""
        failed = classify(error)
        if failed is ErrorClass.DEFECT:
            self._log(logging.ERROR, "hit a defect", exc_info=error)
        else:
            is_told = failed in (ErrorClass.CANCELLED, ErrorClass.DUPLICATE)
            self._log(logging.INFO if is_told else logging.ERROR, "failed (%s): %s", failed, error)
        await self._note(state="failed", ended_at=time.time(), error=text_of(error), error_class=failed)

    async def _note(self, **changes: Any) -> None:
        self._entry = replace(self._entry, **changes)
        await self._record.stage(self._entry)

    def _log(self, level: int, text: str, *values: object, exc_info: Exception | None = None) -> None:
        where = {"at": self._record.run.run_id}
        logger.log(level, f"stage %s {text}", self._stage.name, *values, exc_info=exc_info, extra=where)


async def _pause(cancel: asyncio.Event, seconds: float) -> None:
    """Wait, but no longer than until the user cancels; raises `Cancelled` then."""
    try:
        await asyncio.wait_for(cancel.wait(), timeout=seconds)
    except TimeoutError:
        return
    raise Cancelled("cancelled by the user")
