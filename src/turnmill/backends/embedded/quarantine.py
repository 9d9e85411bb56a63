"""Where uploads lie that can't be trained: each in a folder of its own, with its sidecar and the reports on it.

    training-data/KEY -> quarantine/<run>/NAME, NAME.config.toml, report.json, report.md -> training-data/KEY again

Named after the run and not after the key: keys are nested, come again, and may be as long as a name can be. Each step
may be cut short by a kill and is done again from its beginning.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from turnmill import failpoints
from turnmill.backends.embedded.bucket import SIDECAR_SUFFIX, SUFFIX, TRAINING_DATA, version_of
from turnmill.backends.embedded.files import disk, replacing, sync, write_atomically
from turnmill.errors import InvalidInput
from turnmill.records import Upload

FOLDER = "quarantine"


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

    def hold(self, name: str, upload: Upload, copy: Path, reports: Mapping[str, bytes]) -> str:
        """Take the upload out of the way, with the reports by their names; its place below the bucket.

        `copy` has the content that was refused. The upload itself is moved if it still is that version; where it was
        changed or is gone by now, what is there stays and the copy is held. Doing it again changes nothing.
        """
        folder = self._folder / name
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for report, content in reports.items():
                write_atomically(folder / report, content)
            failpoints.hit("quarantine-reported")
            self._hold_file(self._uploads / upload.key, folder / PurePosixPath(upload.key).name, upload.version, copy)
            sync(folder)
        failpoints.hit("quarantine-moved")
        return self.place(name)

    def _hold_file(self, source: Path, target: Path, version: str, copy: Path) -> None:
        if target.exists():
            return
        is_held = False
        if _version_at(source) == version:
            if _move(_sidecar(source), _sidecar(target)):
                failpoints.hit("quarantine-sidecar-moved")
            is_held = _move(source, target)
        if is_held and _version_at(target) != version:
            # Replaced in this very moment: the new content is an upload of its own, unless it was replaced once more.
            with contextlib.suppress(FileExistsError):
                os.link(target, source)
            target.unlink()
            is_held = False
        if not is_held:
            _copy(copy, target)

    def put_back(self, place: str, key: str) -> None:
        """Upload what is held, changed or not, under its key again: a new version of it, so that it is taken anew.

        Raises `InvalidInput` where the key is not free any more, or nothing is held.
        """
        source, target = self.folder_of(place) / PurePosixPath(key).name, self._uploads / key
        with disk(source):
            if not source.is_file():
                raise InvalidInput(f"{source} is not there any more: upload the file anew and purge the dead letter")
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new time makes a new version of content that was not touched.
            if not (target.exists() and target.samefile(source)):
                os.utime(source)
            # Parameters first: the data may be taken as soon as it is there.
            for old, new in ((_sidecar(source), _sidecar(target)), (source, target)):
                if old.is_file():
                    _link(old, new, key)
            for old in (_sidecar(source), source):
                old.unlink(missing_ok=True)
        self.discard(place)

    def discard(self, place: str) -> None:
        """Remove what is held there; idempotent."""
        folder = self.folder_of(place)
        with disk(folder):
            if folder.is_dir():
                shutil.rmtree(folder)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(SUFFIX) + SIDECAR_SUFFIX)


def _version_at(path: Path) -> str | None:
    """None where nothing is."""
    try:
        return version_of(path.lstat())
    except FileNotFoundError:
        return None


def _move(source: Path, target: Path) -> bool:
    """Whether it is there now and no longer here."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    except PermissionError:
        # A folder that only its owner may change: it lies there for good, and is known to be taken.
        _copy(source, target)
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as file, replacing(target) as copy:
        shutil.copyfileobj(file, copy)


def _link(source: Path, target: Path, key: str) -> None:
    """Give a file another name that nobody has; done again it changes nothing."""
    try:
        os.link(source, target)
    except FileExistsError:
        if not target.samefile(source):
            raise InvalidInput(
                f"{target} is there already: remove it, or upload what is held of {key} under another name"
            ) from None
