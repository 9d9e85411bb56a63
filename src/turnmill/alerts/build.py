"""An alert as it is made: with an id that sorts by time, a severity, and evidence that is bounded."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from turnmill.records import Alert, AlertKind, Severity

SEVERITIES = {
    AlertKind.RUN_FAILED: Severity.ERROR,
    AlertKind.RUN_STALLED: Severity.CRITICAL,
    AlertKind.STAGE_SLOW: Severity.WARNING,
    AlertKind.BUDGET_BREACH: Severity.CRITICAL,
    AlertKind.REWARD_COLLAPSE: Severity.ERROR,
    AlertKind.EVALUATION_FAILED: Severity.WARNING,
    AlertKind.MODEL_HELD: Severity.WARNING,
    AlertKind.CRASH_LOOP: Severity.CRITICAL,
    AlertKind.DEAD_LETTERS_GROWING: Severity.WARNING,
    AlertKind.IGNORED_UPLOAD: Severity.INFO,
    AlertKind.ROLLOUT_FAILED: Severity.ERROR,
    AlertKind.ALERTS_HELD: Severity.WARNING,
}
# Characters.
MOST_SUMMARY = 500
MOST_ERROR = 8000
MOST_LINE = 1000
MOST_COMMAND = 2000
# Lines.
MOST_LINES = 50
# So many times more is looked through for secrets: what is cut in the middle of one would not be known any more.
_MARGIN = 8


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
    """An alert of `kind` at `now` (Unix seconds, else the clock's), of whose log lines the last ones stay.

    The dispatcher takes out the secrets, which it knows, and then cuts the texts (`presentable`).
    """
    created_at = time.time() if now is None else now
    return Alert(
        alert_id=f"{int(created_at * 1000):013d}-{secrets.token_hex(6)}",
        kind=kind,
        severity=SEVERITIES[kind],
        created_at=created_at,
        summary=summary,
        command=command,
        run_id=run_id,
        stage=stage,
        error=error,
        log_lines=tuple(log_lines[-MOST_LINES:]),
        conversation=conversation,
    )


def presentable(alert: Alert, redact: Callable[[str], str]) -> Alert:
    """`alert` as it is recorded and sent: without secrets, valid Unicode, its summary in one line, its texts cut."""

    def fit(text: str, most: int) -> str:
        # Lone surrogates, which logs in other encodings leave, are no text that JSON could hold.
        valid = text[: most * _MARGIN].encode("utf-8", "replace").decode()
        return cut(redact(valid), most)

    # Together, since a key may go over several lines.
    lines = "\n".join(line[: MOST_LINE * _MARGIN].rstrip("\n") for line in alert.log_lines)
    lines = redact(lines.encode("utf-8", "replace").decode())
    return replace(
        alert,
        summary=fit(" ".join(alert.summary.split()), MOST_SUMMARY),
        command=fit(alert.command, MOST_COMMAND),
        error=None if alert.error is None else fit(alert.error, MOST_ERROR),
        log_lines=tuple(cut(line, MOST_LINE) for line in lines.split("\n")[-MOST_LINES:]) if lines else (),
    )


def cut(text: str, most: int) -> str:
    """At most `most` characters of it, with a mark where some are missing."""
    return text if len(text) <= most else text[: most - 1] + "…"
