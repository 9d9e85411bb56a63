"""Where uploads lie that can't be trained: each in a folder of its own, with what came with it and the reports on it.

    training-data/KEY -> quarantine/<run>/NAME.jsonl, .config.toml, .eval.jsonl, report.json, report.md
                      -> training-data/KEY again

Named after the run and not after the key: keys are nested, come again, and may be as long as a name can be. Each step
may be cut short by a kill and is done again from its beginning.
"""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from turnmill import failpoints
from turnmill.backends.embedded.bucket import (
    BESIDE_SUFFIXES,
    HELD_OUT_SUFFIX,
    TRAINING_DATA,
    beside,
    version_of,
)
from turnmill.backends.embedded.files import disk, replacing, sync, write_atomically
from turnmill.errors import InvalidInput
from turnmill.records import Upload

FOLDER = "quarantine"
# Another file system (the uploads may be mounted), or one that knows no second names.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


class Quarantine:
    """`bucket` is the folder of the bucket."""

    def __init__(self, bucket: Path) -> None:
        self._uploads = bucket / TRAINING_DATA
        self._bucket = bucket
        self._folder = bucket / FOLDER

    def place(self, name: str) -> str:
        """Below the bucket, where the upload of this name lies."""
        return f"{FOLDER}/{name}"

    def folder_of(self, place: str) -> Path:
        return self._bucket / place

    def hold(
        self, name: str, upload: Upload, copy: Path, reports: Mapping[str, bytes], *, held_out: Path | None = None
    ) -> str:
        """Take the upload out of the way, with the reports by their names; its place below the bucket.

        `copy` has the content that was refused, `held_out` that of its held-out tasks. The upload itself is moved if it
        still is that version; where it was changed or is gone by now, what is there stays and the copies are held.
        Doing it again changes nothing.
        """
        folder = self._folder / name
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for report, content in reports.items():
                write_atomically(folder / report, content)
            failpoints.hit("quarantine-reported")
            target = folder / PurePosixPath(upload.key).name
            self._hold_file(self._uploads / upload.key, target, upload.version, copy)
            tasks = beside(target, HELD_OUT_SUFFIX)
            if held_out is not None and tasks is not None and not tasks.exists():
                _copy(held_out, tasks)
            sync(folder)
        failpoints.hit("quarantine-moved")
        return self.place(name)

    def _hold_file(self, source: Path, target: Path, version: str, copy: Path) -> None:
        if target.exists():
            return
        is_held = False
        if _version_at(source) == version:
            for old, new in _pairs_beside(source, target):
                if _move(old, new):
                    failpoints.hit("quarantine-sidecar-moved")
            is_held = _move(source, target)
        if is_held and _version_at(target) != version:
            # Replaced in this very moment: the new content is an upload of its own, unless it was replaced once more.
            _link(target, source)
            target.unlink()
            is_held = False
        if not is_held:
            _copy(copy, target)

    def put_back(self, place: str, key: str) -> None:
        """Upload what is held, changed or not, under its key again: a new version of it, so that it is taken anew.

        Raises `InvalidInput` where the key is not free any more, or nothing is held; then nothing is changed.
        """
        source, target = self.folder_of(place) / PurePosixPath(key).name, self._uploads / key
        with disk(source):
            if not source.is_file():
                raise InvalidInput(f"{source} is not there any more: upload the file anew and purge the dead letter")
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new time makes a new version of content that was not touched.
            if not (target.exists() and target.samefile(source)):
                os.utime(source)
            # What comes with it first: the data may be taken as soon as it is there.
            pairs = [(old, new) for old, new in [*_pairs_beside(source, target), (source, target)] if old.is_file()]
            for index, (old, new) in enumerate(pairs):
                if not _link(old, new):
                    # Parameters that are held would be laid over a file that they were not meant for.
                    for _, linked in pairs[:index]:
                        linked.unlink()
                    raise InvalidInput(
                        f"{new} is there already: remove it, or upload what is held of {key} under another name"
                    )
            for old, _ in pairs:
                old.unlink()
        self.discard(place)

    def discard(self, place: str) -> None:
        """Remove what is held there; idempotent."""
        folder = self.folder_of(place)
        with disk(folder):
            if folder.is_dir():
                shutil.rmtree(folder)


def _pairs_beside(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Where what comes with an upload lies, and where it is to lie."""
    pairs = ((beside(source, suffix), beside(target, suffix)) for suffix in BESIDE_SUFFIXES)
    return [(old, new) for old, new in pairs if old is not None and new is not None]


def _version_at(path: Path) -> str | None:
    """None where nothing is."""
    try:
        return version_of(path.lstat())
    except FileNotFoundError:
        return None


def _move(source: Path, target: Path) -> bool:
    """Whether it is there now and no longer here, the same file."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.EXDEV:
            before = _version_at(source)
            _copy(source, target)
            if _version_at(source) == before:
                source.unlink()
        elif isinstance(error, PermissionError):
            # A folder that only its owner may change: it lies there for good, and is known to be taken.
            _copy(source, target)
        else:
            raise
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file, replacing(target) as copy:
        shutil.copyfileobj(file, copy)


def _link(source: Path, target: Path) -> bool:
    """Give a file another name, where nobody else has that; done again it changes nothing. Whether it has it now."""
    try:
        os.link(source, target)
    except FileExistsError:
        return target.samefile(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            return False
        _copy(source, target)
    return True
