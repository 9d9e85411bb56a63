"""What lies in the queues of a run, for everybody who only looks: nothing is changed, locked or held up.

Needs no process of the run: its queues say it all, while others use them and after the run has ended.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turnmill.errors import InvalidInput, NotFound
from turnmill.ports import GENERATE_REQUEST, QueueCounts, queue_names
from turnmill.records import Run, RunKind, RunStatus
from turnmill.wiring.backend import backend_of


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """One queue at one moment."""

    # Messages that can be received now, or as soon as an earlier one of their group is done.
    available: int
    # Received and neither done nor given back.
    in_flight: int
    # Given back, to be received later.
    delayed: int
    # Seconds since the oldest of all these was sent; None where there is none, or where it is unknown.
    oldest_age_s: float | None
    # Received too often and put aside.
    dead_letters: int
    # Messages sent so far; None where nobody counted them.
    num_sent: int | None = None
    # Messages sent and removed a second since an earlier reading; None without one.
    rate_in: float | None = None
    rate_out: float | None = None
    # Of generate_request: the queue of each replica, by index.
    replicas: tuple["QueueStatus", ...] = ()

    @property
    def num_held(self) -> int:
        """All that is there, dead letters included."""
        return self.available + self.in_flight + self.delayed + self.dead_letters


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All queues of a run at one moment of the monotonic clock."""

    at_s: float
    queues: dict[str, QueueStatus]


def queues_of(run: Run) -> list[str]:
    """The names of a run's queues; a foreign generator has one generate_request, our replicas one each."""
    return queue_names(None if run.kind is RunKind.EXTERNAL else int(run.config.get("generation_replicas", 1)))


def read_queues(root: Path, run: Run) -> Reading:
    """The four queues by name; those of all replicas are one, with its parts. Raises `BackendUnavailable`."""
    at_s = time.monotonic()
    reader = backend_of(root).reader(run.run_id)
    found = {name: _status(reader.counts(name)) for name in queues_of(run)}
    if GENERATE_REQUEST not in found:
        found[GENERATE_REQUEST] = _together([found[name] for name in found if name.startswith(GENERATE_REQUEST)])
    names = ("rollout_request", "rollout_response", GENERATE_REQUEST, "generate_response")
    return Reading(at_s=at_s, queues={name: found[name] for name in names})


def with_rates(before: Reading, now: Reading) -> dict[str, QueueStatus]:
    """The queues of `now`, with the rates since `before`."""
    seconds = now.at_s - before.at_s
    return {name: _with_rates(before.queues[name], status, seconds) for name, status in now.queues.items()}


def _with_rates(before: QueueStatus, now: QueueStatus, seconds: float) -> QueueStatus:
    parts = tuple(_with_rates(old, new, seconds) for old, new in zip(before.replicas, now.replicas, strict=True))
    if before.num_sent is None or now.num_sent is None or seconds <= 0:
        return replace(now, replicas=parts)
    num_in = now.num_sent - before.num_sent
    # What came and is not there has been removed, also where it was never seen. Counts of two moments of one
    # transaction each: a queue that was made anew in between would give less than nothing.
    num_out = num_in - (now.num_held - before.num_held)
    return replace(now, rate_in=max(0, num_in) / seconds, rate_out=max(0, num_out) / seconds, replicas=parts)


def _status(counts: QueueCounts) -> QueueStatus:
    return QueueStatus(
        available=counts.available,
        in_flight=counts.in_flight,
        delayed=counts.delayed,
        oldest_age_s=counts.oldest_age_s,
        dead_letters=counts.dead,
        num_sent=counts.num_sent,
    )


def _together(parts: Sequence[QueueStatus]) -> QueueStatus:
    ages = [part.oldest_age_s for part in parts if part.oldest_age_s is not None]
    sent = [part.num_sent for part in parts if part.num_sent is not None]
    return QueueStatus(
        available=sum(part.available for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        delayed=sum(part.delayed for part in parts),
        oldest_age_s=max(ages, default=None),
        dead_letters=sum(part.dead_letters for part in parts),
        num_sent=sum(sent) if len(sent) == len(parts) else None,
        replicas=tuple(parts),
    )


def only_active(runs: Sequence[Run], root: Path) -> Run:
    """The one run that goes on; raises `InvalidInput` that names them where there are several, `NotFound` for none."""
    active = [run for run in runs if run.status is RunStatus.ACTIVE]
    if len(active) == 1:
        return active[0]
    if active:
        raise InvalidInput(f"several runs are active in {root}: {_ids(active)}; name one")
    if not runs:
        raise NotFound(f"there is no run in {root}; `turnmill demo` starts one, --root names another deployment")
    raise NotFound(f"no run is active in {root}; name one of those that ended: {_ids(runs)}")


def _ids(runs: Sequence[Run], limit: int = 10) -> str:
    """The last ones, newest first."""
    ids = [run.run_id for run in reversed(runs)]
    return ", ".join(ids[:limit]) + (f" and {len(ids) - limit} more" if len(ids) > limit else "")
