"""A run on its way through its stages, with somebody who looks for trouble beside it.

open_control -> walk_monitored: Monitor looks | walk -> final record -> alerts that are over are resolved
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from turnmill.alerts import Dispatcher
from turnmill.errors import BackendUnavailable, TurnmillError
from turnmill.pipeline.engine import RunRecord, walk
from turnmill.pipeline.stage import StageContext
from turnmill.pipeline.stages import stages_of
from turnmill.records import Run, RunStatus
from turnmill.wiring.running.cancelling import Cancel
from turnmill.wiring.watching.alarms import model_held, open_alarms, raise_alarm, run_failed
from turnmill.wiring.watching.checks import checks_of
from turnmill.wiring.watching.monitor import Monitor, monitored
from turnmill.wiring.watching.watchdog import watched

logger = logging.getLogger(__name__)


async def walk_monitored(
    root: Path,
    ctx: StageContext,
    record: RunRecord,
    cancel: Cancel,
    alarms: Dispatcher | None,
    failure: TurnmillError | None = None,
) -> tuple[Run, TurnmillError | None]:
    """As `pipeline.engine.walk`, with alerts about what goes wrong meanwhile.

    Without `alarms` the run is in the foreground: they are the deployment's all the same, opened for its duration, and
    that it failed is raised here. Whoever has `alarms` raises that, with those of runs that did not come so far.
    """
    run = record.run
    async with _alarms_of(root, alarms) as dispatcher, watched(root, ctx) as (watched_ctx, stalls):
        monitor = Monitor(run.run_id, [*checks_of(root, ctx, record), stalls], dispatcher)
        try:
            await monitor.recall(run.created_at)
        except BackendUnavailable as error:
            logger.warning("earlier alerts of run %s can't be read, and stay open: %s", run.run_id, error)
        try:
            async with monitored(monitor, f"monitor {run.run_id}"):
                ended, failure = await walk(
                    watched_ctx,
                    stages_of(run.kind),
                    record,
                    cancel.event,
                    when_cancelled=cancel.status,
                    failure=failure,
                )
            return ended, failure
        finally:
            await monitor.end(record.run.status)
            if (held := model_held(root, record.run)) is not None:
                await raise_alarm(dispatcher, held)
            if alarms is None and record.run.status is RunStatus.FAILED:
                await raise_alarm(dispatcher, await asyncio.to_thread(run_failed, root, record.run, failure))


@asynccontextmanager
async def _alarms_of(root: Path, given: Dispatcher | None) -> AsyncIterator[Dispatcher]:
    if given is not None:
        yield given
        return
    async with open_alarms(root) as own:
        yield own
