"""Blobs as files: the first line of each holds the digest of what follows, so one rename publishes both."""

import asyncio
import hashlib
import os
from pathlib import Path

from turnmill.backends.embedded.files import disk, write_atomically
from turnmill.errors import NotFound, RecordCorrupt
from turnmill.ports import BlobInfo, ListedBlob
from turnmill.ports.blob_keys import BLOB_SUFFIX, check_blob_key

_MAGIC = b"sha256:"
_HEADER_SIZE = len(_MAGIC) + 64 + 1


class FolderBlobStore:
    """Implements `ports.BlobStore` in `folder`. A file is `sha256:<hex>`, a line feed, then the content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, key: str, data: bytes) -> BlobInfo:
        """See `ports.BlobStore.put`."""
        return await asyncio.to_thread(self._put, key, data)

    async def get(self, key: str) -> bytes:
        """See `ports.BlobStore.get`."""
        return await asyncio.to_thread(self._get, key)

    async def list(self, prefix: str = "") -> list[ListedBlob]:
        """See `ports.BlobStore.list`."""
        return await asyncio.to_thread(_search, self._folder, prefix)

    async def delete(self, key: str) -> None:
        """See `ports.BlobStore.delete`."""
        path = self._path(key)
        with disk(path):
            await asyncio.to_thread(path.unlink, missing_ok=True)

    def _put(self, key: str, data: bytes) -> BlobInfo:
        path = self._path(key)
        digest = hashlib.sha256(data).hexdigest()
        with disk(path):
            write_atomically(path, _MAGIC, digest.encode(), b"\n", data)
        return BlobInfo(key=key, size=len(data), digest=digest)

    def _get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            with disk(path):
                content = path.read_bytes()
        except NotFound:
            raise NotFound(f"there is no blob {key!r} in {self._folder}") from None
        digest = _digest_in(path, content[:_HEADER_SIZE])
        data = content[_HEADER_SIZE:]
        if hashlib.sha256(data).hexdigest() != digest:
            raise RecordCorrupt(f"blob {key!r} does not match its digest {digest} ({path})")
        return data

    def _path(self, key: str) -> Path:
        *folders, name = check_blob_key(key).split("/")
        return self._folder.joinpath(*folders, name + BLOB_SUFFIX)


def _search(folder: Path, prefix: str) -> list[ListedBlob]:
    """The blobs whose key starts with `prefix`, by key."""
    # Only the folder that the prefix names in full is searched.
    start = folder.joinpath(*[part for part in prefix.split("/")[:-1] if part not in ("", ".", "..")])
    found = []
    for parent, _, names in os.walk(start):
        for name in names:
            path = Path(parent, name)
            key = path.relative_to(folder).as_posix().removesuffix(BLOB_SUFFIX)
            if name.endswith(BLOB_SUFFIX) and key.startswith(prefix):
                found.extend(_listed(key, path))
    return sorted(found, key=lambda blob: blob.key)


def _listed(key: str, path: Path) -> list[ListedBlob]:
    """Nothing if it was deleted meanwhile."""
    try:
        size = path.stat().st_size - _HEADER_SIZE
    except FileNotFoundError:
        return []
    if size < 0:
        raise RecordCorrupt(f"{path} does not begin with its digest")
    return [ListedBlob(key=key, size=size)]


def _digest_in(path: Path, header: bytes) -> str:
    if len(header) != _HEADER_SIZE or not header.startswith(_MAGIC) or not header.endswith(b"\n"):
        raise RecordCorrupt(f"{path} does not begin with its digest")
    return header[len(_MAGIC) : -1].decode("ascii", errors="replace")
