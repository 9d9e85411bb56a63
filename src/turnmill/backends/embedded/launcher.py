"""Roles as child processes: started, watched, started again after a crash, ended without a trace.

    start -> child process -> (its thread waits for the end) -> watcher task: again | exited | failed
    stop, close -> SIGTERM, wait, SIGKILL -> watcher task ends

Each child leads a session of its own, and what it leaves running in that session is killed when it has ended. It can
tell that its parent died by the end of file on its standard input, whose other end only the launcher holds.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnmill.backends.embedded.files import disk
from turnmill.backends.embedded.locks import lock_path, take_lock
from turnmill.backends.embedded.restarts import note_restart
from turnmill.errors import BackendUnavailable, TurnmillError
from turnmill.ports import RoleSpec, RoleStatus
from turnmill.telemetry import redact

logger = logging.getLogger(__name__)

_TAIL_LINES, _TAIL_BYTES = 20, 16384
_LONGEST_PAUSE_S = 5.0
# One thread a process unless the user or the spec says more: two starve each other on shared cores.
_DEFAULT_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class _Child(subprocess.Popen[bytes]):
    """A child that only the thread that waits for it reaps.

    `Popen.send_signal` looks whether the child has ended, and reaps it if so: in the moment in which a child ends by
    itself that would take its end away from its thread, and whoever waits for the role would wait for ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reaping = threading.Lock()
        super().__init__(*args, **kwargs)

    def send_signal(self, sig: int) -> None:
        """To the child alone: nothing once it has been reaped, since its pid may be another's then."""
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, sig)

    def reap(self) -> int:
        """The exit code of a child that has ended."""
        with self._reaping:
            return self.wait()


@dataclass(kw_only=True, eq=False)
class _Role:
    """A started role; changed only on the event loop."""

    spec: RoleSpec
    log: Path
    process: _Child
    # Resolved with the exit code of `process` once it is gone, with all of its session.
    ended: asyncio.Future[int]
    state: str = "running"
    num_restarts: int = 0
    # Of them, those since it last lived long enough to count as steady.
    num_in_a_row: int = 0
    # On the monotonic clock: when `process` was made.
    made: float = field(default_factory=time.monotonic)
    exit_code: int | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None


class ProcessLauncher:
    """Implements `ports.Launcher`. Use it on one event loop.

    A role whose process ends with 0 is `exited`; one that dies otherwise is started again up to `spec.max_restarts`
    times in a row and then `failed`, or at once for an exit code in `spec.final_exit_codes`. A stopped one is
    `exited`. No two processes of one name live in a run at once, whichever launcher started them.
    """

    def __init__(
        self,
        root: Path,
        *,
        command: Sequence[str] = (sys.executable, "-m", "turnmill"),
        stop_s: float = 10.0,
        restart_pause_s: float = 0.2,
        patience_s: float = 30.0,
        steady_s: float = 60.0,
    ) -> None:
        """`stop_s`: between SIGTERM and SIGKILL. `restart_pause_s`: before the first restart, doubling, jittered.

        `patience_s`: for the end of a process of the same name that a launcher left that has died. `steady_s`: a
        process that lived so long was in no crash loop, and has all of its restarts again.
        """
        self._root = root.absolute()
        self._command = tuple(command)
        self._stop_s = stop_s
        self._restart_pause_s = restart_pause_s
        self._patience_s = patience_s
        self._steady_s = steady_s
        # In order of start.
        self._roles: dict[str, _Role] = {}
        self._closing: asyncio.Task[None] | None = None

    async def start(self, spec: RoleSpec) -> None:
        """See `ports.Launcher.start`; raises `BackendUnavailable` if the process can't be made, or after `close`."""
        if self._closing is not None:
            raise BackendUnavailable(f"{spec.name} can't be started: the launcher is closed")
        known = self._roles.get(spec.name)
        if known is not None and known.state == "running" and not known.stopping.is_set():
            return
        if known is not None and known.watcher is not None:
            await known.watcher
        log = self._root / "runs" / spec.run_id / "logs" / f"{spec.name}.log"
        process, ended = await self._spawn(spec, log)
        role = _Role(spec=spec, log=log, process=process, ended=ended)
        self._roles[spec.name] = role
        role.watcher = asyncio.create_task(self._watch(role), name=f"watch {spec.name}")

    async def statuses(self) -> list[RoleStatus]:
        """See `ports.Launcher.statuses`; a role that waits for its restart has no pid."""
        return [
            RoleStatus(
                name=name,
                state=role.state,
                num_restarts=role.num_restarts,
                exit_code=role.exit_code,
                pid=None if role.ended.done() else role.process.pid,
                log_tail=log_tail(role.log),
            )
            for name, role in self._roles.items()
        ]

    async def stop(self, name: str) -> None:
        """See `ports.Launcher.stop`; a name never started is no error."""
        role = self._roles.get(name)
        if role is None or role.watcher is None:
            return
        first = not role.stopping.is_set()
        role.stopping.set()
        if first and not role.ended.done():
            role.process.send_signal(signal.SIGTERM)
            await asyncio.wait([role.ended], timeout=self._stop_s)
            if not role.ended.done():
                logger.warning("%s did not end within %g s of SIGTERM and is killed", name, self._stop_s)
                role.process.send_signal(signal.SIGKILL)
        await asyncio.shield(role.watcher)

    async def close(self) -> None:
        """See `ports.Launcher.close`; idempotent, and goes on to its end when the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._stop_all(), name="close launcher")
        await asyncio.shield(self._closing)

    async def _stop_all(self) -> None:
        # Ends the pauses before restarts.
        for role in self._roles.values():
            if role.ended.done():
                role.stopping.set()
        for name in reversed(list(self._roles)):
            await self.stop(name)

    async def _watch(self, role: _Role) -> None:
        """Consumes the child's end, starts it again or says how it ended."""
        while True:
            role.exit_code = await role.ended
            # While others are being stopped a role may die of it; that is no reason to start it again.
            if role.exit_code == 0 or role.stopping.is_set() or self._closing is not None:
                role.state = "exited"
                return
            if time.monotonic() - role.made >= self._steady_s:
                role.num_in_a_row = 0
            is_final = role.exit_code in role.spec.final_exit_codes
            if is_final or role.num_in_a_row >= role.spec.max_restarts:
                logger.error("%s died with exit code %d and is not started again", role.spec.name, role.exit_code)
                role.state = "failed"
                return
            longest_s = min(self._restart_pause_s * 2**role.num_in_a_row, _LONGEST_PAUSE_S)
            logger.warning("%s died with exit code %d and is started again", role.spec.name, role.exit_code)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(role.stopping.wait(), timeout=longest_s * random.uniform(0.5, 1.0))
            if role.stopping.is_set():
                role.state = "exited"
                return
            try:
                process, ended = await self._spawn(role.spec, role.log)
            except TurnmillError as error:
                # Nobody awaits this task: a role that can't be made again must not look as if it ran.
                logger.error("%s can't be started again: %s", role.spec.name, error)
                role.state = "exited" if role.stopping.is_set() else "failed"
                return
            role.num_restarts += 1
            role.num_in_a_row += 1
            role.process, role.ended, role.made = process, ended, time.monotonic()
            # Not earlier: whoever stops the role while this waits must find the process that lives.
            await self._note_restart(role)

    async def _note_restart(self, role: _Role) -> None:
        path = role.log.parent.parent / "restarts.jsonl"
        try:
            await asyncio.to_thread(note_restart, path, role.spec.name, role.exit_code)
        except TurnmillError as error:
            # A figure is not worth a role.
            logger.warning("the restart of %s is not counted: %s", role.spec.name, error)

    async def _spawn(self, spec: RoleSpec, log: Path) -> tuple[_Child, asyncio.Future[int]]:
        lock = await take_lock(lock_path(self._root, spec.run_id, spec.name), self._patience_s)
        try:
            known = self._roles.get(spec.name)
            if self._closing is not None or (
                known is not None and known.state == "running" and known.stopping.is_set()
            ):
                raise BackendUnavailable(f"{spec.name} is not started any more: the launcher was told to stop it")
            return self._spawn_locked(spec, log, lock)
        finally:
            os.close(lock)

    def _spawn_locked(self, spec: RoleSpec, log: Path, lock: int) -> tuple[_Child, asyncio.Future[int]]:
        arguments = ["role", spec.role, "--root", str(self._root), "--run", spec.run_id, "--name", spec.name]
        with disk(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            file = log.open("ab")
        try:
            process = _Child(
                [*self._command, *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**_DEFAULT_ENV, **os.environ, **spec.env},
                start_new_session=True,
                pass_fds=(lock,),
            )
        except OSError as error:
            raise BackendUnavailable(f"the process {spec.name} can't be made: {error}") from error
        finally:
            file.close()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        threading.Thread(
            target=_await_end, args=(process, loop, ended), name=f"wait for {spec.name}", daemon=True
        ).start()
        return process, ended


def _await_end(process: _Child, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int]) -> None:
    """In a thread: wait for the child, end what it left in its session, then let its pid go."""
    # Not reaped yet, the child keeps its pid, so that the group that bears its number is still its own.
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        # Whoever started us ignores SIGCHLD: the system reaps at once, and nobody learns how the child ended.
        logger.warning("how process %d ended is unknown: SIGCHLD is ignored here", process.pid)
    else:
        # PermissionError: macOS says so of a group in which only the dead child is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    exit_code = process.reap()
    if process.stdin is not None:
        process.stdin.close()
    try:
        loop.call_soon_threadsafe(_resolve, ended, exit_code)
    except RuntimeError:
        # The loop ended before the child: nobody is left to be told.
        if not loop.is_closed():
            raise


def _resolve(ended: asyncio.Future[int], exit_code: int) -> None:
    if not ended.done():
        ended.set_result(exit_code)


def log_tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log, without secrets; none of one that is not there or not for us to read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, PermissionError):
        return ()
    return tuple(redact(line) for line in text.splitlines()[-_TAIL_LINES:])
