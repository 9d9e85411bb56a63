"""An alert as it is made: with an id that sorts by time, a severity, and evidence that is bounded."""

import secrets
import time
from collections.abc import Sequence

from turnmill.records import Alert, AlertKind, Severity

SEVERITIES = {
    AlertKind.RUN_FAILED: Severity.ERROR,
    AlertKind.RUN_STALLED: Severity.CRITICAL,
    AlertKind.STAGE_SLOW: Severity.WARNING,
    AlertKind.BUDGET_BREACH: Severity.CRITICAL,
    AlertKind.REWARD_COLLAPSE: Severity.ERROR,
    AlertKind.CRASH_LOOP: Severity.CRITICAL,
    AlertKind.DEAD_LETTERS_GROWING: Severity.WARNING,
    AlertKind.IGNORED_UPLOAD: Severity.INFO,
    AlertKind.ALERTS_HELD: Severity.WARNING,
}
# Characters.
MOST_SUMMARY = 500
MOST_ERROR = 8000
MOST_LINE = 1000
# Lines.
MOST_LINES = 50


def new_alert(
    kind: AlertKind,
    summary: str,
    *,
    command: str,
    run_id: str | None = None,
    stage: str | None = None,
    error: str | None = None,
    log_lines: Sequence[str] = (),
    conversation: str | None = None,
    now: float | None = None,
) -> Alert:
    """An alert of `kind` at `now` (Unix seconds, else the clock's); texts are cut, of log lines the last ones stay.

    Secrets are taken out by the dispatcher, which knows them.
    """
    created_at = time.time() if now is None else now
    return Alert(
        alert_id=f"{int(created_at * 1000):013d}-{secrets.token_hex(6)}",
        kind=kind,
        severity=SEVERITIES[kind],
        created_at=created_at,
        summary=cut(" ".join(summary.split()), MOST_SUMMARY),
        command=command,
        run_id=run_id,
        stage=stage,
        error=None if error is None else cut(error, MOST_ERROR),
        log_lines=tuple(cut(line.rstrip("\n"), MOST_LINE) for line in log_lines[-MOST_LINES:]),
        conversation=conversation,
    )


def cut(text: str, most: int) -> str:
    """At most `most` characters of it, with a mark where some are missing."""
    return text if len(text) <= most else text[: most - 1] + "…"
