"""Watches that a run makes progress, from within its control process: progress, not liveness.

    look -> nothing for `stall_after_s` -> diagnosis -> finding (an alert)
                       for twice as long -> the stage fails with the diagnosis, and Teardown runs

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| watchdog | the run's stores and processes | a tenth of its limit, 20 s at most | the clock | a diagnosis, or its end |

What is progress says `turnmill.health.progress`, what holds a run up `turnmill.health.diagnosis`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from turnmill.errors import BackendUnavailable, RecordCorrupt, StageFailed
from turnmill.health.diagnosis import examine
from turnmill.health.progress import ProgressClock, stall_after
from turnmill.health.report import Diagnosis
from turnmill.health.snapshot import Snapshot
from turnmill.pipeline.stage import StageContext
from turnmill.records import AlertKind
from turnmill.wiring.watching.evidence import command
from turnmill.wiring.watching.examining import Examiner
from turnmill.wiring.watching.monitor import Finding

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_S, _SHORTEST_INTERVAL_S = 5.0, 0.5
# Over so long is seen whether a process computes.
_LONGEST_WINDOW_S = 20.0
# Between two looks so much more than was planned is time in which this process was away.
_LATE_S = 1.0
# Looking may take this share of the time, however long the conversations are.
_SHARE = 0.02
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
        window_s = min(_LONGEST_WINDOW_S, stall_after_s / 2)
        # Nothing is seen of a process in a window without two looks.
        self._longest_pause_s = window_s
        self._examiner = Examiner(root, run_id, window_s=window_s)
        self._clock = ProgressClock()
        self._away_s = 0.0
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
        """See `monitor.Check.look`: what was found last, at most 20 s ago."""
        return [self._finding] if self._finding is not None else []

    def check(self) -> None:
        """Raise `StageFailed` with the diagnosis once the run has stalled for too long, or what ended the watch."""
        if self._overdue is not None:
            raise StageFailed(self._overdue)
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            try:
                await self._look()
            except (BackendUnavailable, RecordCorrupt, OSError) as error:
                # The run's own processes meet it too, and end the run where it lasts.
                logger.warning("the watchdog can't look: %s", error, extra={"at": self._run_id})
            ended = time.monotonic()
            pause_s = max(self._interval_s, min((ended - before) / _SHARE, self._longest_pause_s))
            await asyncio.sleep(pause_s)
            # Frozen with all others, or without a processor for so long: it is no stall that nothing was done.
            if (late_s := time.monotonic() - ended - pause_s) > _LATE_S:
                self._away_s += late_s

    async def _look(self) -> None:
        fingerprint = await asyncio.to_thread(self._examiner.fingerprint)
        idle_s = self._clock.observe(self._now(), fingerprint)
        if idle_s == 0.0:
            self._moves()
            return
        # Only now, since it costs a look at all processes of the machine.
        seen = await asyncio.to_thread(self._examiner.look)
        idle_s = self._clock.observe(self._now(), seen.fingerprint, seen.computing)
        limit_s = stall_after(self._stall_after_s, seen.snapshot.stage)
        if idle_s < limit_s:
            self._moves()
            return
        await self._stalled(replace(seen.snapshot, idle_s=idle_s, stall_after_s=limit_s))

    def _now(self) -> float:
        """Of a clock that stands still while this process does."""
        return time.monotonic() - self._away_s

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
        text = f"no progress for {snapshot.idle_s:.0f} s (a stall after {snapshot.stall_after_s:g} s): {cause.summary}"
        if first:
            logger.warning("the run is stalled: %s; next: %s", text, self._finding.command, extra={"at": self._run_id})
        if snapshot.idle_s >= FAIL_AFTER * snapshot.stall_after_s:
            self._overdue = "\n".join([text, *cause.evidence, *(f"    {line}" for line in cause.log_lines)])

    def _as_finding(self, snapshot: Snapshot, cause: Diagnosis) -> Finding:
        return Finding(
            kind=AlertKind.RUN_STALLED,
            summary=f"run {self._run_id} has stalled: {cause.summary}",
            command=command(self._root, "doctor", self._run_id),
            stage=snapshot.stage,
            error="\n".join([f"no progress for {snapshot.idle_s:.0f} s", *cause.evidence, *cause.commands]),
            log_lines=cause.log_lines,
            conversation=cause.conversation,
        )
