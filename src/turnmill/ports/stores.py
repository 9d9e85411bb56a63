"""Where things are kept: blobs, records with compare-and-set, weight versions, published models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from turnmill.records import PublishedModel, Version, WeightVersion

# ---------------------------------------------------------------- blobs


@dataclass(frozen=True, kw_only=True)
class BlobInfo:
    """A stored blob."""

    key: str
    size: int
    # SHA-256 hex of the content.
    digest: str


@dataclass(frozen=True, kw_only=True)
class ListedBlob:
    """A stored blob in a list, which object stores make without the digests."""

    key: str
    size: int


class BlobStore(Protocol):
    """Whole objects under slash-separated keys. A reader sees the old or the new content, never a part."""

    async def put(self, key: str, data: bytes) -> BlobInfo:
        """Store or replace. Idempotent. Raises `InvalidInput` for a key that `blob_keys.check_blob_key` refuses."""
        ...

    async def get(self, key: str) -> bytes:
        """The content; raises `NotFound`, or `RecordCorrupt` if it does not match its stored digest."""
        ...

    async def list(self, prefix: str = "") -> list[ListedBlob]:
        """All blobs whose key starts with `prefix`, by key."""
        ...

    async def delete(self, key: str) -> None:
        """Remove; removing what is not there is no error."""
        ...


# ---------------------------------------------------------------- records


class Stored(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record as read."""

    key: str
    value: bytes
    # 1 at creation, +1 with each write.
    version: int


class Write(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One conditional write."""

    key: str
    # None deletes.
    value: bytes | None
    # 0: must not exist yet. n: must be at version n. None: unconditional.
    expected: int | None


class RecordStore(Protocol):
    """Small records with compare-and-set. Keys are `kind/partition/rest`; reads are strongly consistent per key.

    Each method raises `InvalidInput` for a key that is none (`record_keys`), or that is longer than the backend allows.
    """

    async def get(self, keys: Sequence[str]) -> list[Stored | None]:
        """One entry a key, in order; None where there is no record."""
        ...

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        """Try each write; True where it was applied, False where the expectation did not hold.

        Each write is atomic by itself, the sequence is not. Writes to one key are applied in order. Where it raises
        `BackendUnavailable`, any of them may have been applied.
        """
        ...

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """Records whose key starts with `prefix` and is greater than `after`, by key, at most `limit`.

        `prefix` holds at least `kind/partition/`. Pages are not a snapshot; one with less than `limit` is the last.
        """
        ...


# ---------------------------------------------------------------- weights


class WeightStore(Protocol):
    """Weight versions and a pointer to the current one. A version's content never changes."""

    async def publish(self, version: Version, source: Path, digest: str) -> WeightVersion:
        """Store the folder `source` (holding `model.safetensors`) as `version`; does not move the pointer.

        Idempotent for equal digests; raises `VersionConflict` if the version is there with another digest.
        """
        ...

    async def point(self, version: Version) -> None:
        """Make `version` current; raises `NotFound` if it was never published."""
        ...

    async def current(self) -> WeightVersion | None:
        """The version pointed to; cheap enough to ask before every call."""
        ...

    async def get(self, version: Version) -> WeightVersion:
        """Raises `NotFound`."""
        ...

    async def prune(self, keep: Sequence[Version]) -> None:
        """Delete all versions but `keep` and the current one."""
        ...


# ---------------------------------------------------------------- folders


class FolderStore(Protocol):
    """Whole folders by name, each there completely or not at all; for what would be lost with a machine's own disk.

    Names are single segments of a blob's key. Nobody else may write to a name meanwhile.
    """

    async def put(self, name: str, folder: Path) -> None:
        """Store or replace; idempotent. Raises `NotFound` if the folder is not there, or is removed meanwhile."""
        ...

    async def names(self) -> list[str]:
        """Of all folders that are there, sorted."""
        ...

    async def read(self, name: str, file: str) -> bytes:
        """One file of a folder; raises `NotFound`, `RecordCorrupt`."""
        ...

    async def fetch(self, name: str, folder: Path) -> None:
        """Write the files into the existing `folder`; raises `NotFound`, `RecordCorrupt` (some may be written then)."""
        ...

    async def remove(self, name: str) -> None:
        """Remove; removing what is not there is no error."""
        ...


# ---------------------------------------------------------------- models


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A published model and the folder or URI from which it can be loaded."""

    model: PublishedModel
    location: str


class ModelStore(Protocol):
    """The deployment's published models. A version's content never changes."""

    async def publish(self, model: PublishedModel, source: Path, documents: Mapping[str, bytes]) -> StoredModel:
        """Store the folder `source` (Hugging Face format) and the documents, by file name; `model.files` is filled in.

        The first one stands: published again, whatever was published before is returned. Raises `VersionConflict` if
        the version is there with another weight digest.
        """
        ...

    async def find(self, run_id: str, version: Version) -> StoredModel | None:
        """None where it was not published."""
        ...
