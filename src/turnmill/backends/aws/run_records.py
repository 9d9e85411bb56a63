"""The records of a run: in its own table, but for those that are written before there is one.

    kind -> clocks: the deployment's table | everything else: the run's table, made by DeployRunInfra

Reading is defined at any time: a run whose table is not there (yet, or any more) has no records in it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.errors import NotFound
from turnmill.ports import Stored, Write
from turnmill.ports.record_keys import key_parts, prefix_parts

# A run's time is counted from its first stage on.
EARLY_KINDS = ("clocks",)


class RunRecords:
    """Implements `ports.RecordStore`; the methods that end in `_now` are for callers without an event loop."""

    def __init__(self, own: DynamoRecordStore, early: DynamoRecordStore) -> None:
        """`early`: the deployment's, where the records of `EARLY_KINDS` are."""
        self._own = own
        self._early = early

    async def get(self, keys: Sequence[str]) -> list[Stored | None]:
        """See `ports.RecordStore.get`."""
        early = [key for key in keys if _is_early(key)]
        late = [key for key in keys if not _is_early(key)]
        found = dict(zip(early, await self._early.get(early), strict=True)) if early else {}
        if late:
            with suppress(NotFound):
                found |= zip(late, await self._own.get(late), strict=True)
        return [found.get(key) for key in keys]

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        """See `ports.RecordStore.write`; raises `NotFound` where the run's table is not there."""
        stores = [self._early if _is_early(write.key) else self._own for write in writes]
        parts = {store: [write for write, its in zip(writes, stores, strict=True) if its is store] for store in stores}
        outcomes = await asyncio.gather(*(store.write(part) for store, part in parts.items()))
        applied = {store: iter(outcome) for store, outcome in zip(parts, outcomes, strict=True)}
        return [next(applied[store]) for store in stores]

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """See `ports.RecordStore.scan`."""
        if prefix_parts(prefix).kind in EARLY_KINDS:
            return await self._early.scan(prefix, after=after, limit=limit)
        try:
            return await self._own.scan(prefix, after=after, limit=limit)
        except NotFound:
            return []

    def scan_now(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """`scan` in the caller's thread."""
        store = self._early if prefix_parts(prefix).kind in EARLY_KINDS else self._own
        try:
            return store.scan_now(prefix, after=after, limit=limit)
        except NotFound:
            return []


def _is_early(key: str) -> bool:
    return key_parts(key).kind in EARLY_KINDS
