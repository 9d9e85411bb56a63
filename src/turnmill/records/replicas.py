"""What each replica says of itself, and which of them can be sent calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from turnmill.records.training import Version

# Seconds between two signs of life. On DynamoDB a day of them is 43,200 writes a replica, a few cents.
HEARTBEAT_S = 2.0
# A replica without a sign of life for longer is taken for gone: several were missed, so that it was not merely busy.
# By the clocks of those who write and read, which may differ by a few seconds.
GONE_AFTER_S = 10.0


def replica_name(index: int) -> str:
    return f"replica-{index}"


class ReplicaState(StrEnum):
    """What a replica does with calls."""

    # Brings weights into its memory and proves them: it takes no call before.
    LOADING = "loading"
    # Its memory was proved to hold the version that it names.
    SERVING = "serving"
    # Told to end: it takes no call any more, and brings those that run to their end or gives them back.
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """What a replica serves; written by the replica at each change, and as a sign of life in between."""

    run_id: str
    replica: str
    # In its memory; what it samples with where it serves.
    version: Version
    # Weight fingerprints of the versions that were proved under this name, by version text, from the memory that
    # samples; the last few.
    fingerprints: dict[str, str]
    # Of the last sign of life.
    updated_at: float
    pid: int
    state: ReplicaState = ReplicaState.SERVING
    # The version that it loads as soon as its running calls have ended; None: it has the current one.
    next_version: Version | None = None
    # Since when it has served without a break; 0 before. A version that is swapped for the next one is none.
    joined_at: float = 0.0
    # When state or version changed last.
    changed_at: float = 0.0
    # Why it ended, or why the process before it did; None: all is well.
    error: str | None = None
    # Processes of this name in a row whose memory was not what was published.
    num_refusals: int = 0

    def is_fresh(self, now: float, *, gone_after_s: float = GONE_AFTER_S) -> bool:
        """Whether its process is there, as far as its last sign of life tells; one of the future tells nothing."""
        return abs(now - self.updated_at) <= gone_after_s

    def is_live(self, now: float, *, gone_after_s: float = GONE_AFTER_S) -> bool:
        """Whether it answers calls."""
        return self.state is ReplicaState.SERVING and self.is_fresh(now, gone_after_s=gone_after_s)


def live_replicas(
    statuses: Iterable[ReplicaStatus], now: float, *, gone_after_s: float = GONE_AFTER_S
) -> list[ReplicaStatus]:
    """Those that serve and have given a sign of life lately; `now` is in Unix seconds."""
    return [status for status in statuses if status.is_live(now, gone_after_s=gone_after_s)]
