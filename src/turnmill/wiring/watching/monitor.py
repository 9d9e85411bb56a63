"""What goes wrong in a run while it goes on: checks that look again and again, each for one kind of trouble.

    walk_monitored: pipeline walks its stages  |  Monitor: look -> Finding that is new  -> alert
                                               |                   Finding that is gone -> the alert is resolved

Task:
    monitor RUN: consumes what the checks find; waits two seconds, or longer where looking takes long; ended with the
        walk. Nothing that a check does ends the run.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from turnmill.alerts import Dispatcher, new_alert
from turnmill.errors import BackendUnavailable
from turnmill.records import AlertKind, RunStatus

logger = logging.getLogger(__name__)

# How often a monitor looks, at most.
LOOK_S = 2.0
# Looking may take this share of the time, however much there is to read.
_SHARE = 0.05
# How long a look may still take when the run has ended.
_GRACE_S = 5.0
# About what goes on: over when the run is. The others are about what came of it, and stay until the run goes on
# without that trouble or somebody says that it is over.
_PASSING = (
    AlertKind.STAGE_SLOW,
    AlertKind.RUN_STALLED,
    AlertKind.CRASH_LOOP,
    AlertKind.DEAD_LETTERS_GROWING,
    AlertKind.EVALUATION_FAILED,
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Trouble as it is seen at one look; it becomes an alert, and its going away resolves that one."""

    kind: AlertKind
    # One line.
    summary: str
    # What to run next.
    command: str
    stage: str | None = None
    error: str | None = None
    # The last ones, oldest first.
    log_lines: tuple[str, ...] = ()
    # Key of the record of a conversation that failed.
    conversation: str | None = None

    @property
    def about(self) -> "About":
        """Findings of the same are one."""
        return self.kind, self.stage


class Check(Protocol):
    """Looks for one kind of trouble in one run."""

    async def look(self) -> list[Finding]:
        """All that is wrong now, empty where nothing is. Raises `BackendUnavailable` where it can't tell."""
        ...


About = tuple[AlertKind, str | None]


class Monitor:
    """The checks of one run (`run_id` None: of the deployment), and which of their findings are alerts already."""

    def __init__(self, run_id: str | None, checks: Sequence[Check], alarms: Dispatcher) -> None:
        self._run_id = run_id
        self._checks = tuple(checks)
        self._alarms = alarms
        # Each with the check that found it; None for one that an earlier process found.
        self._open: dict[About, Check | None] = {}
        # Told already: checks that can't tell, and their defects.
        self._told: set[tuple[int, str]] = set()

    async def recall(self, since: float) -> None:
        """Take over the open alerts of earlier processes, created since then; raises `BackendUnavailable`.

        That the run failed is over: it goes on.
        """
        for alert in await self._alarms.open_alerts(self._run_id, since=since):
            if alert.kind is AlertKind.RUN_FAILED:
                await self._alarms.resolve(alert.kind, run_id=alert.run_id, stage=alert.stage)
            elif self._run_id is not None or alert.kind is AlertKind.DEAD_LETTERS_GROWING:
                self._open[alert.kind, alert.stage] = None

    async def watch(self, stop: asyncio.Event) -> None:
        """Look until `stop`."""
        while not stop.is_set():
            before = time.monotonic()
            await self.look()
            took_s = time.monotonic() - before
            try:
                await asyncio.wait_for(stop.wait(), max(LOOK_S, took_s / _SHARE))
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Once through all checks; what is new is raised, what is gone resolved."""
        found: dict[About, tuple[Finding, Check]] = {}
        # Of what they have found before nobody knows whether it is still so.
        blind: list[Check] = []
        for number, check in enumerate(self._checks):
            findings = await self._ask(number, check)
            if findings is None:
                blind.append(check)
            else:
                found.update({finding.about: (finding, check) for finding in findings})
        try:
            for about, (finding, check) in found.items():
                if about not in self._open:
                    await self._raise(finding)
                self._open[about] = check
            for about, owner in list(self._open.items()):
                is_unknown = bool(blind) if owner is None else owner in blind
                if about not in found and not is_unknown:
                    await self._resolve(about)
        except BackendUnavailable as error:
            # The next look tries again.
            self._tell_once(-1, "alerts can't be recorded now", error)
        else:
            self._told = {told for told in self._told if told[0] != -1}

    async def end(self, status: RunStatus) -> None:
        """Resolve what is over with the run; one that goes on later keeps its open alerts."""
        if not status.is_final:
            return
        try:
            for about in [about for about in self._open if about[0] in _PASSING]:
                await self._resolve(about)
        except BackendUnavailable as error:
            logger.error("alerts of run %s can't be resolved: %s", self._run_id, error)

    async def _ask(self, number: int, check: Check) -> list[Finding] | None:
        """None where the check can't tell."""
        try:
            findings = await check.look()
        except BackendUnavailable as error:
            self._tell_once(number, f"{type(check).__name__} can't tell whether anything is wrong", error)
            return None
        except Exception as error:
            # The supervision boundary of a check: a defect in one must end neither the run nor the other checks.
            if self._tell_once(number, f"{type(check).__name__} has a defect and is of no use", error):
                logger.error("the defect of %s", type(check).__name__, exc_info=error)
            return None
        self._told = {told for told in self._told if told[0] != number}
        return findings

    def _tell_once(self, number: int, what: str, error: Exception) -> bool:
        told = (number, type(error).__name__)
        if told in self._told:
            return False
        self._told.add(told)
        logger.warning("%s: %s: %s", what, type(error).__name__, error, extra={"at": self._run_id})
        return True

    async def _raise(self, finding: Finding) -> None:
        logger.warning("%s", finding.summary, extra={"at": self._run_id})
        await self._alarms.raise_alert(
            new_alert(
                finding.kind,
                finding.summary,
                command=finding.command,
                run_id=self._run_id,
                stage=finding.stage,
                error=finding.error,
                log_lines=finding.log_lines,
                conversation=finding.conversation,
            )
        )

    async def _resolve(self, about: About) -> None:
        kind, stage = about
        await self._alarms.resolve(kind, run_id=self._run_id, stage=stage)
        del self._open[about]


@asynccontextmanager
async def monitored(monitor: Monitor, name: str) -> AsyncIterator[None]:
    """Look for the duration, in a task of its own."""
    stop = asyncio.Event()
    watching = asyncio.create_task(monitor.watch(stop), name=name)
    watching.add_done_callback(_tell_of_defect)
    try:
        yield
    finally:
        # A look that raises an alert shall end it; one that hangs shall not hold up the run's end.
        stop.set()
        await asyncio.wait({watching}, timeout=_GRACE_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _tell_of_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s has ended by a defect: nothing is looked for any more", task.get_name(), exc_info=error)
