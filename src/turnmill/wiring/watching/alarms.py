"""What a deployment raises alerts about, with the evidence that its records and logs hold."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from turnmill.alerts import Dispatcher, Feed, Redactor, new_alert, secrets_of
from turnmill.backends.embedded import only_one
from turnmill.config.deployment import load_deployment
from turnmill.errors import BackendUnavailable, BudgetExceeded, Conflict
from turnmill.pipeline.promotion import worse_lines
from turnmill.records import ALERT_PREFIX, Alert, AlertKind, Run, RunStatus, Upload, decode
from turnmill.wiring.backend import alert_channels, backend_of
from turnmill.wiring.watching.evidence import command, failing_conversation, last_lines

logger = logging.getLogger(__name__)

# How long deliveries may still take when the process ends; what is left is taken up by the next one.
_GRACE_S = 5.0
# How often a process looks whether it is its turn to deliver.
_TURN_S = 2.0


@asynccontextmanager
async def open_alarms(root: Path) -> AsyncIterator[Dispatcher]:
    """The dispatcher of a deployment, with the channels of its `turnmill.toml`; raises `ConfigError` for a bad one.

    Of the processes of a deployment one delivers: the first one, and when that has ended another. The others record.
    """
    settings = load_deployment(root, os.environ).alerts
    records = backend_of(root).open_records()
    redactor = Redactor([*secrets_of(settings)])
    dispatcher = Dispatcher(
        Feed(records), alert_channels(root, settings), redactor=redactor, command=command(root, "alerts")
    )
    # Released in reverse: the turn, when nothing is delivered any more, then the records.
    with ExitStack() as stack:
        stack.callback(records.close)
        if _take_turn(root, stack):
            await dispatcher.start()
            waiting = None
        else:
            waiting = asyncio.create_task(_deliver_next(root, dispatcher, stack), name="alert deliveries")
        try:
            yield dispatcher
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await dispatcher.close(_GRACE_S)


def _take_turn(root: Path, stack: ExitStack) -> bool:
    """Whether this process is the one that delivers, until `stack` is closed."""
    try:
        stack.enter_context(only_one(root / "locks" / "alerts.lock", "alerts are delivered by another process"))
    except Conflict:
        return False
    return True


async def _deliver_next(root: Path, dispatcher: Dispatcher, stack: ExitStack) -> None:
    """Waits for the turn; unblocked by the end of the process that has it."""
    has_turn = False
    while True:
        try:
            has_turn = has_turn or _take_turn(root, stack)
            if has_turn:
                await dispatcher.start()
                return
        except BackendUnavailable as error:
            logger.warning("alerts can't be delivered now, trying again: %s", error)
        await asyncio.sleep(_TURN_S)


async def raise_alarm(dispatcher: Dispatcher, alert: Alert) -> None:
    """An alert that can't be recorded must not end what it is about."""
    try:
        await dispatcher.raise_alert(alert)
    except BackendUnavailable as error:
        logger.error("this alert can't be recorded (%s): %s", error, alert.summary)


def run_failed(root: Path, run: Run, failure: Exception | None = None) -> Alert:
    """The stage that failed, why, what its processes logged last, and a conversation that failed. Reads files.

    A budget that is used up is an alert of its own.
    """
    if isinstance(failure, BudgetExceeded):
        return _budget_breached(root, run)
    stage = next((stage.name for stage in reversed(run.current_stages) if stage.state == "failed"), None)
    of = f" of {run.upload}" if run.upload else ""
    return new_alert(
        AlertKind.RUN_FAILED,
        f"run {run.run_id}{of} failed" + (f" in {stage}" if stage else " before it began"),
        command=command(root, "status", run.run_id),
        run_id=run.run_id,
        stage=stage,
        error=run.error,
        log_lines=last_lines(root, run.run_id),
        conversation=failing_conversation(root, run.run_id),
    )


def model_held(root: Path, run: Run) -> Alert | None:
    """That the run's model is not published, with the tasks that went worse; None where it is, or where nothing is."""
    published = next((stage.result for stage in run.current_stages if stage.name == "Publish"), {})
    promotion = published.get("promotion")
    if run.status is not RunStatus.SUCCEEDED or promotion is None or promotion["is_published"]:
        return None
    of = f" of {run.upload}" if run.upload else ""
    return new_alert(
        AlertKind.MODEL_HELD,
        f"the model of run {run.run_id}{of} is not published ({promotion['rule']}): {promotion['reason']}",
        command=command(root, "evaluations", run.run_id),
        run_id=run.run_id,
        stage="Publish",
        error="\n".join(worse_lines(promotion)) or None,
    )


def _budget_breached(root: Path, run: Run) -> Alert:
    """What was used up, where the run stopped, and the command that goes on; all of it is in the run's error."""
    return new_alert(
        AlertKind.BUDGET_BREACH,
        f"run {run.run_id}" + (f" of {run.upload}" if run.upload else "") + " used up its budget and stopped",
        command=command(root, "cost", run.run_id),
        run_id=run.run_id,
        error=run.error,
        log_lines=last_lines(root, run.run_id),
    )


def upload_ignored(root: Path, upload: Upload) -> Alert:
    """Somebody waits for a run that will not come."""
    return new_alert(
        AlertKind.IGNORED_UPLOAD,
        f"ignored upload {upload.key}: {upload.ignored or 'it is gone or was changed while it was taken'}",
        command=command(root, "upload", "FILE.jsonl"),
        stage=upload.key,
    )


def look_at_alerts(root: Path, run_id: str | None = None) -> list[Alert]:
    """Alerts of one run or of all, oldest first; leaves no trace."""
    found = [decode(item.value, Alert) for item in backend_of(root).look_at_records(ALERT_PREFIX)]
    return [alert for alert in found if run_id in (None, alert.run_id)]
