"""Group commit on one SQLite file."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from turnmill.backends.embedded.files import write_atomically
from turnmill.backends.embedded.sqlite import Database
from turnmill.errors import BackendUnavailable, RecordCorrupt

SCHEMA = "CREATE TABLE IF NOT EXISTS items (name TEXT PRIMARY KEY, body BLOB);"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "items.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database(path, SCHEMA)
    yield database
    database.close()


def insert(connection: sqlite3.Connection, name: str) -> str:
    connection.execute("INSERT INTO items VALUES (?, x'')", (name,))
    return name


def names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM items ORDER BY name")]


def fail_after_insert(connection: sqlite3.Connection) -> None:
    insert(connection, "half done")
    raise ValueError("the operation's own error")


async def locked(path: Path, database: Database) -> sqlite3.Connection:
    """Another connection, which holds the write lock of the file."""
    await database.write(lambda connection: None)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


async def test_operations_that_wait_together_share_one_commit(path: Path) -> None:
    commits: list[int] = []
    database = Database(path, SCHEMA)
    database.after_commit.append(lambda: commits.append(1))
    other = await locked(path, database)
    commits.clear()
    first = database.write(lambda connection: insert(connection, "first"))
    # The thread waits for the lock with the first one; the others gather behind it.
    await asyncio.sleep(0.05)
    others = [database.write(lambda connection, name=f"{n:02d}": insert(connection, name)) for n in range(50)]  # type: ignore[misc]
    other.execute("COMMIT")
    other.close()
    assert await first == "first"
    assert await asyncio.gather(*others) == [f"{n:02d}" for n in range(50)]
    assert len(commits) == 2
    database.close()


async def test_an_operation_that_raises_fails_alone(path: Path, database: Database) -> None:
    other = await locked(path, database)
    waiting: list[asyncio.Future[Any]] = [
        database.write(lambda connection: insert(connection, "before")),
        database.write(lambda connection: insert(connection, "a")),
        database.write(fail_after_insert),
        database.write(lambda connection: insert(connection, "a")),
        database.write(lambda connection: insert(connection, "b")),
    ]
    other.execute("COMMIT")
    other.close()
    before, a, failed, duplicate, b = await asyncio.gather(*waiting, return_exceptions=True)
    assert (before, a, b) == ("before", "a", "b")
    assert isinstance(failed, ValueError)
    assert isinstance(duplicate, sqlite3.IntegrityError)
    assert await database.read(names) == ["a", "b", "before"]


async def test_a_read_sees_the_writes_submitted_before_it(database: Database) -> None:
    write = database.write(lambda connection: insert(connection, "a"))
    read = database.read(names)
    assert await read == ["a"]
    assert await write == "a"


async def test_a_read_needs_no_lock(path: Path, database: Database) -> None:
    other = await locked(path, database)
    assert await database.read(names) == []
    other.close()


async def test_an_operation_waits_for_the_lock_of_another_process(path: Path, database: Database) -> None:
    other = await locked(path, database)
    writing = database.write(lambda connection: insert(connection, "a"))
    await asyncio.sleep(0.1)
    assert not writing.done()
    other.execute("COMMIT")
    other.close()
    assert await writing == "a"


async def test_a_lock_that_is_never_given_back_makes_the_backend_unavailable(path: Path) -> None:
    database = Database(path, SCHEMA, busy_s=0.1)
    other = await locked(path, database)
    with pytest.raises(BackendUnavailable, match=r"items\.db was locked by another process for 0\.1 s"):
        await database.write(lambda connection: insert(connection, "a"))
    other.execute("COMMIT")
    other.close()
    assert await database.write(lambda connection: insert(connection, "a")) == "a"
    database.close()


async def test_a_full_disk_makes_the_backend_unavailable_and_loses_nothing(database: Database) -> None:
    await database.write(lambda connection: insert(connection, "a"))
    # SQLite's own limit raises the same error as a disk without space.
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count=10").fetchall())
    with pytest.raises(BackendUnavailable, match="the disk is full"):
        await database.write(lambda connection: connection.execute("INSERT INTO items VALUES ('b', zeroblob(1000000))"))
    assert await database.read(names) == ["a"]
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count=100000").fetchall())
    assert await database.write(lambda connection: insert(connection, "b")) == "b"


async def test_a_file_that_is_no_database_is_called_corrupt(tmp_path: Path) -> None:
    write_atomically(tmp_path / "items.db", b"this is no database" * 1000)
    database = Database(tmp_path / "items.db", SCHEMA)
    with pytest.raises(RecordCorrupt, match=r"items\.db is no intact SQLite file"):
        await database.read(names)
    database.close()


async def test_a_folder_that_cannot_be_made_makes_the_backend_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    database = Database(tmp_path / "file" / "items.db", SCHEMA)
    with pytest.raises(BackendUnavailable, match=r"items\.db can't be used"):
        await database.read(names)
    database.close()


async def test_closing_does_what_was_submitted_and_leaves_one_file(path: Path, database: Database) -> None:
    writing = database.write(lambda connection: insert(connection, "a"))
    database.close()
    database.close()
    assert await writing == "a"
    assert [file.name for file in path.parent.iterdir()] == ["items.db"]
    with pytest.raises(BackendUnavailable, match="is closed"):
        await database.write(lambda connection: insert(connection, "b"))


async def test_opening_and_closing_alone_creates_nothing(path: Path) -> None:
    database = Database(path, SCHEMA)
    assert not database.exists
    database.close()
    assert not path.parent.exists()


async def test_the_log_of_writes_is_brought_back_before_it_grows_large(path: Path, database: Database) -> None:
    for number in range(40):
        await database.write(
            lambda connection, number=number: (
                connection.execute(  # type: ignore[misc]
                    "INSERT INTO items VALUES (?, zeroblob(1000000))", (str(number),)
                ).rowcount
            )
        )
    # Behind everything that the thread does after the last commit.
    await database.read(names)
    assert path.with_name("items.db-wal").stat().st_size < 20_000_000


async def test_a_cancelled_caller_does_not_disturb_the_others_of_its_batch(path: Path, database: Database) -> None:
    running, go_on = threading.Event(), threading.Event()

    def slow(connection: sqlite3.Connection) -> str:
        running.set()
        go_on.wait()
        return insert(connection, "slow")

    other = await locked(path, database)
    first = database.write(lambda connection: insert(connection, "first"))
    await asyncio.sleep(0.05)
    cancelled, neighbour = database.write(slow), database.write(lambda connection: insert(connection, "neighbour"))
    # To the thread with it, before the lock is free: on the loop it would stop this test.
    await asyncio.sleep(0.05)
    other.execute("COMMIT")
    other.close()
    await asyncio.to_thread(running.wait)
    cancelled.cancel()
    go_on.set()
    assert (await first, await neighbour) == ("first", "neighbour")


def test_it_serves_uvloop_and_one_loop_after_another(path: Path) -> None:
    database = Database(path, SCHEMA)

    async def use(name: str) -> list[str]:
        await database.write(lambda connection: insert(connection, name))
        return await database.read(names)

    assert uvloop.run(use("a")) == ["a"]
    assert asyncio.run(use("b")) == ["a", "b"]
    assert uvloop.run(use("c")) == ["a", "b", "c"]
    database.close()


def test_a_loop_that_ended_with_operations_under_way_stops_nobody(path: Path) -> None:
    database = Database(path, SCHEMA)

    async def leave() -> None:
        other = await locked(path, database)
        database.write(lambda connection: insert(connection, "a"))
        others.append(other)

    others: list[sqlite3.Connection] = []
    asyncio.run(leave())
    others[0].execute("COMMIT")
    others[0].close()

    async def look() -> list[str]:
        return await database.read(names)

    assert asyncio.run(look()) == ["a"]
    database.close()
