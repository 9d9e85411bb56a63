"""The folder of a run: made and written to before anything needs it, emptied of messages and removed afterwards."""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnmill.backends.embedded.files import aside_in, disk
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.errors import NotFound
from turnmill.records import RUN_RECORD_KINDS

# Beside records and queues, which know their own places.
_FOLDERS = ("blobs", "weights", "logs", "checkpoints", "locks")


class RunFolder:
    """What the processes of a run that are on this machine keep here, whatever holds its records and queues."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def make(self) -> list[str]:
        """Make it and write to each part; their names. Raises `BackendUnavailable`."""
        await asyncio.to_thread(_make, [self._path / name for name in _FOLDERS])
        return list(_FOLDERS)

    async def free_bytes(self) -> int:
        """Of the disk that the folder is on, or will be, for a user without privileges."""
        return await asyncio.to_thread(_free_bytes, self._path)

    async def remove(self) -> None:
        """All of it; idempotent."""
        await asyncio.to_thread(_remove, self._path)


class FolderRunInfra:
    """Implements `ports.RunInfra` in `folder`, which holds the files of `records` and `queues`."""

    expected_s = 5.0

    def __init__(self, folder: Path, records: SqliteRecordStore, queues: Mapping[str, SqliteQueue]) -> None:
        self._folder = RunFolder(folder)
        self._records = records
        self._queues = queues

    async def deploy(self) -> list[str]:
        """See `ports.RunInfra.deploy`."""
        folders = await self._folder.make()
        await self._records.probe(RUN_RECORD_KINDS)
        await asyncio.gather(*(queue.probe() for queue in self._queues.values()))
        records = [f"records/{kind}" for kind in RUN_RECORD_KINDS]
        return [*folders, *records, *(f"queues/{name}" for name in self._queues)]

    async def free_bytes(self) -> int:
        """See `RunFolder.free_bytes`."""
        return await self._folder.free_bytes()

    async def retire(self) -> int:
        """See `ports.RunInfra.retire`."""
        return sum([await queue.purge() for queue in self._queues.values()])

    async def delete(self) -> None:
        """See `ports.RunInfra.delete`."""
        await self._folder.remove()


def _make(folders: Sequence[Path]) -> None:
    for folder in folders:
        probe = aside_in(folder)
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"probe")
            probe.unlink()


def _free_bytes(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    with disk(there):
        return shutil.disk_usage(there).free


def _remove(folder: Path) -> None:
    while folder.exists():
        # What another one removed at the same time is no error, and no reason to leave the rest.
        with contextlib.suppress(NotFound), disk(folder):
            shutil.rmtree(folder)
