"""A small database in memory, made for one conversation, and queries that nobody vouches for.

    tables of the task -> Database -> names, columns, results as text | QueryError

The queries come from a model, so they may be anything. What holds them: an authorizer that knows reading only, SQLite's
own limits on sizes, and a budget of steps and seconds. Nothing on disk is reached, and nothing is ever changed.
"""

import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = str | int | float | None

MAX_ROWS = 20
MAX_CHARACTERS = 1000
# Instructions of SQLite's virtual machine that a query may take, and how many of them pass between two looks at it.
MAX_STEPS = 100_000
_STEPS_A_LOOK = 1_000
# Of the processor: a busy machine is no fault of the query.
MAX_SECONDS = 1.0

_LIMITS = {
    # Of a text, a blob or a row, in bytes: bounds memory together with the steps.
    sqlite3.SQLITE_LIMIT_LENGTH: 4_000,
    # Of the query, in bytes. Preparing one is not counted in steps.
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 10_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
    sqlite3.SQLITE_LIMIT_COLUMN: 50,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 10,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# A common table expression is copied wherever it is named, and the copies in it are: a few dozen characters are enough
# to keep SQLite preparing for hours, which nothing can interrupt.
_NAMED_SUBQUERY = re.compile(r"\bwith\b", re.IGNORECASE)
_READING = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ))
_FUNCTIONS = frozenset(
    "abs avg coalesce count glob group_concat ifnull iif instr length like lower ltrim max min nullif rank replace "
    "round row_number rtrim substr substring sum total trim typeof upper".split()
)


class QueryError(Exception):
    """Why a query has no result; its text is what the model is told."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one table holds."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


class Database:
    """Raises `sqlite3.Error` or `ValueError` for tables that SQLite can't hold. To be closed."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            for name, table in tables.items():
                self._fill(name, table)
        except BaseException:
            self._connection.close()
            raise
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(_authorize)

    def close(self) -> None:
        self._connection.close()

    def list_tables(self) -> str:
        return ", ".join(self._tables)

    def describe_table(self, name: str) -> str:
        """The columns; raises `QueryError` for a table that is not there."""
        if name not in self._tables:
            raise QueryError(f"no such table: {name[:100]}")
        return ", ".join(self._tables[name].columns)

    def run(self, query: str) -> str:
        """One line a row; raises `QueryError` where SQLite refuses the query or a limit ends it."""
        if _NAMED_SUBQUERY.search(query):
            raise QueryError("WITH is not allowed")
        watch = _Watch()
        self._connection.set_progress_handler(watch.is_over, _STEPS_A_LOOK)
        try:
            cursor = self._connection.execute(query)
            rows = cursor.fetchmany(MAX_ROWS + 1)
            cursor.close()
        except MemoryError as error:
            # What SQLite calls it when a program has more instructions than the limit allows.
            raise QueryError("the query is too large") from error
        # Not only SQLite's: a text that holds NUL or half a character is refused by Python.
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            reason = "the query takes too long" if watch.has_ended else str(error)
            raise QueryError(reason) from error
        return _text(rows)

    def _fill(self, name: str, table: Table) -> None:
        columns = ", ".join(map(_quoted, table.columns))
        self._connection.execute(f"CREATE TABLE {_quoted(name)} ({columns})")
        places = ", ".join("?" for _ in table.columns)
        self._connection.executemany(f"INSERT INTO {_quoted(name)} VALUES ({places})", table.rows)


class _Watch:
    """The budget of one query."""

    def __init__(self) -> None:
        self._looks_left = MAX_STEPS // _STEPS_A_LOOK
        self._deadline = time.thread_time() + MAX_SECONDS
        self.has_ended = False

    def is_over(self) -> int:
        """Not 0 ends the query."""
        self._looks_left -= 1
        self.has_ended = self._looks_left < 0 or time.thread_time() > self._deadline
        return int(self.has_ended)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Whether a statement may do this while it is prepared; a function's name is the second argument."""
    is_known_function = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS
    return sqlite3.SQLITE_OK if action in _READING or is_known_function else sqlite3.SQLITE_DENY


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(rows: Sequence[Sequence[Value | bytes]]) -> str:
    if not rows:
        return "no rows"
    lines = [" | ".join(map(_cell, row)) for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        lines.append("... more rows")
    text = "\n".join(lines)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ... more text"


def _cell(value: Value | bytes) -> str:
    if value is None:
        return "NULL"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
