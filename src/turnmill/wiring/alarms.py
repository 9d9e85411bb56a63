"""What a deployment raises alerts about, with the evidence that its records and logs hold."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from turnmill.alerts import Dispatcher, Feed, Redactor, new_alert, open_channels, secrets_of
from turnmill.backends.embedded import log_tail, look_at_root_records, open_root_records
from turnmill.config.deployment import load_deployment
from turnmill.errors import BackendUnavailable
from turnmill.records import ALERT_PREFIX, Alert, AlertKind, Run, Upload, decode

logger = logging.getLogger(__name__)

# How long deliveries may still take when the process ends; what is left is taken up by the next one.
_GRACE_S = 5.0
# Of the log of each role that is shown.
_NUM_LINES = 10


@asynccontextmanager
async def open_alarms(root: Path) -> AsyncIterator[Dispatcher]:
    """The dispatcher of a deployment, with the channels of its `turnmill.toml`; raises `ConfigError` for a bad one."""
    settings = load_deployment(root, os.environ).alerts
    records = open_root_records(root)
    try:
        dispatcher = Dispatcher(Feed(records), open_channels(settings), redactor=Redactor([*secrets_of(settings)]))
        await dispatcher.start()
        try:
            yield dispatcher
        finally:
            await dispatcher.close(_GRACE_S)
    finally:
        records.close()


async def raise_alarm(dispatcher: Dispatcher, alert: Alert) -> None:
    """An alert that can't be recorded must not end what it is about."""
    try:
        await dispatcher.raise_alert(alert)
    except BackendUnavailable as error:
        logger.error("this alert can't be recorded (%s): %s", error, alert.summary)


def run_failed(root: Path, run: Run) -> Alert:
    """The stage that failed, why, and what its processes logged last."""
    stage = next((stage.name for stage in reversed(run.current_stages) if stage.state == "failed"), None)
    at = f" --root {root}"
    return new_alert(
        AlertKind.RUN_FAILED,
        f"run {run.run_id} of {run.upload} failed" + (f" in {stage}" if stage else " before it began"),
        command=f"turnmill status {run.run_id}{at}",
        run_id=run.run_id,
        stage=stage,
        error=run.error,
        log_lines=_last_lines(root / "runs" / run.run_id / "logs"),
    )


def upload_ignored(root: Path, upload: Upload) -> Alert:
    """Somebody waits for a run that will not come."""
    return new_alert(
        AlertKind.IGNORED_UPLOAD,
        f"ignored upload {upload.key}: {upload.ignored or 'it is gone or was changed while it was taken'}",
        command=f"turnmill upload FILE.jsonl --root {root}",
        stage=upload.key,
    )


def look_at_alerts(root: Path, run_id: str | None = None) -> list[Alert]:
    """Alerts of one run or of all, oldest first; leaves no trace."""
    found = [decode(item.value, Alert) for item in look_at_root_records(root, ALERT_PREFIX)]
    return [alert for alert in found if run_id in (None, alert.run_id)]


def _last_lines(folder: Path) -> list[str]:
    """The last lines of each log, with the name of the role in front."""
    logs = sorted(folder.glob("*.log"))
    return [f"{log.stem}: {line}" for log in logs for line in log_tail(log)[-_NUM_LINES:]]
