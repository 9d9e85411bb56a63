"""What the embedded queue keeps beyond the contract: it is exact, and its clock can be moved."""

import asyncio
from collections.abc import Callable

from tests.contracts.killing import killed_after
from tests.contracts.test_queue_contract import bodies, message, take
from turnmill.ports import Message, Queue, QueueCounts


def fleeting(body: str, group: str = "") -> Message:
    """One that may come twice."""
    return Message(body=body.encode(), group=group or body, dedup_id=None)


async def test_what_is_taken_never_comes_again(queue: Queue, hands: list[float]) -> None:
    await queue.send([fleeting("a"), fleeting("b")])
    assert bodies(await queue.take(max_messages=1)) == ["a"]
    hands[0] += 1000.0
    assert bodies(await queue.take(max_messages=2)) == ["b"]


async def test_a_group_is_delivered_one_at_a_time_in_order(queue: Queue) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a"), message("b1", group="b")])
    first = await take(queue)
    assert bodies(first) == ["a1", "b1"]
    assert await take(queue) == []
    assert await queue.ack([first[0].receipt]) == [True]
    assert bodies(await take(queue)) == ["a2"]


async def test_an_id_is_delivered_again_after_the_window(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    await queue.ack([item.receipt for item in await take(queue)])
    hands[0] += 299
    await queue.send([message("a")])
    assert await take(queue) == []
    hands[0] += 2
    await queue.send([message("a")])
    assert bodies(await take(queue)) == ["a"]


async def test_a_lost_lease_cannot_be_acked_nor_one_twice(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    [old] = await take(queue, lease_s=5)
    hands[0] += 6
    [new] = await take(queue)
    assert await queue.ack([old.receipt]) == [False]
    assert await queue.ack([new.receipt]) == [True]
    assert await queue.ack([new.receipt]) == [False]


async def test_a_lost_lease_can_be_neither_extended_nor_released(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    [old] = await take(queue, lease_s=5)
    hands[0] += 6
    assert await queue.extend([old.receipt], 10) == [False]
    [new] = await take(queue)
    await queue.release([old.receipt])
    assert await take(queue) == []
    assert await queue.extend([old.receipt, new.receipt, "no receipt", ""], 10) == [False, True, False, False]


async def test_counts_tell_available_in_flight_delayed_and_dead(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    queue = open_queue(max_receives=1)
    assert await queue.counts() == QueueCounts(available=0, in_flight=0, delayed=0, dead=0)
    await queue.send([message(str(number)) for number in range(5)])
    dead, delayed, _ = await take(queue, 3, lease_s=10)
    await queue.release([dead.receipt])
    assert bodies(await take(queue, 1)) == ["3"]
    await queue.release([delayed.receipt], delay_s=20)
    assert await queue.counts() == QueueCounts(available=1, in_flight=2, delayed=1, dead=1)
    hands[0] += 15
    assert await queue.counts() == QueueCounts(available=2, in_flight=1, delayed=1, dead=1)


async def test_counts_tell_how_old_the_oldest_message_is(queue: Queue, hands: list[float]) -> None:
    assert (await queue.counts()).oldest_age_s is None
    await queue.send([message("a"), message("b")])
    hands[0] += 10
    await queue.send([message("c")])
    assert (await queue.counts()).oldest_age_s == 10.0
    leased = await take(queue, 2, lease_s=60)
    hands[0] += 5
    # A lease makes nothing younger, and neither does its end.
    assert (await queue.counts()).oldest_age_s == 15.0
    await queue.release([leased[1].receipt], delay_s=1)
    assert (await queue.counts()).oldest_age_s == 15.0
    await queue.ack([leased[0].receipt])
    assert [item.body for item in await queue.take(max_messages=1)] == [b"c"]
    hands[0] += 2
    assert [item.body for item in await queue.take(max_messages=1)] == [b"b"]
    assert (await queue.counts()).oldest_age_s is None


async def test_counts_tell_how_many_were_sent_whatever_became_of_them(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue(max_receives=1)
    assert (await queue.counts()).num_sent == 0
    await queue.send([message("a"), message("a"), message("b")])
    await open_queue().send([message("b"), message("c")])
    assert (await queue.counts()).num_sent == 3
    [a, b, c] = await take(queue)
    await queue.ack([a.receipt])
    await queue.release([b.receipt])
    await queue.release([c.receipt])
    await take(queue)
    counts = await queue.counts()
    assert (counts.num_sent, counts.dead, counts.num_held) == (3, 2, 2)
    await queue.redrive()
    assert ((await queue.counts()).num_sent, (await queue.counts()).num_held) == (3, 2)
    await queue.purge()
    assert ((await queue.counts()).num_sent, (await queue.counts()).num_held) == (3, 0)


async def test_messages_of_one_moment_and_of_a_clock_that_began_anew_keep_their_order_and_have_no_wrong_age(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    await open_queue().send([message(str(number)) for number in range(100)])
    hands[0] = 100.0
    queue = open_queue()
    await queue.send([message(str(number)) for number in range(100, 110)])
    assert (await queue.counts()).oldest_age_s is None
    assert bodies(await take(queue, 200)) == [str(number) for number in range(110)]
    counts = await queue.counts()
    assert (counts.available, counts.in_flight) == (0, 110)


async def test_a_process_that_is_killed_while_it_takes_loses_one_message_at_most_and_doubles_none(
    open_queue: Callable[..., Queue], child: Callable[..., list[str]]
) -> None:
    queue = open_queue(real_time=True)
    await queue.send([fleeting(str(number), str(number % 3)) for number in range(300)])
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
    await before.send([fleeting("a")])
    await before.lease(max_messages=1, lease_s=1000.0)
    hands[0] = 20.0
    after = open_queue()
    unsendable = after.send([fleeting("b", "half of a surrogate pair: \ud800")])
    first, failed = await asyncio.gather(after.lease(max_messages=10, lease_s=30.0), unsendable, return_exceptions=True)
    assert isinstance(failed, UnicodeEncodeError)
    hands[0] += 1.0
    assert isinstance(first, list)
    assert bodies(first + await after.lease(max_messages=10, lease_s=30.0)) == ["a"]
