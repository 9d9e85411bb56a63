"""Which version the replicas sample with at least, as their records say.

ReplicaStatus records -> those that may still sample -> the oldest version among them
"""

import time
from collections.abc import Iterable

from turnmill.ports import RecordStore
from turnmill.records import ReplicaState, ReplicaStatus, Version, decode, replica_key


async def read_replicas(records: RecordStore, run_id: str) -> list[ReplicaStatus]:
    """What every replica of a run said last."""
    return [decode(stored.value, ReplicaStatus) for stored in await records.scan(replica_key(run_id, ""))]


def oldest_served(replicas: Iterable[ReplicaStatus], now: float) -> int | None:
    """The n of the oldest version that may still sample at `now`, Unix seconds; None where no replica is alive.

    Calls run on a replica that drains too. One that loads samples with what it loads, or with something later.
    """
    return min((_least(replica).n for replica in replicas if _may_sample(replica, now)), default=None)


def _may_sample(replica: ReplicaStatus, now: float) -> bool:
    return replica.state is not ReplicaState.STOPPED and replica.is_fresh(now)


def _least(replica: ReplicaStatus) -> Version:
    if replica.state is ReplicaState.LOADING and replica.next_version is not None:
        return replica.next_version
    return replica.version


class Served:
    """The oldest version that a live replica samples with, by its n; it never goes down."""

    def __init__(self, records: RecordStore, run_id: str) -> None:
        self._records = records
        self._run_id = run_id
        # None until they were asked.
        self._oldest: int | None = None

    async def look(self, current: int) -> int:
        """Ask the records; `current` is the n of the version that replicas load now.

        A later one than that is of steps that were given up: its replica loads the current one before it takes a call.
        While no replica is alive, it is what it was, or the current one: no older one will sample any more.
        """
        found = oldest_served(await read_replicas(self._records, self._run_id), time.time())
        if found is not None:
            found = min(found, current)
            self._oldest = found if self._oldest is None else max(found, self._oldest)
        return current if self._oldest is None else self._oldest
