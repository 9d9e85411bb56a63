"""One queue of ended rollouts for several schedulers of a run: each would take away what the others wait for.

    rollout_response -> listen -> inbox of the sample's purpose -> Scheduler

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| listen | rollout_response | a message | the proxy | messages in inboxes |
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from turnmill.errors import TurnmillError
from turnmill.ports import Leased
from turnmill.records import Purpose, RolloutResponse, decode

logger = logging.getLogger(__name__)
_BATCH_SIZE = 256
_WAIT_S = 20.0


class News(Protocol):
    """The slice of a queue that a scheduler uses."""

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        """See `ports.WorkQueue.take`."""
        ...


class Inbox:
    """Implements `News` with the messages of one purpose."""

    def __init__(self) -> None:
        self._messages: deque[Leased] = deque()
        self._has_some = asyncio.Event()
        self._failure: BaseException | None = None

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        """See `ports.WorkQueue.take`; raises what ended the listener."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_some.wait(), wait_s)
        if self._failure is not None:
            raise self._failure
        taken = [self._messages.popleft() for _ in range(min(max_messages, len(self._messages)))]
        if not self._messages:
            self._has_some.clear()
        return taken

    def add(self, message: Leased) -> None:
        self._messages.append(message)
        self._has_some.set()

    def fail(self, error: BaseException) -> None:
        """Whoever waits for news hears that there will be none."""
        self._failure = error
        self._has_some.set()


class Listener:
    """Takes each message of `queue` and gives it to the inbox of its purpose: `start`, at last `close`."""

    def __init__(self, queue: News, purposes: Sequence[Purpose]) -> None:
        self.inboxes = {purpose: Inbox() for purpose in purposes}
        self._queue = queue
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen."""
        self._task = asyncio.create_task(self._listen(), name="listen for ended rollouts")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop listening; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        for inbox in self.inboxes.values():
            inbox.fail(task.exception() or TurnmillError(f"{task.get_name()} returned early"))

    async def _listen(self) -> None:
        while True:
            for message in await self._queue.take(max_messages=_BATCH_SIZE, wait_s=_WAIT_S):
                self._hand_over(message)

    def _hand_over(self, message: Leased) -> None:
        """News alone: what it is about is in the records, where nobody is told of it."""
        try:
            purpose = decode(message.body, RolloutResponse).purpose
        except msgspec.DecodeError as error:
            logger.error("a message in rollout_response is unreadable and was dropped: %s", error)
            return
        inbox = self.inboxes.get(purpose)
        if inbox is None:
            logger.info("nobody here waits for news of the purpose %s", purpose)
        else:
            inbox.add(message)
