"""Wake-ups between processes. No wait here ends by its timer: a lost wake-up would hang the test."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvloop

from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.wakeup import Bell, Waiter
from turnmill.errors import BackendUnavailable
from turnmill.ports import Leased, Message

FOREVER_S = 100_000.0
WAIT_IN_A_PROCESS = """
import asyncio, sys
from pathlib import Path
from turnmill.backends.embedded.wakeup import Waiter
async def main():
    waiter = Waiter(Path(sys.argv[1]))
    print("waiting", flush=True)
    await waiter.wait(seen=0, timeout_s=100000)
    waiter.close()
asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Longer than the path of a Unix socket may be.
    return tmp_path / ("long" * 20) / ("path" * 20) / "queue.wake"


def start_waiting(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_IN_A_PROCESS, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


def pipes(folder: Path) -> list[str]:
    return os.listdir(folder)


def test_a_ring_wakes_other_processes(folder: Path) -> None:
    processes = [start_waiting(folder) for _ in range(2)]
    Bell(folder).ring()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert pipes(folder) == []


def test_a_ring_removes_the_pipe_of_a_dead_process(folder: Path) -> None:
    process = start_waiting(folder)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(pipes(folder)) == 1
    Bell(folder).ring()
    assert pipes(folder) == []
    Bell(folder).ring()


def test_a_ring_without_anybody_is_no_error(folder: Path) -> None:
    Bell(folder).ring()


async def test_a_ring_before_the_wait_is_not_lost(folder: Path) -> None:
    waiter = Waiter(folder)
    seen = waiter.num_rings
    Bell(folder).ring()
    await waiter.wait(seen=seen, timeout_s=FOREVER_S)
    waiter.close()


async def test_a_ring_that_another_task_took_is_not_lost(folder: Path) -> None:
    waiter = Waiter(folder)
    seen_by_a_slow_task = waiter.num_rings
    Bell(folder).ring()
    await waiter.wait(seen=waiter.num_rings, timeout_s=FOREVER_S)
    await waiter.wait(seen=seen_by_a_slow_task, timeout_s=FOREVER_S)
    waiter.close()


async def test_a_full_pipe_still_wakes(folder: Path) -> None:
    waiter = Waiter(folder)
    fd = os.open(folder / pipes(folder)[0], os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            os.write(fd, bytes(65536))
    os.close(fd)
    Bell(folder).ring()
    await waiter.wait(seen=waiter.num_rings, timeout_s=FOREVER_S)
    waiter.close()


async def test_a_queue_that_is_closed_removes_the_pipes_of_dead_processes(tmp_path: Path) -> None:
    """Nobody may ring there any more: a control process that was killed, say, when the run was nearly over."""
    alive, closed = SqliteQueue(tmp_path / "q.db"), SqliteQueue(tmp_path / "q.db")
    waiting = asyncio.create_task(alive.lease(max_messages=1, lease_s=30, wait_s=30))
    await closed.send([Message(body=b"a", group="g", dedup_id="1")])
    assert len(await waiting) == 1
    kept = pipes(tmp_path / "q.wake")
    os.mkfifo(tmp_path / "q.wake" / "dead")
    closed.close()
    assert pipes(tmp_path / "q.wake") == kept
    alive.close()
    assert pipes(tmp_path / "q.wake") == []


async def test_closing_wakes_whoever_waits(folder: Path) -> None:
    waiter = Waiter(folder)
    waiting = [asyncio.create_task(waiter.wait(seen=0, timeout_s=FOREVER_S)) for _ in range(3)]
    await asyncio.sleep(0)
    waiter.close()
    waiter.close()
    await asyncio.gather(*waiting)
    assert pipes(folder) == []


async def test_a_wait_ends_at_its_time(folder: Path) -> None:
    waiter = Waiter(folder)
    await waiter.wait(seen=waiter.num_rings, timeout_s=0.01)
    assert waiter.num_rings == 0
    waiter.close()


async def test_without_any_wake_up_a_message_is_found_by_looking(tmp_path: Path) -> None:
    sender, receiver = SqliteQueue(tmp_path / "q.db"), SqliteQueue(tmp_path / "q.db")
    waiting = asyncio.create_task(receiver.lease(max_messages=1, lease_s=30, wait_s=30))
    await asyncio.sleep(0.05)
    for name in pipes(tmp_path / "q.wake"):
        os.unlink(tmp_path / "q.wake" / name)
    await sender.send([Message(body=b"a", group="g", dedup_id="1")])
    assert [leased.body for leased in await waiting] == [b"a"]
    sender.close()
    receiver.close()


def test_a_queue_waits_on_uvloop_and_on_one_loop_after_another(tmp_path: Path) -> None:
    queue = SqliteQueue(tmp_path / "q.db")

    async def exchange(number: str) -> list[Leased]:
        waiting = asyncio.create_task(queue.lease(max_messages=1, lease_s=30, wait_s=30))
        await asyncio.sleep(0.02)
        await queue.send([Message(body=number.encode(), group=number, dedup_id=number)])
        return await waiting

    assert [leased.body for leased in uvloop.run(exchange("1"))] == [b"1"]
    assert [leased.body for leased in asyncio.run(exchange("2"))] == [b"2"]
    assert [leased.body for leased in uvloop.run(exchange("3"))] == [b"3"]
    queue.close()
    queue.close()
    assert pipes(tmp_path / "q.wake") == []


async def test_no_bell_removes_the_pipe_of_a_consumer_that_just_begins_to_wait(folder: Path) -> None:
    """Many tries, because the instant between making and opening a pipe is short."""
    is_over = threading.Event()

    def ring() -> None:
        while not is_over.is_set():
            Bell(folder).ring()

    ringers = [threading.Thread(target=ring) for _ in range(2)]
    for ringer in ringers:
        ringer.start()
    try:
        for _ in range(2000):
            waiter = Waiter(folder)
            assert len(os.listdir(folder)) == 1
            waiter.close()
    finally:
        is_over.set()
        for ringer in ringers:
            ringer.join()


async def test_a_bell_finds_a_waiter_that_came_after_its_last_ring(folder: Path) -> None:
    bell, waiters = Bell(folder), list[Waiter]()
    # At once after the ring, within one tick of the file system's clock, and later, when the folder looks settled.
    for pause_s in (0.0, 0.0, 0.0, 0.07, 0.0, 0.07):
        waiters.append(Waiter(folder))
        bell.ring()
        for waiter in waiters:
            await waiter.wait(seen=waiter.num_rings, timeout_s=FOREVER_S)
        await asyncio.sleep(pause_s)
        bell.ring()
        for waiter in waiters:
            await waiter.wait(seen=waiter.num_rings, timeout_s=FOREVER_S)
    for waiter in waiters:
        waiter.close()
    bell.close()


async def test_a_bell_closes_the_pipes_of_those_who_are_gone(folder: Path) -> None:
    bell = Bell(folder)
    staying = Waiter(folder)
    bell.ring()
    num_open = len(os.listdir("/dev/fd"))
    for pause_s in (0.0, 0.07):
        going = [Waiter(folder) for _ in range(5)]
        bell.ring()
        await asyncio.sleep(pause_s)
        for waiter in going:
            waiter.close()
        bell.ring()
        assert len(os.listdir("/dev/fd")) == num_open
    bell.close()
    bell.close()
    assert len(os.listdir("/dev/fd")) == num_open - 1
    staying.close()


async def test_a_bell_that_was_closed_rings_again(folder: Path) -> None:
    bell, waiter = Bell(folder), Waiter(folder)
    bell.ring()
    bell.close()
    await waiter.wait(seen=waiter.num_rings, timeout_s=FOREVER_S)
    bell.ring()
    await waiter.wait(seen=waiter.num_rings, timeout_s=FOREVER_S)
    waiter.close()
    bell.close()


@pytest.mark.parametrize("num_rounds", range(5))
async def test_whoever_waits_at_a_queue_that_is_closed_is_told_and_leaves_no_pipe(
    tmp_path: Path, num_rounds: int
) -> None:
    """However far it has come by then: about to look, looking, or asleep."""
    queue = SqliteQueue(tmp_path / "q.db")
    assert await queue.take(max_messages=1) == []
    waiting = [
        asyncio.create_task(queue.lease(max_messages=1, lease_s=30, wait_s=FOREVER_S)),
        asyncio.create_task(queue.take(max_messages=1, wait_s=FOREVER_S)),
    ]
    for _ in range(num_rounds):
        await asyncio.sleep(0)
    queue.close()
    for task in waiting:
        with pytest.raises(BackendUnavailable, match="is closed"):
            await task
    with pytest.raises(BackendUnavailable, match="is closed"):
        await queue.take(max_messages=1, wait_s=FOREVER_S)
    assert not (tmp_path / "q.wake").exists() or pipes(tmp_path / "q.wake") == []
