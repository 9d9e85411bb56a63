"""The warden of a box as a child of the worker: started, its output kept, ended by its life line, waited for.

spawn -> warden (order on stdin, which stays open) -> output -> log
end -> stdin closes -> the warden empties its box -> exit -> gone
"""

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from turnmill.errors import BackendUnavailable
from turnmill.rollout.box.isolation import Places, Settings, order_of, places_of, warden_command
from turnmill.rollout.box.log import BoxLog
from turnmill.rollout.box.order import EXIT_NOT_EMPTY, EXIT_REFUSED
from turnmill.rollout.box.usage import Usage, usage_of

logger = logging.getLogger(__name__)

# How long a warden may take to empty its box.
_END_S = 20.0
# How long its output may take to come to its end after that.
_LAST_WORDS_S = 5.0
_CHUNK = 1 << 16


class BoxProcess:
    """One warden with its box; `close` must be called."""

    def __init__(self, settings: Settings, *, on_end: Callable[[str], None]) -> None:
        """`on_end` is told why the box has ended, or has to."""
        self._settings = settings
        self._on_end = on_end
        self._log = BoxLog(settings.log)
        # Its folder on the machine, where it has no file tree of its own.
        self._base: Path | None = None
        # In that, the only part that the box may write to.
        self._home: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # Set when the last process of it is gone.
        self.gone = asyncio.Event()

    async def spawn(self, control: socket.socket) -> Places:
        """Raises `BackendUnavailable` for what the machine does not give."""
        try:
            if not self._settings.isolation.has_view:
                self._base = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="turnmill-box-"))
            places = await asyncio.to_thread(places_of, self._settings, self._base)
            self._home = None if self._base is None else Path(places.home)
            order = order_of(self._settings, places, base=self._base, control_fd=control.fileno())
            process = await asyncio.create_subprocess_exec(
                *warden_command(self._settings.python),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=order.environ,
                pass_fds=(control.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            raise BackendUnavailable(f"a box for the environment can't be made: {error}") from error
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(order.to_line())
        keeping = asyncio.create_task(self._keep_log(process.stdout), name="box-log")
        waiting = asyncio.create_task(self._await_exit(process, keeping), name="box-exit")
        self._tasks = [keeping, waiting]
        return places

    async def usage(self) -> Usage:
        """What all of its processes use now."""
        assert self._process is not None
        return await asyncio.to_thread(usage_of, self._process.pid, self._home, self._settings.limits)

    @property
    def last_words(self) -> str:
        """How it ended, with the last lines of its output."""
        code = None if self._process is None else self._process.returncode
        what = "the box could not be made" if code == EXIT_REFUSED else "its process ended"
        return f"{what} with exit code {code}: {self._log.tail or 'it wrote nothing'}"

    async def _keep_log(self, output: asyncio.StreamReader) -> None:
        limits, was_cut = self._settings.limits, False
        while data := await output.read(_CHUNK):
            await self._keep(self._log.write, data)
            if self._log.num_cut and not was_cut:
                was_cut = True
                logger.warning("the environment writes too much: its output is cut, see %s", self._settings.log)
            if self._log.num_bytes > limits.output_mb << 20:
                self._on_end(f"it wrote more than {limits.output_mb} MiB of output")
        await self._keep(self._log.close)

    async def _keep(self, write: Callable[..., None], *data: bytes) -> None:
        try:
            await asyncio.to_thread(write, *data)
        except OSError as error:
            # What it wrote is not worth a box.
            logger.error("the output of the environment can't be kept: %s", error)

    async def _await_exit(self, process: asyncio.subprocess.Process, keeping: asyncio.Task[None]) -> None:
        code = await process.wait()
        # Nobody is left to write, as a rule: what there is may say why.
        _, pending = await asyncio.wait({keeping}, timeout=_LAST_WORDS_S)
        for task in pending:
            task.cancel()
        if code == EXIT_NOT_EMPTY:
            logger.error("a box could not be emptied: processes of the environment may be left")
        self._on_end(self.last_words)
        self.gone.set()

    def end(self) -> None:
        """Have all of it killed, without waiting for that; idempotent."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        """Kill what is left and wait until nothing is; idempotent."""
        if self._process is not None:
            self.end()
            try:
                await asyncio.wait_for(self.gone.wait(), _END_S)
            except TimeoutError:
                logger.error("the warden of a box did not end within %g s and is killed", _END_S)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self.gone.wait()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._base is not None:
            await asyncio.to_thread(shutil.rmtree, self._base, ignore_errors=True)
