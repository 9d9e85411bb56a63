"""What goes wrong in a run while it goes on: checks that look again and again, each for one kind of trouble."""

from dataclasses import dataclass
from typing import Protocol

from turnmill.records import AlertKind


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


class Check(Protocol):
    """Looks for one kind of trouble in one run."""

    async def look(self) -> list[Finding]:
        """All that is wrong now, empty where nothing is. Raises `BackendUnavailable` where it can't tell."""
        ...
