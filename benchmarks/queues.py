"""How many messages pass through a queue, from one process to another?

    python -m benchmarks.queues [--quick]

One producer and one consumer process, 2 KB a message, ten at a time where the queue can. Each is leased and then
acknowledged. Ours adds groups, receipts and deduplication to what the SQLite by hand does.
"""

import argparse
import asyncio
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import (
    PEER_PYTHON,
    PEERS,
    ROOT,
    Claim,
    arguments,
    emit_ratio,
    emit_skip,
    has_peers,
    interleave,
)
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.ports import Message
from turnmill.wiring.event_loop import run_loop

NAME = "queues"
BATCH = 10
SIZE = 2048
OURS, BY_HAND, LITEQUEUE, REDIS = "SqliteQueue", "SQLite by hand", "litequeue", "Redis streams"


# ---------------------------------------------------------------- the two that need no peer


async def produce_ours(path: Path, total: int) -> None:
    queue = SqliteQueue(path)
    bodies = [secrets.token_bytes(SIZE) for _ in range(BATCH)]
    begin()
    for start in range(0, total, BATCH):
        await queue.send(
            [
                Message(body=body, group=f"calls/{start + i}", dedup_id=f"calls/{start + i}/0")
                for i, body in enumerate(bodies)
            ]
        )
    queue.close()


async def consume_ours(path: Path, total: int) -> None:
    queue = SqliteQueue(path)
    begin()
    left = total
    while left:
        leased = await queue.lease(max_messages=BATCH, lease_s=30.0, wait_s=5.0)
        left -= sum(await queue.ack([item.receipt for item in leased]))
    queue.close()


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("CREATE TABLE IF NOT EXISTS q (id INTEGER PRIMARY KEY, body BLOB, visible_at REAL DEFAULT 0)")
    return connection


async def produce_by_hand(path: Path, total: int) -> None:
    connection = _open(path)
    rows = [(secrets.token_bytes(SIZE),) for _ in range(BATCH)]
    begin()
    for _ in range(0, total, BATCH):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO q (body) VALUES (?)", rows)
        connection.execute("COMMIT")


async def consume_by_hand(path: Path, total: int) -> None:
    connection = _open(path)
    begin()
    left = total
    while left:
        now = time.time()
        connection.execute("BEGIN IMMEDIATE")
        rows = connection.execute(
            "SELECT id, body FROM q WHERE visible_at <= ? ORDER BY id LIMIT ?", (now, BATCH)
        ).fetchall()
        connection.executemany("UPDATE q SET visible_at = ? WHERE id = ?", [(now + 30, row[0]) for row in rows])
        connection.execute("COMMIT")
        if not rows:
            await asyncio.sleep(0.001)
            continue
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("DELETE FROM q WHERE id = ?", [(row[0],) for row in rows])
        connection.execute("COMMIT")
        left -= len(rows)


ROLES = {
    (OURS, "produce"): produce_ours,
    (OURS, "consume"): consume_ours,
    (BY_HAND, "produce"): produce_by_hand,
    (BY_HAND, "consume"): consume_by_hand,
}


def begin() -> None:
    """In a role: say that all is open, and wait for the word to start."""
    print("ready", flush=True)
    sys.stdin.readline()


# ---------------------------------------------------------------- driving two processes


def measure(kind: str, total: int) -> float:
    """Messages a second from the word to start until the last one is acknowledged."""
    with tempfile.TemporaryDirectory() as folder, _place(kind, Path(folder)) as place, ExitStack() as stack:
        # One after the other: two processes that make a file at once meet its lock.
        roles = [stack.enter_context(_role(kind, role, place, total)) for role in ("consume", "produce")]
        begun = time.perf_counter()
        for process in roles:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        consumer, producer = roles
        assert consumer.stdout is not None
        line = consumer.stdout.readline()
        seconds = time.perf_counter() - begun
        if line != "done\n" or producer.wait() or consumer.wait():
            raise RuntimeError(f"{kind}: a process failed")
    return total / seconds


@contextmanager
def _role(kind: str, role: str, place: str, total: int) -> Iterator["subprocess.Popen[str]"]:
    """A producer or consumer that is ready to start; ended afterwards, whatever happened."""
    if kind in (OURS, BY_HAND):
        command = [sys.executable, "-m", "benchmarks.queues"]
    else:
        command = [str(PEER_PYTHON), str(PEERS / "queue_peers.py")]
    with subprocess.Popen(
        [*command, "--role", role, "--kind", kind, "--place", place, "--total", str(total)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{kind}: the process to {role} ended before it was ready")
            yield process
        finally:
            process.kill()


@contextmanager
def _place(kind: str, folder: Path) -> Iterator[str]:
    """Where the queue is: a file, or the port of a Redis server with an append-only file."""
    if kind != REDIS:
        yield str(folder / "queue.db")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    # Survives a killed client and a killed server's process, as WAL with synchronous=NORMAL does.
    server = subprocess.Popen(
        [*command, "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"], stdout=subprocess.DEVNULL
    )
    try:
        yield str(port)
    finally:
        server.terminate()
        server.wait()


def compare(args: argparse.Namespace) -> None:
    total = 5000 if args.quick else 50000
    subjects: dict[str, Callable[[], float]] = {OURS: partial(measure, OURS, total)}
    subjects[BY_HAND] = partial(measure, BY_HAND, total)
    if not has_peers():
        emit_skip(NAME, f"{LITEQUEUE}, {REDIS}", "no .venv-peers: run `make bench-peers`")
    else:
        subjects[LITEQUEUE] = partial(measure, LITEQUEUE, total // 5)
        if shutil.which("redis-server"):
            subjects[REDIS] = partial(measure, REDIS, total)
        else:
            emit_skip(NAME, REDIS, "redis-server is not installed")
    case = f"2 processes, {SIZE} bytes, batch {BATCH}"
    figures, met = interleave(NAME, case, "messages/s", subjects, rounds=2 if args.quick else 5)
    bounds = {LITEQUEUE: 1.0}
    for peer in subjects:
        if peer != OURS:
            claim = Claim(benchmark=NAME, text=case, unit="messages/s", ours=OURS, peer=peer, at_least=bounds.get(peer))
            emit_ratio(claim, figures[OURS], figures[peer], met)


def main() -> None:
    parser = arguments("How many messages pass through a queue?")
    for name in ("role", "kind", "place", "total"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is None:
        compare(args)
        return
    run_loop(ROLES[args.kind, args.role](Path(args.place), int(args.total)))
    print("done", flush=True)


if __name__ == "__main__":
    main()
