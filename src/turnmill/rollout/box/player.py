"""The process inside a box: loads one environment and plays rollouts with it, side by side, as the worker says.

    control socket -> Load -> environment;  Play -> task: play_scored -> Ended;  Cancel -> the task ends -> Ended
                  '-> Examine -> task: preflight -> Examined
                  '-> Ping -> Pong, by a thread of its own

Nothing here defends against the environment, whose code runs in this process: what it must not do, the walls of the box
and the worker's checks prevent.
"""

import asyncio
import contextvars
import io
import logging
import os
import resource
import signal
import site
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import uvloop

from turnmill.conversation.client import ChatClient
from turnmill.conversation.http import HttpClient
from turnmill.environment.base import Environment
from turnmill.environment.boundary import WatchedChat, describe, play_scored
from turnmill.environment.preflight import preflight
from turnmill.environment.registry import FoundEnvironment, load
from turnmill.errors import TurnmillError
from turnmill.records import InvalidReason, RolloutResult, Task
from turnmill.rollout.box.filter import refuse_calls
from turnmill.rollout.box.order import CONTROL_FD
from turnmill.rollout.box.wire import (
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
    PlayerMessage,
    Pong,
    WireError,
    WorkerMessage,
    check_player,
    decode_worker,
    frame,
    length_of,
)

# The relay gives a call up first.
_CALL_MARGIN_S = 30.0
# The worker ends a rollout before a call in here gives up: it knows what was pending.
_DEADLINE_MARGIN_S = 5.0
_TICK_S = 0.25
_LONGEST_LINE = 8192
# What `asyncio.to_thread` has for all rollouts together; fewer than the box may have processes and threads.
_NUM_THREADS = 64

_play: contextvars.ContextVar[int | None] = contextvars.ContextVar("play", default=None)
_sample: contextvars.ContextVar[str] = contextvars.ContextVar("sample", default="-")


def main() -> None:
    """Returns when the worker closes the control socket."""
    link = Link(socket.socket(fileno=CONTROL_FD))
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        # The relay answers there: a socket of this network, served by the worker.
        origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
        link.send_listener(listener)
    order = link.receive()
    if not isinstance(order, Load):
        raise WireError(f"the first message must be Load, not {type(order).__name__}")
    if order.num_processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (order.num_processes, order.num_processes))
    output = TaggedOutput(1)
    sys.stdout = sys.stderr = cast(TextIO, output)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpx2"):
        # A line for each call of an agent's client, with the path of its rollout.
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        refuse_calls()
        environment = load_environment(order)
        _reset_signals()
    except BaseException as error:  # the boundary to the environment's code, which may also exit
        text = str(error) if isinstance(error, TurnmillError) else describe(error)
        link.send(LoadFailed(detail=_printable(text)))
        return
    link.send(Loaded())
    uvloop.run(Player(environment, link, origin, call_timeout_s=order.call_timeout_s, package=order.package).run())


def _reset_signals() -> None:
    """An environment may have taken them for itself when it was made: a process that is told to end must end.

    Not ignored, since processes that the environment starts would ignore them as well.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def load_environment(order: Load) -> Environment:
    """The environment, with what was installed for its package in the module path."""
    if order.layer is not None:
        # Before the worker's own packages, where another version is installed for it.
        num_before = len(sys.path)
        site.addsitedir(order.layer)
        sys.path[:] = sys.path[num_before:] + sys.path[:num_before]
    folder = None if order.package is None else Path(order.package)
    return load(FoundEnvironment(choice=order.choice, kind=order.kind, module=order.module, folder=folder))


class Link:
    """The player's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sending = threading.Lock()

    def send_listener(self, listener: socket.socket) -> None:
        socket.send_fds(self._control, [b"L"], [listener.fileno()])

    def send(self, message: PlayerMessage) -> None:
        """From any thread."""
        data = frame(message)
        with self._sending:
            self._control.sendall(data)

    def receive(self) -> WorkerMessage | None:
        """The next message, None at the end."""
        head = self._read(4)
        return None if head is None else decode_worker(self._read(length_of(head)) or b"")

    def _read(self, num_bytes: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._control.recv(min(num_bytes - len(parts), 1 << 16))
            if not part:
                return None
            parts += part
        return bytes(parts)


class Player:
    """The rollouts of one process."""

    def __init__(
        self, environment: Environment, link: Link, origin: str, *, call_timeout_s: float, package: str | None
    ) -> None:
        """`package`: the folder of the environment's own code, where it has one."""
        self._environment = environment
        self._package = package
        self._link = link
        self._origin = origin
        self._call_timeout_s = call_timeout_s
        # By the worker's number.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        # Which rollout a task belongs to, also one that the environment made.
        self._plays: weakref.WeakKeyDictionary[asyncio.Task[Any], int | None] = weakref.WeakKeyDictionary()
        self._ticked = time.monotonic()
        self._over = asyncio.Event()
        self._examination: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(cast(Any, self._make_task))
        # For agents that are not async: a thread each, which mostly waits for the model.
        loop.set_default_executor(ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="agent"))
        async with HttpClient() as session:
            threading.Thread(target=self._listen, args=(loop, session), name="control", daemon=True).start()
            while not self._over.is_set():
                self._ticked = time.monotonic()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), _TICK_S)
        # Not politely: what the environment left running has no use any more.
        os._exit(0)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **rest: Any) -> Any:
        task = asyncio.Task(work, loop=loop, **rest)
        self._plays[task] = _play.get()
        return task

    def _listen(self, loop: asyncio.AbstractEventLoop, session: HttpClient) -> None:
        """In a thread, so that a blocked event loop can be told."""
        while (message := self._link.receive()) is not None:
            if isinstance(message, Ping):
                self._link.send(self._pong(loop))
            elif isinstance(message, Play):
                loop.call_soon_threadsafe(self._start, message, session)
            elif isinstance(message, Examine):
                loop.call_soon_threadsafe(self._examine, message)
            elif isinstance(message, Cancel):
                loop.call_soon_threadsafe(self._cancel, message.play)
        loop.call_soon_threadsafe(self._over.set)

    def _pong(self, loop: asyncio.AbstractEventLoop) -> Pong:
        blocked_s = max(0.0, time.monotonic() - self._ticked - 2 * _TICK_S)
        current = asyncio.current_task(loop)
        running = None if current is None else self._plays.get(current)
        return Pong(blocked_s=blocked_s, running=running, place=_place(self._package) if blocked_s else "")

    # ------------------------------------------------------------ on the event loop

    def _start(self, message: Play, session: HttpClient) -> None:
        context = contextvars.copy_context()
        context.run(_play.set, message.play)
        context.run(_sample.set, message.sample_id)
        work = self._run(message, session)
        self._tasks[message.play] = asyncio.get_running_loop().create_task(
            work, name=f"play {message.sample_id}", context=context
        )

    def _cancel(self, play: int) -> None:
        if (task := self._tasks.get(play)) is not None:
            self._cancelled.add(play)
            task.cancel()

    def _examine(self, message: Examine) -> None:
        self._examination = asyncio.get_running_loop().create_task(self._report(message), name="examine")

    async def _report(self, message: Examine) -> None:
        def playing(what: str) -> None:
            self._link.send(Examining(what=_printable(what)))

        report = await preflight(
            self._environment, message.tasks, message.request, others=message.others, playing=playing
        )
        checks = tuple(replace(check, detail=_printable(check.detail)) for check in report.checks)
        self._link.send(Examined(report=replace(report, checks=checks)))

    async def _run(self, message: Play, session: HttpClient) -> None:
        self._plays[cast("asyncio.Task[Any]", asyncio.current_task())] = message.play
        ended = Ended(play=message.play, reason=InvalidReason.ENV_ERROR, detail="the environment ended its process")
        try:
            ended = _ended(message.play, await self._result(message, session))
        except asyncio.CancelledError:
            whose = (
                "ended by the worker" if message.play in self._cancelled else "the environment cancelled its own task"
            )
            ended = Ended(play=message.play, reason=InvalidReason.ENV_ERROR, detail=whose)
        except BaseException as error:  # the boundary to the environment's code, which may also exit
            ended = Ended(play=message.play, reason=InvalidReason.ENV_ERROR, detail=_printable(describe(error)))
        finally:
            del self._tasks[message.play]
            self._cancelled.discard(message.play)
            self._link.send(ended)

    async def _result(self, message: Play, session: HttpClient) -> RolloutResult:
        client = ChatClient(
            session,
            self._origin + message.path,
            timeout_s=self._call_timeout_s + _CALL_MARGIN_S,
            deadline=time.monotonic() + message.limit_s + _DEADLINE_MARGIN_S,
        )
        task = Task(id=message.sample_id, metadata=message.metadata)
        return await play_scored(self._environment, task, WatchedChat(client), reward_range=message.reward_range)


def _ended(play: int, result: RolloutResult) -> Ended:
    """What can't be said in a message is the environment's fault."""
    ended = Ended(
        play=play,
        reward=result.reward,
        reason=result.reason,
        metrics=result.metrics,
        turn_rewards=result.turn_rewards,
        stop_reason=result.stop_reason,
        detail=None if result.detail is None else _printable(result.detail),
    )
    try:
        check_player(frame(ended))
    except (WireError, TypeError, ValueError) as error:
        return Ended(play=play, reason=InvalidReason.ENV_ERROR, detail=_printable(f"its result can't be sent: {error}"))
    return ended


def _place(package: str | None) -> str:
    """Where the thread of the event loop is: its innermost call, and those of the package that led there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    own = [call for call in stack if package is not None and call.filename.startswith(package)]
    # None of them for an environment without a folder of its own.
    shown = [*own[-2:], *(stack[-1:] if own and stack[-1] is not own[-1] else ())] or stack[-3:]
    return ", called at ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in reversed(shown))


def _printable(text: str) -> str:
    """Without half surrogate pairs, which no message can hold."""
    return text.encode(errors="backslashreplace").decode()[:20_000]


class TaggedOutput(io.TextIOBase):
    """Standard output whose lines begin with the rollout that wrote them."""

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        # Begun lines by rollout.
        self._begun: dict[str, str] = {}
        self._writing = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        at = _sample.get()
        with self._writing:
            *lines, rest = (self._begun.pop(at, "") + text).split("\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], ""
            if rest:
                self._begun[at] = rest
            if lines:
                data = "".join(f"[{at}] {line}\n" for line in lines).encode(errors="backslashreplace")
                while data:
                    data = data[os.write(self._fd, data) :]
        return len(text)
