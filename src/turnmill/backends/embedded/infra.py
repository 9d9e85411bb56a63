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


class FolderRunInfra:
    """Implements `ports.RunInfra` in `folder`, which holds the files of `records` and `queues`."""

    def __init__(self, folder: Path, records: SqliteRecordStore, queues: Mapping[str, SqliteQueue]) -> None:
        self._folder = folder
        self._records = records
        self._queues = queues

    async def deploy(self) -> list[str]:
        """See `ports.RunInfra.deploy`."""
        await asyncio.to_thread(_make, [self._folder / name for name in _FOLDERS])
        await self._records.probe(RUN_RECORD_KINDS)
        await asyncio.gather(*(queue.probe() for queue in self._queues.values()))
        records = [f"records/{kind}" for kind in RUN_RECORD_KINDS]
        return [*_FOLDERS, *records, *(f"queues/{name}" for name in self._queues)]

    async def free_bytes(self) -> int:
        """Of the disk that the folder is on, or will be, for a user without privileges."""
        return await asyncio.to_thread(_free_bytes, self._folder)

    async def retire(self) -> int:
        """See `ports.RunInfra.retire`."""
        return sum([await queue.purge() for queue in self._queues.values()])

    async def delete(self) -> None:
        """See `ports.RunInfra.delete`."""
        await asyncio.to_thread(_remove, self._folder)


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
