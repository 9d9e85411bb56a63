"""What every queue keeps."""

import asyncio
import subprocess
from collections.abc import Callable

from tests.contracts.clock import Later
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


async def test_nothing_of_a_group_comes_while_one_of_it_is_leased(queue: Queue) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a"), message("b1", group="b")])
    [first] = await take(queue, 1)
    assert bodies(await take(queue)) == ["b1"]
    assert await take(queue) == []
    assert await queue.ack([first.receipt]) == [True]
    assert bodies(await take(queue)) == ["a2"]


async def test_messages_of_a_group_come_in_order_however_many_at_a_time(queue: Queue) -> None:
    await queue.send([message(f"{number}", group="a") for number in range(25)])
    taken: list[str] = []
    while leased := await take(queue, 7):
        assert await queue.ack([item.receipt for item in leased]) == [True] * len(leased)
        taken += bodies(leased)
    assert taken == [str(number) for number in range(25)]


async def test_a_delayed_message_blocks_its_group(queue: Queue, later: Later) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a")])
    [leased] = await take(queue, 1)
    await queue.release([leased.receipt], delay_s=2)
    assert await take(queue) == []
    await later(2.1)
    assert bodies(await take(queue, 1)) == ["a1"]


async def test_a_message_that_comes_back_stays_ahead_of_its_group(queue: Queue, later: Later) -> None:
    await queue.send([message("a1", group="a"), message("a2", group="a")])
    await take(queue, 1, lease_s=1)
    await later(1.1)
    [again] = await take(queue, 1)
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


async def test_a_leased_message_is_hidden_until_the_lease_runs_out(queue: Queue, later: Later) -> None:
    await queue.send([message("a")])
    await take(queue, lease_s=3)
    await later(1)
    assert await take(queue) == []
    await later(2.1)
    [again] = await take(queue)
    assert again.num_receives == 2


async def test_an_extended_lease_lasts_longer(queue: Queue, later: Later) -> None:
    await queue.send([message("a")])
    [leased] = await take(queue, lease_s=3)
    await later(1.5)
    assert await queue.extend([leased.receipt], 4) == [True]
    await later(2)
    assert await take(queue) == []
    assert await queue.ack([leased.receipt]) == [True]


async def test_a_lease_that_another_has_cannot_be_acked(queue: Queue, later: Later) -> None:
    await queue.send([message("a")])
    [old] = await take(queue, lease_s=1)
    await later(1.1)
    [new] = await take(queue)
    assert await queue.ack([old.receipt]) == [False]
    assert await queue.ack([new.receipt]) == [True]


async def test_a_lease_that_another_has_can_be_neither_extended_nor_released(queue: Queue, later: Later) -> None:
    await queue.send([message("a")])
    [old] = await take(queue, lease_s=1)
    await later(1.1)
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
        [leased] = await take(queue, 1)
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


async def test_counts_tell_available_hidden_and_dead(open_queue: Callable[..., Queue], later: Later) -> None:
    queue = open_queue(max_receives=1)
    assert await queue.counts() == QueueCounts(available=0, in_flight=0, delayed=0, dead=0)
    await queue.send([message(str(number)) for number in range(5)])
    dead, delayed, _ = await take(queue, 3, lease_s=3)
    await queue.release([dead.receipt])
    assert bodies(await take(queue, 1)) == ["3"]
    await queue.release([delayed.receipt], delay_s=20)
    counts = await queue.counts()
    assert (counts.available, counts.in_flight + counts.delayed, counts.dead, counts.num_held) == (1, 3, 1, 5)
    await later(3.1)
    counts = await queue.counts()
    assert (counts.available, counts.in_flight + counts.delayed, counts.dead, counts.num_held) == (2, 2, 1, 5)


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
    [first] = await take(queue, 1)
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
