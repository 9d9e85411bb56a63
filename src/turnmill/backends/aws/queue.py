"""A queue of SQS: FIFO per group, leases by visibility timeouts, deduplication per group, dead letters.

    send    SendMessageBatch                      one group at most once in a batch
    lease   ReceiveMessage ...                    ten each, until one comes back short
    take    (ReceiveMessage -> DeleteMessageBatch) ...
    extend  ChangeMessageVisibilityBatch
    ack     DeleteMessageBatch
    release ChangeMessageVisibilityBatch          a delay is a visibility timeout

What SQS makes of the contract (`ports.queues`):

- Its times are whole seconds. Leases and delays are rounded up; a wait between 0 and 1 s is one of 1 s.
- One receive may bring several messages of a group, in their order. None comes while one of them is leased.
- A lease that has run out can't be extended or acked. (An emulator may be more lenient until somebody else has the
  message.) Acking twice is no error to SQS, so that an answer that was lost on the way does no harm.
- A released message that is delayed counts as in flight.
- A receive without a wait asks only some of the machines that hold a queue, and may miss what is there.

Waiting is done in polls of `POLL_S`, each in a thread: a process that ends waits for those that are under way, because
they may still bring messages, which have to be given back.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec import structs

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.queue_admin import DeadLetterQueue, count, drain, purge
from turnmill.backends.aws.queue_bodies import Overflow, UnreadableBody, body_of, group_of, to_wire
from turnmill.backends.aws.queue_requests import MAX_BATCH, MAX_VISIBILITY_S, QueueRequests, Received, give_back
from turnmill.errors import BackendUnavailable, InvalidInput
from turnmill.ports import DeadLetter, Leased, Message, QueueCounts

logger = logging.getLogger(__name__)
# Up to 20 s is possible; a quarter of it, four times the requests of an idle queue, keeps the end of a process short.
POLL_S = 5
# For the moment between receiving and deleting.
_TAKE_S = 30


class SqsQueue:
    """Implements `ports.Queue`; a receipt is SQS's receipt handle. Has nothing to close: the clients are the caller's.

    `name` and `dead_letters` are the names of two FIFO queues, made of `queue_properties`; `overflow` is where bodies
    lie that are too large for a message; None: there are none, as somebody else reads the queue, and a larger message
    than SQS takes is `InvalidInput`. Raises `NotDeployed` where the queues are not there.
    """

    def __init__(self, clients: AwsClients, name: str, dead_letters: str, *, overflow: Overflow | None) -> None:
        self._clients = clients
        self._overflow = overflow
        self._queue = QueueRequests(clients, name)
        self._dead = QueueRequests(clients, dead_letters)
        self._letters = DeadLetterQueue(self._dead, self._queue, overflow)

    # ------------------------------------------------------------ work

    async def send(self, messages: Sequence[Message]) -> None:
        """See `ports.WorkQueue.send`. Cancelled, it may have sent any of them, or send them yet."""
        if messages:
            await self._clients.run(partial(self.send_now, messages))

    def send_now(self, messages: Sequence[Message]) -> None:
        """`send` for a thread of the caller's own."""
        self._queue.send([to_wire(message, self._overflow) for message in messages])

    async def lease(self, *, max_messages: int, lease_s: float, wait_s: float = 0.0) -> list[Leased]:
        """See `ports.WorkQueue.lease`. Cancelled while messages are on their way, it gives them back."""
        visibility_s = whole_seconds(lease_s)
        return await self._bring(lambda handover: self._lease(max_messages, visibility_s, wait_s, handover))

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        """See `ports.WorkQueue.take`. Cancelled while messages are on their way, it gives them back where it can."""
        return await self._bring(lambda handover: self._take(max_messages, wait_s, handover))

    async def extend(self, receipts: Sequence[str], lease_s: float) -> list[bool]:
        """See `ports.WorkQueue.extend`. A message can't be leased for more than 12 h, all extensions together."""
        return await self._clients.run(partial(self._queue.hide, receipts, whole_seconds(lease_s)))

    async def ack(self, receipts: Sequence[str]) -> list[bool]:
        """See `ports.WorkQueue.ack`."""
        return await self._clients.run(partial(self._queue.delete, receipts))

    async def release(self, receipts: Sequence[str], *, delay_s: float = 0.0) -> None:
        """See `ports.WorkQueue.release`."""
        await self._clients.run(partial(self._queue.hide, receipts, whole_seconds(delay_s)))

    # ------------------------------------------------------------ administration

    async def counts(self) -> QueueCounts:
        """Approximate, and up to a minute old. Messages that wait behind their group count as available."""
        return await self._clients.run(self.counts_now)

    def counts_now(self) -> QueueCounts:
        """`counts` for a thread of the caller's own."""
        return count(self._queue, self._dead)

    async def purge(self) -> int:
        """See `ports.QueueAdmin.purge`. SQS allows one a minute: a second one waits for its turn."""
        return await self._clients.run(partial(purge, self._queue))

    async def drain(self) -> int:
        """Remove the messages of a queue that nobody uses now, and unlike a purge none that is sent afterwards."""
        return await self._clients.poll(partial(drain, self._queue))

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """See `ports.QueueAdmin.dead_letters`."""
        return await self._clients.run(partial(self.dead_letters_now, limit))

    def dead_letters_now(self, limit: int = 100) -> list[DeadLetter]:
        """`dead_letters` for a thread of the caller's own."""
        return self._letters.first(limit)

    async def redrive(self, letter_ids: Sequence[str] | None = None) -> int:
        """See `ports.QueueAdmin.redrive`: each is sent, then deleted; killed in between, SQS swallows the second one
        for five minutes."""
        return await self._clients.run(partial(self._letters.redrive, letter_ids))

    async def discard(self, letter_ids: Sequence[str]) -> int:
        """See `ports.QueueAdmin.discard`."""
        return await self._clients.run(partial(self._letters.discard, letter_ids))

    # ------------------------------------------------------------ receiving

    async def _bring(self, receive: "Callable[[_Handover], list[Leased]]") -> list[Leased]:
        handover = _Handover()
        try:
            return await self._clients.poll(partial(receive, handover))
        except asyncio.CancelledError:
            if brought := handover.abandon():
                # Not on this loop: it may be about to end.
                threading.Thread(target=self._give_back, args=(brought,), name=f"{self._queue.name}-give-back").start()
            raise

    def _lease(self, max_messages: int, visibility_s: int, wait_s: float, handover: "_Handover") -> list[Leased]:
        leased: list[Leased] = []
        for brought in self._rounds(max_messages, visibility_s, wait_s, handover):
            leased += brought
        if handover.bring([item.receipt for item in leased]):
            return leased
        self._give_back([item.receipt for item in leased])
        return []

    def _take(self, max_messages: int, wait_s: float, handover: "_Handover") -> list[Leased]:
        taken: list[Leased] = []
        for brought in self._rounds(max_messages, _TAKE_S, wait_s, handover):
            handles = [item.receipt for item in brought]
            if handover.is_abandoned:
                self._give_back(handles)
                break
            taken += [structs.replace(item, receipt="") for item in brought]
            try:
                self._queue.delete(handles)
            except BackendUnavailable as error:
                # News that may come twice: it does.
                logger.warning("messages that were taken from %s may come again: %s", self._queue.name, error)
                break
        return taken

    def _rounds(
        self, max_messages: int, visibility_s: int, wait_s: float, handover: "_Handover"
    ) -> Iterator[list[Leased]]:
        """Receives until there are `max_messages` or one comes back short; waits for the first message only.

        Raises where the first one fails; later ones must not cost what the earlier ones brought.
        """
        give_up = time.monotonic() + wait_s
        poll_s = min(math.ceil(wait_s), POLL_S)
        num_received = 0
        while num_received < max_messages and not handover.is_abandoned:
            wanted = min(max_messages - num_received, MAX_BATCH)
            try:
                received = self._queue.receive(max_messages=wanted, visibility_s=visibility_s, wait_s=poll_s)
                brought = self._read(received)
            except BackendUnavailable as error:
                if not num_received:
                    raise
                logger.warning("%s brought %d of %d messages: %s", self._queue.name, num_received, max_messages, error)
                return
            if received:
                num_received += len(received)
                yield brought
            if 0 < len(received) < wanted:
                return
            # Whole seconds: a wait is over when less than half of one is left.
            poll_s = 0 if num_received else min(round(give_up - time.monotonic()), POLL_S)
            if not received and poll_s <= 0:
                return

    def _read(self, received: Sequence[Received]) -> list[Leased]:
        """What can be read; the rest stays hidden, comes back, and ends among the dead letters."""
        read: list[Leased] = []
        try:
            for message in received:
                try:
                    body, group = body_of(message, self._overflow), group_of(message)
                except UnreadableBody as error:
                    logger.error("message %s of %s is left: %s", message.message_id, self._queue.name, error)
                    continue
                read.append(Leased(body=body, group=group, receipt=message.handle, num_receives=message.num_receives))
        except (BackendUnavailable, InvalidInput):
            self._give_back([message.handle for message in received])
            raise
        return read

    def _give_back(self, handles: Sequence[str]) -> None:
        give_back(self._queue, handles)


class _Handover:
    """What a thread has for a coroutine that may be cancelled at any moment: the later of the two gives it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._brought: Sequence[str] = ()

    @property
    def is_abandoned(self) -> bool:
        """Nobody waits any more."""
        return self._is_abandoned

    def bring(self, handles: Sequence[str]) -> bool:
        """In the thread, at its end; False where nobody waits any more."""
        with self._lock:
            self._brought = handles
            return not self._is_abandoned

    def abandon(self) -> Sequence[str]:
        """In the coroutine, when it is cancelled: what the thread has brought already."""
        with self._lock:
            self._is_abandoned = True
            return self._brought


def whole_seconds(seconds: float) -> int:
    """A visibility timeout of at least `seconds`; raises `InvalidInput` above the service's limit."""
    if seconds > MAX_VISIBILITY_S:
        raise InvalidInput(
            f"a message can be leased or delayed for at most {MAX_VISIBILITY_S} s on SQS, not {seconds:g} s"
        )
    return max(0, math.ceil(seconds))
