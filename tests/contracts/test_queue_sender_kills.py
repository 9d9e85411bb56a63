"""A queue's senders may be killed at any moment."""

import asyncio
from collections.abc import Callable

from tests.contracts.killing import killed_after
from turnmill.ports import Queue


async def test_what_was_sent_survives_the_death_of_its_sender(
    open_queue: Callable[..., Queue], child: Callable[..., list[str]]
) -> None:
    queue = open_queue()
    lines = await asyncio.to_thread(killed_after, child("send_forever"), 50)
    sent: set[int] = set()
    while leased := await queue.lease(max_messages=100, lease_s=30, wait_s=0.1):
        sent |= {int(item.group) for item in leased}
    assert {int(line) for line in lines} <= sent
