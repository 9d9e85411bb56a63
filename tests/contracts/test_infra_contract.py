"""What a run stands on is made once, however often it is asked for, and nothing is left of it after its removal."""

from collections.abc import Callable

import pytest

from turnmill.ports import Message, RunPorts, Write


@pytest.fixture
def ports(open_ports: Callable[[], RunPorts]) -> RunPorts:
    return open_ports()


async def test_deploying_twice_is_deploying_once_and_loses_nothing(
    ports: RunPorts, open_ports: Callable[[], RunPorts], look: Callable[[], set[str]]
) -> None:
    names = await ports.infra.deploy()
    assert len(set(names)) == len(names) > 10
    await ports.records.write([Write(key="samples/run/x", value=b"1", expected=0)])
    await ports.rollout_request.send([Message(body=b"m", group="g", dedup_id=None)])
    await ports.blobs.put("a/b", b"content")
    before = look()
    other = open_ports()
    assert await other.infra.deploy() == names
    assert look() == before
    (stored,) = await other.records.get(["samples/run/x"])
    assert stored is not None and stored.value == b"1"
    assert (await other.rollout_request.counts()).available == 1
    assert await other.blobs.get("a/b") == b"content"


async def test_what_is_deployed_needs_no_further_file_for_records_and_messages(
    ports: RunPorts, look: Callable[[], set[str]]
) -> None:
    await ports.infra.deploy()
    before = look()
    await ports.records.write([Write(key="samples/run/x", value=b"1", expected=0)])
    await ports.generate_response.send([Message(body=b"m", group="g", dedup_id=None)])
    assert look() == before


async def test_retiring_removes_what_waits_and_no_dead_letter_record_or_blob(ports: RunPorts) -> None:
    await ports.infra.deploy()
    queue = ports.rollout_request
    await queue.send([Message(body=b"dead", group="g", dedup_id=None)])
    for _ in range(21):
        for leased in await queue.lease(max_messages=1, lease_s=30):
            await queue.release([leased.receipt])
    await queue.send([Message(body=b"waits", group="g", dedup_id=None)])
    await ports.generate_response.send([Message(body=b"waits", group="g", dedup_id=None)])
    await ports.records.write([Write(key="calls/run/train/s/x", value=b"1", expected=0)])
    await ports.blobs.put("a", b"content")
    assert await ports.infra.retire() == 2
    assert await ports.infra.retire() == 0
    counts = await queue.counts()
    assert (counts.available, counts.dead) == (0, 1)
    assert (await ports.records.get(["calls/run/train/s/x"]))[0] is not None
    assert await ports.blobs.get("a") == b"content"


async def test_retiring_what_was_never_deployed_makes_nothing(ports: RunPorts, look: Callable[[], set[str]]) -> None:
    assert await ports.infra.retire() == 0
    assert look() == set()


async def test_nothing_is_left_of_a_run_that_was_deleted_and_deleting_it_again_is_no_error(
    ports: RunPorts, open_ports: Callable[[], RunPorts], look: Callable[[], set[str]]
) -> None:
    await ports.infra.deploy()
    await ports.blobs.put("a/b", b"content")
    ports.close()
    await ports.infra.delete()
    # The folder that all runs are in may stay.
    assert look() <= {"runs"}
    await ports.infra.delete()
    again = open_ports()
    await again.infra.deploy()
    assert await again.blobs.list() == []


async def test_free_space_is_told_before_anything_is_made(ports: RunPorts, look: Callable[[], set[str]]) -> None:
    free = await ports.infra.free_bytes()
    assert free is None or free > 0
    assert look() == set()
