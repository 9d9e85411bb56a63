"""The loop over the checks: what is new is raised once, what is gone is resolved, and nothing in a check ends it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from turnmill.alerts import Dispatcher, Feed, new_alert
from turnmill.backends.embedded import open_root_records
from turnmill.errors import BackendUnavailable
from turnmill.records import Alert, AlertKind, RunStatus
from turnmill.wiring.watching.monitor import Finding, Monitor, monitored

SLOW = Finding(kind=AlertKind.STAGE_SLOW, summary="slow", command="turnmill status r1", stage="Evaluate")
COLLAPSED = Finding(kind=AlertKind.REWARD_COLLAPSE, summary="bad", command="turnmill status r1")


class Scripted:
    """A check that finds what it is told to."""

    def __init__(self, *findings: Finding) -> None:
        self.findings = list(findings)
        self.error: Exception | None = None

    async def look(self) -> list[Finding]:
        if self.error is not None:
            raise self.error
        return self.findings


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    records = open_root_records(tmp_path)
    yield Feed(records)
    records.close()


@asynccontextmanager
async def alarms(feed: Feed) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(feed, [])
    await dispatcher.start()
    yield dispatcher
    await dispatcher.close(0)


async def recorded(feed: Feed) -> list[tuple[AlertKind, bool]]:
    """Kinds, and whether each is resolved; sorted, since those of one millisecond have no order."""
    return sorted([(alert.kind, alert.resolved_at is not None) async for alert in feed.alerts()])


async def test_a_finding_is_raised_once_and_resolved_when_it_is_gone(feed: Feed) -> None:
    check = Scripted(SLOW)
    async with alarms(feed) as dispatcher:
        monitor = Monitor("r1", [check], dispatcher)
        for _ in range(3):
            await monitor.look()
        (alert,) = [alert async for alert in feed.alerts()]
        assert (alert.run_id, alert.stage, alert.num_repeats) == ("r1", "Evaluate", 0)
        check.findings = []
        await monitor.look()
        assert await recorded(feed) == [(AlertKind.STAGE_SLOW, True)]
        check.findings = [SLOW]
        await monitor.look()
        assert await recorded(feed) == [(AlertKind.STAGE_SLOW, False), (AlertKind.STAGE_SLOW, True)]


async def test_a_check_that_can_not_tell_changes_nothing_and_is_told_of_once(
    feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    blind, other = Scripted(SLOW), Scripted(COLLAPSED)
    async with alarms(feed) as dispatcher:
        monitor = Monitor("r1", [blind, other], dispatcher)
        await monitor.look()
        blind.error = BackendUnavailable("the disk is away")
        other.findings = []
        for _ in range(3):
            await monitor.look()
        assert await recorded(feed) == [(AlertKind.REWARD_COLLAPSE, True), (AlertKind.STAGE_SLOW, False)]
        assert caplog.text.count("the disk is away") == 1
        blind.error, blind.findings = None, []
        await monitor.look()
        assert await recorded(feed) == [(AlertKind.REWARD_COLLAPSE, True), (AlertKind.STAGE_SLOW, True)]


async def test_a_defect_of_a_check_is_seen_and_ends_neither_the_monitor_nor_the_other_checks(
    feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = Scripted(), Scripted()
    broken.error = ZeroDivisionError("division by zero")
    async with alarms(feed) as dispatcher:
        monitor = Monitor("r1", [broken, other], dispatcher)
        async with monitored(monitor, "monitor r1"):
            other.findings = [COLLAPSED]
            for _ in range(1000):
                if await recorded(feed):
                    break
                await asyncio.sleep(0.01)
        await monitor.look()
    assert await recorded(feed) == [(AlertKind.REWARD_COLLAPSE, False)]
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.exc_info is not None and error.exc_info[0] is ZeroDivisionError


async def test_alerts_of_an_earlier_process_are_known_and_resolved_when_nobody_finds_them_any_more(feed: Feed) -> None:
    async with alarms(feed) as dispatcher:
        await Monitor("r1", [Scripted(SLOW, COLLAPSED)], dispatcher).look()
        for run_id in ("r1", "r2"):
            failed = new_alert(AlertKind.RUN_FAILED, "failed", command="turnmill status", run_id=run_id)
            await dispatcher.raise_alert(failed)
    async with alarms(feed) as dispatcher:
        blind, seeing = Scripted(), Scripted(COLLAPSED)
        blind.error = BackendUnavailable("away")
        monitor = Monitor("r1", [blind, seeing], dispatcher)
        await monitor.recall(since=0.0)
        await monitor.look()
        assert await recorded(feed) == [
            (AlertKind.REWARD_COLLAPSE, False),
            (AlertKind.RUN_FAILED, False),
            (AlertKind.RUN_FAILED, True),
            (AlertKind.STAGE_SLOW, False),
        ]
        blind.error = None
        await monitor.look()
        found = await recorded(feed)
        assert (found[0], found[-1]) == ((AlertKind.REWARD_COLLAPSE, False), (AlertKind.STAGE_SLOW, True))


@pytest.mark.parametrize(
    ("status", "open_after"),
    [
        (RunStatus.SUCCEEDED, [AlertKind.REWARD_COLLAPSE]),
        (RunStatus.FAILED, [AlertKind.REWARD_COLLAPSE]),
        (RunStatus.CANCELLED, [AlertKind.REWARD_COLLAPSE]),
        (RunStatus.QUEUED, [AlertKind.REWARD_COLLAPSE, AlertKind.STAGE_SLOW]),
    ],
)
async def test_what_goes_on_is_over_with_the_run_and_what_came_of_it_stays(
    feed: Feed, status: RunStatus, open_after: list[AlertKind]
) -> None:
    async with alarms(feed) as dispatcher:
        monitor = Monitor("r1", [Scripted(SLOW, COLLAPSED)], dispatcher)
        await monitor.look()
        await monitor.end(status)
    still: list[Alert] = [alert async for alert in feed.alerts() if alert.resolved_at is None]
    assert sorted(alert.kind for alert in still) == open_after
