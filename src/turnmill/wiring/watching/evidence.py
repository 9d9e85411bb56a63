"""What an alert shows beside its summary: the last log lines, a conversation that failed, the command to run next."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from turnmill.backends.embedded import log_tail
from turnmill.errors import BackendUnavailable
from turnmill.records import Purpose, SampleState, decode, sample_prefix
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.logs import matches

# Of the log of each role that is shown.
_NUM_LINES = 10
# Records of samples that are looked through for one that failed: a tenth of a second of reading.
_MOST_SAMPLES, _PAGE = 20_000, 500


class _Ended(msgspec.Struct, frozen=True):
    """What tells how a sample ended; the rest of its record is not decoded."""

    state: SampleState
    created_at: float
    reward: float | None = None


def command(root: Path, *arguments: str) -> str:
    """`turnmill ARGUMENTS --root ROOT` as it can be pasted into a shell, in whatever folder."""
    return shlex.join(["turnmill", *arguments, "--root", str(root.absolute())])


def last_lines(root: Path, run_id: str, roles: Sequence[str] = ()) -> list[str]:
    """The last lines of the log of each of these roles (all without any), with the name of the role in front."""
    logs = sorted(path for path in (root / "runs" / run_id / "logs").glob("*.log") if matches(path.stem, roles))
    return [f"{log.stem}: {line}" for log in logs for line in log_tail(log)[-_NUM_LINES:]]


def failing_conversation(root: Path, run_id: str) -> str | None:
    """Key of the record of the last sample that has no reward; where all have one, of the lowest one's.

    Of the training, or of the baseline where that was not begun. None where nothing was played, or where the records
    can't be read: an alert is worth more than its evidence.
    """
    try:
        ended = _ended(root, run_id, Purpose.TRAIN) or _ended(root, run_id, Purpose.BASELINE)
    except BackendUnavailable:
        return None
    if invalid := [(sample.created_at, key) for key, sample in ended if sample.state is SampleState.INVALID]:
        return max(invalid)[1]
    rewarded = [(sample.reward, -sample.created_at, key) for key, sample in ended if sample.reward is not None]
    return min(rewarded)[2] if rewarded else None


def _ended(root: Path, run_id: str, purpose: Purpose) -> list[tuple[str, _Ended]]:
    """By key; read in pages, since whole records are long."""
    found: list[tuple[str, _Ended]] = []
    prefix = sample_prefix(run_id, purpose)
    while len(found) < _MOST_SAMPLES:
        after = found[-1][0] if found else ""
        page = backend_of(root).reader(run_id).records(prefix, after=after, limit=_PAGE)
        found += [(one.key, decode(one.value, _Ended)) for one in page]
        if len(page) < _PAGE:
            break
    return found
