"""Published models in S3: files first, then the manifest, which is created once and never changed.

    models/<run>/<version>/<content>/...        the files (see `folders`)
    models/<run>/<version>/manifest.json        the model; there while, and only while, it is published

An upload that was killed is done again, without the files that are there; a version without a manifest is no model.
What lost against another publication is removed by the loser, or by the winner where the loser died before.
"""

import asyncio
import re
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from turnmill import failpoints
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.folders import (
    MANIFEST,
    Source,
    content_of,
    download,
    reading,
    remove_others,
    sources_files,
    sources_in,
    upload,
)
from turnmill.backends.aws.objects import Objects
from turnmill.errors import BackendUnavailable, Cancelled, NotFound, RecordCorrupt, VersionConflict
from turnmill.ports import StoredModel
from turnmill.records import PublishedModel, Version, decode, encode

_VERSION = re.compile(r"\d+\.\d+")


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
        model = stored.model
        await self._clients.run(partial(download, self._objects, _place(model), model.files, folder))

    def fetch_latest(self, run_id: str, folder: Path) -> Path | None:
        """Download what was published last of a run to `folder`/<version>, which is whole as soon as it is there.

        Blocks. None where nothing was published; raises `RecordCorrupt` for files that are not what was published.
        """
        names = [item.key.removesuffix(f"/{MANIFEST}") for item in self._objects.listed(f"{run_id}/")]
        versions = [match[0] for name in names if (match := _VERSION.fullmatch(name.removeprefix(f"{run_id}/")))]
        latest = max(map(Version.parse, versions), key=lambda version: (version.incarnation, version.n), default=None)
        stored = None if latest is None else self._find(f"{run_id}/{latest}")
        if stored is None:
            return None
        target = folder / str(latest)
        if target.is_dir():
            return target
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder) as aside:
                whole = Path(aside) / "model"
                download(self._objects, _place(stored.model), stored.model.files, whole)
                whole.rename(target)
        except OSError as error:
            # Somebody else was faster, with the same files.
            if target.is_dir():
                return target
            raise BackendUnavailable(f"{target} can't be written: {error}") from error
        return target

    def document(self, location: str, name: str) -> bytes | None:
        """A file of a published model; None where there is none, or no more. Blocks."""
        try:
            return self._objects.get(location.removeprefix(self._objects.uri()) + name)
        except NotFound:
            return None

    def _publish(
        self, model: PublishedModel, source: Path, documents: Mapping[str, bytes], is_given_up: threading.Event
    ) -> StoredModel:
        stored = self._find(model.name)
        if stored is None:
            with reading(source):
                self._upload(model, sources_in(source, documents), is_given_up)
            stored = self._find(model.name)
        if stored is None or stored.model.digest != model.digest:
            found = stored.model.digest if stored else "nothing"
            raise VersionConflict(f"model {model.name} was published before with weights {found}, not {model.digest}")
        return stored

    def _upload(self, model: PublishedModel, sources: Mapping[str, Source], is_given_up: threading.Event) -> None:
        model = replace(model, files=sources_files(sources))
        upload(self._objects, _place(model), sources, is_given_up.is_set)
        if is_given_up.is_set():
            raise Cancelled("nobody waits for the model any more")
        failpoints.hit("model-copied")
        # False: another one stands, or ours does and the answer was lost; in both cases what stands is read next.
        self._objects.create(f"{model.name}/{MANIFEST}", encode(model))
        stored = self._find(model.name)
        if stored is not None:
            remove_others(self._objects, model.name, _place(stored.model))

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


def _place(model: PublishedModel) -> str:
    """Where the files of a model are: it follows from what they are."""
    return f"{model.name}/{content_of(model.files)}/"
