"""A bucket that is a folder: people and programs copy files into it, and each finished one is told once.

    file system events -> look at the folder -> wait until nobody writes a file any more -> Upload

Events only say that it is time to look: what lies in the folder is the truth, so that lost, doubled and reordered
events change nothing, and files that came while nobody looked are found. A file is finished when it has not changed for
`settle_s` and no process holds it open for writing (Linux tells; elsewhere the first must do).
"""

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import time
import unicodedata
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from watchfiles import awatch

from turnmill.backends.embedded.files import disk, replacing
from turnmill.errors import BackendUnavailable, Conflict, InvalidInput, printable
from turnmill.records import Upload

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl"
SIDECAR_SUFFIX = ".config.toml"
# Held-out tasks of the upload beside them.
HELD_OUT_SUFFIX = ".eval.jsonl"
# What comes with an upload, placed before it.
BESIDE_SUFFIXES = (SIDECAR_SUFFIX, HELD_OUT_SUFFIX)
# Where tasks lie within the bucket.
TRAINING_DATA = "training-data"
# How long nothing may have changed.
SETTLE_S = 0.5
# How often the folder is looked at without an event: events may be lost when thousands come at once.
LOOK_S = 10.0
# Without events, because the system gives no more watches.
POLL_S = 1.0
# How long held-out tasks may lie there without their data before somebody is told.
ALONE_S = 60.0
# Endings of what editors, browsers and copying programs leave while they work.
_TEMPORARY = ("~", ".tmp", ".temp", ".swp", ".swx", ".swo", ".bak", ".part", ".partial", ".crdownload", ".filepart")
_VIM_PROBE = "4913"
# Of an upload's key (an object store's limit), and of one segment of it (a file system's).
_MOST_KEY_BYTES, _MOST_NAME_BYTES = 1024, 255


@dataclass(kw_only=True)
class _Seen:
    """A file as it was when it was looked at last."""

    version: str
    # By the monotonic clock: since when it has this version.
    since: float
    is_told: bool = False


class FolderBucket:
    """`folder` is the bucket; only what lies below its `training-data/` is looked at."""

    def __init__(self, folder: Path, *, settle_s: float = SETTLE_S, alone_s: float = ALONE_S) -> None:
        self.name = folder.name
        self.folder = folder.absolute() / TRAINING_DATA
        self._settle_s = settle_s
        self._alone_s = alone_s
        self._seen: dict[str, _Seen] = {}
        self._unreadable: dict[str, OSError] = {}

    # ------------------------------------------------------------ looking

    async def watch(self, stop: asyncio.Event) -> AsyncIterator[list[Upload]]:
        """What is finished, each version of a file once, until `stop`; what lies there already comes first."""
        with disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        changed = asyncio.Event()
        waking = asyncio.create_task(self._wake(changed, stop), name="bucket events")
        stopped = asyncio.create_task(stop.wait(), name="bucket stop")
        try:
            while not stop.is_set():
                changed.clear()
                finished, is_waiting = await asyncio.to_thread(self.look)
                if finished:
                    yield finished
                timeout = self._settle_s / 2 if is_waiting else POLL_S if waking.done() else LOOK_S
                event = asyncio.create_task(changed.wait(), name="bucket changed")
                await asyncio.wait({event, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                event.cancel()
        finally:
            for task in (waking, stopped):
                task.cancel()
            await asyncio.gather(waking, stopped, return_exceptions=True)

    async def _wake(self, changed: asyncio.Event, stop: asyncio.Event) -> None:
        """Set `changed` at each event; returns where the system gives no events (any more)."""
        try:
            async for _ in awatch(self.folder, watch_filter=None, debounce=100, step=20, stop_event=stop):
                changed.set()
        except (OSError, RuntimeError) as error:
            # Out of watches, a file system without them, or the folder is gone: then looking must do.
            logger.warning("no events from %s (%s): it is looked at every %.0f s", self.folder, error, POLL_S)

    def look(self) -> tuple[list[Upload], bool]:
        """(finished files that were not told yet, whether others are still being written); blocks for a moment."""
        finished: list[Upload] = []
        is_waiting = False
        seen: dict[str, _Seen] = {}
        unreadable: dict[str, OSError] = {}
        for key, path, status in _files(self.folder, unreadable):
            version = version_of(status)
            known = self._seen.get(key)
            if known is None or known.version != version:
                known = _Seen(version=version, since=time.monotonic())
            seen[key] = known
            if known.is_told:
                continue
            ignored, wait_s = _why_ignored(key, status), self._settle_s
            if key.endswith(BESIDE_SUFFIXES) and (ignored := _why_misnamed(key)) is None:
                ignored, wait_s = _why_alone(path), self._alone_s
                if ignored is None:
                    continue
            if not _is_finished(path, status, known, wait_s):
                is_waiting = is_waiting or wait_s == self._settle_s
                continue
            known.is_told = True
            finished.append(
                Upload(
                    bucket=self.name,
                    # A name that is no text, or more than a line of it, is told in a form that can be shown.
                    key=printable(os.fsencode(key).decode("utf-8", "backslashreplace"), limit=_MOST_KEY_BYTES)
                    if ignored
                    else key,
                    version=version,
                    num_bytes=status.st_size,
                    ignored=ignored,
                )
            )
        for name in unreadable.keys() - self._unreadable.keys():
            logger.warning("%s can't be looked at: %s; change its permissions", name, unreadable[name].strerror)
        self._seen, self._unreadable = seen, unreadable
        return finished, is_waiting

    def forget(self, upload: Upload) -> None:
        """Tell it again: what it was meant for could not be done."""
        self._seen.pop(upload.key, None)

    # ------------------------------------------------------------ reading and writing

    def sidecar_of(self, upload: Upload) -> Path | None:
        """The file with parameters for this upload alone, if there is one."""
        return self._beside(upload, SIDECAR_SUFFIX)

    def _beside(self, upload: Upload, suffix: str) -> Path | None:
        path = beside(self.folder / upload.key, suffix)
        # Whatever it is: a folder, or a link to nothing, is refused by whoever reads it, and not passed over.
        return path if path is not None and os.path.lexists(path) else None

    def paths_of(self, key: str, cause: str) -> list[Path]:
        """What lies beside an upload for it alone, then the file, as long as that is the one that was the cause."""
        path = self.folder / key
        try:
            version = version_of(path.lstat())
        except OSError:
            return []
        if f"{self.name}/{key}@{version}" != cause:
            return []
        found = (beside(path, suffix) for suffix in BESIDE_SUFFIXES)
        return [*(one for one in found if one is not None and os.path.isfile(one)), path]

    def fetch(self, upload: Upload, target: Path) -> None:
        """Copy the uploaded content; raises `NotFound` or `Conflict` where it is gone or is another one by now."""
        source = self.folder / upload.key
        with disk(source), source.open("rb") as file, replacing(target) as copy:
            before = version_of(os.fstat(file.fileno()))
            shutil.copyfileobj(file, copy)
            if {before, version_of(os.fstat(file.fileno()))} != {upload.version}:
                raise Conflict(f"{upload.key} was changed while it was taken; its new content is an upload of its own")

    def fetch_held_out(self, upload: Upload, target: Path) -> bool:
        """Copy the upload's held-out tasks; False where there are none.

        Raises `BackendUnavailable` while they are being written: they were to be there before their data.
        """
        source = self._beside(upload, HELD_OUT_SUFFIX)
        if source is None:
            return False
        with disk(source), source.open("rb") as file, replacing(target) as copy:
            before = version_of(os.fstat(file.fileno()))
            shutil.copyfileobj(file, copy)
            if before != version_of(os.fstat(file.fileno())) or _is_being_written(source):
                raise BackendUnavailable(f"{source} is being written: it is taken once it is finished")
        return True

    def put(self, source: Path, key: str, *, sidecar: Path | None = None, held_out: Path | None = None) -> Path:
        """Upload a file under `key`, whole or not at all, last of all: its sidecar and its held-out tasks come first.

        Raises `InvalidInput` or `NotFound`.
        """
        if source.is_dir():
            raise InvalidInput(f"{source} is a folder; upload one {SUFFIX} file at a time")
        target = self.folder / key
        _check_key(key, (SUFFIX,))
        if key.endswith(HELD_OUT_SUFFIX):
            data = key.removesuffix(HELD_OUT_SUFFIX) + SUFFIX
            raise InvalidInput(
                f"{key!r} is the name of the held-out tasks of {data}: upload them with it (--eval-data)"
            )
        beside = [(path, suffix) for path, suffix in ((sidecar, SIDECAR_SUFFIX), (held_out, HELD_OUT_SUFFIX)) if path]
        # All are there, or nothing is placed.
        for path in (source, *(path for path, _ in beside)):
            if path.is_dir():
                raise InvalidInput(f"{path} is a folder; give a file")
            with disk(path), path.open("rb"):
                pass
        for path, suffix in beside:
            _place(path, self.folder / (key.removesuffix(SUFFIX) + suffix))
        _place(source, target)
        return target

    @contextmanager
    def receive(self, key: str) -> Iterator[BinaryIO]:
        """A file to write the content of an upload, or of a sidecar, into: it is there at the end, whole.

        Nothing of it stays after an error. Raises `InvalidInput` for a name that can't be one, `Conflict` where a
        folder has that name, `BackendUnavailable` for a full disk.
        """
        _check_key(key, (SUFFIX, SIDECAR_SUFFIX))
        target = self.folder / key
        with disk(target):
            try:
                with replacing(target) as file:
                    yield file
            except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
                raise Conflict(
                    f"{key} can't be uploaded: a folder has that name, or a file that of its folder"
                ) from error

    def holds(self, key: str) -> bool:
        """Whether a file of that name is there."""
        return os.path.isfile(self.folder / key)


def _check_key(key: str, suffixes: tuple[str, ...]) -> None:
    """Raise `InvalidInput` for what would lie elsewhere, or would not be looked at."""
    if not key.endswith(suffixes) or os.path.normpath(key) != key or key.startswith(("/", "..")) or "\0" in key:
        raise InvalidInput(f"{key!r} can't be the name of an upload: use NAME{SUFFIX} or FOLDER/NAME{SUFFIX}")
    if not _is_text(key):
        raise InvalidInput(f"{key!a} can't be the name of an upload: it is no valid UTF-8; give it another one")
    if not _is_one_line(key):
        raise InvalidInput(f"{key!a} can't be the name of an upload: it has line breaks or other control characters")
    if len(os.fsencode(key)) > _MOST_KEY_BYTES or any(
        len(os.fsencode(part)) > _MOST_NAME_BYTES for part in key.split("/")
    ):
        raise InvalidInput(f"{printable(key)!r} can't be the name of an upload: it is too long")
    if any(_is_temporary(part) for part in key.split("/")):
        raise InvalidInput(f"{key!r} looks like a temporary file and would be ignored")


def _place(source: Path, target: Path) -> None:
    with disk(target), source.open("rb") as file, replacing(target) as copy:
        shutil.copyfileobj(file, copy)


# ---------------------------------------------------------------- files


def _files(folder: Path, unreadable: dict[str, OSError]) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Everything below that is meant to be looked at, as (key, path, status of the file itself, links not followed).

    What is there and can't be looked at is added to `unreadable`, by path.
    """

    def note(error: OSError) -> None:
        # What was removed in this moment, or made a folder of, is no trouble.
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            unreadable[str(error.filename)] = error

    for parent, folders, names in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not _is_temporary(name))
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted([*names, *links]):
            if _is_temporary(name):
                continue
            path = Path(parent, name)
            try:
                status = path.lstat()
            except OSError as error:
                note(error)
            else:
                yield path.relative_to(folder).as_posix(), path, status


def _is_finished(path: Path, status: os.stat_result, seen: _Seen, wait_s: float) -> bool:
    quiet_s = time.monotonic() - seen.since
    # It lay there before: what was written long ago need not be watched first. Not with a date in the future.
    age_s = time.time() - max(status.st_mtime, status.st_ctime)
    if max(quiet_s, age_s) < wait_s:
        return False
    return not (stat.S_ISREG(status.st_mode) and _is_being_written(path))


def _is_temporary(name: str) -> bool:
    """What editors, file managers and copying programs make for themselves."""
    is_backup = name.startswith("#") and name.endswith("#")
    return name.startswith(".") or is_backup or name == _VIM_PROBE or name.lower().endswith(_TEMPORARY)


def _why_ignored(key: str, status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "it is a link, and links are not followed: copy the file itself"
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if not _is_text(key):
        return "its name is no valid UTF-8"
    if not _is_one_line(key):
        return "its name has line breaks or other control characters"
    if not key.endswith(SUFFIX):
        return f"only {SUFFIX} files are trained on; parameters for one go into NAME{SIDECAR_SUFFIX}"
    return None


def _why_misnamed(key: str) -> str | None:
    """Of a file that lies beside uploads: None where an upload could find it."""
    for suffix in BESIDE_SUFFIXES:
        data = key.removesuffix(suffix)
        if data != key and data.endswith(SUFFIX):
            return f"what comes with {data} is found as {data.removesuffix(SUFFIX)}{suffix}"
    return None


def _why_alone(path: Path) -> str | None:
    """Of held-out tasks without data, which somebody may want to be trained on."""
    data = path.name.removesuffix(HELD_OUT_SUFFIX) + SUFFIX
    if not path.name.endswith(HELD_OUT_SUFFIX) or os.path.lexists(path.with_name(data)):
        return None
    return f"it is taken for the held-out tasks of {data}, which is not there; to train on it, rename it"


def _is_one_line(key: str) -> bool:
    return not any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for char in key)


def _is_text(key: str) -> bool:
    """Whether the bytes of the name are UTF-8."""
    return key.isascii() or os.fsencode(key).decode("utf-8", "replace") == key


def beside(path: Path, suffix: str) -> Path | None:
    """The file of this suffix that comes with an upload; None where no file can have so long a name."""
    name = path.name.removesuffix(SUFFIX) + suffix
    return None if len(os.fsencode(name)) > _MOST_NAME_BYTES else path.with_name(name)


def version_of(status: os.stat_result) -> str:
    """Another one for other content."""
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


def _is_being_written(path: Path) -> bool:
    """Whether some process holds the file open for writing, as far as the system tells.

    Linux grants a read lease on a file exactly when nobody has it open for writing; it is given back at once.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        with _opened(path) as fd:
            # Should somebody open it for writing in this very moment, the signal must be one that is ignored.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except FileNotFoundError:
        return True
    except OSError as error:
        # Anything else: somebody else's file, or a file system without leases.
        return error.errno == errno.EAGAIN
    return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
