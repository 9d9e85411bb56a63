"""What every outbox keeps: a record and the news of it, both or neither."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.contracts.killing import killed_after
from tests.contracts.outbox_side import OutboxSide
from turnmill.errors import InvalidInput
from turnmill.ports import Count, Message, Write

PREFIX = "calls/run/train/s/"
OpenOutbox = Callable[[], OutboxSide]


def entry(name: str, value: bytes | None = b"x", *, expected: int | None = 0) -> tuple[Write, Message]:
    key = PREFIX + name
    return Write(key=key, value=value, expected=expected), Message(body=name.encode(), group=key, dedup_id=None)


async def news(side: OutboxSide) -> list[str]:
    taken = await side.news.take(max_messages=100_000)
    return [item.body.decode() for item in taken]


async def recorded(side: OutboxSide) -> dict[str, bytes]:
    found = await side.records.scan(PREFIX, limit=100_000)
    return {stored.key.removeprefix(PREFIX): stored.value for stored in found}


async def test_a_write_that_is_applied_sends_one_message(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    assert await side.outbox.write([entry("a"), entry("b", b"y")]) == [True, True]
    assert await news(side) == ["a", "b"]
    assert await recorded(side) == {"a": b"x", "b": b"y"}


async def test_a_write_that_is_not_applied_sends_none(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    await side.outbox.write([entry("a", b"first")])
    assert await news(side) == ["a"]
    entries = [entry("a", b"second"), entry("b"), entry("b"), entry("a", b"third", expected=7)]
    assert await side.outbox.write(entries) == [False, True, False, False]
    assert await news(side) == ["b"]
    assert await recorded(side) == {"a": b"first", "b": b"x"}


async def test_writing_nothing_does_nothing(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    assert await side.outbox.write([]) == []
    assert await news(side) == []


async def test_expectations_mean_what_they_mean_to_the_record_store(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    await side.records.write([entry("a")[0]])
    assert await side.outbox.write([entry("a", b"second", expected=1)]) == [True]
    assert await side.outbox.write([entry("a", b"third", expected=None)]) == [True]
    assert await side.outbox.write([entry("a", None, expected=3)]) == [True]
    assert await news(side) == ["a", "a", "a"]
    assert await recorded(side) == {}


async def test_of_many_who_write_the_same_record_one_is_told(open_outbox: OpenOutbox) -> None:
    writers = [open_outbox() for _ in range(4)]
    outcomes: list[Sequence[bool]] = await asyncio.gather(
        *(side.outbox.write([entry(str(name)) for name in range(50)]) for side in writers)
    )
    assert all(sum(applied) == 1 for applied in zip(*outcomes, strict=True))
    assert sorted(await news(writers[0])) == sorted(map(str, range(50)))


async def test_who_waits_for_the_news_is_woken(open_outbox: OpenOutbox) -> None:
    writer, reader = open_outbox(), open_outbox()
    waiting = asyncio.create_task(reader.news.take(max_messages=10, wait_s=1000.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await writer.outbox.write([entry("a")])
    assert [item.body for item in await waiting] == [b"a"]


@pytest.mark.parametrize("key", ["calls", "calls//a", "samples/run/a", PREFIX + "\ud800"])
async def test_a_key_that_is_none_of_its_records_is_refused_whole(open_outbox: OpenOutbox, key: str) -> None:
    side = open_outbox()
    bad = (Write(key=key, value=b"x", expected=0), Message(body=b"bad", group="g", dedup_id=None))
    with pytest.raises(InvalidInput):
        await side.outbox.write([entry("a"), bad])
    assert await news(side) == []
    assert await recorded(side) == {}


async def test_a_message_that_can_not_be_sent_leaves_no_record(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    unsendable = (entry("b")[0], Message(body=b"b", group="half of a surrogate pair: \ud800", dedup_id=None))
    with pytest.raises(UnicodeEncodeError):
        await side.outbox.write([entry("a"), unsendable])
    assert await side.outbox.write([entry("c")]) == [True]
    assert await news(side) == ["c"]
    assert await recorded(side) == {"c": b"x"}


async def test_of_a_writer_that_is_killed_nothing_is_lost_but_the_news_that_it_was_about_to_send(
    open_outbox: OpenOutbox, child: Callable[..., list[str]], backend: str
) -> None:
    # One transaction has both, else the record is first.
    untold_at_most = 0 if backend == "embedded" else 1
    side = open_outbox()
    first = 0
    for _ in range(3):
        stored = await asyncio.to_thread(killed_after, child("answer_forever", first), 30)
        told = await news(side)
        records = await recorded(side)
        # Nothing that was stored is lost, no message tells of a record that is not there, and none comes twice.
        assert {f"{int(line):06d}" for line in stored} <= records.keys()
        untold = Counter(f"{PREFIX}{name}" for name in records if int(name) >= first)
        untold.subtract(told)
        assert set(untold.values()) <= {0, 1}
        assert untold.total() <= untold_at_most
        assert await total(side) == len(records)
        first = 1 + max(map(int, records))


async def total(side: OutboxSide, key: str = "tokens/run/a") -> int:
    (stored,) = await side.records.get([key])
    return int(stored.value) if stored else 0


async def test_more_than_a_transaction_takes_is_written_and_counted(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    await side.outbox.write([entry("007"), entry("123")])
    entries = [entry(f"{number:03d}", b"x" * 60_000) for number in range(150)]
    counts = [Count(key=f"tokens/run/{number % 3}", amount=1) for number in range(150)]
    applied = await side.outbox.write(entries, counts)
    assert [number for number, done in enumerate(applied) if not done] == [7, 123]
    assert [await total(side, f"tokens/run/{number}") for number in range(3)] == [49, 49, 50]
    assert len(await recorded(side)) == 150
    assert sorted(await news(side)) == sorted(f"{number:03d}" for number in range(150))


async def test_what_is_replaced_and_deleted_is_counted_once(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    one = Count(key="tokens/run/a", amount=1)
    entries = [entry("a"), entry("a", b"y", expected=None), entry("a", None, expected=2), entry("b", None, expected=7)]
    entries += [entry("c", None, expected=None), entry("a", b"again"), entry("a", b"z", expected=5)]
    assert await side.outbox.write(entries, [one] * 7) == [True, True, True, False, True, True, False]
    assert await total(side) == 5
    assert await recorded(side) == {"a": b"again"}


async def test_what_is_applied_is_counted_and_nothing_else(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    first, second = Count(key="tokens/run/a", amount=3), Count(key="tokens/run/b", amount=4)
    assert await side.outbox.write([entry("a"), entry("b"), entry("a")], [first, second, first]) == [
        True,
        True,
        False,
    ]
    assert await side.outbox.write([entry("a"), entry("c")], [first, first]) == [False, True]
    assert (await total(side), await total(side, "tokens/run/b")) == (6, 4)
    await side.outbox.write([entry("d")])
    assert [stored.key for stored in await side.records.scan("tokens/run/")] == ["tokens/run/a", "tokens/run/b"]
    assert await total(side) == 6


async def test_counters_of_many_writers_lose_nothing(open_outbox: OpenOutbox) -> None:
    writers = [open_outbox() for _ in range(4)]
    await asyncio.gather(
        *(
            side.outbox.write([entry(str(name))], [Count(key="tokens/run/a", amount=2**40)])
            for side in writers
            for name in range(25)
        )
    )
    assert await total(writers[0]) == 25 * 2**40


async def test_a_count_that_can_not_be_matched_leaves_no_record(open_outbox: OpenOutbox) -> None:
    side = open_outbox()
    with pytest.raises(ValueError):
        await side.outbox.write([entry("a"), entry("b")], [Count(key="tokens/run/a", amount=1)])
    assert await recorded(side) == {} and await total(side) == 0


@pytest.mark.parametrize("key", [PREFIX + "counter", "tokens/run", "tokens//a"])
async def test_a_counter_that_can_be_none_leaves_no_record(open_outbox: OpenOutbox, key: str) -> None:
    side = open_outbox()
    with pytest.raises(InvalidInput):
        await side.outbox.write([entry("a")], [Count(key=key, amount=1)])
    assert await recorded(side) == {}
