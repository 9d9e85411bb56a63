"""What every queue keeps."""

import asyncio
import subprocess
from collections.abc import Callable

from turnmill.ports import Leased, Message, Queue, QueueCounts


def message(body: str, *, group: str | None = None, epoch: int = 0) -> Message:
    return Message(body=body.encode(), group=group or body, dedup_id=f"{body}/{epoch}")


async def take(queue: Queue, max_messages: int = 10, *, lease_s: float = 30.0) -> list[Leased]:
    return await queue.lease(max_messages=max_messages, lease_s=lease_s)


def bodies(leased: list[Leased]) -> list[str]:
    return [item.body.decode() for item in leased]


async def test_messages_arrive_in_the_order_of_sending(queue: Queue) -> None:
    await queue.send([message("a"), message("b")])
    await queue.send([message("c")])
    assert bodies(await take(queue)) == ["a", "b", "c"]


async def test_a_lease_takes_at_most_what_was_asked_for(queue: Queue) -> None:
    await queue.send([message(str(number)) for number in range(5)])
    assert bodies(await take(queue, 2)) == ["0", "1"]
    assert bodies(await take(queue, 2)) == ["2", "3"]
    assert bodies(await take(queue, 2)) == ["4"]
    assert await take(queue, 2) == []


async def test_a_group_is_delivered_one_at_a_time_in_order(queue: Queue) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a"), message("b1", group="b")])
    first = await take(queue)
    assert bodies(first) == ["a1", "b1"]
    assert await take(queue) == []
    assert await queue.ack([first[0].receipt]) == [True]
    assert bodies(await take(queue)) == ["a2"]


async def test_a_delayed_message_blocks_its_group(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a")])
    [leased] = await take(queue)
    await queue.release([leased.receipt], delay_s=10)
    assert await take(queue) == []
    hands[0] += 11
    assert bodies(await take(queue)) == ["a1"]


async def test_a_message_that_comes_back_stays_ahead_of_its_group(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a")])
    await take(queue, lease_s=5)
    hands[0] += 6
    [again] = await take(queue)
    assert (again.body, again.num_receives) == (b"a1", 2)
    assert await queue.ack([again.receipt]) == [True]
    [following] = await take(queue)
    assert (following.body, following.num_receives) == (b"a2", 1)


async def test_a_second_send_of_one_id_is_swallowed_and_a_new_epoch_is_not(queue: Queue) -> None:
    await queue.send([message("a"), message("a")])
    await queue.send([message("a")])
    assert bodies(await take(queue)) == ["a"]
    await queue.send([message("a", epoch=1)])
    assert (await queue.counts()).available == 1


async def test_an_id_is_swallowed_even_after_its_message_was_acked(queue: Queue) -> None:
    await queue.send([message("a")])
    await queue.ack([item.receipt for item in await take(queue)])
    await queue.send([message("a")])
    assert await take(queue) == []


async def test_an_id_is_delivered_again_after_the_window(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    await queue.ack([item.receipt for item in await take(queue)])
    hands[0] += 299
    await queue.send([message("a")])
    assert await take(queue) == []
    hands[0] += 2
    await queue.send([message("a")])
    assert bodies(await take(queue)) == ["a"]


async def test_a_leased_message_is_hidden_until_the_lease_runs_out(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    await take(queue, lease_s=10)
    hands[0] += 9
    assert await take(queue) == []
    hands[0] += 2
    [again] = await take(queue)
    assert again.num_receives == 2


async def test_an_extended_lease_lasts_longer(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    [leased] = await take(queue, lease_s=10)
    hands[0] += 9
    assert await queue.extend([leased.receipt], 10) == [True]
    hands[0] += 9
    assert await take(queue) == []
    assert await queue.ack([leased.receipt]) == [True]


async def test_a_lost_lease_cannot_be_acked(queue: Queue, hands: list[float]) -> None:
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


async def test_a_released_message_is_there_at_once_and_counted(queue: Queue) -> None:
    await queue.send([message("a")])
    [leased] = await take(queue)
    await queue.release([leased.receipt])
    [again] = await take(queue)
    assert again.num_receives == 2


async def test_a_message_received_too_often_goes_to_the_dead_letters(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue(max_receives=2)
    await queue.send([message("bad", group="g"), message("good", group="g")])
    for _ in range(2):
        [leased] = await take(queue)
        assert leased.body == b"bad"
        await queue.release([leased.receipt])
    assert bodies(await take(queue)) == ["good"]
    [letter] = await queue.dead_letters()
    assert (letter.body, letter.group, letter.num_receives) == (b"bad", "g", 2)
    assert (await queue.counts()).dead == 1


async def test_redriven_dead_letters_are_delivered_again_from_zero(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue(max_receives=1)
    await queue.send([message("a"), message("b")])
    await queue.release([item.receipt for item in await take(queue)])
    assert await take(queue) == []
    assert await queue.redrive() == 2
    assert [(item.body, item.num_receives) for item in await take(queue)] == [(b"a", 1), (b"b", 1)]
    assert await queue.dead_letters() == []
    assert await queue.redrive() == 0


async def test_single_dead_letters_are_redriven_or_discarded_and_their_ids_never_come_again(
    open_queue: Callable[..., Queue],
) -> None:
    queue = open_queue(max_receives=1)

    async def bury(*names: str) -> list[str]:
        await queue.send([message(name) for name in names])
        for _ in range(2):
            await queue.release([item.receipt for item in await take(queue, 10)])
        return [letter.letter_id for letter in await queue.dead_letters()]

    first, second, third = await bury("a", "b", "c")
    assert await queue.redrive([second, "unknown"]) == 1
    assert await queue.discard([third, ""]) == 1
    assert [letter.letter_id for letter in await queue.dead_letters()] == [first]
    [again] = await take(queue)
    assert (again.body, again.num_receives) == (b"b", 1)
    assert await queue.redrive([second, third]) == await queue.discard([second]) == 0
    await queue.ack([again.receipt])
    assert await queue.redrive([]) == 0
    ids = await bury("d")
    assert len(ids) == 2 and ids[0] == first and ids[1] not in (second, third)


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


async def test_a_purge_removes_leased_messages_too_and_keeps_the_dead(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue(max_receives=1)
    await queue.send([message("dead")])
    await queue.release([item.receipt for item in await take(queue)])
    assert await take(queue) == []
    await queue.send([message("a"), message("b")])
    [leased] = await take(queue, 1)
    assert await queue.purge() == 2
    assert await queue.ack([leased.receipt]) == [False]
    assert await queue.counts() == QueueCounts(available=0, in_flight=0, delayed=0, dead=1)


async def test_another_opener_sees_the_same_queue(open_queue: Callable[..., Queue]) -> None:
    first, second = open_queue(), open_queue()
    await first.send([message("a")])
    [leased] = await take(second)
    assert await take(first) == []
    assert await first.ack([leased.receipt]) == [True]


async def test_a_waiting_lease_gets_what_is_sent_meanwhile(open_queue: Callable[..., Queue]) -> None:
    sender, receiver = open_queue(), open_queue()
    waiting = asyncio.create_task(receiver.lease(max_messages=1, lease_s=30, wait_s=30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await sender.send([message("a")])
    assert bodies(await waiting) == ["a"]


async def test_a_waiting_lease_gets_the_next_of_a_group_when_the_first_is_acked(
    open_queue: Callable[..., Queue],
) -> None:
    queue = open_queue()
    await queue.send([message("a1", group="a"), message("a2", group="a")])
    [first] = await take(queue)
    waiting = asyncio.create_task(queue.lease(max_messages=1, lease_s=30, wait_s=30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await queue.ack([first.receipt])
    assert bodies(await waiting) == ["a2"]


async def test_a_waiting_lease_gets_what_comes_back_by_itself(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue(real_time=True)
    await queue.send([message("a")])
    await take(queue, lease_s=0.2)
    [again] = await queue.lease(max_messages=1, lease_s=30, wait_s=30)
    assert again.num_receives == 2


async def test_a_wait_ends_without_messages(queue: Queue) -> None:
    assert await queue.lease(max_messages=1, lease_s=30, wait_s=0.05) == []


async def test_many_waiters_share_what_comes(queue: Queue) -> None:
    waiting = [asyncio.create_task(queue.lease(max_messages=1, lease_s=30, wait_s=30)) for _ in range(20)]
    await asyncio.sleep(0.05)
    await queue.send([message(str(number)) for number in range(20)])
    got = [bodies(leased) for leased in await asyncio.gather(*waiting)]
    assert sorted(body for [body] in got) == sorted(str(number) for number in range(20))


async def test_a_cancelled_lease_keeps_no_message(queue: Queue) -> None:
    await queue.send([message("a")])
    leasing = asyncio.create_task(queue.lease(max_messages=1, lease_s=1000))
    # It has asked for messages and does not have them yet.
    await asyncio.sleep(0)
    leasing.cancel()
    await asyncio.wait([leasing])
    assert leasing.cancelled()
    assert bodies(await queue.lease(max_messages=1, lease_s=30, wait_s=30)) == ["a"]


async def test_processes_that_compete_take_each_message_once(queue: Queue, child: Callable[..., list[str]]) -> None:
    await queue.send([message(str(number), group=str(number % 40)) for number in range(300)])
    outputs = await asyncio.gather(*(asyncio.to_thread(subprocess.check_output, child("drain")) for _ in range(3)))
    taken = [line for output in outputs for line in output.split()]
    assert sorted(map(int, taken)) == list(range(300))
    assert await queue.counts() == QueueCounts(available=0, in_flight=0, delayed=0, dead=0)


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
