"""A queue in one SQLite file: FIFO per group, leases with receipts, deduplication, dead letters.

    send -> WAITING (behind its group) -> READY (head of its group) -> HIDDEN (leased or delayed) -> gone | dead
                                             ^------- lease ran out or released -------|

Only the oldest message of a group, its head, is ever ready or hidden, so a blocked group costs a lease nothing: what
can be leased is one index, in the order of arrival.

Times are those of the machine's monotonic clock, which all of its processes share (see `time.monotonic`): by the wall
clock, setting it back by an hour would keep the messages of a dead consumer hidden for an hour, and setting it forward
would end all leases at once. It begins anew with the machine, which no consumer outlives.

The id of a message is the time of its sending in microseconds, or one more than the greatest id where that is later:
it tells order and age in one number.
"""

import asyncio
import math
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from turnmill.backends.embedded.counts import count
from turnmill.backends.embedded.letters import exhume, letters_in
from turnmill.backends.embedded.sqlite import BUSY_S, Database, touch
from turnmill.backends.embedded.wakeup import Bell, Waiter
from turnmill.ports import DeadLetter, Leased, Message, QueueCounts

DEDUP_WINDOW_S = 300.0
# How often ids that are past the window are removed, and times of an earlier clock: not once, because the transaction
# that does it may be rolled back.
_TIDY_EVERY_S = 1.0
# Longest time between two looks at the queue while waiting: what a lost wake-up costs.
_LOOK_EVERY_S = 0.5
_WAITING, _READY, _HIDDEN = 0, 1, 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY,
    grp TEXT NOT NULL,
    body BLOB NOT NULL,
    state INTEGER NOT NULL,
    hidden_at REAL NOT NULL DEFAULT 0,
    visible_at REAL NOT NULL DEFAULT 0,
    token TEXT,
    num_receives INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS messages_by_group ON messages (grp, id);
CREATE INDEX IF NOT EXISTS messages_ready ON messages (id) WHERE state = 1;
CREATE INDEX IF NOT EXISTS messages_hidden ON messages (visible_at) WHERE state = 2;
CREATE INDEX IF NOT EXISTS messages_waiting ON messages (id) WHERE state = 0;
CREATE TABLE IF NOT EXISTS sent (dedup_id TEXT PRIMARY KEY, sent_at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sent_by_time ON sent (sent_at);
CREATE TABLE IF NOT EXISTS dead (
    id INTEGER PRIMARY KEY,
    grp TEXT NOT NULL,
    body BLOB NOT NULL,
    num_receives INTEGER NOT NULL,
    dead_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS totals (id INTEGER PRIMARY KEY CHECK (id = 1), num_sent INTEGER NOT NULL);
"""
_INSERT = """
INSERT INTO messages (id, grp, body, state)
VALUES (
    max(?3, (SELECT coalesce(max(id), 0) + 1 FROM messages)),
    ?1, ?2, CASE WHEN EXISTS (SELECT 1 FROM messages WHERE grp = ?1) THEN 0 ELSE 1 END
)
"""
_COUNT = "INSERT INTO totals VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET num_sent = num_sent + excluded.num_sent"
_REMEMBER = """
INSERT INTO sent VALUES (?, ?) ON CONFLICT (dedup_id) DO UPDATE SET sent_at = excluded.sent_at WHERE sent_at <= ?
"""
_PROMOTE = """
UPDATE messages SET state = 1 WHERE state = 0 AND id = (SELECT id FROM messages WHERE grp = ? ORDER BY id LIMIT 1)
"""
_LEASE = """
UPDATE messages SET state = 2, hidden_at = ?, visible_at = ?, token = ?, num_receives = num_receives + 1
WHERE id IN (SELECT id FROM messages WHERE state = 1 ORDER BY id LIMIT ?)
RETURNING id, grp, body, num_receives
"""
_TAKE = """
DELETE FROM messages WHERE id IN (SELECT id FROM messages WHERE state = 1 ORDER BY id LIMIT ?)
RETURNING id, grp, body, num_receives
"""


class SqliteQueue:
    """Implements `ports.Queue`. A lease is lost at the moment it runs out, whether or not another took the message.

    Of a group one message is leased at a time; deduplication ids are those of the whole queue; counts are exact.

    A receipt is `<message id>.<token of the lease>`. `clock` gives seconds since some moment, the same one for all who
    open the queue, and never goes back while one of them lives; tests move it.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_receives: int = 20,
        clock: Callable[[], float] = time.monotonic,
        busy_s: float = BUSY_S,
        database: Database | None = None,
    ) -> None:
        """The queue at `path`, or in the tables of `SCHEMA` in another `database`; `path` then names its pipes only."""
        self._max_receives = max_receives
        self._clock = clock
        self._wake_folder = path.with_suffix(".wake")
        self._bell = Bell(self._wake_folder)
        self._db = database or Database(path, SCHEMA, busy_s=busy_s)
        self._db.after_commit.append(self._ring)
        # Set by operations that made a message ready.
        self._news = False
        self._tidied_at = -math.inf
        self._waiters: dict[asyncio.AbstractEventLoop, Waiter] = {}

    # ------------------------------------------------------------ work

    async def send(self, messages: Sequence[Message]) -> None:
        """See `ports.WorkQueue.send`."""
        if messages:
            await self._db.write(partial(self.append, messages=messages))

    async def lease(self, *, max_messages: int, lease_s: float, wait_s: float = 0.0) -> list[Leased]:
        """See `ports.WorkQueue.lease`. Cancelled while messages are on their way, it gives them back."""
        return await self._wait(partial(self._lease_now, max_messages, lease_s), wait_s)

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        """See `ports.WorkQueue.take`. What came never comes again, whatever becomes of the caller."""
        return await self._wait(partial(self._take_now, max_messages), wait_s)

    async def extend(self, receipts: Sequence[str], lease_s: float) -> list[bool]:
        """See `ports.WorkQueue.extend`."""
        return await self._db.write(partial(self._extend, receipts=receipts, lease_s=lease_s))

    async def ack(self, receipts: Sequence[str]) -> list[bool]:
        """See `ports.WorkQueue.ack`."""
        return await self._db.write(partial(self._ack, receipts=receipts))

    async def release(self, receipts: Sequence[str], *, delay_s: float = 0.0) -> None:
        """See `ports.WorkQueue.release`."""
        await self._db.write(partial(self._release, receipts=receipts, delay_s=delay_s))

    # ------------------------------------------------------------ administration

    async def counts(self) -> QueueCounts:
        """Exact. Messages that wait behind their group count as available."""
        if not self._db.exists:
            return QueueCounts(available=0, in_flight=0, delayed=0, dead=0, num_sent=0)
        return await self._db.read(lambda connection: count(connection, self._clock()))

    async def purge(self) -> int:
        """See `ports.QueueAdmin.purge`. What was sent stays known to the deduplication."""
        if not self._db.exists:
            return 0
        return await self._db.write(lambda connection: connection.execute("DELETE FROM messages").rowcount)

    async def probe(self) -> None:
        """Make the file and write to it; raises `BackendUnavailable` naming it where that fails."""
        await self._db.write(touch)

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """The oldest `limit`."""
        if not self._db.exists:
            return []
        return await self._db.read(partial(letters_in, limit=limit))

    async def redrive(self, letter_ids: Sequence[str] | None = None) -> int:
        """See `ports.QueueAdmin.redrive`: they join the end of their groups, past the deduplication."""
        if not self._db.exists:
            return 0
        return await self._db.write(partial(self._redrive, letter_ids=letter_ids))

    async def discard(self, letter_ids: Sequence[str]) -> int:
        """See `ports.QueueAdmin.discard`."""
        if not self._db.exists:
            return 0
        return await self._db.write(lambda connection: len(exhume(connection, letter_ids)))

    def close(self) -> None:
        """Release file, thread and pipes; idempotent."""
        for waiter in self._waiters.values():
            waiter.close()
        self._waiters.clear()
        self._db.close()
        self._bell.close()

    # ------------------------------------------------------------ on the loop

    async def _wait(self, look: Callable[[], Awaitable[list[Leased]]], wait_s: float) -> list[Leased]:
        """Look until there is something, `wait_s` at most."""
        give_up = time.monotonic() + wait_s
        if wait_s <= 0 or self._db.closed:
            return await look()
        waiter = self._waiter()
        while True:
            seen = waiter.num_rings
            found = await look()
            remaining_s = give_up - time.monotonic()
            if found or remaining_s <= 0:
                return found
            await waiter.wait(seen=seen, timeout_s=min(remaining_s, _LOOK_EVERY_S))

    async def _take_now(self, max_messages: int) -> list[Leased]:
        return await self._db.write(partial(self._take, max_messages=max_messages))

    async def _lease_now(self, max_messages: int, lease_s: float) -> list[Leased]:
        future = self._db.write(partial(self._lease, max_messages=max_messages, lease_s=lease_s))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, future: asyncio.Future[list[Leased]]) -> None:
        """Nobody awaits these any more; otherwise they would stay hidden until their lease runs out."""
        if future.cancelled() or future.exception() is not None or not future.result() or self._db.closed:
            return
        self._db.write(partial(self._release, receipts=[item.receipt for item in future.result()], delay_s=0.0))

    def _waiter(self) -> Waiter:
        loop = asyncio.get_running_loop()
        if loop not in self._waiters:
            for ended in [other for other in self._waiters if other.is_closed()]:
                self._waiters.pop(ended).close()
            self._waiters[loop] = Waiter(self._wake_folder)
        return self._waiters[loop]

    # ------------------------------------------------------------ operations

    def _ring(self) -> None:
        if self._news:
            self._news = False
            self._bell.ring()

    def append(self, connection: sqlite3.Connection, *, messages: Iterable[Message]) -> None:
        """`send` as an operation on the queue's file, to be part of a larger one."""
        now = self._tidy(connection)
        before = now - DEDUP_WINDOW_S
        num_sent = 0
        for message in messages:
            dedup_id = message.dedup_id
            if dedup_id is None or connection.execute(_REMEMBER, (dedup_id, now, before)).rowcount:
                connection.execute(_INSERT, (message.group, message.body, int(now * 1e6)))
                num_sent += 1
        if num_sent:
            connection.execute(_COUNT, (num_sent,))
            self._news = True

    def _lease(self, connection: sqlite3.Connection, *, max_messages: int, lease_s: float) -> list[Leased]:
        now = self._tidy(connection)
        self._return_expired(connection, now)
        token = secrets.token_hex(8)
        leased: list[Leased] = []
        while len(leased) < max_messages:
            found = connection.execute(_LEASE, (now, now + lease_s, token, max_messages - len(leased))).fetchall()
            buried: list[str] = []
            # RETURNING promises no order.
            for row_id, group, body, num_receives in sorted(found):
                if num_receives > self._max_receives:
                    self._bury(connection, row_id)
                    buried.append(group)
                else:
                    receipt = f"{row_id}.{token}"
                    leased.append(Leased(body=body, group=group, receipt=receipt, num_receives=num_receives))
            if not buried:
                # Nothing else can have become ready.
                break
            self._promote(connection, buried)
        return leased

    @staticmethod
    def _return_expired(connection: sqlite3.Connection, now: float) -> None:
        connection.execute("UPDATE messages SET state = 1 WHERE state = 2 AND visible_at <= ?", (now,))

    def _take(self, connection: sqlite3.Connection, *, max_messages: int) -> list[Leased]:
        self._return_expired(connection, self._tidy(connection))
        taken: list[Leased] = []
        while len(taken) < max_messages:
            rows = sorted(connection.execute(_TAKE, (max_messages - len(taken),)).fetchall())
            taken += [
                Leased(body=body, group=group, receipt="", num_receives=num_receives + 1)
                for _, group, body, num_receives in rows
            ]
            if not rows or not self._has_waiting(connection):
                break
            self._promote(connection, [group for _, group, _, _ in rows])
        return taken

    def _tidy(self, connection: sqlite3.Connection) -> float:
        """The time, of which nothing in the file is far off any more.

        What is dated later is of before the machine was started, and its consumers are gone.
        """
        now = self._clock()
        if not 0 <= now - self._tidied_at < _TIDY_EVERY_S:
            self._tidied_at = now
            connection.execute("DELETE FROM sent WHERE sent_at <= ?", (now - DEDUP_WINDOW_S,))
            connection.execute("UPDATE messages SET state = 1 WHERE state = 2 AND hidden_at > ?", (now,))
            # Remembered for another window: longer than needed is safe.
            connection.execute("UPDATE sent SET sent_at = ?1 WHERE sent_at > ?1", (now,))
        return now

    def _bury(self, connection: sqlite3.Connection, row_id: int) -> None:
        """Move a message to the dead letters, with the number of times that it was delivered."""
        connection.execute(
            "INSERT INTO dead (grp, body, num_receives, dead_at)"
            " SELECT grp, body, num_receives - 1, ? FROM messages WHERE id = ?",
            (time.time(), row_id),
        )
        connection.execute("DELETE FROM messages WHERE id = ?", (row_id,))

    def _promote(self, connection: sqlite3.Connection, groups: Iterable[str]) -> None:
        """Make the next message of each group ready, now that its head is gone."""
        for group in groups:
            if connection.execute(_PROMOTE, (group,)).rowcount:
                self._news = True

    @staticmethod
    def _has_waiting(connection: sqlite3.Connection) -> bool:
        """Some message waits behind its group: usually none does."""
        return connection.execute("SELECT 1 FROM messages WHERE state = 0 LIMIT 1").fetchone() is not None

    def _extend(self, connection: sqlite3.Connection, *, receipts: Sequence[str], lease_s: float) -> list[bool]:
        now = self._clock()
        statement = (
            "UPDATE messages SET hidden_at = ?, visible_at = ? WHERE id = ? AND token = ? AND state = 2"
            " AND visible_at > ?"
        )
        return [
            connection.execute(statement, (now, now + lease_s, *_parse_receipt(receipt), now)).rowcount == 1
            for receipt in receipts
        ]

    def _ack(self, connection: sqlite3.Connection, *, receipts: Sequence[str]) -> list[bool]:
        now = self._clock()
        statement = "DELETE FROM messages WHERE id = ? AND token = ? AND state = 2 AND visible_at > ? RETURNING grp"
        acked = []
        has_waiting = self._has_waiting(connection)
        for receipt in receipts:
            groups = [group for (group,) in connection.execute(statement, (*_parse_receipt(receipt), now)).fetchall()]
            if has_waiting:
                self._promote(connection, groups)
            acked.append(bool(groups))
        return acked

    def _release(self, connection: sqlite3.Connection, *, receipts: Sequence[str], delay_s: float) -> None:
        now = self._clock()
        state = _HIDDEN if delay_s > 0 else _READY
        statement = (
            "UPDATE messages SET state = ?, hidden_at = ?, visible_at = ?, token = NULL"
            " WHERE id = ? AND token = ? AND state = 2 AND visible_at > ?"
        )
        for receipt in receipts:
            changed = connection.execute(statement, (state, now, now + delay_s, *_parse_receipt(receipt), now)).rowcount
            if changed and state == _READY:
                self._news = True

    def _redrive(self, connection: sqlite3.Connection, *, letter_ids: Sequence[str] | None) -> int:
        letters = exhume(connection, letter_ids)
        now = int(self._clock() * 1e6)
        for group, body in letters:
            connection.execute(_INSERT, (group, body, now))
        self._news = self._news or bool(letters)
        return len(letters)


def _parse_receipt(receipt: str) -> tuple[int, str]:
    """Message id and token; a receipt of another make names no message, so its lease counts as lost."""
    row_id, _, token = receipt.partition(".")
    return (int(row_id), token) if row_id.isdecimal() and len(row_id) < 19 else (-1, "")
