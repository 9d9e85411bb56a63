"""The wall clock is set while messages are under way, or the machine, and its clock, begins anew: leases keep their
length, nothing is lost, nothing is delivered twice for good."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import shim
from turnmill.ports import Leased, Message, Queue

HOUR_S = 3600.0
ANEW_S = 20.0
BOTH_WAYS = pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["set-back", "set-forward"])
needs_shim = pytest.mark.skipif(shim.why_not() is not None, reason=shim.why_not() or "")


def message(body: str, epoch: int = 0) -> Message:
    return Message(body=body.encode(), group=body, dedup_id=f"{body}/{epoch}")


async def drain(queue: Queue, hands: list[float]) -> list[str]:
    """Take and ack all there is, letting half a minute go by three times when there is nothing."""
    taken: list[Leased] = []
    for _ in range(3):
        while leased := await queue.lease(max_messages=10, lease_s=30.0):
            assert await queue.ack([item.receipt for item in leased]) == [True] * len(leased)
            taken += leased
        hands[0] += 30.0
    return [item.body.decode() for item in taken]


@pytest.fixture
def lease_elsewhere(child: Callable[..., list[str]], tmp_path: Path) -> Callable[[float, float], str]:
    """Another process, whose wall clock is ahead of this one's, leases a message and dies; returns the body."""

    def lease(ahead_s: float, lease_s: float) -> str:
        built = shim.build(tmp_path / "shim")
        built.step_clock(ahead_s)
        env = {**os.environ, **built.env(tmp_path)}
        ended = subprocess.run(child("lease", lease_s), env=env, stdout=subprocess.PIPE, text=True)
        assert ended.returncode == -signal.SIGKILL
        return ended.stdout.strip()

    return lease


@needs_shim
@BOTH_WAYS
async def test_a_dead_consumers_message_comes_back_after_its_lease_when_the_wall_clock_was_set(
    open_queue: Callable[..., Queue], lease_elsewhere: Callable[[float, float], str], ahead_s: float
) -> None:
    queue = open_queue(real_time=True)
    await queue.send([message("a")])
    assert lease_elsewhere(ahead_s, 0.2) == "a"
    [again] = await queue.lease(max_messages=1, lease_s=30.0, wait_s=30.0)
    assert (again.body, again.num_receives) == (b"a", 2)


@needs_shim
@BOTH_WAYS
async def test_a_lease_holds_when_the_wall_clock_was_set(
    open_queue: Callable[..., Queue], lease_elsewhere: Callable[[float, float], str], ahead_s: float
) -> None:
    queue = open_queue(real_time=True)
    await queue.send([message("a"), message("b")])
    assert lease_elsewhere(ahead_s, 60.0) == "a"
    assert [item.body for item in await queue.lease(max_messages=10, lease_s=30.0)] == [b"b"]


async def test_messages_survive_a_restart_of_the_machine_in_their_order(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    await open_queue().send([message(str(number)) for number in range(5)])
    hands[0] = ANEW_S
    queue = open_queue()
    await queue.send([message(str(number)) for number in range(5, 8)])
    assert await drain(queue, hands) == [str(number) for number in range(8)]


async def test_what_was_leased_or_delayed_before_a_restart_of_the_machine_is_there_at_once(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    before = open_queue()
    await before.send([message("a"), message("b")])
    first, second = await before.lease(max_messages=2, lease_s=30.0)
    await before.release([first.receipt], delay_s=10.0)
    hands[0] = ANEW_S
    after = open_queue()
    again = await after.lease(max_messages=10, lease_s=30.0)
    assert [(item.body, item.num_receives) for item in again] == [(b"a", 2), (b"b", 2)]
    assert await after.ack([second.receipt]) == [False]
    assert await after.ack([item.receipt for item in again]) == [True, True]
    assert await drain(after, hands) == [] and await after.dead_letters() == []


async def test_what_was_sent_before_a_restart_of_the_machine_is_not_sent_twice(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    await open_queue().send([message("a")])
    hands[0] = ANEW_S
    queue = open_queue()
    await queue.send([message("a")])
    assert await drain(queue, hands) == ["a"]
    hands[0] += 300.0
    await queue.send([message("a")])
    assert await drain(queue, hands) == ["a"]


async def test_another_opener_does_not_take_what_is_leased_now(
    open_queue: Callable[..., Queue], hands: list[float]
) -> None:
    first = open_queue()
    await first.send([message(str(number)) for number in range(4)])
    taken = await first.lease(max_messages=2, lease_s=30.0)
    hands[0] += 1.0
    taken += await open_queue().lease(max_messages=10, lease_s=30.0)
    assert [item.body.decode() for item in taken] == ["0", "1", "2", "3"]
