"""One SQLite file, owned by one thread, with group commit.

    callers (any event loop) -> inbox -> the file's thread: BEGIN, all that waits, COMMIT -> one wake-up per loop

Why a thread: a commit may wait for another process or for the disk, and an event loop must not. Why group commit: one
transaction costs as much as dozens of statements, so operations that arrive while one commits share the next one.
"""

import asyncio
import contextlib
import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from turnmill.errors import BackendUnavailable, RecordCorrupt

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Longest batch: bounds how long other processes wait for the write lock.
_MAX_BATCH = 512
# Longest wait for the lock: a process that is paused (Ctrl-Z) in the middle of a commit keeps it until it goes on.
BUSY_S = 600.0
# A wait that lasts so long is told.
_LONG_WAIT_S = 10.0
# Seconds between two tries to get the lock: jittered, doubling from the first to the second figure.
_FIRST_RETRY_S, _LAST_RETRY_S = 0.0002, 0.01
# WAL: readers and the writer do not block each other. NORMAL: a commit survives the death of the process, not of the
# machine, and needs no fsync.
_PRAGMAS = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-16000; PRAGMA wal_autocheckpoint=0;"
# SQLite's own checkpoint does not hold the write lock, so under steady writing from two processes it never catches up
# and the -wal file grows without end; this thread's does, at this size.
_CHECKPOINT_BYTES = 16 * 2**20
_CHECKPOINT_WAIT_S = 0.1
# The file or the disk fails, whatever was asked.
_UNAVAILABLE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)


@dataclass(kw_only=True, eq=False)
class _Operation:
    """Something to do on the connection, and who waits for it."""

    run: Callable[[sqlite3.Connection], Any]
    writes: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class Database:
    """The only way to one SQLite file from this process. Opened (and created) by the first operation.

    Operations are functions on the connection. They run in the order of submission, in the file's thread, and each is
    atomic: one that raises is rolled back alone, and its exception goes to its caller. They may run while the caller
    was already cancelled. `after_commit` runs in the thread after each commit that wrote, before callers are resolved.
    """

    def __init__(
        self, path: Path, schema: str, *, busy_s: float = BUSY_S, after_commit: Callable[[], None] | None = None
    ) -> None:
        self.path = path
        self._schema = schema
        self._busy_s = busy_s
        self._after_commit = after_commit
        self._wal = path.with_name(path.name + "-wal")
        # Set and read in the thread: the last batch wrote something.
        self._committed = False
        self._inbox: SimpleQueue[_Operation | None] = SimpleQueue()
        # Guards the two below: nothing may enter the inbox behind the closing mark.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def exists(self) -> bool:
        """The file is there; readers ask it so that looking at nothing creates nothing."""
        return self._thread is not None or self.path.exists()

    @property
    def closed(self) -> bool:
        return self._closed

    def read(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Run `operation`, which only reads, on one snapshot; needs no write lock."""
        return self._submit(operation, writes=False)

    def write(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Run `operation` in a transaction; the future is resolved after its commit.

        Raises (through the future) `BackendUnavailable` when the lock, the disk or the file can't be had.
        """
        return self._submit(operation, writes=True)

    def close(self) -> None:
        """Do what was submitted, checkpoint, end the thread; idempotent. Later operations raise."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _submit(self, operation: Callable[[sqlite3.Connection], T], *, writes: bool) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"{self.path} is closed")
            self._inbox.put(_Operation(run=operation, writes=writes, loop=loop, future=future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"sqlite {self.path.name}", daemon=True)
                self._thread.start()
        return future

    # ------------------------------------------------------------ the file's thread

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        for batch in self._batches():
            try:
                if connection is None:
                    connection = self._patiently(self._open)
                self._run_batch(connection, batch)
            except Exception as error:  # the supervision boundary of the thread: whatever failed, callers are told
                for operation in batch:
                    operation.error = self._named(error)
            if connection is not None and self._committed:
                self._committed = False
                self._notify()
                self._resolve(batch)
                self._checkpoint(connection)
            else:
                self._resolve(batch)
        if connection is not None:
            # The last connection of all processes checkpoints and removes the -wal file here.
            connection.close()

    def _batches(self) -> Iterator[list[_Operation]]:
        """What waits, together, until the closing mark."""
        closing = False
        while not closing:
            batch: list[_Operation] = []
            item = self._inbox.get()
            with contextlib.suppress(Empty):
                while item is not None:
                    if not item.future.cancelled():
                        batch.append(item)
                    if len(batch) >= _MAX_BATCH:
                        break
                    item = self._inbox.get_nowait()
            closing = item is None
            if batch:
                yield batch

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=1.0, isolation_level=None)
        try:
            connection.executescript(_PRAGMAS)
            connection.executescript(f"BEGIN IMMEDIATE; {self._schema} COMMIT;")
            # From here on `_begin` is what waits: SQLite's own pauses (1, 2, 5, 10 ... ms) cost a busy queue its speed.
            connection.execute("PRAGMA busy_timeout=0")
        except BaseException:
            connection.close()
            raise
        return connection

    def _run_batch(self, connection: sqlite3.Connection, batch: list[_Operation]) -> None:
        """All of `batch` in one transaction; raises if the transaction as a whole failed."""
        writes = any(operation.writes for operation in batch)
        self._begin(connection, writes=writes)
        try:
            for operation in batch:
                self._run_one(connection, operation)
            connection.execute("COMMIT")
        except BaseException:
            # SQLite ends a transaction by itself after some errors (a full disk).
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if writes:
            self._committed = True

    def _notify(self) -> None:
        if self._after_commit is None:
            return
        try:
            self._after_commit()
        except OSError as error:
            # What was written stays written: a wake-up that fails costs its receiver a timer's tick.
            logger.warning("nobody could be woken after a commit to %s: %s", self.path, error)

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Bring a large -wal file back into the database."""
        try:
            if os.stat(self._wal).st_size < _CHECKPOINT_BYTES:
                return
            connection.execute(f"PRAGMA busy_timeout={int(_CHECKPOINT_WAIT_S * 1000)}")
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                connection.execute("PRAGMA busy_timeout=0")
        except (sqlite3.OperationalError, OSError) as error:
            # Nothing is lost: the next commit tries again, and a disk that fails tells the next caller.
            logger.warning("%s could not be checkpointed: %s", self.path, error)

    def _begin(self, connection: sqlite3.Connection, *, writes: bool) -> None:
        """Start a transaction that can't meet SQLITE_BUSY any more."""

        def begin() -> None:
            if writes:
                connection.execute("BEGIN IMMEDIATE")
                return
            connection.execute("BEGIN")
            try:
                # Takes the snapshot, which may meet another process that recovers the file after a crash.
                connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
            except sqlite3.OperationalError:
                connection.execute("ROLLBACK")
                raise

        self._patiently(begin)

    def _patiently(self, action: Callable[[], T]) -> T:
        """Try until the lock is free, `busy_s` at most; the only retry of this file's operations."""
        begun = time.monotonic()
        pause_s, told = _FIRST_RETRY_S, False
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                waited_s = time.monotonic() - begun
                if _primary_code(error) != sqlite3.SQLITE_BUSY or waited_s > self._busy_s:
                    raise
                if waited_s > _LONG_WAIT_S and not told:
                    told = True
                    logger.warning("%s is locked by another process, which may be paused; waiting", self.path)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _run_one(self, connection: sqlite3.Connection, operation: _Operation) -> None:
        if operation.writes:
            connection.execute("SAVEPOINT operation")
        try:
            operation.result = operation.run(connection)
        except Exception as error:  # the operation's exception belongs to its caller, whatever it is
            if not connection.in_transaction:
                raise
            operation.error = self._named(error)
            if operation.writes:
                connection.execute("ROLLBACK TO operation")
        if operation.writes:
            connection.execute("RELEASE operation")

    def _named(self, error: Exception) -> Exception:
        """The error in the words of the port: what the file could not do, and why."""
        primary = _primary_code(error)
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return RecordCorrupt(f"{self.path} is no intact SQLite file: {error}")
        if primary == sqlite3.SQLITE_BUSY:
            return BackendUnavailable(f"{self.path} was locked by another process for {self._busy_s:g} s")
        if primary == sqlite3.SQLITE_FULL:
            return BackendUnavailable(f"{self.path} can't grow: the disk is full; free some space and try again")
        if primary in _UNAVAILABLE or isinstance(error, OSError):
            return BackendUnavailable(f"{self.path} can't be used: {error}")
        return error

    def _resolve(self, batch: list[_Operation]) -> None:
        """Tell the callers: one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
        for operation in batch:
            by_loop.setdefault(operation.loop, []).append(operation)
        for loop, operations in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_results, operations)
            except RuntimeError:
                # The loop ended while its operations were under way: nobody is left to be told.
                if not loop.is_closed():
                    raise


def _primary_code(error: Exception) -> int | None:
    """SQLite's result code without its extension; None for an error that has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def _set_results(operations: list[_Operation]) -> None:
    for operation in operations:
        if operation.future.done():
            continue
        if operation.error is None:
            operation.future.set_result(operation.result)
        else:
            operation.future.set_exception(operation.error)
