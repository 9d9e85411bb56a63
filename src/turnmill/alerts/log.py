"""Alerts in the log of the process."""

import logging

from turnmill.records import Alert, Severity

logger = logging.getLogger(__name__)
_LEVELS = {
    Severity.CRITICAL: logging.CRITICAL,
    Severity.ERROR: logging.ERROR,
    Severity.WARNING: logging.WARNING,
    Severity.INFO: logging.INFO,
}


class LogChannel:
    """Implements `ports.Notifier`; never fails."""

    def __init__(self, name: str = "log") -> None:
        self._name = name

    @property
    def name(self) -> str:
        """See `ports.Notifier.name`."""
        return self._name

    async def send(self, alert: Alert) -> None:
        """See `ports.Notifier.send`."""
        error = f": {alert.error}" if alert.error else ""
        logger.log(
            _LEVELS[alert.severity],
            "alert %s: %s%s; next: %s",
            alert.kind,
            alert.summary,
            error,
            alert.command,
            extra={"at": "/".join(part for part in (alert.run_id, alert.stage, alert.alert_id) if part)},
        )

    async def resolve(self, alert: Alert) -> None:
        """See `ports.Notifier.resolve`."""
        logger.info("alert %s is over: %s", alert.kind, alert.summary, extra={"at": alert.alert_id})
