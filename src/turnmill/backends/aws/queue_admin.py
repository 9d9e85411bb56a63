"""Operating a queue of SQS: counts, purge, and the queue of its dead letters.

    dead letter queue -> receive all (hidden for `_LOOK_S`) -> list | send again, delete | delete -> give the rest back

SQS lists nothing: who wants to see the letters has to receive them. Two who look at the same time each see a part, and
of a group with more than ten letters the first ones are seen until they are gone.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from turnmill.backends.aws.queue_bodies import Overflow, UnreadableBody, body_of, digest, group_of
from turnmill.backends.aws.queue_requests import MAX_BATCH, BusyPurging, Outgoing, QueueRequests, Received, give_back
from turnmill.errors import BackendUnavailable
from turnmill.ports import DeadLetter, QueueCounts

logger = logging.getLogger(__name__)
_AVAILABLE = "ApproximateNumberOfMessages"
_IN_FLIGHT = "ApproximateNumberOfMessagesNotVisible"
_DELAYED = "ApproximateNumberOfMessagesDelayed"
# Longer than it takes to receive the letters of any queue that is worth looking at.
_LOOK_S = 60
# Longer than the leases of a run's processes, which may have been killed.
_LEASES_S = 20.0
# A purge is allowed once in 60 s.
_PURGE_WAIT_S, _PURGE_PAUSE_S = 70.0, 2.0


def count(queue: QueueRequests, dead: QueueRequests) -> QueueCounts:
    """As SQS tells: approximately. Letters that somebody looks at are counted."""
    available, in_flight, delayed = _counts(queue)
    return QueueCounts(available=available, in_flight=in_flight, delayed=delayed, dead=sum(_counts(dead)))


def purge(queue: QueueRequests) -> int:
    """Remove all messages; about how many there were. Waits for a purge that somebody else has begun, because it
    leaves what was sent since."""
    give_up = time.monotonic() + _PURGE_WAIT_S
    while True:
        num_held = sum(_counts(queue))
        try:
            queue.call("purge_queue")
        except BusyPurging as busy:
            if time.monotonic() > give_up:
                raise BackendUnavailable(f"{queue.name} can't be purged, others purge it all the time") from busy
            time.sleep(_PURGE_PAUSE_S)
        else:
            return num_held


def drain(queue: QueueRequests) -> int:
    """Remove the messages that wait, those that come back within `_LEASES_S` too, and none that is sent afterwards.

    How many. A purge goes on for up to a minute after its answer, and takes what is sent in that minute with it.
    """
    num_removed = 0
    give_up = time.monotonic() + _LEASES_S
    while True:
        # With a wait, SQS asks all machines that hold a part of the queue.
        received = queue.receive(max_messages=MAX_BATCH, visibility_s=_LOOK_S, wait_s=1)
        num_removed += sum(queue.delete([message.handle for message in received]))
        if not received and (sum(_counts(queue)) == 0 or time.monotonic() > give_up):
            return num_removed


class DeadLetterQueue:
    """The letters of `source`, in the order of their sending. A letter's id is that of its message in SQS.

    For threads.
    """

    def __init__(self, queue: QueueRequests, source: QueueRequests, overflow: Overflow | None) -> None:
        self._queue = queue
        self._source = source
        self._overflow = overflow

    def first(self, limit: int) -> list[DeadLetter]:
        """At most `limit`. A letter whose body can't be read shows what is on the wire.

        SQS counts looks as deliveries and keeps no time of death: a letter was received as often as the source allows,
        and `dead_at` is the time of the sending where SQS tells no later one.
        """
        with self._looked_at(limit) as letters:
            if not letters:
                return []
            max_receives = int(json.loads(self._source.attributes("RedrivePolicy")["RedrivePolicy"])["maxReceiveCount"])
            return [self._letter(letter, max_receives) for letter in letters.values()]

    def redrive(self, letter_ids: Sequence[str] | None) -> int:
        """Send the letters of these ids, or all, to the source again; how many."""
        return self._remove(letter_ids, self._send_again)

    def discard(self, letter_ids: Sequence[str]) -> int:
        """Remove the letters of these ids for good; how many there were."""
        return self._remove(letter_ids, lambda letters: None)

    def _remove(self, letter_ids: Sequence[str] | None, before: Callable[[Sequence[Received]], None]) -> int:
        """Remove after `before`, in as many rounds as bring something: letters may wait behind their group."""
        wanted = None if letter_ids is None else set(letter_ids)
        num_removed = 0
        while wanted is None or wanted:
            with self._looked_at(None) as letters:
                found = [letter for name, letter in letters.items() if wanted is None or name in wanted]
                before(found)
                deleted = self._queue.delete([letter.handle for letter in found])
                gone = {letter.message_id for letter, done in zip(found, deleted, strict=True) if done}
                for letter_id in gone:
                    del letters[letter_id]
            num_removed += len(gone)
            if not gone:
                break
            if wanted is not None:
                wanted -= gone
        return num_removed

    @contextmanager
    def _looked_at(self, limit: int | None) -> Iterator[dict[str, Received]]:
        """The letters by id, hidden from others; those that are left in it at the end are given back."""
        letters: dict[str, Received] = {}
        try:
            # To go on until nothing comes would cost a wait each time.
            num_wanted = _counts(self._queue)[0] if limit is None else min(limit, _counts(self._queue)[0])
            while len(letters) < num_wanted:
                num_missing = min(num_wanted - len(letters), MAX_BATCH)
                # With a wait, SQS asks all machines that hold a part of the queue.
                received = self._queue.receive(max_messages=num_missing, visibility_s=_LOOK_S, wait_s=1)
                if not received:
                    break
                letters |= {letter.message_id: letter for letter in received}
            letters = dict(sorted(letters.items(), key=lambda item: item[1].sent_at))
            yield letters
        finally:
            give_back(self._queue, [letter.handle for letter in letters.values()])

    def _send_again(self, letters: Sequence[Received]) -> None:
        """As they came, and past the deduplication of their first sending; not of one that was redriven just before."""
        self._source.send(
            [
                Outgoing(
                    group_id=letter.group_id,
                    dedup_id=digest(f"redriven/{letter.message_id}"),
                    body=letter.body,
                    attributes={
                        name: {key: value for key, value in attribute.items() if not key.endswith("ListValues")}
                        for name, attribute in letter.attributes.items()
                    },
                )
                for letter in letters
            ]
        )

    def _letter(self, letter: Received, max_receives: int) -> DeadLetter:
        body, group = letter.body.encode(), letter.group_id
        try:
            group = group_of(letter)
            body = body_of(letter, self._overflow)
        except UnreadableBody as error:
            logger.warning("dead letter %s of %s: %s", letter.message_id, self._queue.name, error)
        return DeadLetter(
            letter_id=letter.message_id, body=body, group=group, num_receives=max_receives, dead_at=letter.sent_at
        )


def _counts(queue: QueueRequests) -> tuple[int, int, int]:
    """Available, in flight, delayed."""
    found = queue.attributes(_AVAILABLE, _IN_FLIGHT, _DELAYED)
    return int(found[_AVAILABLE]), int(found[_IN_FLIGHT]), int(found[_DELAYED])
