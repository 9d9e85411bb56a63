"""Which replica answers the calls of a conversation.

    statuses of the replicas -> who is live, and since when -> rendezvous over them -> queue of one replica

A conversation stays with its replica, which holds its KV cache. A replica that is gone loses its conversations to the
others; when it is back, it gets its share of those that begin from then on, and those that run stay where their caches
are. That follows from two times, without a memory of who is where: a conversation is answered by one of the replicas
that have served without a break since before it began. So every proxy of a run decides alike, and a restarted one, too.
"""

import hashlib
import time
from collections.abc import Sequence

import msgspec

from turnmill.ports import RecordStore
from turnmill.records import (
    GenerateRequest,
    ReplicaStatus,
    decode,
    live_replicas,
    replica_key,
    replica_name,
)

# Seconds between two looks at the replicas' statuses.
LOOK_S = 1.0


class Asked(msgspec.Struct, kw_only=True, gc=False):
    """A call that is asked for, and who was sent it last."""

    request: GenerateRequest
    # When the conversation began.
    begun_at: float
    replica: int = 0
    sent_at: float = 0.0


def rendezvous(sample_id: str, replicas: Sequence[int]) -> int:
    """The one of these replicas that a conversation belongs to: the same one for all its calls, evenly spread.

    Highest random weight hashing (Thaler and Ravishankar, 1998): when a replica is added or taken away, only the
    conversations that it wins or loses move.
    """
    if len(replicas) == 1:
        return replicas[0]
    return max(replicas, key=lambda index: _weight(index, sample_id))


def _weight(index: int, sample_id: str) -> bytes:
    return hashlib.blake2b(f"{index}/{sample_id}".encode(), digest_size=8).digest()


class Routes:
    """The replicas of a run as their statuses say; of a single one nothing is asked."""

    def __init__(self, records: RecordStore, run_id: str, num_replicas: int) -> None:
        self._records = records
        self._all = range(num_replicas)
        self._keys = [replica_key(run_id, replica_name(index)) for index in self._all]
        # Since when each live one has served without a break, and since when the one has that served first.
        self._joined: dict[int, float] = {}
        self._first_joined = 0.0
        self._looked_at = 0.0

    @property
    def is_lone(self) -> bool:
        """There is one place for all calls: a single replica, or a foreign generator."""
        return len(self._all) == 1

    def replica_of(self, sample_id: str, begun_at: float) -> int:
        """The index of the replica for a conversation that began then (Unix seconds)."""
        if self.is_lone:
            return 0
        if not self._joined:
            # Nobody is known to live, so that each waits for its own to come back.
            return rendezvous(sample_id, self._all)
        # Where none is as old as the conversation, the one that is the oldest has held it for longest.
        bound = max(begun_at, self._first_joined)
        return rendezvous(sample_id, [index for index, joined_at in self._joined.items() if joined_at <= bound])

    def new_replica_of(self, sample_id: str, begun_at: float, *, replica: int, sent_at: float) -> int | None:
        """Who is to be sent a call again that `replica` was sent; None while that one may still answer it.

        It does not where it is gone, or was away since: what it had taken ended with the process that it was then.
        """
        if self.is_lone or not self._joined:
            return None
        joined_at = self._joined.get(replica)
        if joined_at is not None and joined_at <= sent_at:
            return None
        target = self.replica_of(sample_id, begun_at)
        return None if target == replica else target

    async def refresh(self) -> None:
        """Look at the statuses, unless that was done within the last `LOOK_S`."""
        now = time.time()
        if self.is_lone or 0.0 <= now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stored = await self._records.get(self._keys)
        statuses = {
            index: decode(item.value, ReplicaStatus) for index, item in zip(self._all, stored, strict=True) if item
        }
        live = {status.replica for status in live_replicas(statuses.values(), now)}
        self._joined = {index: status.joined_at for index, status in statuses.items() if status.replica in live}
        self._first_joined = min(self._joined.values(), default=0.0)
