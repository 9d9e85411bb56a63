"""Weight versions as folders: copied aside, renamed into place with their `meta.json`, pointed to by one small file."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from turnmill.backends.embedded.files import aside_in, disk, remove_abandoned, sync, write_atomically
from turnmill.errors import InvalidInput, NotFound, RecordCorrupt, VersionConflict
from turnmill.records import Version, WeightVersion, decode, encode
from turnmill.weights import WEIGHTS_FILE

_META = "meta.json"


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """Marks a version as complete. Holds no path: the folder may be moved."""

    version: Version
    digest: str


class FolderWeightStore:
    """Implements `ports.WeightStore`: `folder/versions/<incarnation>.<n>/` and `folder/current.json`."""

    def __init__(self, folder: Path) -> None:
        self._versions = folder / "versions"
        self._pointer = folder / "current.json"
        # What `current` read last, with the identity of the file that it read.
        self._read: tuple[tuple[int, int, int], WeightVersion] | None = None

    async def publish(self, version: Version, source: Path, digest: str) -> WeightVersion:
        """See `ports.WeightStore.publish`; raises `InvalidInput` if `source` holds no weights file."""
        return await asyncio.to_thread(self._publish, version, source, digest)

    async def point(self, version: Version) -> None:
        """See `ports.WeightStore.point`."""
        await asyncio.to_thread(self._point, version)

    async def current(self) -> WeightVersion | None:
        """See `ports.WeightStore.current`: one `stat` while the pointer stays."""
        try:
            status = os.stat(self._pointer)
        except FileNotFoundError:
            return None
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        if self._read is None or self._read[0] != identity:
            self._read = (identity, self._parse(self._pointer))
        return self._read[1]

    async def get(self, version: Version) -> WeightVersion:
        """See `ports.WeightStore.get`."""
        return await asyncio.to_thread(self._get, version)

    async def prune(self, keep: Sequence[Version]) -> None:
        """See `ports.WeightStore.prune`."""
        current = await self.current()
        kept = {str(version) for version in keep} | ({str(current.version)} if current else set())
        await asyncio.to_thread(self._prune, kept)

    def _publish(self, version: Version, source: Path, digest: str) -> WeightVersion:
        if not (source / WEIGHTS_FILE).is_file():
            raise InvalidInput(f"{source} can't be published as weights {version}: it holds no {WEIGHTS_FILE}")
        target = self._versions / str(version)
        if not target.exists():
            with disk(target):
                self._copy(source, target, _Meta(version=version, digest=digest))
        published = self._get(version)
        if published.digest != digest:
            raise VersionConflict(
                f"weights {version} were published before with digest {published.digest}, not {digest} ({target})"
            )
        return published

    def _copy(self, source: Path, target: Path, meta: _Meta) -> None:
        aside = aside_in(self._versions)
        try:
            shutil.copytree(source, aside)
            for path in aside.rglob("*"):
                sync(path)
            write_atomically(aside / _META, encode(meta))
            try:
                os.rename(aside, target)
            except OSError:
                # Another process published this version first; the caller compares the digests.
                if not target.exists():
                    raise
            sync(self._versions)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _point(self, version: Version) -> None:
        published = self._get(version)
        with disk(self._pointer):
            write_atomically(self._pointer, encode(_Meta(version=version, digest=published.digest)))

    def _get(self, version: Version) -> WeightVersion:
        path = self._versions / str(version) / _META
        if not path.exists():
            raise NotFound(f"weights {version} were never published in {self._versions}")
        return self._parse(path)

    def _parse(self, path: Path) -> WeightVersion:
        with disk(path):
            content = path.read_bytes()
        try:
            meta = decode(content, _Meta)
        except msgspec.DecodeError as error:
            raise RecordCorrupt(f"{path} does not name a weight version: {error}") from error
        location = str(self._versions / str(meta.version))
        return WeightVersion(version=meta.version, digest=meta.digest, location=location)

    def _prune(self, kept: set[str]) -> None:
        if not self._versions.exists():
            return
        with disk(self._versions):
            remove_abandoned(self._versions)
            remove_abandoned(self._pointer.parent)
            for path in list(self._versions.iterdir()):
                if not path.name.startswith(".") and path.name not in kept:
                    # Out of sight first, so that nobody meets half a version.
                    aside = aside_in(self._versions)
                    os.rename(path, aside)
                    shutil.rmtree(aside)


def look_at_pointer(folder: Path) -> tuple[Version, float] | None:
    """The version that is current in `FolderWeightStore(folder)`, and since when (Unix seconds); None without one.

    Raises `BackendUnavailable` and `RecordCorrupt`.
    """
    pointer = folder / "current.json"
    try:
        with disk(pointer):
            content, since = pointer.read_bytes(), pointer.stat().st_mtime
    except NotFound:
        return None
    try:
        return decode(content, _Meta).version, since
    except msgspec.DecodeError as error:
        raise RecordCorrupt(f"{pointer} does not name a weight version: {error}") from error
