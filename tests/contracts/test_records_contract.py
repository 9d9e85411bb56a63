"""What every record store keeps."""

import asyncio
import subprocess
from collections.abc import Callable

import pytest

from tests.contracts.killing import killed_after
from turnmill.errors import InvalidInput
from turnmill.ports import RecordStore, Stored, Write


def create(key: str, value: bytes = b"{}") -> Write:
    return Write(key=key, value=value, expected=0)


async def test_a_record_is_read_as_it_was_written(records: RecordStore) -> None:
    assert await records.write([create("kind/run/a", b"one")]) == [True]
    assert await records.get(["kind/run/a"]) == [Stored(key="kind/run/a", value=b"one", version=1)]


async def test_get_answers_in_order_with_none_where_nothing_is(records: RecordStore) -> None:
    await records.write([create("kind/run/a", b"1"), create("other/run/b", b"2")])
    got = await records.get(["other/run/b", "none/run/x", "kind/run/a", "kind/run/x", "kind/run/a"])
    assert [stored and stored.value for stored in got] == [b"2", None, b"1", None, b"1"]
    assert await records.get([]) == []


async def test_a_record_is_created_once(records: RecordStore) -> None:
    assert await records.write([create("kind/run/a", b"1"), create("kind/run/a", b"2")]) == [True, False]
    [stored] = await records.get(["kind/run/a"])
    assert stored is not None and stored.value == b"1"


async def test_a_write_needs_the_version_that_was_read(records: RecordStore) -> None:
    await records.write([create("kind/run/a")])
    update = Write(key="kind/run/a", value=b"new", expected=1)
    assert await records.write([update]) == [True]
    assert await records.write([update]) == [False]
    assert await records.get(["kind/run/a"]) == [Stored(key="kind/run/a", value=b"new", version=2)]
    assert await records.write([Write(key="kind/run/absent", value=b"new", expected=1)]) == [False]


async def test_an_unconditional_write_counts_the_version_up(records: RecordStore) -> None:
    write = Write(key="kind/run/a", value=b"1", expected=None)
    assert await records.write([write, write]) == [True, True]
    assert await records.get(["kind/run/a"]) == [Stored(key="kind/run/a", value=b"1", version=2)]


async def test_a_delete_can_be_conditional(records: RecordStore) -> None:
    await records.write([create("kind/run/a")])
    assert await records.write([Write(key="kind/run/a", value=None, expected=2)]) == [False]
    assert await records.write([Write(key="kind/run/a", value=None, expected=0)]) == [False]
    assert await records.write([Write(key="kind/run/a", value=None, expected=1)]) == [True]
    assert await records.write([Write(key="kind/run/a", value=None, expected=1)]) == [False]
    assert await records.write([Write(key="kind/run/a", value=None, expected=None)]) == [True]
    assert await records.get(["kind/run/a"]) == [None]


async def test_a_failed_write_leaves_its_neighbours_applied(records: RecordStore) -> None:
    await records.write([create("kind/run/b")])
    assert await records.write([create("kind/run/a"), create("kind/run/b"), create("other/run/c")]) == [
        True,
        False,
        True,
    ]


async def test_a_scan_gives_the_keys_of_a_prefix_in_pages(records: RecordStore) -> None:
    keys = [f"kind/run/s{number:03d}" for number in range(25)]
    await records.write([create(key) for key in reversed(keys)])
    await records.write([create("kind/run2/s000"), create("kind/ru/s000"), create("kind/run0/a"), create("king/run/a")])
    found: list[str] = []
    while page := await records.scan("kind/run/", after=found[-1] if found else "", limit=10):
        assert len(page) <= 10
        found += [stored.key for stored in page]
    assert found == keys
    assert [stored.key for stored in await records.scan("kind/run/s01")] == keys[10:20]
    assert await records.scan("none/run/") == []
    assert [stored.key for stored in await records.scan("kind/run/s0", limit=1)] == keys[:1]


async def test_a_scan_goes_on_after_any_key(records: RecordStore) -> None:
    keys = ["kind/run/a", "kind/run/a/", "kind/run/a/1", "kind/run/a0", "kind/run/b"]
    await records.write([create(key) for key in keys])
    starts = [
        "",
        "kind",
        "kind/run/",
        "kind/run/a",
        "kind/run/a/",
        "kind/run/a/\x00",
        "kind/run/a/2",
        "kind/run/z",
        "l",
    ]
    for prefix in ("kind/run/", "kind/run/a", "kind/run/a/"):
        for after in starts:
            found = [stored.key for stored in await records.scan(prefix, after=after)]
            assert found == [key for key in keys if key.startswith(prefix) and key > after]


async def test_the_calls_of_a_sample_are_scanned(records: RecordStore) -> None:
    keys = [f"calls/run/train/{name}" for name in ("s/0", "s/1", "s0/0", "s%2F/0")]
    assert await records.write([create(key) for key in keys]) == [True] * 4
    assert [stored.key for stored in await records.scan("calls/run/train/s/")] == keys[:2]
    assert [stored.key for stored in await records.scan("calls/run/train/s/1")] == [keys[1]]


async def test_large_values_are_kept_like_small_ones(records: RecordStore) -> None:
    large, larger = b"a" * 500_000, b"b" * 1_000_000
    writes = [create("kind/run/a", large), create("kind/run/b", b"small"), create("kind/run/c", large)]
    assert await records.write(writes) == [True] * 3
    assert await records.write([create("kind/run/a", larger)]) == [False]
    assert await records.write([Write(key="kind/run/b", value=larger, expected=1)]) == [True]
    assert await records.write([Write(key="kind/run/c", value=b"", expected=None)]) == [True]
    expected = [
        Stored(key="kind/run/a", value=large, version=1),
        Stored(key="kind/run/b", value=larger, version=2),
        Stored(key="kind/run/c", value=b"", version=2),
    ]
    assert await records.scan("kind/run/") == expected
    assert await records.get(["kind/run/c", "kind/run/b", "kind/run/a"]) == expected[::-1]


async def test_many_keys_are_read_at_once(records: RecordStore) -> None:
    keys = [f"kind/run/{number}" for number in range(250)]
    assert await records.write([create(key, key.encode()) for key in keys[::2]]) == [True] * 125
    found = await records.get(keys)
    assert [stored and stored.value for stored in found[::2]] == [key.encode() for key in keys[::2]]
    assert found[1::2] == [None] * 125


async def test_ids_may_hold_any_text(records: RecordStore) -> None:
    keys = ["kind/run/../../etc/passwd_0", "kind/run/a b\tc\n'\"%_0", "kind/run/𐍈\U0010ffff_0", "kind/run//_0"]
    assert await records.write([create(key) for key in keys]) == [True] * 4
    assert [stored.key for stored in await records.scan("kind/run/")] == sorted(keys)
    assert [stored.key for stored in await records.scan("kind/run/𐍈\U0010ffff")] == [keys[2]]


NO_KEYS = [
    "",
    "kind",
    "kind/",
    "/run/a",
    "../run/a",
    "a.b/run/x",
    "kind//a",
    "kind/run",
    "kind/run/",
    "kind/run/\ud800",
]


@pytest.mark.parametrize("key", [*NO_KEYS, "calls/run/a", "calls/run/train/s/", "calls/run//s/a"])
async def test_a_key_without_kind_and_partition_is_refused(records: RecordStore, key: str) -> None:
    with pytest.raises(InvalidInput, match="record key"):
        await records.get([key])
    with pytest.raises(InvalidInput, match="record key"):
        await records.write([create(key)])


@pytest.mark.parametrize("prefix", ["", "kind", "kind/", "kind/run", "calls/run/", "calls/run/train/s"])
async def test_a_scan_of_more_than_a_partition_is_refused(records: RecordStore, prefix: str) -> None:
    with pytest.raises(InvalidInput, match="kind/partition/"):
        await records.scan(prefix)


async def test_of_concurrent_creators_one_wins(open_records: Callable[[], RecordStore]) -> None:
    stores = [open_records() for _ in range(4)]
    writes = [
        store.write([create("kind/run/a", f"{index}.{turn}".encode())])
        for turn in range(10)
        for index, store in enumerate(stores)
    ]
    assert sum(applied for [applied] in await asyncio.gather(*writes)) == 1


async def test_processes_that_count_up_one_record_lose_no_step(
    records: RecordStore, child: Callable[..., list[str]]
) -> None:
    command = child("increment", "kind/run/counter", 100)
    await asyncio.gather(*(asyncio.to_thread(subprocess.check_output, command) for _ in range(4)))
    assert await records.get(["kind/run/counter"]) == [Stored(key="kind/run/counter", value=b"400", version=400)]


async def test_what_was_written_survives_the_death_of_its_writer(
    records: RecordStore, child: Callable[..., list[str]]
) -> None:
    lines = await asyncio.to_thread(killed_after, child("record_forever", "kind/run/"), 50)
    acknowledged = {int(line) for line in lines}
    stored = {int(item.key.removeprefix("kind/run/")) for item in await records.scan("kind/run/", limit=100_000)}
    assert len(acknowledged) >= 50
    assert acknowledged <= stored
    # The one that was under way when it died may be there, and no other.
    assert len(stored) <= len(acknowledged) + 1
