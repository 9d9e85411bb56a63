"""The preflight role: plays the environment without a model and leaves a report, also when it has to be cut off.

    request blob -> load environment, read tasks -> environment.preflight -> report blob

It opens no queue and no record. An environment that blocks the process can't be ended from within by an event loop: a
thread watches, writes the report that says where it hangs, and ends the process; where not even a thread gets its turn,
`faulthandler` does.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from turnmill.environment import Environment
from turnmill.environment.boundary import describe
from turnmill.environment.preflight import choose, preflight, rest
from turnmill.errors import InvalidInput
from turnmill.intake.dataset import read_tasks
from turnmill.pipeline.preparing import report_key, request_key
from turnmill.ports import BlobStore
from turnmill.records import (
    Check,
    CheckState,
    EnvironmentChoice,
    PreflightReport,
    PreflightRequest,
    Task,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

# How much later `faulthandler` ends a process whose watchdog got no turn.
_LAST_RESORT_S = 5.0
_EXIT_HANGS = 1
# Tasks that are played, and those that are looked at.
Rows = tuple[list[Task], list[Task]]
_LEVELS = {CheckState.FAILED: logging.ERROR, CheckState.WARNING: logging.WARNING}


class Watchdog:
    """A thread that ends the process when one thing takes longer than `limit_s`, having told what and where."""

    def __init__(self, limit_s: float, bark: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._bark = bark
        self._lock = threading.Lock()
        self._what = ""
        self._began = time.monotonic()
        self._watched = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preflight watchdog", daemon=True)
        self._thread.start()

    def next(self, what: str) -> None:
        """Something else begins; called in the thread that is watched."""
        logger.info("preflight: %s", what)
        with self._lock:
            self._what, self._began = what, time.monotonic()
        faulthandler.dump_traceback_later(self._limit_s + _LAST_RESORT_S, exit=True)

    def close(self) -> None:
        """Idempotent."""
        faulthandler.cancel_dump_traceback_later()
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._lock:
                what, left_s = self._what, self._began + self._limit_s - time.monotonic()
            if left_s <= 0:
                break
            if self._stop.wait(left_s):
                return
        self._bark(f"{what}: the process is not given back within {self._limit_s:g} s; it is at {self._place()}")
        # Nothing gentler ends a thread that does not listen.
        os._exit(_EXIT_HANGS)

    def _place(self) -> str:
        """Where the watched thread is: its innermost calls, last one first."""
        frame = sys._current_frames().get(self._watched)
        calls = reversed(traceback.extract_stack(frame)[-3:])
        return ", called at ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in calls)


async def run_preflight(
    blobs: BlobStore,
    name: str,
    *,
    stop: asyncio.Event,
    load: Callable[[EnvironmentChoice], Environment],
    grace_s: float = 3.0,
) -> None:
    """Do what the request of `name` asks for and leave its report; ends early, without one, when told to stop.

    `grace_s`: what an environment has beyond its own limit to give its process back.
    """
    request = decode(await blobs.get(request_key(name)), PreflightRequest)
    rows = await rows_of(request)

    async def leave(report: PreflightReport) -> None:
        await leave_report(blobs, name, report)

    def bark(text: str) -> None:
        asyncio.run(leave(PreflightReport(checks=(Check(name="limits", state=CheckState.FAILED, detail=text),))))

    watchdog = Watchdog(request.play_s + grace_s, bark)
    try:
        await unless_stopped(stop, _check(request, rows, watchdog, leave, load))
    finally:
        watchdog.close()


async def leave_report(blobs: BlobStore, name: str, report: PreflightReport) -> None:
    """Log it, and put it where the pipeline looks for it."""
    for check in report.checks:
        logger.log(
            _LEVELS.get(check.state, logging.INFO), "preflight: %s: %s: %s", check.name, check.state, check.detail
        )
    await blobs.put(report_key(name), encode(report))


async def _check(
    request: PreflightRequest,
    rows: Rows,
    watchdog: Watchdog,
    leave: Callable[[PreflightReport], Awaitable[None]],
    load: Callable[[EnvironmentChoice], Environment],
) -> None:
    await leave(await examine(request, rows, load=load, playing=watchdog.next))


async def examine(
    request: PreflightRequest,
    rows: Rows,
    *,
    load: Callable[[EnvironmentChoice], Environment],
    playing: Callable[[str], None],
) -> PreflightReport:
    """What is found out about an environment whose code may run in this process.

    `playing` is told what is about to be done, for a watchdog.
    """
    played, others = rows
    playing("loading the environment")
    try:
        environment = load(request.environment)
    except Exception as error:  # the boundary to the environment's code
        text = str(error) if isinstance(error, InvalidInput) else describe(error)
        return PreflightReport(checks=(Check(name="loads", state=CheckState.FAILED, detail=text),))
    return await preflight(environment, played, request, others=others, playing=playing)


async def rows_of(request: PreflightRequest) -> Rows:
    """Of the request's file; raises `DataError`."""
    tasks = await asyncio.to_thread(read_tasks, Path(request.data_path))
    played = choose(tasks, request.seed)
    return played, rest(tasks, played)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Do the work, or end it when told to stop."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopped):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(working, stopped, return_exceptions=True)
