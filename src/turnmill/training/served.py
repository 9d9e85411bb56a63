"""Which version the replicas sample with at least, as their records say.

ReplicaStatus records -> those that give signs of life -> those that may sample -> the oldest version among them
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

from turnmill.ports import RecordStore
from turnmill.records import GONE_AFTER_S, ReplicaState, ReplicaStatus, Version, decode, replica_key


async def read_replicas(records: RecordStore, run_id: str) -> list[ReplicaStatus]:
    """What every replica of a run said last."""
    return [decode(stored.value, ReplicaStatus) for stored in await records.scan(replica_key(run_id, ""))]


def oldest_served(replicas: Iterable[ReplicaStatus]) -> int | None:
    """The n of the oldest version that one of these, which are alive, may sample with; None where none may sample.

    Calls run on a replica that drains too. One that loads samples with what it loads, or with something later.
    """
    return min((_least(replica).n for replica in replicas if replica.state is not ReplicaState.STOPPED), default=None)


def _least(replica: ReplicaStatus) -> Version:
    if replica.state is ReplicaState.LOADING and replica.next_version is not None:
        return replica.next_version
    return replica.version


class Served:
    """The oldest version that a live replica samples with, by its n; it never goes down.

    Alive is who gives signs of life, as seen from here: clocks of other machines may go wrong, and be set.
    """

    def __init__(self, records: RecordStore, run_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that only go up."""
        self._records = records
        self._run_id = run_id
        self._clock = clock
        # None until they were asked.
        self._oldest: int | None = None
        # Of each replica, the time that its last sign of life tells, and when that was seen here first, by `clock`.
        self._signs: dict[str, tuple[float, float]] = {}

    async def look(self, current: int) -> int:
        """Ask the records; `current` is the n of the version that replicas load now.

        A later one than that is of steps that were given up: its replica loads the current one before it takes a call.
        While no replica is alive, it is what it was, or the current one: no older one will sample any more.
        """
        found = oldest_served(self._alive(await read_replicas(self._records, self._run_id)))
        if found is not None:
            found = min(found, current)
            self._oldest = found if self._oldest is None else max(found, self._oldest)
        return current if self._oldest is None else self._oldest

    def _alive(self, replicas: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
        now = self._clock()
        for replica in replicas:
            told_at, seen_at = self._signs.get(replica.replica, (None, -math.inf))
            # At first sight, what was told long ago is left from a process that is gone, as far as clocks can tell.
            if told_at != replica.updated_at and (told_at is not None or replica.is_fresh(time.time())):
                seen_at = now
            self._signs[replica.replica] = (replica.updated_at, seen_at)
        return [replica for replica in replicas if now - self._signs[replica.replica][1] <= GONE_AFTER_S]
