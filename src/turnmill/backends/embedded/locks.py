"""One process a name: a role process holds a lock from its first instruction to its end, however it ends.

A launcher that dies leaves its children to end by themselves, which takes as long as what they are doing. The next
launcher of the run must not start a second one beside them. The lock belongs to the file description that the child
inherits (flock(2)), so the kernel gives it up when the last process that holds it is gone.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnmill.backends.embedded.files import disk
from turnmill.errors import BackendUnavailable, Conflict

_SUFFIX = ".lock"
_INTERVAL_S = 0.05


def lock_path(root: Path, run_id: str, name: str) -> Path:
    """The lock of a role process."""
    return root.absolute() / "runs" / run_id / "locks" / f"{name}{_SUFFIX}"


async def take_lock(path: Path, patience_s: float) -> int:
    """An open descriptor that holds the lock, to be inherited and closed; raises `BackendUnavailable` after a while."""
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with disk(path):
            await _wait(fd, path.name.removesuffix(_SUFFIX), patience_s)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Hold the lock for the duration; raises `Conflict` naming `what` where another process holds it."""
    with _held(path, fcntl.LOCK_EX, what) as fd:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield


@contextmanager
def one_of_many(path: Path, what: str) -> Iterator[None]:
    """Hold the lock together with others; raises `Conflict` naming `what` where a process holds it for itself alone."""
    with _held(path, fcntl.LOCK_SH, what) as fd:
        # Whoever had it for itself is not to be named any more.
        os.ftruncate(fd, 0)
        yield


@contextmanager
def _held(path: Path, kind: int, what: str) -> Iterator[int]:
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
            raise Conflict(f"{what} (pid {pid})" if pid else what) from None
        yield fd
    finally:
        os.close(fd)


async def wait_until_gone(root: Path, run_id: str, patience_s: float) -> None:
    """Return when no role process of the run is left; raises `BackendUnavailable` naming the one that stays."""
    for fd in await take_all(root, run_id, patience_s):
        os.close(fd)


async def _wait(fd: int, name: str, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise BackendUnavailable(
                    f"the process {name} that an earlier control process started has not ended yet; try again later"
                ) from None
        await asyncio.sleep(_INTERVAL_S)


def holder_of(path: Path) -> int | None:
    """The pid of the process that holds a lock of `only_one`; None where nobody does."""
    try:
        # Who may not write there may ask all the same.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 20, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    else:
        return None
    finally:
        os.close(fd)


async def take_all(root: Path, run_id: str, patience_s: float) -> list[int]:
    """Hold the locks of all roles that the run ever had: none of them is started again until they are closed.

    Raises `BackendUnavailable` naming the process that does not end.
    """
    end = time.monotonic() + patience_s
    held: list[int] = []
    try:
        for path in sorted(lock_path(root, run_id, "").parent.glob(f"*{_SUFFIX}")):
            held.append(await take_lock(path, end - time.monotonic()))
    except BaseException:
        for fd in held:
            os.close(fd)
        raise
    return held
