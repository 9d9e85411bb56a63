"""Blobs as files: the first line of each holds the digest of what follows, so one rename publishes both."""

import asyncio
import hashlib
import os
from pathlib import Path

from turnmill.backends.embedded.files import disk, write_atomically
from turnmill.errors import InvalidInput, NotFound, RecordCorrupt
from turnmill.ports import BlobInfo

# A blob `a/b` is the file `a/b.blob`, so that it may stand beside blobs `a/b/...`.
_SUFFIX = ".blob"
_MAGIC = b"sha256:"
_HEADER_SIZE = len(_MAGIC) + 64 + 1
# Most file systems allow names of 255 bytes.
_MAX_SEGMENT_BYTES = 200
_MAX_KEY_BYTES = 1024


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

    async def list(self, prefix: str = "") -> list[BlobInfo]:
        """See `ports.BlobStore.list`; reads the first line of each file."""
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
        segments = key.split("/")
        for segment in segments:
            if segment in ("", ".", "..") or "\0" in segment:
                raise InvalidInput(f"blob key {key!r} has an empty, '.', '..' or NUL segment; use a/b/c")
            try:
                size = len(segment.encode())
            except UnicodeEncodeError as error:
                raise InvalidInput(f"blob key {key!r} is no valid Unicode text: {error.reason}") from error
            if size > _MAX_SEGMENT_BYTES:
                raise InvalidInput(f"blob key {key!r} has a segment over {_MAX_SEGMENT_BYTES} bytes")
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise InvalidInput(f"blob key {key[:60]!r}... is longer than {_MAX_KEY_BYTES} bytes")
        if any(segment.endswith(_SUFFIX) for segment in segments[:-1]):
            raise InvalidInput(f"blob key {key!r}: only the last segment may end with {_SUFFIX}")
        return self._folder.joinpath(*segments[:-1], segments[-1] + _SUFFIX)


def _search(folder: Path, prefix: str) -> list[BlobInfo]:
    """The blobs whose key starts with `prefix`, by key."""
    # Only the folder that the prefix names in full is searched.
    start = folder.joinpath(*[part for part in prefix.split("/")[:-1] if part not in ("", ".", "..")])
    found = []
    for parent, _, names in os.walk(start):
        for name in names:
            path = Path(parent, name)
            key = path.relative_to(folder).as_posix().removesuffix(_SUFFIX)
            if name.endswith(_SUFFIX) and key.startswith(prefix):
                found.extend(_info(key, path))
    return sorted(found, key=lambda info: info.key)


def _info(key: str, path: Path) -> list[BlobInfo]:
    """What a file's first line says; nothing if it was deleted meanwhile."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_SIZE)
            size = os.fstat(file.fileno()).st_size - _HEADER_SIZE
    except FileNotFoundError:
        return []
    return [BlobInfo(key=key, size=size, digest=_digest_in(path, header))]


def _digest_in(path: Path, header: bytes) -> str:
    if len(header) != _HEADER_SIZE or not header.startswith(_MAGIC) or not header.endswith(b"\n"):
        raise RecordCorrupt(f"{path} does not begin with its digest")
    return header[len(_MAGIC) : -1].decode("ascii", errors="replace")
