"""Records in SQLite, one file a kind (the first segment of a key), so that kinds do not wait for one another."""

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from turnmill.backends.embedded.sqlite import BUSY_S, Database, touch
from turnmill.ports import Stored, Write
from turnmill.ports.record_keys import key_parts, prefix_parts

T = TypeVar("T")
SCHEMA = "CREATE TABLE IF NOT EXISTS records (key TEXT NOT NULL UNIQUE, value BLOB NOT NULL, version INTEGER NOT NULL);"
_UPSERT = (
    "INSERT INTO records VALUES (?, ?, 1) ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = version + 1"
)
_SCAN = "SELECT key, value, version FROM records WHERE key >= ? AND key > ? AND key < ? ORDER BY key LIMIT ?"


class SqliteRecordStore:
    """Implements `ports.RecordStore` in `folder`, or in `shared` files (which have the tables of `SCHEMA`) by kind.

    Writes of one call to one kind share a transaction.
    """

    def __init__(self, folder: Path, *, busy_s: float = BUSY_S, shared: Mapping[str, Database] | None = None) -> None:
        self._folder = folder
        self._busy_s = busy_s
        self._databases: dict[str, Database] = dict(shared or {})

    async def get(self, keys: Sequence[str]) -> list[Stored | None]:
        """See `ports.RecordStore.get`."""
        found: dict[str, Stored] = {}
        by_kind: defaultdict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_kind[key_parts(key).kind].append(key)
        databases = [(self._database(kind), wanted) for kind, wanted in by_kind.items()]
        for part in await _all(
            [database.read(partial(_get, keys=wanted)) for database, wanted in databases if database.exists]
        ):
            found |= part
        return [found.get(key) for key in keys]

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        """See `ports.RecordStore.write`."""
        applied = [False] * len(writes)
        by_kind: defaultdict[str, list[int]] = defaultdict(list)
        for index, write in enumerate(writes):
            by_kind[key_parts(write.key).kind].append(index)
        outcomes = await _all(
            [
                self._database(kind).write(partial(_write, writes=[writes[index] for index in indices]))
                for kind, indices in by_kind.items()
            ]
        )
        for indices, outcome in zip(by_kind.values(), outcomes, strict=True):
            for index, done in zip(indices, outcome, strict=True):
                applied[index] = done
        return applied

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """See `ports.RecordStore.scan`."""
        database = self._database(kind_of(prefix))
        if not database.exists:
            return []
        return await database.read(partial(scan, prefix=prefix, after=after, limit=limit))

    async def probe(self, kinds: Sequence[str]) -> None:
        """Make the files of these kinds and write to each; raises `BackendUnavailable` naming the one that fails."""
        await _all([self._database(kind).write(touch) for kind in kinds])

    def close(self) -> None:
        """Release files and threads; idempotent."""
        for database in self._databases.values():
            database.close()

    def _database(self, kind: str) -> Database:
        if kind not in self._databases:
            self._databases[kind] = Database(self._folder / f"{kind}.db", SCHEMA, busy_s=self._busy_s)
        return self._databases[kind]


async def _all(futures: Sequence[asyncio.Future[T]]) -> Sequence[T]:
    """The results of all; mostly there is one kind only, and gathering costs more than waiting."""
    return (await futures[0],) if len(futures) == 1 else await asyncio.gather(*futures)


def kind_of(prefix: str) -> str:
    """The kind of the records below a prefix; raises `InvalidInput` for one shorter than `kind/partition/`."""
    return prefix_parts(prefix).kind


def _get(connection: sqlite3.Connection, *, keys: Sequence[str]) -> dict[str, Stored]:
    found = {}
    for key in keys:
        row = connection.execute("SELECT value, version FROM records WHERE key = ?", (key,)).fetchone()
        if row is not None:
            found[key] = Stored(key=key, value=row[0], version=row[1])
    return found


def _write(connection: sqlite3.Connection, *, writes: Sequence[Write]) -> list[bool]:
    return [write_one(connection, write) for write in writes]


def write_one(connection: sqlite3.Connection, write: Write) -> bool:
    """A conditional write as an operation on a file, to be part of a larger one; whether it was applied."""
    key, value, expected = write.key, write.value, write.expected
    if value is None:
        if expected == 0:
            return connection.execute("SELECT 1 FROM records WHERE key = ?", (key,)).fetchone() is None
        if expected is None:
            connection.execute("DELETE FROM records WHERE key = ?", (key,))
            return True
        return connection.execute("DELETE FROM records WHERE key = ? AND version = ?", (key, expected)).rowcount == 1
    if expected is None:
        connection.execute(_UPSERT, (key, value))
        return True
    if expected == 0:
        return connection.execute("INSERT OR IGNORE INTO records VALUES (?, ?, 1)", (key, value)).rowcount == 1
    return (
        connection.execute(
            "UPDATE records SET value = ?, version = version + 1 WHERE key = ? AND version = ?", (value, key, expected)
        ).rowcount
        == 1
    )


def scan(connection: sqlite3.Connection, *, prefix: str, after: str, limit: int) -> list[Stored]:
    """`SqliteRecordStore.scan` as an operation on a file; a `limit` of -1 is none."""
    rows = connection.execute(_SCAN, (prefix, after, _after_prefix(prefix), limit)).fetchall()
    return [Stored(key=key, value=value, version=version) for key, value, version in rows]


def _after_prefix(prefix: str) -> str:
    """The smallest text greater than every text that starts with `prefix`, in the order of code points."""
    stem = prefix.rstrip("\U0010ffff")
    following = ord(stem[-1]) + 1
    # The surrogates are no text.
    return stem[:-1] + chr(0xE000 if 0xD800 <= following <= 0xDFFF else following)
