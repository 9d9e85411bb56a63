"""A box as the worker holds it: started, spoken to, watched, and ended without a trace.

    start -> warden -> player -> listener for the relay, Loaded
    play -> Play -> Ended                     cancel -> Cancel -> Ended

task          consumes                  produces
box-read      the player's messages     results of rollouts; the end of a player that sends nonsense
box-watch     pings, usage              the end of one that hangs or takes too much

Whatever goes wrong in a box ends it as a whole: `BoxEnded` says why, and whose fault it is where that can be told.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnmill.errors import printable
from turnmill.records import PreflightReport, PreflightRequest, Task
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.box.process import BoxProcess
from turnmill.rollout.box.relay import Relay, RelayServer
from turnmill.rollout.box.wire import (
    MAX_WORKER_FRAME,
    Cancel,
    Ended,
    Examine,
    Examined,
    Examining,
    Load,
    Loaded,
    LoadFailed,
    Ping,
    Play,
    Pong,
    WireError,
    WorkerMessage,
    frame,
    read_player,
)
from turnmill.telemetry import redact

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
# How long a player may take to end by itself that did not load.
_OWN_END_S = 5.0
# Messages about an examination that were not looked at yet.
_MOST_WAITING = 1000
# Of what a box says of where it is, and of why it does not load; bytes for it that it did not read, more than a task
# has.
_PLACE_LENGTH, _DETAIL_LINES, _MOST_UNREAD = 1000, 40, MAX_WORKER_FRAME


class BoxEnded(Exception):
    """The box is gone, and what it played did not end; the text says why."""

    def __init__(self, cause: str, *, is_own_fault: bool) -> None:
        """`is_own_fault`: by the rollout that this is raised for, as opposed to perhaps by another one."""
        super().__init__(cause)
        self.is_own_fault = is_own_fault


class LoadError(Exception):
    """The environment does not load, or the box can't be made; the text says why."""


@dataclass(kw_only=True, eq=False)
class Playing:
    """A rollout in a box."""

    number: int
    sample_id: str
    # Raises `BoxEnded`.
    ended: asyncio.Future[Ended] = field(repr=False)


class Box:
    """One player. Made by `start`; `close` must be called."""

    def __init__(self, settings: Settings, relay: Relay) -> None:
        self._settings = settings
        self._relay = relay
        self._process = BoxProcess(settings, on_end=self.end)
        self._server: RelayServer | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._playing: dict[int, Playing] = {}
        # Those whose end nobody waits for any more.
        self._abandoned: set[int] = set()
        # Pings without an answer.
        self._num_pings = 0
        # Why it was ended, once it was.
        self._cause: str | None = None
        self._ponged = 0.0
        self._is_closed = False
        # What it says about its examination; None at the end.
        self._examination: asyncio.Queue[Examining | Examined | None] | None = None
        # Rollouts begun so far; nothing more is to be begun in one that is retired.
        self.num_begun = 0
        self.is_retired = False

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    @property
    def is_open(self) -> bool:
        """More rollouts may be begun."""
        return self._cause is None and not self.is_retired

    @classmethod
    async def start(cls, settings: Settings, relay: Relay) -> "Box":
        """Raises `LoadError`, and `BackendUnavailable` for what the machine does not give."""
        box = cls(settings, relay)
        try:
            await box._start()
        except BaseException:
            await asyncio.shield(box.close())
            raise
        return box

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        found = self._settings.found
        with theirs:
            places = await self._process.spawn(theirs)
        try:
            async with asyncio.timeout(self._settings.load_s):
                await self._take_listener(ours)
                reader, self._writer = await asyncio.open_unix_connection(sock=ours)
                self._send(
                    Load(
                        choice=found.choice,
                        kind=found.kind,
                        module=found.module,
                        package=places.package,
                        layer=places.layer,
                        call_timeout_s=self._settings.call_timeout_s,
                        num_processes=self._settings.own_process_limit,
                    )
                )
                answer = await read_player(reader)
        except TimeoutError as error:
            raise LoadError(f"it was not loaded within {self._settings.load_s:g} s") from error
        except (OSError, WireError, ValueError) as error:
            answer = None
            logger.debug("a box did not start: %s", error)
        finally:
            if self._writer is None:
                ours.close()
        if isinstance(answer, LoadFailed):
            raise LoadError(_shown(answer.detail))
        if not isinstance(answer, Loaded):
            raise LoadError(await self._why_not_loaded())
        self._ponged = time.monotonic()
        self._run("read", self._read(reader))
        self._run("watch", self._watch())

    async def _take_listener(self, control: socket.socket) -> None:
        """Made by the player before any code of the environment runs; looked at all the same."""
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(control, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(control)
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data or not fds:
            raise WireError("the player sent no listening socket")
        self._server = RelayServer(self._relay, socket.socket(fileno=fds[0]), on_flood=self.end)
        await self._server.start()

    async def _why_not_loaded(self) -> str:
        # Its own end says more than one that is made for it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.gone.wait(), _OWN_END_S)
        self.end("it was not loaded")
        await self._process.gone.wait()
        return self._process.last_words

    def _run(self, job: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"box-{job}"))

    # ------------------------------------------------------------ rollouts

    def play(self, task: Task, *, path: str, limit_s: float, reward_range: tuple[float, float]) -> Playing:
        """Begin a rollout; how it ended is in `Playing.ended`. Raises `BoxEnded`."""
        if self._cause is not None:
            raise BoxEnded(self._cause, is_own_fault=False)
        self.num_begun += 1
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        playing = Playing(number=self.num_begun, sample_id=task.id, ended=ended)
        self._playing[playing.number] = playing
        self._send(
            Play(
                play=playing.number,
                sample_id=task.id,
                metadata=task.metadata,
                path=path,
                limit_s=limit_s,
                reward_range=reward_range,
            )
        )
        return playing

    async def cancel(self, playing: Playing, *, grace_s: float) -> bool:
        """Have the code of a rollout end, and wait for it; whether it did within `grace_s`."""
        if playing.ended.done():
            return True
        self._send(Cancel(play=playing.number))
        await asyncio.wait({playing.ended}, timeout=grace_s)
        return playing.ended.done()

    def abandon(self, playing: Playing) -> None:
        """Nobody waits for it any more, though it did not end: nothing new is begun here, and it ends with the box."""
        self.is_retired = True
        if self._playing.pop(playing.number, None) is not None:
            self._abandoned.add(playing.number)
        playing.ended.cancel()

    async def examine(
        self,
        request: PreflightRequest,
        tasks: Sequence[Task],
        others: Sequence[Task],
        *,
        playing: Callable[[str], None],
        limit_s: float,
    ) -> PreflightReport:
        """Have tasks played without a model, and others looked at.

        `playing` is told what is about to be done, which may take `limit_s`. Raises `BoxEnded`, also where it takes
        longer.
        """
        self._examination = asyncio.Queue()
        self._send(Examine(request=request, tasks=list(tasks), others=list(others)))
        while True:
            try:
                message = await asyncio.wait_for(self._examination.get(), limit_s)
            except TimeoutError:
                self.end(f"no end after {limit_s:g} s")
                message = None
            if message is None:
                raise BoxEnded(self._cause or "", is_own_fault=True)
            if isinstance(message, Examined):
                return message.report
            playing(message.what)

    def _send(self, message: WorkerMessage) -> None:
        if self._writer is None or self._writer.is_closing():
            return
        self._writer.write(frame(message))
        if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            self.end("it does not read what the worker says")

    # ------------------------------------------------------------ tasks

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await read_player(reader)) is not None:
                if isinstance(message, Pong):
                    self._take_pong(message)
                elif isinstance(message, Ended):
                    self._take_end(message)
                elif isinstance(message, Examining | Examined) and self._examination is not None:
                    if self._examination.qsize() > _MOST_WAITING:
                        raise WireError("more about its examination than there is to be said")
                    self._examination.put_nowait(message)
                else:
                    raise WireError(f"an unexpected {type(message).__name__}")
        except WireError as error:
            self.end(f"it sends nonsense to the worker: {error}")
        except OSError as error:
            logger.debug("the control socket of a box broke: %s", error)

    def _take_pong(self, pong: Pong) -> None:
        if self._num_pings == 0:
            raise WireError("an answer that nobody asked for")
        self._num_pings -= 1
        self._ponged = time.monotonic()
        if pong.blocked_s > self._settings.block_s:
            at = f", at {printable(pong.place, limit=_PLACE_LENGTH)}" if pong.place else ""
            cause = (
                f"it did not give the event loop back for {pong.blocked_s:.0f} s{at}; what blocks belongs in a thread"
            )
            self.end(cause, guilty=pong.running)

    def _take_end(self, ended: Ended) -> None:
        playing = self._playing.pop(ended.play, None)
        if playing is not None:
            if not playing.ended.done():
                playing.ended.set_result(ended)
        elif ended.play in self._abandoned:
            self._abandoned.remove(ended.play)
        else:
            raise WireError(f"the end of rollout {ended.play}, which is not being played")

    async def _watch(self) -> None:
        while True:
            self._num_pings += 1
            self._send(Ping())
            await asyncio.sleep(_WATCH_S)
            usage = await self._process.usage()
            silent_s = time.monotonic() - self._ponged
            if (breach := usage.breach_of(self._settings.limits)) is not None:
                self.end(breach)
            elif silent_s > self._settings.block_s + 2 * _WATCH_S:
                self.end(f"its process did not answer for {silent_s:.0f} s")

    # ------------------------------------------------------------ end

    def end(self, cause: str, *, guilty: int | None = None) -> None:
        """Have all of it killed, without waiting for that; the first cause counts. `guilty` is a rollout's number."""
        if self._cause is not None:
            return
        self._cause = cause
        if not self._is_closed:
            logger.warning("the environment's process is ended, %d rollouts in it: %s", len(self._playing), cause)
        is_known = guilty in self._playing
        # One that ended, or says so, may have left something behind that does harm now.
        is_alone = len(self._playing) == 1 and self.num_begun == 1
        for playing in self._playing.values():
            is_own = is_alone or (is_known and playing.number == guilty)
            if not playing.ended.done():
                playing.ended.set_exception(BoxEnded(cause, is_own_fault=is_own))
                # Looked at here, so that one that nobody waits for is no error unseen.
                playing.ended.exception()
        self._playing.clear()
        if self._examination is not None:
            self._examination.put_nowait(None)
        self._process.end()

    async def close(self) -> None:
        """Kill what is left and wait until nothing is; idempotent, and not to be cancelled."""
        self._is_closed = True
        self.end("the worker has no more use for it")
        await self._process.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        if self._writer is not None:
            self._writer.close()


def _shown(detail: str) -> str:
    """Lines of a box as a terminal may show them, without secrets."""
    return "\n".join(printable(redact(line), limit=_PLACE_LENGTH) for line in detail.splitlines()[:_DETAIL_LINES])
