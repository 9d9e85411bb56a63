"""A clock that is set while messages are under way: nothing is lost, nothing is delivered to two at once for good."""

from collections.abc import Callable

import pytest

from turnmill.ports import Leased, Message, Queue

HOUR_S = 3600.0
STEPS = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])


def message(body: str, epoch: int = 0) -> Message:
    return Message(body=body.encode(), group=body, dedup_id=f"{body}/{epoch}")


async def drain(queue: Queue, hands: list[float]) -> list[str]:
    """Take and ack all there is, letting half a minute go by whenever there is nothing, for over an hour."""
    taken: list[Leased] = []
    for _ in range(130):
        while leased := await queue.lease(max_messages=10, lease_s=30.0):
            assert await queue.ack([item.receipt for item in leased]) == [True] * len(leased)
            taken += leased
        hands[0] += 30.0
    return [item.body.decode() for item in taken]


@STEPS
async def test_messages_that_wait_survive_a_step_of_the_clock(queue: Queue, hands: list[float], step_s: float) -> None:
    await queue.send([message(str(number)) for number in range(5)])
    hands[0] += step_s
    await queue.send([message(str(number)) for number in range(5, 8)])
    assert await drain(queue, hands) == [str(number) for number in range(8)]


@STEPS
async def test_a_leased_message_is_acked_once_across_a_step_of_the_clock(
    queue: Queue, hands: list[float], step_s: float
) -> None:
    await queue.send([message("a"), message("b")])
    leased = await queue.lease(max_messages=2, lease_s=30.0)
    hands[0] += step_s
    acked = await queue.ack([item.receipt for item in leased])
    # A lease that ran out by the clock can't be acked, and its message comes again; the others are gone.
    expected = [item.body.decode() for item, was_acked in zip(leased, acked, strict=True) if not was_acked]
    assert await drain(queue, hands) == expected
    assert await queue.dead_letters() == []


@STEPS
async def test_a_message_of_a_dead_consumer_comes_back_after_a_step_of_the_clock(
    queue: Queue, hands: list[float], step_s: float
) -> None:
    await queue.send([message("a")])
    [lost] = await queue.lease(max_messages=1, lease_s=30.0)
    hands[0] += step_s
    assert await drain(queue, hands) == ["a"]
    assert await queue.ack([lost.receipt]) == [False]


@STEPS
async def test_a_renewed_lease_is_held_by_one_across_a_step_of_the_clock(
    queue: Queue, hands: list[float], step_s: float
) -> None:
    await queue.send([message("a")])
    [leased] = await queue.lease(max_messages=1, lease_s=30.0)
    hands[0] += step_s
    [is_held] = await queue.extend([leased.receipt], 30.0)
    others = await queue.lease(max_messages=1, lease_s=30.0)
    assert is_held == (not others)
    [was_acked] = await queue.ack([(others or [leased])[0].receipt])
    assert was_acked
    assert await drain(queue, hands) == []


@STEPS
async def test_a_released_message_comes_back_after_a_step_of_the_clock(
    queue: Queue, hands: list[float], step_s: float
) -> None:
    await queue.send([message("a"), message("b")])
    first, second = await queue.lease(max_messages=2, lease_s=30.0)
    await queue.release([first.receipt], delay_s=10.0)
    await queue.release([second.receipt])
    hands[0] += step_s
    assert sorted(await drain(queue, hands)) == ["a", "b"]


async def test_a_clock_set_back_keeps_what_was_sent_from_being_sent_twice(queue: Queue, hands: list[float]) -> None:
    await queue.send([message("a")])
    hands[0] -= HOUR_S
    await queue.send([message("a")])
    assert await drain(queue, hands) == ["a"]


async def test_leases_count_on_across_openers_with_different_clocks(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    ahead, behind = open_queue(), open_queue()
    await ahead.send([message(str(number)) for number in range(4)])
    hands[0] += HOUR_S
    taken = await ahead.lease(max_messages=2, lease_s=30.0)
    hands[0] -= HOUR_S
    taken += await behind.lease(max_messages=10, lease_s=30.0)
    assert sorted(item.body.decode() for item in taken) == ["0", "1", "2", "3"]
    assert await behind.ack([item.receipt for item in taken]) == [True] * 4
    assert await drain(behind, hands) == []
