"""Calls that wait for their answer.

    Sessions -> ask -> generate_request[replica] -> replica -> Call record + generate_response -> Sessions

| task | consumes | waits for | produces |
|---|---|---|---|
| send | what was asked in one turn of the event loop | nothing | one send a replica |
| listen | generate_response, in batches | the next message | answered calls (a failed one with its error) |
| look | records of calls that wait longer than `LOOK_AFTER_S` | a second | answered calls whose message was lost |
| look | statuses of the replicas, where there are several | a second | calls sent again, whose replica is gone |

The Call record is the answer; the message is the news of it and brings a copy. Who waits is woken by either.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from turnmill.conversation.attempts import failure_of
from turnmill.conversation.history import check_call, checked_call
from turnmill.conversation.routing import Asked, Routes
from turnmill.errors import CallTimeout, RecordCorrupt, ShuttingDown
from turnmill.ports import Leased, Message, RecordStore, WorkQueue
from turnmill.records import Call, GenerateRequest, GenerateResponse, call_key, decode, encode

logger = logging.getLogger(__name__)
BATCH_SIZE = 256
WAIT_S = 1.0
LOOK_AFTER_S = 1.0


@dataclass(kw_only=True)
class _Waiting:
    """A call that somebody waits for."""

    # On the loop's clock.
    since: float
    # None: it was asked for by a process that is gone, in whose place this one waits.
    asked: Asked | None = None
    # One a waiter: one that times out or is cancelled takes the answer from nobody else.
    waiters: list[asyncio.Future[Call]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Somebody still waits for the answer."""
        return not all(waiter.done() for waiter in self.waiters)

    def answer(self, call: Call) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(call)

    def fail(self, error: BaseException) -> None:
        for waiter in self.waiters:
            _fail(waiter, error)


class _Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A generate request on its way to a queue."""

    message: Message
    replica: int
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
    # Generate requests sent again, to another replica than the one that is gone.
    num_moved: int = 0
    # Messages about calls that nobody here waits for (late, repeated, or another proxy's).
    num_unexpected: int = 0
    # Messages that are no GenerateResponse; dropped and logged.
    num_unreadable: int = 0


def _closing() -> ShuttingDown:
    return ShuttingDown("the proxy is closing")


class Calls:
    """Sends generate requests and hands the recorded answers to whoever waits."""

    def __init__(
        self,
        records: RecordStore,
        requests: Sequence[WorkQueue],
        responses: WorkQueue,
        routes: Routes,
        *,
        timeout_s: float,
    ) -> None:
        """`routes` tells which of the `requests` a call is sent to."""
        self.counts = CallCounts()
        self._records = records
        self._requests = requests
        self._responses = responses
        self._routes = routes
        self._timeout_s = timeout_s
        self._waiting: dict[str, _Waiting] = {}
        # When each waiter gives up, on the loop's clock. All wait equally long, so the earliest is the first, and one
        # timer does for all.
        self._give_up_at: dict[asyncio.Future[Call], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: list[_Outgoing] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    async def ask(self, asked: Asked) -> Call:
        """Queue a call at the replica that holds the sample's conversations; its answer, as recorded.

        Raises `GenerationFailed` (the replica's error), `CallTimeout`, `ShuttingDown`, `RecordCorrupt`.
        """
        request = asked.request
        key = call_key(request.run_id, request.purpose, request.sample_id, request.step_id)
        waiting, answer = self._expect(key, asked)
        asked.replica = self._routes.replica_of(request.sample_id, asked.begun_at)
        asked.sent_at = time.time()
        self.counts.num_sent += 1
        self._outbox.append(_Outgoing(message=_message(request), replica=asked.replica, waiting=waiting))
        if len(self._outbox) == 1:
            # Runs after everything that is ready now: what many clients ask at once is sent at once.
            sending = asyncio.create_task(self._send(), name="calls-send")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        return await self._wait(key, waiting, answer)

    async def _send(self) -> None:
        batch, self._outbox = self._outbox, []
        by_replica: dict[int, list[_Outgoing]] = {}
        for item in batch:
            by_replica.setdefault(item.replica, []).append(item)
        sends = [self._requests[index].send([item.message for item in items]) for index, items in by_replica.items()]
        for items, error in zip(by_replica.values(), await asyncio.gather(*sends, return_exceptions=True), strict=True):
            if error is not None:
                for item in items:
                    item.waiting.fail(error)

    async def ask_again(self, key: str, asked: Asked | None) -> Call:
        """The answer to a call that was asked before: recorded by now, or still to come. Raises like `ask`."""
        waiting, answer = self._expect(key, asked)
        try:
            await self._answer_from_records([key])
        except BaseException:
            self._forget(key, waiting, answer)
            raise
        return await self._wait(key, waiting, answer)

    def _expect(self, key: str, asked: Asked | None) -> tuple[_Waiting, asyncio.Future[Call]]:
        if self._is_stopped:
            raise _closing()
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(since=loop.time(), asked=asked)
        answer: asyncio.Future[Call] = loop.create_future()
        waiting.waiters.append(answer)
        return waiting, answer

    async def _wait(self, key: str, waiting: _Waiting, answer: asyncio.Future[Call]) -> Call:
        loop = answer.get_loop()
        self._give_up_at[answer] = give_up_at = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(give_up_at, self._time_out, loop)
        try:
            return await answer
        finally:
            del self._give_up_at[answer]
            self._forget(key, waiting, answer)

    def _forget(self, key: str, waiting: _Waiting, answer: asyncio.Future[Call]) -> None:
        waiting.waiters.remove(answer)
        if not waiting.waiters:
            del self._waiting[key]

    def _time_out(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail whoever has waited for too long, and come back when the next one will have."""
        self._timer = None
        now = loop.time()
        for answer, give_up_at in self._give_up_at.items():
            if give_up_at > now:
                self._timer = loop.call_at(give_up_at, self._time_out, loop)
                break
            self.counts.num_timeouts += not answer.done()
            _fail(answer, CallTimeout(f"the call was not answered within {self._timeout_s:g} s"))

    def stop(self) -> None:
        """Fail all waiters, now and from now on, with `ShuttingDown`."""
        self._is_stopped = True
        for waiting in self._waiting.values():
            waiting.fail(_closing())

    async def close(self) -> None:
        """Stop, and wait for what is being sent."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._sending)

    # ------------------------------------------------------------ tasks

    async def listen(self) -> None:
        """Until cancelled: answer calls as the news about them comes in."""
        while True:
            # For good: whoever waits for it here would not outlive this process either.
            await self._take(await self._responses.take(max_messages=BATCH_SIZE, wait_s=WAIT_S))

    async def look(self) -> None:
        """Until cancelled: look up the records of calls that wait long, in case the news or their replica was lost."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            before = loop.time() - LOOK_AFTER_S
            late = [key for key, waiting in self._waiting.items() if waiting.since <= before]
            for start in range(0, len(late), BATCH_SIZE):
                self.counts.num_found += await self._answer_from_records(late[start : start + BATCH_SIZE])
            await self._routes.refresh()
            await self._move()

    async def _move(self) -> None:
        """Send the calls of replicas that are gone to others.

        Each stays under its key: should the first replica answer it all the same, the first record stands.
        """
        moved: dict[int, list[Message]] = {}
        for waiting in () if self._routes.is_lone else self._waiting.values():
            asked = waiting.asked
            if asked is None or not waiting.is_open:
                continue
            target = self._routes.new_replica_of(
                asked.request.sample_id, asked.begun_at, replica=asked.replica, sent_at=asked.sent_at
            )
            if target is None:
                continue
            asked.request = structs.replace(asked.request, epoch=asked.request.epoch + 1)
            asked.replica, asked.sent_at = target, time.time()
            moved.setdefault(target, []).append(_message(asked.request))
        for index, messages in moved.items():
            logger.warning("%d calls are sent once more, to replica-%d: theirs is gone", len(messages), index)
            self.counts.num_moved += len(messages)
            await self._requests[index].send(messages)

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
            if waiting is None:
                self.counts.num_unexpected += 1
            elif response.error is not None:
                self.counts.num_failed += 1
                waiting.fail(failure_of(response.error))
            elif response.call is not None:
                self.counts.num_told += 1
                self._answer(waiting, key, response.call)
            else:
                recorded.append(key)
        self.counts.num_told += await self._answer_from_records(recorded)

    async def _answer_from_records(self, keys: Sequence[str]) -> int:
        """Answer those of the calls that are recorded; how many."""
        num_answered = 0
        for key, stored in zip(keys, await self._records.get(keys) if keys else (), strict=True):
            waiting = self._waiting.get(key)
            if stored is None or waiting is None:
                continue
            num_answered += 1
            try:
                waiting.answer(checked_call(stored))
            except RecordCorrupt as error:
                self._report_corrupt(waiting, key, error)
        return num_answered

    def _answer(self, waiting: _Waiting, key: str, call: Call) -> None:
        """Answer with the record that came in the message."""
        try:
            check_call(call, key)
        except RecordCorrupt as error:
            self._report_corrupt(waiting, key, error)
        else:
            waiting.answer(call)

    @staticmethod
    def _report_corrupt(waiting: _Waiting, key: str, error: RecordCorrupt) -> None:
        logger.error("%s", error, extra={"at": key})
        waiting.fail(error)


def _message(request: GenerateRequest) -> Message:
    """Never swallowed: a replica that gets it twice answers it with the record that stands."""
    return Message(body=encode(request), group=request.step_id, dedup_id=None)


def _fail(waiter: asyncio.Future[Call], error: BaseException) -> None:
    if not waiter.done():
        waiter.set_exception(error)
        # Retrieved here, so that an error whose waiter is gone by now is no unhandled one.
        waiter.exception()
