"""What every queue keeps when messages are taken for good, and when they may come twice."""

import asyncio
import signal
import subprocess
from collections.abc import Callable

from tests.contracts.clock import Later
from turnmill.ports import Leased, Message, Queue, QueueCounts

EMPTY = QueueCounts(available=0, in_flight=0, delayed=0, dead=0)


def message(body: str, group: str = "", dedup_id: str | None = None) -> Message:
    return Message(body=body.encode(), group=group or body, dedup_id=dedup_id)


def bodies(taken: list[Leased]) -> list[str]:
    return [item.body.decode() for item in taken]


async def test_what_is_taken_comes_in_order_and_is_gone(queue: Queue, later: Later) -> None:
    await queue.send([message("a"), message("b"), message("c")])
    assert bodies(await queue.take(max_messages=2)) == ["a", "b"]
    await later(1.1)
    assert bodies(await queue.take(max_messages=2)) == ["c"]
    assert await queue.take(max_messages=2) == []
    assert await queue.counts() == EMPTY


async def test_nothing_is_taken_where_nothing_is_asked_for(queue: Queue) -> None:
    await queue.send([message("a")])
    assert await queue.take(max_messages=0) == []
    assert (await queue.counts()).available == 1


async def test_the_messages_of_a_group_are_taken_in_order_each_making_way_for_the_next(queue: Queue) -> None:
    await queue.send([message("a1", "a"), message("a2", "a"), message("b1", "b"), message("a3", "a")])
    taken = bodies(await queue.take(max_messages=2)) + bodies(await queue.take(max_messages=10))
    assert [body for body in taken if body != "b1"] == ["a1", "a2", "a3"]
    assert sorted(taken) == ["a1", "a2", "a3", "b1"]
    assert await queue.counts() == EMPTY


async def test_nothing_is_taken_past_a_message_of_its_group_that_is_leased(queue: Queue, later: Later) -> None:
    await queue.send([message("a1", "a"), message("a2", "a"), message("b1", "b")])
    [leased] = await queue.lease(max_messages=1, lease_s=2.0)
    assert bodies(await queue.take(max_messages=10)) == ["b1"]
    await later(2.1)
    again = await queue.take(max_messages=1)
    assert [(item.body, item.num_receives) for item in again] == [(b"a1", 2)]
    assert await queue.ack([leased.receipt]) == [False]
    assert bodies(await queue.take(max_messages=10)) == ["a2"]


async def test_the_receipt_of_what_was_taken_is_good_for_nothing(queue: Queue) -> None:
    await queue.send([message("a1", "a"), message("a2", "a")])
    [taken] = await queue.take(max_messages=1)
    assert taken.num_receives == 1
    assert await queue.ack([taken.receipt]) == [False]
    assert await queue.extend([taken.receipt], 10.0) == [False]
    await queue.release([taken.receipt])
    assert bodies(await queue.take(max_messages=10)) == ["a2"]


async def test_a_take_that_waits_is_woken_by_a_message(open_queue: Callable[..., Queue]) -> None:
    sender, receiver = open_queue(), open_queue()
    waiting = asyncio.create_task(receiver.take(max_messages=10, wait_s=1000.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await sender.send([message("a")])
    assert bodies(await waiting) == ["a"]


async def test_a_take_that_waits_gets_the_next_of_a_group_when_the_first_is_acked(queue: Queue) -> None:
    await queue.send([message("a1", "a"), message("a2", "a")])
    [first] = await queue.lease(max_messages=1, lease_s=1000.0)
    waiting = asyncio.create_task(queue.take(max_messages=10, wait_s=1000.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await queue.ack([first.receipt])
    assert bodies(await waiting) == ["a2"]


async def test_a_take_ends_without_messages(queue: Queue) -> None:
    assert await queue.take(max_messages=1, wait_s=0.05) == []


async def test_messages_without_an_id_are_never_swallowed(queue: Queue) -> None:
    await queue.send([message("a"), message("a")])
    await queue.send([message("a"), message("a", dedup_id="a")])
    assert bodies(await queue.take(max_messages=10)) == ["a"] * 4


async def test_what_a_process_took_that_was_killed_is_gone_and_nothing_else(
    open_queue: Callable[..., Queue], child: Callable[..., list[str]]
) -> None:
    queue = open_queue(real_time=True)
    await queue.send([message("a1", "a"), message("a2", "a"), message("b1", "b")])
    ended = await asyncio.to_thread(subprocess.run, child("take"), stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "a1\n")
    assert sorted(bodies(await queue.take(max_messages=10))) == ["a2", "b1"]
