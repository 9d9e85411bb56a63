"""Folders in S3: their files below a digest over all of them, and a manifest that says which one counts.

    <name>/<content>/...        the files
    <name>/manifest.json        what is there, with the digest of each file; written last

Files of different contents never meet, so that what a manifest names is whole, whoever else writes or is killed.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.objects import Objects
from turnmill.errors import BackendUnavailable, NotFound, RecordCorrupt
from turnmill.records import ModelFile, decode, digest_of, encode

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file to upload: a path or, for a document, its content."""

    content: Path | bytes
    file: ModelFile


@dataclass(frozen=True, kw_only=True)
class StoredFolder:
    """The manifest of a folder that is nothing but a folder."""

    # By path within it.
    files: dict[str, ModelFile]


class S3FolderStore:
    """Implements `ports.FolderStore` below `prefix` of a bucket, e.g. `runs/<run>/checkpoints/`."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str, *, kms_key: str | None = None) -> None:
        """Encrypted with `kms_key`, else as the bucket says."""
        self._clients = clients
        self._objects = Objects(clients, bucket, prefix, kms_key=kms_key)

    async def put(self, name: str, folder: Path) -> None:
        """See `ports.FolderStore.put`; a file that is there already is not sent again."""
        await self._clients.run(partial(self._put, name, folder))

    async def names(self) -> list[str]:
        """See `ports.FolderStore.names`."""
        listed = await self._clients.run(self._objects.listed)
        suffix = f"/{MANIFEST}"
        names = (item.key.removesuffix(suffix) for item in listed if item.key.endswith(suffix))
        return sorted(name for name in names if "/" not in name)

    async def read(self, name: str, file: str) -> bytes:
        """See `ports.FolderStore.read`."""
        return await self._clients.run(partial(self._read, name, file))

    async def fetch(self, name: str, folder: Path) -> None:
        """See `ports.FolderStore.fetch`."""
        await self._clients.run(partial(self._fetch, name, folder))

    async def remove(self, name: str) -> None:
        """See `ports.FolderStore.remove`."""
        await self._clients.run(partial(self._remove, name))

    def _put(self, name: str, folder: Path) -> None:
        with reading(folder):
            sources = sources_in(folder)
            place = f"{name}/{content_of(sources_files(sources))}/"
            upload(self._objects, place, sources, lambda: False)
        self._objects.put(f"{name}/{MANIFEST}", encode(StoredFolder(files=sources_files(sources))))
        remove_others(self._objects, name, place)

    def _manifest(self, name: str) -> StoredFolder:
        key = f"{name}/{MANIFEST}"
        try:
            return decode(self._objects.get(key), StoredFolder)
        except msgspec.DecodeError as error:
            raise RecordCorrupt(f"{self._objects.uri(key)} does not describe a folder: {error}") from error

    def _read(self, name: str, file: str) -> bytes:
        return self._objects.get(f"{name}/{content_of(self._manifest(name).files)}/{file}")

    def _fetch(self, name: str, folder: Path) -> None:
        files = self._manifest(name).files
        download(self._objects, f"{name}/{content_of(files)}/", files, folder)

    def _remove(self, name: str) -> None:
        # The manifest first: ended in the middle, what is left is no folder.
        self._objects.delete(f"{name}/{MANIFEST}")
        self._objects.delete(*[item.key for item in self._objects.listed(f"{name}/")])


def content_of(files: Mapping[str, ModelFile]) -> str:
    """A digest over files and their names."""
    return digest_of(*(f"{name}\n{file.sha256}".encode() for name, file in sorted(files.items())))


def sources_in(folder: Path, documents: Mapping[str, bytes] = {}) -> dict[str, Source]:
    """By path within the folder; a document takes the place of a file of its name."""
    found = {path.relative_to(folder).as_posix(): _of_file(path) for path in folder.rglob("*") if path.is_file()}
    found |= {name: _of_document(content) for name, content in documents.items()}
    return dict(sorted(found.items()))


def sources_files(sources: Mapping[str, Source]) -> dict[str, ModelFile]:
    """What the manifest says about them."""
    return {name: source.file for name, source in sources.items()}


def upload(objects: Objects, place: str, sources: Mapping[str, Source], is_given_up: Callable[[], bool]) -> None:
    """Store the files below `place` that are not there; stops between two of them once it is given up."""
    there = {item.key: item.size for item in objects.listed(place)}
    for name, source in sources.items():
        if is_given_up():
            return
        # What is there has this content: the place is named after it, and objects are whole.
        if there.get(place + name) == source.file.num_bytes:
            continue
        if isinstance(source.content, bytes):
            objects.put(place + name, source.content)
        else:
            objects.put_file(place + name, source.content, source.file.sha256)


def download(objects: Objects, place: str, files: Mapping[str, ModelFile], folder: Path) -> None:
    """Write the files into `folder`; raises `RecordCorrupt` where one is not what the manifest says."""
    for name, file in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise RecordCorrupt(f"the manifest at {objects.uri(place)} names a file outside of it: {name!r}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            objects.get_file(place + name, path, file.sha256)
        except NotFound as error:
            raise RecordCorrupt(f"{objects.uri(place + name)} is missing, which the manifest names") from error
        except OSError as error:
            raise BackendUnavailable(f"{path} can't be written: {error}") from error


def remove_others(objects: Objects, name: str, kept: str) -> None:
    """Remove what lies below `name` beside the manifest and the place `kept`."""
    keys = [item.key for item in objects.listed(f"{name}/")]
    objects.delete(*[key for key in keys if not key.startswith(kept) and key != f"{name}/{MANIFEST}"])


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What the disk says about the folder that is uploaded, in the words of the ports."""
    if not folder.is_dir():
        raise NotFound(f"{folder} is no folder")
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{folder} was removed while it was uploaded: {error}") from error
    except OSError as error:
        raise BackendUnavailable(f"{folder} can't be read: {error}") from error


def _of_file(path: Path) -> Source:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Source(content=path, file=ModelFile(sha256=sha256, num_bytes=path.stat().st_size))


def _of_document(content: bytes) -> Source:
    file = ModelFile(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))
    return Source(content=content, file=file)
