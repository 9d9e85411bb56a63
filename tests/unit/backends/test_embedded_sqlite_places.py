"""Where the operations on one SQLite file run: on the event loop, or in its thread when it has to be waited for."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnmill.backends.embedded.sqlite import Database
from turnmill.errors import BackendUnavailable

SCHEMA = "CREATE TABLE IF NOT EXISTS items (id INTEGER PRIMARY KEY, name TEXT UNIQUE);"
# Holds the write lock from the line that it prints to the line that it reads.
LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
"""


class Locker:
    """Another process that holds the file's write lock."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOCKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "locked\n"

    def unlock(self) -> None:
        self._process.communicate("\n")
        assert self._process.returncode == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "items.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database(path, SCHEMA)
    yield database
    database.close()


def insert(connection: sqlite3.Connection, name: str) -> str:
    """Inserts and tells in which thread."""
    connection.execute("INSERT INTO items (name) VALUES (?)", (name,))
    return threading.current_thread().name


def in_order(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM items ORDER BY id")]


def write(database: Database, name: str) -> "asyncio.Future[str]":
    return database.write(lambda connection: insert(connection, name))


async def test_the_file_is_opened_in_its_thread_and_used_on_the_loop(database: Database) -> None:
    here = threading.current_thread().name
    assert await write(database, "first") == "sqlite items.db"
    assert await write(database, "second") == here
    assert await database.read(lambda connection: threading.current_thread().name) == here


async def test_while_another_process_has_the_lock_operations_wait_in_the_thread_and_in_order(
    path: Path, database: Database
) -> None:
    here = threading.current_thread().name
    await write(database, "opened")
    locker = Locker(path)
    waiting = [write(database, f"waiting {number}") for number in range(3)]
    # Several rounds of the loop, which goes on meanwhile.
    for number in range(3):
        await asyncio.sleep(0.01)
        waiting.append(write(database, f"behind {number}"))
    await asyncio.sleep(0.01)
    assert not any(future.done() for future in waiting)
    locker.unlock()
    at_once = write(database, "at once")
    assert set(await asyncio.gather(*waiting)) == {"sqlite items.db"}
    await at_once
    assert await write(database, "after") == here
    expected = ["opened", *(f"waiting {n}" for n in range(3)), *(f"behind {n}" for n in range(3)), "at once", "after"]
    assert await database.read(in_order) == expected


async def test_order_is_kept_when_operations_go_back_and_forth(path: Path, database: Database) -> None:
    await write(database, "opened")
    names, futures = ["opened"], []
    for round_ in range(3):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for number in range(40):
            names.append(f"{round_} {number}")
            futures.append(write(database, names[-1]))
            if number % 3 == 0:
                await asyncio.sleep(0)
            if number == 20:
                other.execute("COMMIT")
                other.close()
    await asyncio.gather(*futures)
    assert await database.read(in_order) == names


async def test_more_operations_than_fit_a_transaction_are_all_done_in_order(path: Path, database: Database) -> None:
    commits: list[int] = []
    database.after_commit.append(lambda: commits.append(1))
    names = [f"{number:04d}" for number in range(1300)]
    await asyncio.gather(*(write(database, name) for name in names[:1200]))
    assert len(commits) == 3
    await asyncio.gather(*(write(database, name) for name in names[1200:]))
    assert len(commits) == 4
    assert await database.read(in_order) == names


@pytest.mark.parametrize("is_locked", [False, True], ids=["on-the-loop", "in-the-thread"])
async def test_an_operation_that_raises_among_others_leaves_the_others_applied(
    path: Path, database: Database, is_locked: bool
) -> None:
    await write(database, "opened")
    locker = Locker(path) if is_locked else None

    def fail(connection: sqlite3.Connection) -> str:
        insert(connection, "half done")
        raise ValueError("the operation's own error")

    writing = [write(database, "a"), database.write(fail), write(database, "a"), write(database, "b")]
    if locker:
        await asyncio.sleep(0.01)
        locker.unlock()
    a, failed, twice, b = await asyncio.gather(*writing, return_exceptions=True)
    assert a == b == ("sqlite items.db" if is_locked else threading.current_thread().name)
    assert isinstance(failed, ValueError)
    assert isinstance(twice, sqlite3.IntegrityError)
    assert await database.read(in_order) == ["opened", "a", "b"]


async def test_ctrl_c_in_an_operation_gives_the_lock_back(path: Path, database: Database) -> None:
    await write(database, "opened")

    def interrupted(connection: sqlite3.Connection) -> None:
        insert(connection, "half done")
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()

    async def submit() -> None:
        await database.write(interrupted)

    def run() -> None:
        task = loop.create_task(submit())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    await asyncio.to_thread(run)
    other = sqlite3.connect(path, isolation_level=None, timeout=0)
    other.execute("BEGIN IMMEDIATE")
    other.close()
    assert await database.read(in_order) == ["opened"]


def test_closing_while_another_loop_is_at_work_loses_none_of_its_operations(path: Path) -> None:
    """The other loop is in the middle of its operations, and meets a lock after the closing has begun."""
    database = Database(path, SCHEMA)
    others: list[sqlite3.Connection] = []
    running, go_on, locked = threading.Event(), threading.Event(), threading.Event()
    outcome: list[int] = []

    def slow(connection: sqlite3.Connection) -> str:
        running.set()
        go_on.wait()
        return insert(connection, "slow")

    def lock() -> None:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        others.append(other)
        locked.set()

    async def work() -> None:
        await write(database, "opened")
        database.after_commit.append(lock)
        futures = [database.write(slow), *(write(database, str(number)) for number in range(600))]
        outcome.append(len(await asyncio.gather(*futures)))

    worker = threading.Thread(target=asyncio.run, args=(work(),))
    worker.start()
    running.wait()
    closer = threading.Thread(target=database.close)
    closer.start()
    while not database.closed:
        time.sleep(0.001)
    go_on.set()
    locked.wait()
    database.after_commit.clear()
    others[0].execute("COMMIT")
    others[0].close()
    worker.join()
    closer.join()
    assert outcome == [601]
    assert [file.name for file in path.parent.iterdir()] == ["items.db"]

    async def late() -> None:
        with pytest.raises(BackendUnavailable, match="is closed"):
            await write(database, "late")

    asyncio.run(late())
