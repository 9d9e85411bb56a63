"""Published models in S3: files first, then the manifest, which is created once and never changed.

    models/<run>/<version>/<content>/...        the files; `content` is a digest over all of them
    models/<run>/<version>/manifest.json        the model; there while, and only while, it is published

Two that publish the same content write the same objects; one that publishes another content writes beside it. So what
the manifest names is whole, whoever wins and whoever is killed: an upload that was killed is done again, and a version
without a manifest is no model. What lost is removed, by the loser, or by the winner where the loser died.
"""

import asyncio
import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from turnmill import failpoints
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.objects import Objects
from turnmill.errors import BackendUnavailable, Cancelled, NotFound, RecordCorrupt, VersionConflict
from turnmill.ports import StoredModel
from turnmill.records import ModelFile, PublishedModel, Version, decode, digest_of, encode

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One file to upload: a path or, for a document, its content."""

    content: Path | bytes
    file: ModelFile


class S3ModelStore:
    """Implements `ports.ModelStore` below `prefix` of a bucket, e.g. `models/`."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str, *, kms_key: str | None = None) -> None:
        """Encrypted with `kms_key`, else as the bucket says."""
        self._clients = clients
        self._objects = Objects(clients, bucket, prefix, kms_key=kms_key)

    async def publish(self, model: PublishedModel, source: Path, documents: Mapping[str, bytes]) -> StoredModel:
        """See `ports.ModelStore.publish`."""
        is_given_up = threading.Event()
        try:
            return await self._clients.run(partial(self._publish, model, source, documents, is_given_up))
        except asyncio.CancelledError:
            # Of a run that was cancelled no thread publishes anything later.
            is_given_up.set()
            raise

    async def find(self, run_id: str, version: Version) -> StoredModel | None:
        """See `ports.ModelStore.find`."""
        return await self._clients.run(partial(self._find, f"{run_id}/{version}"))

    async def fetch(self, stored: StoredModel, folder: Path) -> None:
        """Download the files of a published model into `folder`, which is made; raises `RecordCorrupt` for others."""
        await self._clients.run(partial(self._fetch, stored.model, folder))

    def _publish(
        self, model: PublishedModel, source: Path, documents: Mapping[str, bytes], is_given_up: threading.Event
    ) -> StoredModel:
        stored = self._find(model.name)
        if stored is None:
            if not source.is_dir():
                raise NotFound(f"{source} is no folder: there is no model to publish")
            try:
                self._upload(model, _sources(source, documents), is_given_up)
            except OSError as error:
                raise BackendUnavailable(f"{source} can't be read: {error}") from error
            stored = self._find(model.name)
        if stored is None or stored.model.digest != model.digest:
            found = stored.model.digest if stored else "nothing"
            raise VersionConflict(f"model {model.name} was published before with weights {found}, not {model.digest}")
        return stored

    def _upload(self, model: PublishedModel, sources: Mapping[str, _Source], is_given_up: threading.Event) -> None:
        model = replace(model, files={name: source.file for name, source in sources.items()})
        place = _place(model)
        for name, source in sources.items():
            _check_wanted(is_given_up)
            if isinstance(source.content, bytes):
                self._objects.put(place + name, source.content)
            else:
                self._objects.put_file(place + name, source.content, source.file.sha256)
        _check_wanted(is_given_up)
        failpoints.hit("model-copied")
        # False: another one stands, or ours does and the answer was lost; in both cases what stands is read next.
        self._objects.create(f"{model.name}/{MANIFEST}", encode(model))
        self._remove_losers(model.name)

    def _remove_losers(self, name: str) -> None:
        """Remove what lies beside the model that stands; nothing before there is one."""
        stored = self._find(name)
        if stored is None:
            return
        kept = _place(stored.model)
        keys = [item.key for item in self._objects.listed(f"{name}/")]
        self._objects.delete(*[key for key in keys if not key.startswith(kept) and key != f"{name}/{MANIFEST}"])

    def _find(self, name: str) -> StoredModel | None:
        key = f"{name}/{MANIFEST}"
        try:
            content = self._objects.get(key)
        except NotFound:
            return None
        try:
            model = decode(content, PublishedModel)
        except msgspec.DecodeError as error:
            raise RecordCorrupt(f"{self._objects.uri(key)} does not describe a model: {error}") from error
        return StoredModel(model=model, location=self._objects.uri(_place(model)))

    def _fetch(self, model: PublishedModel, folder: Path) -> None:
        for name, file in model.files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise RecordCorrupt(f"the manifest of model {model.name} names a file outside of it: {name!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._objects.get_file(_place(model) + name, path, file.sha256)


def _place(model: PublishedModel) -> str:
    """Where the files of a model are: it follows from what they are."""
    content = digest_of(*(f"{name}\n{file.sha256}".encode() for name, file in sorted(model.files.items())))
    return f"{model.name}/{content}/"


def _sources(folder: Path, documents: Mapping[str, bytes]) -> dict[str, _Source]:
    """By path within the model; a document takes the place of a file of its name."""
    found = {path.relative_to(folder).as_posix(): _of_file(path) for path in folder.rglob("*") if path.is_file()}
    found |= {name: _of_document(content) for name, content in documents.items()}
    return dict(sorted(found.items()))


def _of_file(path: Path) -> _Source:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return _Source(content=path, file=ModelFile(sha256=sha256, num_bytes=path.stat().st_size))


def _of_document(content: bytes) -> _Source:
    file = ModelFile(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))
    return _Source(content=content, file=file)


def _check_wanted(is_given_up: threading.Event) -> None:
    if is_given_up.is_set():
        raise Cancelled("nobody waits for the model any more")
