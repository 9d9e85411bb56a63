"""The preflight of a package, whose code runs in a box: here its report is awaited, and limits are watched.

request blob -> find, box -> Examine -> (in the box: environment.preflight) -> Examined -> report blob
                                  '-> it hangs or ends: a report that says so
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from turnmill.conversation.http import HttpClient
from turnmill.errors import InvalidInput, printable
from turnmill.pipeline.preparing import request_key
from turnmill.ports import BlobStore
from turnmill.records import Check, CheckState, EnvironmentChoice, PreflightReport, PreflightRequest, decode
from turnmill.rollout.box.box import Box, BoxEnded, LoadError
from turnmill.rollout.box.isolation import Settings, seen_from_outside
from turnmill.rollout.box.relay import Relay
from turnmill.telemetry import redact
from turnmill.wiring.running.preflight import leave_report, rows_of, unless_stopped

logger = logging.getLogger(__name__)
_DETAIL_LENGTH = 2000
# How much later than a blocked event loop one play is cut off that lets itself not be ended.
_MARGIN_S = 5.0


async def run_boxed_preflight(
    blobs: BlobStore,
    name: str,
    *,
    stop: asyncio.Event,
    settings_of: Callable[[EnvironmentChoice], Settings],
    grace_s: float = 3.0,
) -> None:
    """Do what the request of `name` asks for and leave its report; ends early, without one, when told to stop.

    `grace_s`: what an environment has beyond its own limit to give its process back.
    """
    request = decode(await blobs.get(request_key(name)), PreflightRequest)

    async def examine() -> None:
        await leave_report(blobs, name, await examine_boxed(request, settings_of=settings_of, grace_s=grace_s))

    await unless_stopped(stop, examine())


async def examine_boxed(
    request: PreflightRequest,
    *,
    settings_of: Callable[[EnvironmentChoice], Settings],
    playing: Callable[[str], None] = lambda what: None,
    grace_s: float = 3.0,
) -> PreflightReport:
    """The report; where the box says nothing any more, one of its own. Raises `DataError`.

    `playing` is told what is about to be done; `grace_s` as in `run_boxed_preflight`.
    """
    tasks, others = await rows_of(request)
    limit_s = request.play_s + grace_s
    what = "loading the environment"

    def begins(next_one: str) -> None:
        nonlocal what
        what = printable(next_one, limit=200)
        logger.info("preflight: %s", what)
        playing(what)

    begins(what)
    async with HttpClient() as session:
        # There is no model, so nothing is let through.
        relay = Relay(session, call_timeout_s=limit_s)
        try:
            settings = await asyncio.to_thread(settings_of, request.environment)
        except InvalidInput as error:
            return _failed("loads", str(error))
        try:
            box = await Box.start(replace(settings, block_s=limit_s), relay)
        except (InvalidInput, LoadError) as error:
            return _failed("loads", seen_from_outside(str(error), settings))
        try:
            # Where the data lies is not its business.
            report = await box.examine(
                replace(request, data_path=""), tasks, others, playing=begins, limit_s=limit_s + _MARGIN_S
            )
        except BoxEnded as error:
            return _failed("limits", seen_from_outside(f"{what}: {error}", settings))
        finally:
            await asyncio.shield(box.close())
    return _printable(report, settings)


def _printable(report: PreflightReport, settings: Settings) -> PreflightReport:
    """What a box says is shown to people."""
    return replace(
        report,
        checks=tuple(
            replace(check, name=printable(check.name), detail=_shown(seen_from_outside(check.detail, settings)))
            for check in report.checks
        ),
        mean_rewards={printable(script): mean for script, mean in report.mean_rewards.items()},
    )


def _failed(name: str, detail: str) -> PreflightReport:
    return PreflightReport(checks=(Check(name=name, state=CheckState.FAILED, detail=_shown(detail)),))


def _shown(detail: str) -> str:
    return printable(redact(detail), limit=_DETAIL_LENGTH)
