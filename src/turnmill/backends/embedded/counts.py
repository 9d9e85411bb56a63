"""What a file holds, counted: the messages of a queue, the samples of a run."""

import sqlite3

from turnmill.ports import QueueCounts
from turnmill.records import Purpose, SampleState

# Message ids are times of sending, in microseconds. Below this they are of an earlier build, which counted from 1.
FIRST_TIMED_ID = 1_000_000


def count(connection: sqlite3.Connection, now: float) -> QueueCounts:
    """What `connection` sees at `now`, a time of the queue's clock. Messages behind their group count as available."""
    total, oldest, dead = connection.execute(
        "SELECT (SELECT count(*) FROM messages), (SELECT min(id) FROM messages), (SELECT count(*) FROM dead)"
    ).fetchone()
    # What was hidden later than now was hidden before the machine was started, and is there again.
    hidden, leased = connection.execute(
        "SELECT count(*), count(token) FROM messages WHERE state = 2 AND visible_at > ?1 AND hidden_at <= ?1", (now,)
    ).fetchone()
    has_totals = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'totals'").fetchone() is not None
    sent = connection.execute("SELECT num_sent FROM totals").fetchone() if has_totals else None
    return QueueCounts(
        available=total - hidden,
        in_flight=leased,
        delayed=hidden - leased,
        dead=dead,
        oldest_age_s=_age_s(oldest, now),
        num_sent=sent[0] if sent else (0 if has_totals else None),
    )


def _age_s(oldest: int | None, now: float) -> float | None:
    """Seconds since the message of this id was sent; None for no message, and for one of another time of the clock."""
    if oldest is None or oldest < FIRST_TIMED_ID or (age_s := now - oldest / 1e6) < -1.0:
        return None
    return max(0.0, age_s)


def count_samples(connection: sqlite3.Connection) -> dict[tuple[Purpose, SampleState], int]:
    """How many samples there are of each purpose in each state: reads all of them, though only as far as needed."""
    rows = connection.execute(
        "SELECT CAST(value AS TEXT) ->> 'purpose', CAST(value AS TEXT) ->> 'state', count(*) FROM records GROUP BY 1, 2"
    )
    return {(Purpose(purpose), SampleState(state)): number for purpose, state, number in rows}
