"""Records, their messages and their counters in one transaction: all lie in one SQLite file."""

import sqlite3
from collections.abc import Sequence
from functools import partial

from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import write_one
from turnmill.backends.embedded.sqlite import Database
from turnmill.errors import InvalidInput
from turnmill.ports import Count, Message, Write
from turnmill.ports.record_keys import key_parts

# A counter is a record whose value is its digits.
_ADD = (
    "INSERT INTO records VALUES (?, CAST(CAST(? AS TEXT) AS BLOB), 1) ON CONFLICT (key) DO UPDATE SET "
    "value = CAST(CAST(CAST(CAST(value AS TEXT) AS INTEGER) + ? AS TEXT) AS BLOB), version = version + 1"
)


class SqliteOutbox:
    """Implements `ports.Outbox` on a database that holds the records of a kind and the tables of `queue`.

    Counters are stored in the same file; whoever reads them finds them as records of a kind that is `shared` there.
    """

    def __init__(self, database: Database, queue: SqliteQueue) -> None:
        self._database = database
        self._queue = queue

    async def write(self, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count] = ()) -> list[bool]:
        """See `ports.Outbox.write`; raises `InvalidInput` for a record of another kind, and a counter of this one."""
        kind = self._database.path.stem
        for write, _ in entries:
            if key_parts(write.key).kind != kind:
                raise InvalidInput(f"record {write.key!r} does not lie in {self._database.path.name}")
        for key in {count.key for count in counts}:
            if key_parts(key).kind == kind:
                raise InvalidInput(f"counter {key!r} is of the kind of the records that it counts")
        return await self._database.write(partial(self._write, entries=entries, counts=counts)) if entries else []

    def _write(
        self, connection: sqlite3.Connection, *, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count]
    ) -> list[bool]:
        applied = [write_one(connection, write) for write, _ in entries]
        self._queue.append(
            connection, messages=[message for (_, message), done in zip(entries, applied, strict=True) if done]
        )
        sums: dict[str, int] = {}
        for count, done in zip(counts, applied, strict=True) if counts else ():
            if done:
                sums[count.key] = sums.get(count.key, 0) + count.amount
        for key, amount in sums.items():
            connection.execute(_ADD, (key, amount, amount))
        return applied
