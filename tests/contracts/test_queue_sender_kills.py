"""A queue's senders may be killed at any moment."""

import asyncio
from collections.abc import Callable

from tests.contracts.killing import killed_after
from turnmill.ports import Queue


async def test_what_was_sent_survives_the_death_of_its_sender(
    open_queue: Callable[..., Queue], child: Callable[..., list[str]]
) -> None:
    lines = await asyncio.to_thread(killed_after, child("send_forever"), 50)
    sent = {int(item.group) for item in await open_queue().lease(max_messages=100_000, lease_s=30)}
    assert {int(line) for line in lines} <= sent
