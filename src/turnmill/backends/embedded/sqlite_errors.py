"""SQLite's errors in the words of the ports: what the file could not do, and why."""

import sqlite3
from pathlib import Path

from turnmill.errors import BackendUnavailable, RecordCorrupt

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


def primary_code(error: Exception) -> int | None:
    """SQLite's result code without its extension; None for an error that has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def named_error(error: Exception, path: Path, *, busy_s: float) -> Exception:
    """The error of an operation on `path`, which waited for its lock for `busy_s`; one of its own stays as it is."""
    primary = primary_code(error)
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return RecordCorrupt(f"{path} is no intact SQLite file: {error}")
    if primary == sqlite3.SQLITE_BUSY:
        return BackendUnavailable(f"{path} was locked by another process for {busy_s:g} s")
    if primary == sqlite3.SQLITE_FULL:
        return BackendUnavailable(f"{path} can't grow: the disk is full; free some space and try again")
    if primary in _UNAVAILABLE or isinstance(error, OSError):
        return BackendUnavailable(f"{path} can't be used: {error}")
    return error
