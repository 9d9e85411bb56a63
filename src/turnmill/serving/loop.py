"""The one owner of an engine: calls of all clients join and leave its batches.

    generate -> waits for a slot -> engine.submit -> [engine.step in a thread] -> its new tokens -> ... -> its result

Task `engine`: consumes calls; waits for one when nothing runs; produces tokens for those who wait for them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from turnmill.errors import GenerationFailed, ShuttingDown
from turnmill.generation.engine import EngineCall, EngineResult, StreamingEngine


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a step brought a call."""

    token_ids: list[int]
    # With the last tokens.
    result: EngineResult | None = None


class _Stream:
    """A call and what has not been taken of it."""

    def __init__(self, call: EngineCall) -> None:
        self.call = call
        self.num_told = 0
        self.news: asyncio.Queue[Progress | Exception] = asyncio.Queue()


class EngineLoop:
    """`async with` runs it; whoever generates when it ends is told."""

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._waiting: deque[_Stream] = deque()
        self._running: dict[str, _Stream] = {}
        self._given_up: set[str] = set()
        self._wanted = asyncio.Event()
        self._is_closed = False
        # Ends only by an error, or with `close`.
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EngineLoop":
        self.task = asyncio.create_task(self._run(), name="engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the step that runs, and whatever waits for one; idempotent."""
        self._is_closed = True
        self._wanted.set()
        if self.task is not None:
            await asyncio.wait([self.task])

    async def generate(self, call: EngineCall) -> AsyncGenerator[Progress, None]:
        """The call's tokens as they come; leaving early (close it with `aclosing`) ends the call.

        Raises `GenerationFailed` for what the engine can't run, `ShuttingDown` when the loop ends.
        """
        if self._is_closed or self.task is None or self.task.done():
            raise ShuttingDown("the server is closing")
        stream = _Stream(call)
        self._waiting.append(stream)
        self._wanted.set()
        try:
            while True:
                news = await stream.news.get()
                if isinstance(news, Exception):
                    raise news
                yield news
                if news.result is not None:
                    return
        finally:
            if self._running.get(call.call_id) is stream:
                self._given_up.add(call.call_id)
            elif stream in self._waiting:
                self._waiting.remove(stream)

    async def _run(self) -> None:
        try:
            while not self._is_closed:
                self._end_given_up()
                self._admit()
                if self._running:
                    self._tell(await asyncio.to_thread(self._engine.step))
                else:
                    self._wanted.clear()
                    await self._wanted.wait()
        finally:
            for stream in (*self._running.values(), *self._waiting):
                self._engine.cancel(stream.call.call_id)
                stream.news.put_nowait(ShuttingDown("the server is closing"))
            self._running.clear()
            self._waiting.clear()

    def _end_given_up(self) -> None:
        for call_id in self._given_up:
            if self._running.pop(call_id, None) is not None:
                self._engine.cancel(call_id)
        self._given_up.clear()

    def _admit(self) -> None:
        while self._waiting and self._engine.num_free:
            stream = self._waiting.popleft()
            try:
                self._engine.submit(stream.call)
            except GenerationFailed as error:
                stream.news.put_nowait(error)
            else:
                self._running[stream.call.call_id] = stream

    def _tell(self, results: list[EngineResult]) -> None:
        for result in results:
            stream = self._running.pop(result.call_id)
            if result.error is not None:
                stream.news.put_nowait(GenerationFailed("engine_failed", result.error))
                continue
            # Its cache keeps its name, so that the conversation goes on without another prefill.
            self._engine.keep(result.call_id, result.call_id)
            stream.news.put_nowait(Progress(token_ids=result.token_ids[stream.num_told :], result=result))
        for call_id, stream in self._running.items():
            token_ids = self._engine.sampled(call_id, stream.num_told)
            if token_ids:
                stream.num_told += len(token_ids)
                stream.news.put_nowait(Progress(token_ids=token_ids))
