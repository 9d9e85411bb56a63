"""What the doctor says of a run: a verdict, and the causes of what is wrong."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What there is to say about a run as a whole."""

    WAITING = "waiting for its turn"
    PROGRESSING = "progressing"
    # Nothing was achieved for longer than its limit.
    STALLED = "stalled"
    # It may still move, and something is wrong.
    FAULTY = "something is wrong"
    ENDED_WELL = "ended as it should"
    ENDED_BADLY = "ended badly"

    @property
    def is_healthy(self) -> bool:
        return self in (Verdict.WAITING, Verdict.PROGRESSING, Verdict.ENDED_WELL)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause."""

    # A process of the run by its name, `environment`, `disk`, `store`, `data`, `budget`, or `message ID`.
    role: str
    # One line.
    summary: str
    evidence: tuple[str, ...] = ()
    # What to do, in order; each can be typed as it is.
    commands: tuple[str, ...] = ()
    log_lines: tuple[str, ...] = ()
    # Key of the record of a conversation that shows it.
    conversation: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor says."""

    verdict: Verdict
    # One line: where the run is.
    summary: str
    # The first one is the cause, as far as can be told; others may follow from it.
    diagnoses: tuple[Diagnosis, ...] = ()
