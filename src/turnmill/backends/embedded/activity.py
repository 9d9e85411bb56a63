"""What a run's stores say about whether it moves, for those who look: nothing on disk changes and nobody has to wait.

The figures of calls and samples are cheap however long the run is: the newest call, and the samples of the last rows.
"""

import sqlite3
import time
from functools import partial
from pathlib import Path

from turnmill.backends.embedded.counts import count
from turnmill.backends.embedded.looking import look
from turnmill.ports import BatchActivity, CallActivity, QueueActivity, QueueCounts, SampleActivity, Stored

# A message that was received that often was given up or left behind by as many consumers: two may be an accident.
OFTEN = 3
# Samples are looked at from a row on that moves by so many at a time, so that counts of two looks compare.
_WINDOW_ROWS = 2048
_TEXT = "cast(value AS TEXT)"
_NEWEST_CALL = f"SELECT rowid, json_extract({_TEXT}, '$.created_at') FROM records ORDER BY rowid DESC LIMIT 1"
_BY_STATE = (
    f"SELECT json_extract({_TEXT}, '$.state'), count(*), count(json_extract({_TEXT}, '$.reward'))"
    " FROM records WHERE rowid > ? GROUP BY 1"
)
_NEWEST_INVALID = (
    f"SELECT key, value, version FROM records WHERE rowid > ? AND json_extract({_TEXT}, '$.state') = 'invalid'"
    " ORDER BY rowid DESC LIMIT 1"
)
# Batches are only written while they are new; later writes (given up for an earlier step) are by who has the run.
_LAST_BATCHES = (
    f"SELECT max(rowid), sum(version), total(json_extract({_TEXT}, '$.state') = 'recorded')"
    " FROM records WHERE rowid > (SELECT max(rowid) FROM records) - 16"
)


def look_at_queue(path: Path) -> QueueActivity:
    """The queue in this file, empty where there is none yet; raises `BackendUnavailable`."""
    nothing = QueueActivity(counts=QueueCounts(available=0, in_flight=0, delayed=0, dead=0, oldest_age_s=None))
    return look(path, "dead", partial(_queue, now=time.monotonic())) or nothing


def look_at_recent_samples(path: Path) -> SampleActivity:
    """As `look_at_queue`, of the samples in this file."""
    return look(path, "records", _samples) or SampleActivity()


def look_at_calls(path: Path) -> CallActivity:
    """As `look_at_queue`, of the calls in this file."""
    return look(path, "records", _newest_call) or CallActivity()


def look_at_batches(path: Path) -> BatchActivity:
    """As `look_at_queue`, of the batches in this file."""
    return look(path, "records", _last_batches) or BatchActivity()


def _queue(connection: sqlite3.Connection, *, now: float) -> QueueActivity:
    (renewed,) = connection.execute(
        "SELECT max(hidden_at) FROM messages WHERE state = 2 AND token IS NOT NULL AND visible_at > ?1"
        " AND hidden_at <= ?1",
        (now,),
    ).fetchone()
    received = connection.execute(
        "SELECT grp, num_receives FROM messages ORDER BY num_receives DESC LIMIT 1"
    ).fetchone()
    (num_often,) = connection.execute("SELECT count(*) FROM messages WHERE num_receives >= ?", (OFTEN,)).fetchone()
    return QueueActivity(
        num_often=num_often,
        counts=count(connection, now),
        renewed_ago_s=None if renewed is None else now - renewed,
        most_received=tuple(received) if received and received[1] else None,
    )


def _samples(connection: sqlite3.Connection) -> SampleActivity:
    (last,) = connection.execute("SELECT coalesce(max(rowid), 0) FROM records").fetchone()
    after = max(0, last // _WINDOW_ROWS - 1) * _WINDOW_ROWS
    rows = connection.execute(_BY_STATE, (after,)).fetchall()
    invalid = connection.execute(_NEWEST_INVALID, (after,)).fetchone()
    return SampleActivity(
        by_state={state: num for state, num, _ in rows},
        num_rewarded=after + sum(rewarded for _, _, rewarded in rows),
        invalid=Stored(key=invalid[0], value=invalid[1], version=invalid[2]) if invalid else None,
    )


def _newest_call(connection: sqlite3.Connection) -> CallActivity:
    found = connection.execute(_NEWEST_CALL).fetchone()
    return CallActivity(row=found[0], created_at=found[1]) if found else CallActivity()


def _last_batches(connection: sqlite3.Connection) -> BatchActivity:
    row, num_writes, num_recorded = connection.execute(_LAST_BATCHES).fetchone()
    return BatchActivity(row=row or 0, num_writes=num_writes or 0, has_recorded=num_recorded > 0)
