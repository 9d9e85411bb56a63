"""Watches that a run makes progress, from within its control process: progress, not liveness.

    look -> nothing for `stall_after_s` -> diagnosis -> finding (an alert)
                       for twice as long -> the stage fails with the diagnosis, and Teardown runs

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| watchdog | the run's stores and processes | a tenth of its limit, 5 s at most | the clock | a diagnosis, or its end |

What is progress says `turnmill.health.progress`, what holds a run up `turnmill.health.diagnosis`.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from turnmill.errors import BackendUnavailable, RecordCorrupt, StageFailed
from turnmill.health.diagnosis import Diagnosis, examine
from turnmill.health.progress import ProgressClock
from turnmill.health.snapshot import Snapshot
from turnmill.pipeline.stage import StageContext
from turnmill.records import AlertKind
from turnmill.wiring.examining import Examiner
from turnmill.wiring.monitor import Finding

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_S, _SHORTEST_INTERVAL_S = 5.0, 0.5
# Over so long is seen whether a process computes.
_LONGEST_WINDOW_S = 20.0
# A stall that lasts so many times its limit ends the run: nothing is spent on a hang for ever.
FAIL_AFTER = 2


@asynccontextmanager
async def watched(root: Path, ctx: StageContext) -> AsyncIterator[tuple[StageContext, "StallCheck"]]:
    """The context of a run whose stages fail once it has stalled for too long, and the check that says so earlier."""
    stalls = StallCheck(root, ctx.run.run_id, ctx.config.stall_after_s)

    def check() -> None:
        ctx.check()
        stalls.check()

    await stalls.start()
    try:
        yield replace(ctx, check=check), stalls
    finally:
        await stalls.close()


class StallCheck:
    """Implements `monitor.Check`, and `check` for the pipeline; between `start` and `close`."""

    def __init__(self, root: Path, run_id: str, stall_after_s: float) -> None:
        self._root = root
        self._run_id = run_id
        self._stall_after_s = stall_after_s
        self._interval_s = min(_LONGEST_INTERVAL_S, max(_SHORTEST_INTERVAL_S, stall_after_s / 10))
        self._examiner = Examiner(root, run_id, window_s=min(_LONGEST_WINDOW_S, stall_after_s / 2))
        self._clock = ProgressClock()
        self._finding: Finding | None = None
        # Text for people, once the run is to fail.
        self._overdue: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look from now on, until `close`."""
        self._task = asyncio.create_task(self._watch(), name=f"watchdog {self._run_id}")

    async def close(self) -> None:
        """Look no more; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> list[Finding]:
        """See `monitor.Check.look`: what was found last, at most 5 s ago."""
        return [self._finding] if self._finding is not None else []

    def check(self) -> None:
        """Raise `StageFailed` with the diagnosis once the run has stalled for too long, or what ended the watch."""
        if self._overdue is not None:
            raise StageFailed(self._overdue)
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except (BackendUnavailable, RecordCorrupt, OSError) as error:
                # The run's own processes meet it too, and end the run where it lasts.
                logger.warning("the watchdog can't look: %s", error, extra={"at": self._run_id})
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        fingerprint = await asyncio.to_thread(self._examiner.fingerprint)
        idle_s = self._clock.observe(time.monotonic(), fingerprint)
        if idle_s == 0.0:
            self._moves()
            return
        # Only now, since it costs a look at all processes of the machine.
        seen = await asyncio.to_thread(self._examiner.look)
        idle_s = self._clock.observe(time.monotonic(), seen.fingerprint, seen.computing)
        if idle_s < self._stall_after_s:
            self._moves()
            return
        await self._stalled(replace(seen.snapshot, idle_s=idle_s, stall_after_s=self._stall_after_s))

    def _moves(self) -> None:
        self._overdue = None
        if self._finding is not None:
            logger.warning("the run makes progress again", extra={"at": self._run_id})
            self._finding = None

    async def _stalled(self, snapshot: Snapshot) -> None:
        found = examine(snapshot).diagnoses
        if not found:
            return
        cause, first = found[0], self._finding is None
        self._finding = self._as_finding(snapshot, cause)
        text = f"no progress for {snapshot.idle_s:.0f} s (a stall after {self._stall_after_s:g} s): {cause.summary}"
        if first:
            logger.warning("the run is stalled: %s; next: %s", text, self._finding.command, extra={"at": self._run_id})
        if snapshot.idle_s >= FAIL_AFTER * self._stall_after_s:
            self._overdue = "\n".join([text, *cause.evidence, *(f"    {line}" for line in cause.log_lines)])

    def _as_finding(self, snapshot: Snapshot, cause: Diagnosis) -> Finding:
        return Finding(
            kind=AlertKind.RUN_STALLED,
            summary=f"run {self._run_id} has stalled: {cause.summary}",
            command=f"turnmill doctor {self._run_id} --root {shlex.quote(str(self._root))}",
            stage=snapshot.stage,
            error="\n".join([f"no progress for {snapshot.idle_s:.0f} s", *cause.evidence, *cause.commands]),
            log_lines=cause.log_lines,
            conversation=cause.conversation,
        )
