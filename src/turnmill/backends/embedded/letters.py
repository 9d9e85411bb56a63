"""The dead letters in a queue's file.

A letter's id is `<row>.<when it died, in microseconds>`: SQLite gives the row of a letter that is gone to another one.
"""

import sqlite3
from collections.abc import Sequence

from turnmill.ports import DeadLetter


def letters_in(connection: sqlite3.Connection, *, limit: int) -> list[DeadLetter]:
    """The oldest `limit`, all where it is negative."""
    rows = connection.execute(
        "SELECT id, body, grp, num_receives, dead_at FROM dead ORDER BY id LIMIT ?", (limit,)
    ).fetchall()
    return [
        DeadLetter(letter_id=_id_of(row, dead_at), body=body, group=group, num_receives=num_receives, dead_at=dead_at)
        for row, body, group, num_receives, dead_at in rows
    ]


def exhume(connection: sqlite3.Connection, letter_ids: Sequence[str] | None) -> list[tuple[str, bytes]]:
    """Remove the letters of these ids, or all; their (group, body), oldest first. Unknown ids are passed over."""
    wanted = None if letter_ids is None else set(letter_ids)
    found: list[tuple[str, bytes]] = []
    for row, group, body, dead_at in connection.execute(
        "SELECT id, grp, body, dead_at FROM dead ORDER BY id"
    ).fetchall():
        if wanted is None or _id_of(row, dead_at) in wanted:
            connection.execute("DELETE FROM dead WHERE id = ?", (row,))
            found.append((group, body))
    return found


def _id_of(row: int, dead_at: float) -> str:
    return f"{row}.{round(dead_at * 1e6)}"
