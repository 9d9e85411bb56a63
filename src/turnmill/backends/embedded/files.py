"""Files that appear whole: write aside, flush to disk, rename; and their errors in the words of the ports."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from turnmill.errors import BackendUnavailable, NotFound


@contextlib.contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turns an `OSError` about `path` into `NotFound` (no such file) or `BackendUnavailable`."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BackendUnavailable(f"{path} can't be written: the disk is full; free some space") from error
        raise BackendUnavailable(f"{path} can't be used: {error}") from error


def aside_in(folder: Path) -> Path:
    """A name that nobody else uses for something that is not whole yet; it says which process makes it."""
    return folder / f".{os.getpid()}-{uuid.uuid4().hex}.tmp"


def remove_abandoned(folder: Path) -> None:
    """Remove what processes left aside in `folder` that died before it was whole."""
    for path in list(folder.glob(".*-*.tmp")):
        pid = path.name[1:].partition("-")[0]
        if not pid.isdecimal() or process_lives(int(pid)):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def process_lives(pid: int) -> bool:
    """A process of this pid is there, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to somebody else
    return True


def write_atomically(path: Path, *parts: bytes) -> None:
    """Replace the content of `path`: a reader, also after a crash, sees the old or the new one."""
    with replacing(path) as file:
        for part in parts:
            file.write(part)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end, whole and on disk; nothing of it stays after an error.

    `mode`: who may read and write it, before the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_in(path.parent)
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
