"""What every outbox keeps: a record and the news of it, both or neither."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.contracts.killing import killed_after
from turnmill.errors import InvalidInput
from turnmill.ports import Count, Message, RunPorts, Write

PREFIX = "calls/run/"
OpenPorts = Callable[[], RunPorts]


def entry(name: str, value: bytes | None = b"x", *, expected: int | None = 0) -> tuple[Write, Message]:
    key = PREFIX + name
    return Write(key=key, value=value, expected=expected), Message(body=name.encode(), group=key, dedup_id=None)


async def news(ports: RunPorts) -> list[str]:
    taken = await ports.generate_response.take(max_messages=100_000)
    return [item.body.decode() for item in taken]


async def recorded(ports: RunPorts) -> dict[str, bytes]:
    found = await ports.records.scan(PREFIX, limit=100_000)
    return {stored.key.removeprefix(PREFIX): stored.value for stored in found}


async def test_a_write_that_is_applied_sends_one_message(open_ports: OpenPorts) -> None:
    ports = open_ports()
    assert await ports.answers.write([entry("a"), entry("b", b"y")]) == [True, True]
    assert await news(ports) == ["a", "b"]
    assert await recorded(ports) == {"a": b"x", "b": b"y"}


async def test_a_write_that_is_not_applied_sends_none(open_ports: OpenPorts) -> None:
    ports = open_ports()
    await ports.answers.write([entry("a", b"first")])
    assert await news(ports) == ["a"]
    entries = [entry("a", b"second"), entry("b"), entry("b"), entry("a", b"third", expected=7)]
    assert await ports.answers.write(entries) == [False, True, False, False]
    assert await news(ports) == ["b"]
    assert await recorded(ports) == {"a": b"first", "b": b"x"}


async def test_writing_nothing_does_nothing(open_ports: OpenPorts) -> None:
    ports = open_ports()
    assert await ports.answers.write([]) == []
    assert await news(ports) == []


async def test_expectations_mean_what_they_mean_to_the_record_store(open_ports: OpenPorts) -> None:
    ports = open_ports()
    await ports.records.write([entry("a")[0]])
    assert await ports.answers.write([entry("a", b"second", expected=1)]) == [True]
    assert await ports.answers.write([entry("a", b"third", expected=None)]) == [True]
    assert await ports.answers.write([entry("a", None, expected=3)]) == [True]
    assert await news(ports) == ["a", "a", "a"]
    assert await recorded(ports) == {}


async def test_of_many_who_write_the_same_record_one_is_told(open_ports: OpenPorts) -> None:
    writers = [open_ports() for _ in range(4)]
    outcomes: list[Sequence[bool]] = await asyncio.gather(
        *(ports.answers.write([entry(str(name)) for name in range(50)]) for ports in writers)
    )
    assert all(sum(applied) == 1 for applied in zip(*outcomes, strict=True))
    assert sorted(await news(writers[0])) == sorted(map(str, range(50)))


async def test_who_waits_for_the_news_is_woken(open_ports: OpenPorts) -> None:
    writer, reader = open_ports(), open_ports()
    waiting = asyncio.create_task(reader.generate_response.take(max_messages=10, wait_s=1000.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await writer.answers.write([entry("a")])
    assert [item.body for item in await waiting] == [b"a"]


@pytest.mark.parametrize("key", ["calls", "calls//a", "samples/run/a", "calls/run/\ud800"])
async def test_a_key_that_is_none_of_its_records_is_refused_whole(open_ports: OpenPorts, key: str) -> None:
    ports = open_ports()
    bad = (Write(key=key, value=b"x", expected=0), Message(body=b"bad", group="g", dedup_id=None))
    with pytest.raises(InvalidInput):
        await ports.answers.write([entry("a"), bad])
    assert await news(ports) == []
    assert await recorded(ports) == {}


async def test_a_message_that_can_not_be_sent_leaves_no_record(open_ports: OpenPorts) -> None:
    ports = open_ports()
    unsendable = (entry("b")[0], Message(body=b"b", group="half of a surrogate pair: \ud800", dedup_id=None))
    with pytest.raises(UnicodeEncodeError):
        await ports.answers.write([entry("a"), unsendable])
    assert await ports.answers.write([entry("c")]) == [True]
    assert await news(ports) == ["c"]
    assert await recorded(ports) == {"c": b"x"}


async def test_of_a_writer_that_is_killed_both_or_neither_is_stored(
    open_ports: OpenPorts, child: Callable[..., list[str]]
) -> None:
    ports = open_ports()
    first = 0
    for _ in range(3):
        stored = await asyncio.to_thread(killed_after, child("answer_forever", first), 30)
        told = await news(ports)
        records = await recorded(ports)
        # Nothing that was stored is lost, and no record is without its message or the other way round.
        assert {f"{int(line):06d}" for line in stored} <= records.keys()
        assert Counter(told) == Counter(f"{PREFIX}{name}" for name in records if int(name) >= first)
        assert await total(ports) == len(records)
        first = 1 + max(map(int, records))


async def total(ports: RunPorts, key: str = "tokens/run/a") -> int:
    (stored,) = await ports.records.get([key])
    return int(stored.value) if stored else 0


async def test_what_is_applied_is_counted_and_nothing_else(open_ports: OpenPorts) -> None:
    ports = open_ports()
    first, second = Count(key="tokens/run/a", amount=3), Count(key="tokens/run/b", amount=4)
    assert await ports.answers.write([entry("a"), entry("b"), entry("a")], [first, second, first]) == [
        True,
        True,
        False,
    ]
    assert await ports.answers.write([entry("a"), entry("c")], [first, first]) == [False, True]
    assert (await total(ports), await total(ports, "tokens/run/b")) == (6, 4)
    await ports.answers.write([entry("d")])
    assert [stored.key for stored in await ports.records.scan("tokens/run/")] == ["tokens/run/a", "tokens/run/b"]
    assert await total(ports) == 6


async def test_counters_of_many_writers_lose_nothing(open_ports: OpenPorts) -> None:
    writers = [open_ports() for _ in range(4)]
    await asyncio.gather(
        *(
            ports.answers.write([entry(str(name))], [Count(key="tokens/run/a", amount=2**40)])
            for ports in writers
            for name in range(25)
        )
    )
    assert await total(writers[0]) == 25 * 2**40


async def test_a_count_that_can_not_be_matched_leaves_no_record(open_ports: OpenPorts) -> None:
    ports = open_ports()
    with pytest.raises(ValueError):
        await ports.answers.write([entry("a"), entry("b")], [Count(key="tokens/run/a", amount=1)])
    assert await recorded(ports) == {} and await total(ports) == 0
