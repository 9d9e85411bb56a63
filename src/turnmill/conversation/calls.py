"""Calls that wait for their answer.

    Sessions -> ask -> generate_request[replica] -> replica -> Call record + generate_response -> Sessions

| task | consumes | waits for | produces |
|---|---|---|---|
| send | what was asked in one turn of the event loop | nothing | one send a replica |
| listen | generate_response, in batches | the next message | answered calls (a failed one with its error) |
| look | records of calls that wait longer than `LOOK_AFTER_S` | a second | answered calls whose message was lost |

The Call record is the answer; the message is only the news of it. Who waits is woken by either.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from turnmill.conversation.history import checked_call
from turnmill.errors import CallTimeout, GenerationFailed, RecordCorrupt, ShuttingDown
from turnmill.ports import Leased, Message, RecordStore, WorkQueue
from turnmill.records import Call, GenerateRequest, GenerateResponse, call_key, decode, encode

logger = logging.getLogger(__name__)
BATCH_SIZE = 256
LEASE_S = 30.0
WAIT_S = 1.0
LOOK_AFTER_S = 1.0


@dataclass(kw_only=True)
class _Waiting:
    """A call with at least one waiter."""

    answer: asyncio.Future[Call]
    since: float
    num_waiters: int = 0


@dataclass(frozen=True, kw_only=True)
class _Outgoing:
    """A generate request on its way to a queue."""

    message: Message
    sample_id: str
    waiting: _Waiting


@dataclass(kw_only=True)
class CallCounts:
    """What happened so far."""

    # Generate requests sent.
    num_sent: int = 0
    # Answers that came by message, and by looking at the records.
    num_told: int = 0
    num_found: int = 0
    num_failed: int = 0
    num_timeouts: int = 0
    # Messages about calls that nobody here waits for (late, repeated, or another proxy's).
    num_unexpected: int = 0
    # Messages that are no GenerateResponse; acked and logged.
    num_unreadable: int = 0


def rendezvous(sample_id: str, num_replicas: int) -> int:
    """The replica of a conversation: the same one for all its calls (its KV cache), evenly spread over replicas.

    Highest random weight hashing (Thaler and Ravishankar, 1998): when a replica is added or taken away, only the
    conversations that it wins or loses move.
    """
    if num_replicas == 1:
        return 0
    weight = [hashlib.blake2b(f"{index}/{sample_id}".encode(), digest_size=8).digest() for index in range(num_replicas)]
    return max(range(num_replicas), key=weight.__getitem__)


def _closing() -> ShuttingDown:
    return ShuttingDown("the proxy is closing")


class Calls:
    """Sends generate requests and hands the recorded answers to whoever waits."""

    def __init__(
        self, records: RecordStore, requests: Sequence[WorkQueue], responses: WorkQueue, *, timeout_s: float
    ) -> None:
        self.counts = CallCounts()
        self._records = records
        self._requests = requests
        self._responses = responses
        self._timeout_s = timeout_s
        self._waiting: dict[str, _Waiting] = {}
        self._outbox: list[_Outgoing] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    async def ask(self, request: GenerateRequest) -> Call:
        """Queue a call at the replica that holds the sample's conversations; its answer, as recorded.

        Raises `GenerationFailed` (the replica's error), `CallTimeout`, `ShuttingDown`, `RecordCorrupt`.
        """
        key = call_key(request.run_id, request.purpose, request.sample_id, request.step_id)
        message = Message(body=encode(request), group=request.step_id, dedup_id=f"{key}#{request.epoch}")
        with self._expected(key) as waiting:
            self.counts.num_sent += 1
            self._outbox.append(_Outgoing(message=message, sample_id=request.sample_id, waiting=waiting))
            if len(self._outbox) == 1:
                # Runs after everything that is ready now: what many clients ask at once is sent at once.
                sending = asyncio.create_task(self._send(), name="calls-send")
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            return await self._wait(waiting)

    async def _send(self) -> None:
        batch, self._outbox = self._outbox, []
        by_replica: dict[int, list[_Outgoing]] = {}
        for item in batch:
            by_replica.setdefault(rendezvous(item.sample_id, len(self._requests)), []).append(item)
        sends = [self._requests[index].send([item.message for item in items]) for index, items in by_replica.items()]
        for items, error in zip(by_replica.values(), await asyncio.gather(*sends, return_exceptions=True), strict=True):
            if error is not None:
                for item in items:
                    self._fail(item.waiting, error)

    async def ask_again(self, key: str) -> Call:
        """The answer to a call that was asked before: recorded by now, or still to come. Raises like `ask`."""
        with self._expected(key) as waiting:
            await self._answer_from_records([key])
            return await self._wait(waiting)

    @contextmanager
    def _expected(self, key: str) -> Iterator[_Waiting]:
        if self._is_stopped:
            raise _closing()
        waiting = self._waiting.get(key)
        if waiting is None:
            loop = asyncio.get_running_loop()
            waiting = self._waiting[key] = _Waiting(answer=loop.create_future(), since=loop.time())
        waiting.num_waiters += 1
        try:
            yield waiting
        finally:
            waiting.num_waiters -= 1
            if not waiting.num_waiters:
                del self._waiting[key]
                waiting.answer.cancel()

    async def _wait(self, waiting: _Waiting) -> Call:
        try:
            async with asyncio.timeout(self._timeout_s):
                # Shielded: one waiter that times out or is cancelled must not take the answer from the others.
                return await asyncio.shield(waiting.answer)
        except TimeoutError as error:
            self.counts.num_timeouts += 1
            raise CallTimeout(f"the call was not answered within {self._timeout_s:g} s") from error

    def stop(self) -> None:
        """Fail all waiters, now and from now on, with `ShuttingDown`."""
        self._is_stopped = True
        for waiting in self._waiting.values():
            self._fail(waiting, _closing())

    async def close(self) -> None:
        """Stop, and wait for what is being sent."""
        self.stop()
        await asyncio.gather(*self._sending)

    # ------------------------------------------------------------ tasks

    async def listen(self) -> None:
        """Until cancelled: answer calls as the news about them comes in."""
        done: list[str] = []
        while True:
            lease = self._responses.lease(max_messages=BATCH_SIZE, lease_s=LEASE_S, wait_s=WAIT_S)
            # What was taken before is acked beside the next lease, so that nobody waits for that commit.
            messages, _ = await asyncio.gather(lease, self._ack(done))
            await self._take(messages)
            done = [message.receipt for message in messages]

    async def _ack(self, receipts: Sequence[str]) -> None:
        if receipts:
            await self._responses.ack(receipts)

    async def look(self) -> None:
        """Until cancelled: look up the records of calls that wait long, in case the news was lost."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            before = loop.time() - LOOK_AFTER_S
            late = [key for key, waiting in self._waiting.items() if waiting.since <= before]
            for start in range(0, len(late), BATCH_SIZE):
                self.counts.num_found += await self._answer_from_records(late[start : start + BATCH_SIZE])

    async def _take(self, messages: Sequence[Leased]) -> None:
        recorded: list[str] = []
        for message in messages:
            try:
                response = decode(message.body, GenerateResponse)
            except msgspec.DecodeError as error:
                self.counts.num_unreadable += 1
                logger.error("a message in generate_response is unreadable and was dropped: %s", error)
                continue
            key = call_key(response.run_id, response.purpose, response.sample_id, response.step_id)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.answer.done():
                self.counts.num_unexpected += 1
            elif response.error is not None:
                self.counts.num_failed += 1
                error_code = response.error.get("code", "generation_failed")
                self._fail(waiting, GenerationFailed(error_code, response.error.get("message", error_code)))
            else:
                recorded.append(key)
        self.counts.num_told += await self._answer_from_records(recorded)

    async def _answer_from_records(self, keys: Sequence[str]) -> int:
        """Answer those of the calls that are recorded; how many."""
        num_answered = 0
        for key, stored in zip(keys, await self._records.get(keys) if keys else (), strict=True):
            waiting = self._waiting.get(key)
            if stored is None or waiting is None or waiting.answer.done():
                continue
            num_answered += 1
            try:
                waiting.answer.set_result(checked_call(stored))
            except RecordCorrupt as error:
                logger.error("%s", error, extra={"at": key})
                self._fail(waiting, error)
        return num_answered

    @staticmethod
    def _fail(waiting: _Waiting, error: BaseException) -> None:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
            # Retrieved here, so that an answer whose waiters are all gone is no unhandled error.
            waiting.answer.exception()
