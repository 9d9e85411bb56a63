"""Reading a SQLite file of a deployment without a trace: nothing on disk changes and no writer ever waits.

A `Database` is no way to look: opening one creates the tables, under the write lock, and closing the last one brings
the -wal file back and removes it. Here the file is opened read-only.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from turnmill.backends.embedded.sqlite_errors import named_error, primary_code
from turnmill.errors import BackendUnavailable

T = TypeVar("T")
# A reader meets a lock only while a process recovers the file after a crash, or while the last one that has it closes.
_TRIES, _PAUSE_S = 50, 0.01
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN)


def look(path: Path, table: str, operation: Callable[[sqlite3.Connection], T]) -> T | None:
    """What `operation`, which only reads, finds on one snapshot of the file; None where it has no such table yet.

    Raises `BackendUnavailable` for a file that can't be read or has other columns, `RecordCorrupt` for one that is no
    SQLite file.
    """
    tries = 0
    while _exists(path):
        tries += 1
        try:
            is_steady, found = _look(path, table, operation)
        except sqlite3.Error as error:
            if primary_code(error) == sqlite3.SQLITE_ERROR:
                raise BackendUnavailable(f"{path} was made by another build, which laid it out otherwise") from error
            # With `immutable` a file that is taken into use in between may look torn: look again before saying so.
            if tries >= _TRIES or (primary_code(error) not in _BUSY and tries > 1):
                raise named_error(error, path, busy_s=_TRIES * _PAUSE_S) from error
        else:
            if is_steady:
                return found
            if tries >= _TRIES:
                raise BackendUnavailable(f"{path} is opened and closed all the time; look again")
        time.sleep(_PAUSE_S)
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise named_error(error, path, busy_s=0.0) from error


def _look(path: Path, table: str, operation: Callable[[sqlite3.Connection], T]) -> tuple[bool, T | None]:
    """What was found, and whether it counts: the file was not taken into use in between."""
    wal = path.with_name(path.name + "-wal")
    in_use = wal.exists()
    # Without a -wal file nobody has it open and the file is all: `immutable` then creates none of the files beside it.
    mode = "mode=ro" if in_use else "mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=0)) as connection:
        connection.execute("BEGIN")
        tables = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
        found = None if tables is None else operation(connection)
    return in_use or not wal.exists(), found
