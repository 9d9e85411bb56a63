"""What carries the news: queues, their dead letters, and records that are written together with the news of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from turnmill.ports.stores import Write


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is sent."""

    body: bytes
    # Messages of one group are delivered in order.
    group: str
    # A second send of the same id to the same group within the deduplication window (300 s) is swallowed; include the
    # delivery epoch. None: never swallowed, for news that may well come twice.
    dedup_id: str | None


class Leased(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is received."""

    body: bytes
    group: str
    # Opaque; good for extend, ack and release until the lease ends.
    receipt: str
    # 1 on the first delivery.
    num_receives: int


class WorkQueue(Protocol):
    """At-least-once FIFO per group: while messages of a group are leased, later ones of that group wait.

    One lease may bring several messages of a group, in their order; where one of them is released and a later one is
    not, they come back out of order. Durations may be rounded up to whole seconds; a lease or a delay is of
    12 h at most.
    """

    async def send(self, messages: Sequence[Message]) -> None:
        """Append. All are durable on return; order within the sequence is kept per group.

        Where it raises or is cancelled, some of them may have been sent.
        """
        ...

    async def lease(self, *, max_messages: int, lease_s: float, wait_s: float = 0.0) -> list[Leased]:
        """Up to `max_messages`, hidden from others for `lease_s`; waits up to `wait_s` for the first one.

        A message received more often than the queue's limit goes to the dead letters instead. Without a wait, none may
        come although there are some. Cancelled, it gives back what is on its way.
        """
        ...

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        """Like `lease`, but what comes is removed at once: for news of what is recorded elsewhere.

        Usually it comes once. Where the caller is cancelled or dies in the middle, what is on its way comes never or
        again. The receipts are good for nothing.
        """
        ...

    async def extend(self, receipts: Sequence[str], lease_s: float) -> list[bool]:
        """Renew leases from now; False where the lease was lost, at the latest once another has the message."""
        ...

    async def ack(self, receipts: Sequence[str]) -> list[bool]:
        """Remove for good; False where the lease was lost (the message may be delivered again).

        A lease that has run out is lost at the latest once another has the message. What was acked before may be True
        or False: an answer may be lost on the way, and the request sent again.
        """
        ...

    async def release(self, receipts: Sequence[str], *, delay_s: float = 0.0) -> None:
        """Give back before the lease ends; a lost lease is no error."""
        ...


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """Exact, or approximate and up to a minute old."""

    available: int
    # Leased; and those that were released with a delay, where nobody tells them apart.
    in_flight: int
    delayed: int
    dead: int
    # Seconds since the oldest message was sent, leased and delayed ones included; None without one, or where unknown.
    # Counts are equal where they count the same messages, however old.
    oldest_age_s: float | None = field(default=None, compare=False)
    # Messages sent since the queue was made, without those that were swallowed; None where nobody counts them.
    num_sent: int | None = field(default=None, compare=False)

    @property
    def num_held(self) -> int:
        """All that is there, dead letters included: what was sent and is not held has been removed."""
        return self.available + self.in_flight + self.delayed + self.dead


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A message that was received too often."""

    # Opaque; no other message of the queue ever has it.
    letter_id: str
    body: bytes
    group: str
    num_receives: int
    # When it died, in seconds since the epoch; when it was sent, where nobody tells that.
    dead_at: float


class QueueAdmin(Protocol):
    """Operating a queue; not for the data path."""

    async def counts(self) -> QueueCounts: ...

    async def purge(self) -> int:
        """Remove all messages, leased ones too (dead letters stay); how many, as exact as the counts.

        It may take a minute, and what is sent in that minute may go, too.
        """
        ...

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """At most `limit`, the oldest ones first; those at which others look just then may be missing."""
        ...

    async def redrive(self, letter_ids: Sequence[str] | None = None) -> int:
        """Move the dead letters of these ids, or all, back, their counts at zero; how many were there.

        Killed in the middle, it may leave one that it has sent among the dead letters.
        """
        ...

    async def discard(self, letter_ids: Sequence[str]) -> int:
        """Remove the dead letters of these ids for good; how many were there."""
        ...


class Queue(WorkQueue, QueueAdmin, Protocol):
    """Both sides of one queue."""


class Count(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How much a write adds to a counter: the record under `key`, a decimal number, 0 before the first one.

    Counters are written by counts alone, and are of another kind than the records that they count.
    """

    key: str
    amount: int


class Outbox(Protocol):
    """Records and the news of them in one go: the transactional outbox of a queue."""

    async def write(self, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count] = ()) -> list[bool]:
        """Try each write, and send its message where it was applied; True there, False where it was not.

        `counts`, where given, has one for each entry: what is applied is counted, in the same transaction, so that a
        counter says exactly what its records do.

        In one transaction where the backend has it, else the record first: no message tells of a record that is not
        there, and a record whose message was lost is found by those who wait for it. Raises `InvalidInput`, having
        done nothing, for the key of a record that does not belong here.
        """
        ...
