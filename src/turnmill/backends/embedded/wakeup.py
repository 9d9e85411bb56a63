"""Wake-ups between processes: a named pipe per waiting consumer, one byte to each when there is something new.

Named pipes, because the path of a Unix socket may hold only some 100 characters. A byte is a hint and never the news
itself: consumers look again on a slow timer as well, so a lost one costs time and nothing else.
"""

import asyncio
import contextlib
import errno
import os
import time
import uuid
from pathlib import Path

# A change of a folder that is so old, in nanoseconds, was the last one of its tick.
_SETTLED_NS = 50_000_000


class Bell:
    """The sender's side: rings at everyone who waits at `folder`. Not to be used by two threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Open pipes by name, as of the folder's change time.
        self._pipes: dict[str, int] = {}
        self._seen_ns = -1

    def ring(self) -> None:
        """One byte to each pipe; removes those that dead processes left behind."""
        self._look()
        for name, fd in list(self._pipes.items()):
            try:
                os.write(fd, b"\0")
            except BlockingIOError:
                # A full pipe has enough bytes to wake its owner.
                continue
            except BrokenPipeError:
                self._forget(name)
                (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the pipes, and remove those of dead processes, which nobody may ring any more; idempotent.

        A later ring opens them again.
        """
        self._forget_all()
        try:
            self._look()
        finally:
            self._forget_all()

    def _forget_all(self) -> None:
        for name in list(self._pipes):
            self._forget(name)
        self._seen_ns = -1

    def _look(self) -> None:
        """Open what is new in the folder and close what is gone, if the folder has changed."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return
        if changed_ns == self._seen_ns:
            return
        # Clocks of file systems tick slowly: a second change within the same tick would not show.
        is_settled = time.time_ns() - changed_ns > _SETTLED_NS
        names = {name for name in os.listdir(self._folder) if not name.startswith(".")}
        for name in self._pipes.keys() - names:
            self._forget(name)
        for name in names - self._pipes.keys():
            self._open(name)
        self._seen_ns = changed_ns if is_settled else -1

    def _open(self, name: str) -> None:
        path = self._folder / name
        try:
            self._pipes[name] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        except OSError as error:
            # ENXIO: nobody has it open for reading, so its owner is dead.
            if error.errno != errno.ENXIO:
                raise
            path.unlink(missing_ok=True)

    def _forget(self, name: str) -> None:
        os.close(self._pipes.pop(name))


class Waiter:
    """The consumer's side on one event loop: owns one pipe, shared by all tasks of the loop that wait."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex
        # Bells see it once it is open: before, it looks like one that a dead process left behind.
        hidden = folder / f".{name}"
        os.mkfifo(hidden, 0o600)
        # Read and write: so the pipe never reports an end of file when a sender closes it.
        self._fd = os.open(hidden, os.O_RDWR | os.O_NONBLOCK)
        self._path = hidden.rename(folder / name)
        self._waiting: set[asyncio.Future[None]] = set()
        # Counts the rings taken from the pipe.
        self.num_rings = 0

    async def wait(self, *, seen: int, timeout_s: float) -> None:
        """Return at a ring or after `timeout_s`.

        `seen` is `num_rings` as it was before the caller last looked: a ring that another task took from the pipe
        since then returns at once. So does a wait that begins when the waiter is closed.
        """
        if self.num_rings != seen or self._fd < 0:
            return
        loop = asyncio.get_running_loop()
        rung: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.add_reader(self._fd, self._on_ring)
        self._waiting.add(rung)
        timer = loop.call_later(timeout_s, _resolve, rung)
        try:
            await rung
        finally:
            timer.cancel()
            self._waiting.discard(rung)
            if not self._waiting and self._fd >= 0:
                loop.remove_reader(self._fd)

    def _on_ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 65536)
        self.num_rings += 1
        for rung in self._waiting:
            _resolve(rung)

    def close(self) -> None:
        """Remove the pipe and wake whoever waits; idempotent. Called on the loop, or when the loop has ended."""
        if self._fd < 0:
            return
        self._path.unlink(missing_ok=True)
        for rung in self._waiting:
            loop = rung.get_loop()
            if not loop.is_closed():
                loop.remove_reader(self._fd)
                _resolve(rung)
        os.close(self._fd)
        self._fd = -1


def _resolve(rung: asyncio.Future[None]) -> None:
    if not rung.done():
        rung.set_result(None)
