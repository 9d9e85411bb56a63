"""One SQLite file: group commit on the caller's event loop, and a thread for whatever would have to wait.

    operations of one turn of the loop -> BEGIN, all of them, COMMIT -> results        the lock is free: at once, here
                                       '-> inbox -> the file's thread: the same -> one wake-up per loop   otherwise

Why on the loop: without an fsync a commit is a copy into the page cache, some ten microseconds; handing it to a thread
and back costs several times as much. Why a thread as well: opening a file, waiting for a lock that another process
holds and bringing a long -wal file back may take long, and an event loop must not. Why group commit: one transaction
costs as much as dozens of statements, so operations that arrive together share one.
"""

import asyncio
import contextlib
import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from turnmill.backends.embedded.files import disk
from turnmill.backends.embedded.sqlite_errors import named_error, primary_code
from turnmill.errors import BackendUnavailable

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Longest batch: bounds how long other processes wait for the write lock.
_MAX_BATCH = 512
# Longest wait for the lock: a process that is paused (Ctrl-Z) in the middle of a commit keeps it until it goes on.
BUSY_S = 600.0
# A wait that lasts so long is told.
_LONG_WAIT_S = 10.0
# Tries and pauses between them, in seconds, that an event loop spends on a lock: another process's transaction takes
# about as long. Longer waits are the thread's.
_TRIES_HERE, _PAUSE_HERE_S = 4, 0.0001
# Seconds between two tries of the thread: jittered, doubling from the first to the second figure.
_FIRST_RETRY_S, _LAST_RETRY_S = 0.0002, 0.01
# WAL: readers and the writer do not block each other. NORMAL: a commit survives the death of the process, not of the
# machine, and needs no fsync. The page cache is small because a process has a dozen of these files open. Some systems
# build SQLite to overwrite what is deleted with zeros; a queue deletes all that it holds, and no secret is in it.
_PRAGMAS = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA secure_delete=OFF; PRAGMA cache_size=-500;
PRAGMA wal_autocheckpoint=0;
"""
# SQLite's own checkpoint does not hold the write lock, so under steady writing from two processes it never catches up
# and the -wal file grows without end; this thread's does, at this size.
_CHECKPOINT_BYTES = 16 * 2**20
_CHECKPOINT_WAIT_S = 0.1


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

    Operations are functions on the connection. Those of one event loop run in the order of submission, on that loop or
    in the file's thread, and each is atomic: one that raises is rolled back alone, and its exception goes to its
    caller. They may run while the caller was already cancelled, and may run again if their transaction was rolled
    back, so they do nothing but SQL.
    """

    def __init__(self, path: Path, schema: str, *, busy_s: float = BUSY_S) -> None:
        self.path = path
        # Run after each commit that wrote, before callers are resolved.
        self.after_commit: list[Callable[[], None]] = []
        self._schema = schema
        self._busy_s = busy_s
        self._wal = path.with_name(path.name + "-wal")
        self._connection: sqlite3.Connection | None = None
        # Held by whoever uses the connection.
        self._using = threading.Lock()
        # Something was written since the last look at the -wal file.
        self._has_written = False
        self._inbox: SimpleQueue[list[_Operation] | None] = SimpleQueue()
        # Guards the four below; whoever holds it waits for nothing.
        self._lock = threading.Lock()
        self._pending: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
        # Lists of operations in the inbox or being run by the thread: while there are any, later ones go behind them.
        self._num_handed_over = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def exists(self) -> bool:
        """The file is there; readers ask it so that looking at nothing creates nothing."""
        with disk(self.path):
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
            is_first, self._closed = not self._closed, True
            for batch in self._pending.values():
                self._hand_over(batch)
            self._pending.clear()
        if is_first:
            # Another loop may be at work here, and hands over what it can't do: nothing may follow the closing mark.
            with self._using:
                self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ on the event loop

    def _submit(self, operation: Callable[[sqlite3.Connection], T], *, writes: bool) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        submitted = _Operation(run=operation, writes=writes, loop=loop, future=future)
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"{self.path} is closed")
            pending = self._pending.get(loop)
            if pending is None:
                self._pending[loop] = [submitted]
                # Runs after everything that is ready now: what many tasks submit at once shares a transaction.
                loop.call_soon(self._flush, loop)
            else:
                pending.append(submitted)
        return future

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run what this loop has submitted: here if nobody has to be waited for, else in the thread."""
        with self._lock:
            submitted = self._pending.pop(loop, [])
            if self._closed or not submitted:
                return
            connection = self._connection
            is_free = not self._num_handed_over and self._using.acquire(blocking=False)
            if connection is None or not is_free:
                if is_free:
                    self._using.release()
                self._hand_over(submitted)
                return
        try:
            while submitted:
                batch = [operation for operation in submitted[:_MAX_BATCH] if not operation.future.cancelled()]
                if batch and not self._run_here(connection, batch):
                    break
                submitted = submitted[_MAX_BATCH:]
                _set_results(batch)
            if submitted or self._is_long():
                with self._lock:
                    # An empty list has the thread look at the -wal file.
                    self._hand_over(submitted)
        finally:
            self._using.release()

    def _run_here(self, connection: sqlite3.Connection, batch: list[_Operation]) -> bool:
        """False when the lock is taken, and nothing was done."""
        for _ in range(_TRIES_HERE):
            try:
                self._run_batch(connection, batch)
                return True
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY:
                    self._fail(batch, error)
                    return True
            except Exception as error:  # the supervision boundary: whatever failed, callers are told
                self._fail(batch, error)
                return True
            time.sleep(_PAUSE_HERE_S)
        return False

    def _hand_over(self, batch: list[_Operation]) -> None:
        """To the thread; called with `_lock` held."""
        self._num_handed_over += 1
        self._inbox.put(batch)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"sqlite {self.path.name}", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------ the file's thread

    def _serve(self) -> None:
        for batch, num_lists in self._batches():
            with self._using:
                for start in range(0, len(batch), _MAX_BATCH):
                    self._run_patiently(batch[start : start + _MAX_BATCH])
                if self._connection is not None and (not batch or self._is_long()):
                    self._checkpoint(self._connection)
            with self._lock:
                self._num_handed_over -= num_lists
            self._resolve(batch)
        if self._connection is not None:
            # The last connection of all processes checkpoints and removes the -wal file here.
            self._connection.close()

    def _run_patiently(self, batch: list[_Operation]) -> None:
        try:
            if self._connection is None:
                self._connection = self._patiently(self._open)
            self._patiently(partial(self._run_batch, self._connection, batch))
        except Exception as error:  # the supervision boundary of the thread: whatever failed, callers are told
            self._fail(batch, error)

    def _batches(self) -> Iterator[tuple[list[_Operation], int]]:
        """What waits, together, and from how many lists, until the closing mark."""
        item: list[_Operation] | None = self._inbox.get()
        while item is not None:
            batch, num_lists = list(item), 1
            item = []
            with contextlib.suppress(Empty):
                while len(batch) < _MAX_BATCH and (item := self._inbox.get_nowait()) is not None:
                    batch += item
                    num_lists += 1
            is_closing = item is None
            yield [operation for operation in batch if not operation.future.cancelled()], num_lists
            item = None if is_closing else self._inbox.get()

    def _fail(self, batch: Sequence[_Operation], error: Exception) -> None:
        for operation in batch:
            operation.error = named_error(error, self.path, busy_s=self._busy_s)

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            connection.executescript(_PRAGMAS)
            connection.executescript(f"BEGIN IMMEDIATE; {self._schema} COMMIT;")
            # From here on this class waits: SQLite's own pauses (1, 2, 5, 10 ... ms) cost a busy queue its speed.
            connection.execute("PRAGMA busy_timeout=0")
        except BaseException:
            connection.close()
            raise
        return connection

    def _run_batch(self, connection: sqlite3.Connection, batch: list[_Operation]) -> None:
        """All of `batch` in one transaction; raises if the transaction as a whole failed.

        Operations rarely raise, so the first try goes without a savepoint for each of them.
        """
        writes = any(operation.writes for operation in batch)
        self._begin(connection, writes=writes)
        try:
            for operation in batch:
                operation.result, operation.error = operation.run(connection), None
        except Exception:  # of whichever operation: with savepoints it turns out whose it is
            self._roll_back(connection)
            self._begin(connection, writes=writes)
            try:
                for operation in batch:
                    self._run_one(connection, operation)
            except BaseException:
                self._roll_back(connection)
                raise
        except BaseException:
            # Ctrl-C on the loop's thread: the lock must not outlive the loop.
            self._roll_back(connection)
            raise
        try:
            connection.execute("COMMIT")
        except BaseException:
            self._roll_back(connection)
            raise
        if writes:
            self._has_written = True
            self._notify()

    @staticmethod
    def _roll_back(connection: sqlite3.Connection) -> None:
        # SQLite ends a transaction by itself after some errors (a full disk).
        if connection.in_transaction:
            connection.execute("ROLLBACK")

    def _notify(self) -> None:
        for ring in self.after_commit:
            try:
                ring()
            except OSError as error:
                # What was written stays written: a wake-up that fails costs its receiver a timer's tick.
                logger.warning("nobody could be woken after a commit to %s: %s", self.path, error)

    def _is_long(self) -> bool:
        """Whether the -wal file has to be brought back into the database."""
        if not self._has_written:
            return False
        self._has_written = False
        try:
            return os.stat(self._wal).st_size >= _CHECKPOINT_BYTES
        except OSError:
            # Gone, or out of reach: then the next operation tells.
            return False

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Bring the -wal file back into the database."""
        try:
            connection.execute(f"PRAGMA busy_timeout={int(_CHECKPOINT_WAIT_S * 1000)}")
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                connection.execute("PRAGMA busy_timeout=0")
        except sqlite3.Error as error:
            # Nothing is lost: a later commit tries again, and a disk or a file that fails tells the next caller.
            logger.warning("%s could not be checkpointed: %s", self.path, error)

    @staticmethod
    def _begin(connection: sqlite3.Connection, *, writes: bool) -> None:
        """Start a transaction that can't meet SQLITE_BUSY any more."""
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

    def _patiently(self, action: Callable[[], T]) -> T:
        """Try until the lock is free, `busy_s` at most; the only retry of this file's operations."""
        begun = time.monotonic()
        pause_s, told = _FIRST_RETRY_S, False
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                waited_s = time.monotonic() - begun
                if primary_code(error) != sqlite3.SQLITE_BUSY or waited_s > self._busy_s:
                    raise
                if waited_s > _LONG_WAIT_S and not told:
                    told = True
                    logger.warning("%s is locked by another process, which may be paused; waiting", self.path)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _run_one(self, connection: sqlite3.Connection, operation: _Operation) -> None:
        if operation.writes:
            connection.execute("SAVEPOINT operation")
        operation.error = None
        try:
            operation.result = operation.run(connection)
        except Exception as error:  # the operation's exception belongs to its caller, whatever it is
            if not connection.in_transaction:
                raise
            operation.error = named_error(error, self.path, busy_s=self._busy_s)
            if operation.writes:
                connection.execute("ROLLBACK TO operation")
        if operation.writes:
            connection.execute("RELEASE operation")

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


def touch(connection: sqlite3.Connection) -> None:
    """The least that is a write, to an applications' number in the header, which nothing here reads."""
    connection.execute("PRAGMA user_version = 0")


def _set_results(operations: list[_Operation]) -> None:
    for operation in operations:
        if operation.future.done():
            continue
        if operation.error is None:
            operation.future.set_result(operation.result)
        else:
            operation.future.set_exception(operation.error)
