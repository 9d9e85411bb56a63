"""What every queue keeps when messages are taken for good, and when they may come twice."""

import asyncio
import signal
import subprocess
from collections.abc import Callable

from tests.contracts.killing import killed_after
from turnmill.ports import Leased, Message, Queue, QueueCounts

EMPTY = QueueCounts(available=0, in_flight=0, delayed=0, dead=0)


def message(body: str, group: str = "", dedup_id: str | None = None) -> Message:
    return Message(body=body.encode(), group=group or body, dedup_id=dedup_id)


def bodies(taken: list[Leased]) -> list[str]:
    return [item.body.decode() for item in taken]


async def test_what_is_taken_comes_in_order_and_is_gone(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a"), message("b"), message("c")])
    assert bodies(await queue.take(max_messages=2)) == ["a", "b"]
    hands[0] += 1000.0
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


async def test_nothing_is_taken_past_a_message_of_its_group_that_is_leased(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a1", "a"), message("a2", "a"), message("b1", "b")])
    [leased] = await queue.lease(max_messages=1, lease_s=30.0)
    assert bodies(await queue.take(max_messages=10)) == ["b1"]
    hands[0] += 31.0
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


async def test_a_process_that_is_killed_while_it_takes_loses_one_message_at_most_and_doubles_none(
    open_queue: Callable[..., Queue], child: Callable[..., list[str]]
) -> None:
    queue = open_queue(real_time=True)
    await queue.send([message(str(number), str(number % 3)) for number in range(300)])
    seen = await asyncio.to_thread(killed_after, child("take_forever"), 40)
    left = bodies(await queue.take(max_messages=1000))
    told = [*seen, *left]
    assert len(set(told)) == len(told)
    assert len({*map(str, range(300))} - {*told}) <= 1


async def test_a_first_transaction_that_is_undone_keeps_no_message_hidden_after_a_restart_of_the_machine(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    """The times of the clock before are removed by a queue's first transaction, which a neighbour may spoil."""
    before = open_queue()
    await before.send([message("a")])
    await before.lease(max_messages=1, lease_s=1000.0)
    hands[0] = 20.0
    after = open_queue()
    unsendable = after.send([message("b", "half of a surrogate pair: \ud800")])
    first, failed = await asyncio.gather(after.lease(max_messages=10, lease_s=30.0), unsendable, return_exceptions=True)
    assert isinstance(failed, UnicodeEncodeError)
    hands[0] += 1.0
    assert isinstance(first, list)
    assert bodies(first + await after.lease(max_messages=10, lease_s=30.0)) == ["a"]
