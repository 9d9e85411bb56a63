"""Published models as folders: copied aside with their documents, described by `manifest.json`, renamed into place."""

import asyncio
import hashlib
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from turnmill import failpoints
from turnmill.backends.embedded.files import aside_in, disk, remove_abandoned, sync, write_atomically
from turnmill.errors import Cancelled, RecordCorrupt, VersionConflict
from turnmill.ports import StoredModel
from turnmill.records import ModelFile, PublishedModel, Version, decode, encode

MANIFEST = "manifest.json"


class FolderModelStore:
    """Implements `ports.ModelStore`: `folder/<run>/<incarnation>.<n>/`, loadable as it lies there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def publish(self, model: PublishedModel, source: Path, documents: Mapping[str, bytes]) -> StoredModel:
        """See `ports.ModelStore.publish`."""
        is_given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._publish, model, source, documents, is_given_up)
        except asyncio.CancelledError:
            # Of a run that was cancelled no thread publishes anything later.
            is_given_up.set()
            raise

    async def find(self, run_id: str, version: Version) -> StoredModel | None:
        """See `ports.ModelStore.find`."""
        return await asyncio.to_thread(self._read, self._folder / run_id / str(version))

    def _publish(
        self, model: PublishedModel, source: Path, documents: Mapping[str, bytes], is_given_up: threading.Event
    ) -> StoredModel:
        target = self._folder / model.name
        with disk(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(target.parent)
            if not target.exists():
                _copy(model, source, documents, target, is_given_up)
        stored = self._read(target)
        if stored is None or stored.model.digest != model.digest:
            found = stored.model.digest if stored else "nothing"
            raise VersionConflict(f"model {model.name} was published before with weights {found}, not {model.digest}")
        return stored

    def _read(self, target: Path) -> StoredModel | None:
        path = target / MANIFEST
        if not path.exists():
            return None
        with disk(path):
            content = path.read_bytes()
        try:
            return StoredModel(model=decode(content, PublishedModel), location=str(target))
        except msgspec.DecodeError as error:
            raise RecordCorrupt(f"{path} does not describe a model: {error}") from error


def _copy(
    model: PublishedModel,
    source: Path,
    documents: Mapping[str, bytes],
    target: Path,
    is_given_up: threading.Event,
) -> None:
    aside = aside_in(target.parent)

    def copy_file(old: str, new: str) -> None:
        _check_wanted(is_given_up)
        # Here, and not around all: `copytree` makes one error of many, which no longer says that the disk is full.
        with disk(Path(new)):
            shutil.copyfile(old, new)

    try:
        shutil.copytree(source, aside, copy_function=copy_file)
        for name, content in documents.items():
            (aside / name).write_bytes(content)
        paths = sorted(path for path in aside.rglob("*") if path.is_file())
        files = {path.relative_to(aside).as_posix(): _describe(path) for path in paths}
        for path in aside.rglob("*"):
            sync(path)
        write_atomically(aside / MANIFEST, encode(replace(model, files=files)))
        _check_wanted(is_given_up)
        failpoints.hit("model-copied")
        try:
            os.rename(aside, target)
        except OSError:
            # Another process published it first; the caller compares the digests.
            if not target.exists():
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_wanted(is_given_up: threading.Event) -> None:
    if is_given_up.is_set():
        raise Cancelled("nobody waits for the model any more")


def _describe(path: Path) -> ModelFile:
    with path.open("rb") as file:
        return ModelFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), num_bytes=path.stat().st_size)
