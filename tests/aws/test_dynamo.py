"""Records on DynamoDB beyond the contract: limits, pages, large values in S3, time to live, transactions.

The emulator keeps no throughput limit and runs one transaction at a time: what AWS answers then comes from a proxy.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.aws.emulator import REGION, Emulator
from tests.aws.meddling import Meddler, Meddling, refuse, rewrite
from tests.aws.service_proxy import Faults, running_proxy
from tests.aws.tables import create_table
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.objects import Objects
from turnmill.backends.aws.outbox import DynamoOutbox
from turnmill.backends.aws.records import MAX_INLINE, DynamoRecordStore
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt
from turnmill.ports import Count, Message, RecordStore, Write

KEY = "kind/run/a"
LARGE = b"x" * (MAX_INLINE + 1)


def create(key: str, value: bytes = b"{}") -> Write:
    return Write(key=key, value=value, expected=0)


# ---------------------------------------------------------------- reading


async def test_a_scan_goes_over_pages_of_1_mb(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler
) -> None:
    value = b"x" * 60_000
    keys = [f"kind/run/{number:02d}" for number in range(50)]
    await records.write([create(key, value) for key in keys])
    assert [stored.key for stored in await meddled.scan("kind/run/")] == keys
    assert meddler.seen == ["Query"] * 3
    assert [stored.key for stored in meddled.scan_now("kind/run/", limit=-1)] == keys
    assert [stored.key for stored in await meddled.scan("kind/run/", after=keys[3], limit=30)] == keys[4:34]


def half_unprocessed(table: str) -> Meddling:
    """The answer of BatchGetItem that is too busy for the second half."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        items = answer["Responses"][table]
        left = items[len(items) // 2 :]
        keys = [{name: item[name] for name in ("pk", "sk")} for item in left]
        unprocessed = {table: {"Keys": keys, "ConsistentRead": True}} if keys else {}
        return {"Responses": {table: items[: len(items) // 2]}, "UnprocessedKeys": unprocessed}

    return rewrite(change)


async def test_keys_that_were_not_processed_are_asked_for_again(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, table: str
) -> None:
    keys = [f"kind/run/{number}" for number in range(8)]
    await records.write([create(key, key.encode()) for key in keys])
    meddler.plan("BatchGetItem", *[half_unprocessed(table)] * 3)
    found = await meddled.get([*keys, "kind/run/none"])
    assert [stored and stored.value for stored in found] == [*(key.encode() for key in keys), None]
    assert meddler.seen == ["BatchGetItem"] * 4


@pytest.mark.slow
async def test_a_table_that_processes_nothing_is_unavailable(
    meddled: DynamoRecordStore, meddler: Meddler, table: str
) -> None:
    keys = [{"pk": {"S": "kind/run"}, "sk": {"S": "a"}}]
    nothing = {"Responses": {table: []}, "UnprocessedKeys": {table: {"Keys": keys}}}
    meddler.plan("BatchGetItem", *[rewrite(lambda _: nothing)] * 20)
    with pytest.raises(BackendUnavailable, match="too busy"):
        await meddled.get([KEY, "kind/run/b"])


def test_records_are_read_without_an_event_loop(records: DynamoRecordStore) -> None:
    asyncio.run(records.write([create(KEY, LARGE), create("kind/run/b", b"2")]))
    assert [stored.value for stored in records.scan_now("kind/run/")] == [LARGE, b"2"]
    assert [stored.key for stored in records.scan_now("kind/run/", after=KEY, limit=-1)] == ["kind/run/b"]
    assert [stored and stored.value for stored in records.get_now(["kind/run/b", "kind/run/c", KEY])] == [
        b"2",
        None,
        LARGE,
    ]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("key", [f"kind/{'p' * 2048}/a", f"kind/run/{'ä' * 513}"])
async def test_a_key_longer_than_dynamodb_takes_is_refused_before_anything_is_written(
    records: DynamoRecordStore, key: str
) -> None:
    with pytest.raises(InvalidInput, match=r"DynamoDB takes (2048|1024): shorten"):
        await records.write([create(KEY), create(key)])
    assert await records.get([KEY]) == [None]


async def test_a_table_that_is_not_there_is_named(clients: AwsClients, overflow: LargeValues) -> None:
    absent = DynamoRecordStore(clients, "absent", overflow=overflow)
    for work in (absent.get([KEY]), absent.write([create(KEY)]), absent.scan("kind/run/")):
        with pytest.raises(NotFound, match="DynamoDB table absent does not exist"):
            await work


async def test_an_item_that_is_no_record_is_corrupt(
    clients: AwsClients, records: DynamoRecordStore, table: str
) -> None:
    item = {"pk": {"S": "kind/run"}, "sk": {"S": "a"}, "something": {"S": "else"}}
    await clients.call("dynamodb", "put_item", TableName=table, Item=item)
    with pytest.raises(RecordCorrupt, match=KEY):
        await records.get([KEY])


# ---------------------------------------------------------------- large values


async def test_an_object_goes_with_the_record_that_it_belongs_to(
    records: DynamoRecordStore, objects: Callable[[], list[str]]
) -> None:
    assert await records.write([create(KEY, LARGE), create(KEY, LARGE)]) == [True, False]
    (first,) = objects()
    assert first.startswith("records/kind/")
    assert await records.write([Write(key=KEY, value=LARGE, expected=1)]) == [True]
    (second,) = objects()
    assert second != first
    assert await records.write([Write(key=KEY, value=b"small", expected=None)]) == [True]
    assert objects() == []
    assert await records.write([Write(key=KEY, value=LARGE, expected=3)]) == [True]
    assert len(objects()) == 1
    assert await records.write([Write(key=KEY, value=None, expected=3)]) == [False]
    assert len(objects()) == 1
    assert await records.write([Write(key=KEY, value=None, expected=4)]) == [True]
    assert objects() == []


async def test_values_up_to_the_threshold_are_in_their_items(
    records: DynamoRecordStore, objects: Callable[[], list[str]]
) -> None:
    await records.write([create(KEY, LARGE[1:])])
    assert objects() == []


async def test_a_large_value_that_was_changed_or_lost_is_corrupt(
    clients: AwsClients, records: DynamoRecordStore, objects: Callable[[], list[str]], table: str
) -> None:
    await records.write([create(KEY, LARGE)])
    (name,) = objects()
    Objects(clients, table, "").put(name, LARGE[1:])
    with pytest.raises(RecordCorrupt, match=f"{name} does not match the digest in its record"):
        await records.get([KEY])
    await clients.call("s3", "delete_object", Bucket=table, Key=name)
    with pytest.raises(RecordCorrupt, match=f"{KEY} is lost"):
        await records.scan("kind/run/")


async def test_a_record_is_replaced_also_where_its_object_can_not_be_removed(
    clients: AwsClients, table: str, records: DynamoRecordStore, caplog: pytest.LogCaptureFixture
) -> None:
    await records.write([create(KEY, LARGE)])
    elsewhere = DynamoRecordStore(clients, table, overflow=LargeValues(clients, "absent", "records/"))
    assert await elsewhere.write([Write(key=KEY, value=b"small", expected=1)]) == [True]
    assert "s3://absent/records/kind/" in caplog.text and "is not needed any more and stays" in caplog.text


async def test_readers_of_a_large_value_that_is_replaced_see_the_old_or_the_new_one(
    records: DynamoRecordStore,
) -> None:
    await records.write([create(KEY, LARGE)])

    async def replace() -> None:
        for version in range(1, 30):
            assert await records.write([Write(key=KEY, value=LARGE + bytes([version]), expected=version)]) == [True]

    replacing = asyncio.create_task(replace())
    last = 0
    while not replacing.done():
        ((stored,), (scanned,)) = await asyncio.gather(records.get([KEY]), records.scan("kind/run/"))
        assert stored is not None and stored.version >= last
        assert stored.value == LARGE + (bytes([stored.version - 1]) if stored.version > 1 else b"")
        assert scanned.value == LARGE + (bytes([scanned.version - 1]) if scanned.version > 1 else b"")
        last = stored.version
    await replacing


# ---------------------------------------------------------------- time to live, and the table


async def test_records_expire_only_where_that_was_asked(clients: AwsClients, table: str, overflow: LargeValues) -> None:
    records = DynamoRecordStore(clients, table, overflow=overflow, ttl_s={"clocks": 100}, clock=lambda: 1000.5)
    again = Write(key="clocks/run/a", value=b"2", expected=1)
    await records.write([create("clocks/run/a"), again, create("clocks/run/b", LARGE), create(KEY)])
    found = await clients.call("dynamodb", "scan", TableName=table)
    expiry = {f"{item['pk']['S']}/{item['sk']['S']}": item.get("expires_at") for item in found["Items"]}
    assert expiry == {"clocks/run/a": {"N": "1100"}, "clocks/run/b": {"N": "1100"}, KEY: None}


@pytest.mark.parametrize(("is_recoverable", "status"), [(True, "ENABLED"), (False, "DISABLED")])
async def test_a_table_is_made_as_described(clients: AwsClients, is_recoverable: bool, status: str) -> None:
    name = f"described-{status}"
    create_table(clients, name, is_recoverable=is_recoverable)
    made = (await clients.call("dynamodb", "describe_table", TableName=name))["Table"]
    assert made["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    ttl = await clients.call("dynamodb", "describe_time_to_live", TableName=name)
    assert ttl["TimeToLiveDescription"] == {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires_at"}
    backups = await clients.call("dynamodb", "describe_continuous_backups", TableName=name)
    recovery = backups["ContinuousBackupsDescription"]["PointInTimeRecoveryDescription"]
    assert recovery["PointInTimeRecoveryStatus"] == status


# ---------------------------------------------------------------- transactions


def call(name: str, value: bytes | None = b"x", *, expected: int | None = 0) -> tuple[Write, Message]:
    message = Message(body=name.encode(), group=name, dedup_id=None)
    return Write(key=f"calls/run/train/s/{name}", value=value, expected=expected), message


COUNT = Count(key="tokens/run/a", amount=1)


async def test_those_that_a_transaction_refuses_cost_the_others_one_more(
    meddled: DynamoRecordStore, meddler: Meddler, news: SqliteQueue
) -> None:
    outbox = DynamoOutbox(meddled, news)
    await outbox.write([call("b"), call("d")], [COUNT] * 2)
    meddler.seen.clear()
    entries = [call(name) for name in "abcde"]
    assert await outbox.write(entries, [COUNT] * 5) == [True, False, True, False, True]
    assert meddler.seen == ["TransactWriteItems"] * 2
    assert [stored and stored.value for stored in meddled.get_now(["tokens/run/a"])] == [b"5"]


async def test_without_counts_each_record_is_a_write_of_its_own(
    meddled: DynamoRecordStore, meddler: Meddler, news: SqliteQueue
) -> None:
    assert await DynamoOutbox(meddled, news).write([call("a"), call("b")]) == [True, True]
    assert meddler.seen == ["PutItem"] * 2


@pytest.mark.parametrize("code", ["TransactionConflict", "ThrottlingError"])
async def test_a_transaction_that_meets_another_is_tried_again(
    meddled: DynamoRecordStore, meddler: Meddler, news: SqliteQueue, code: str
) -> None:
    reasons = [{"Code": "None"}, {"Code": code, "Message": "by the test"}]
    cancelled = refuse("TransactionCanceledException", CancellationReasons=reasons)
    meddler.plan("TransactWriteItems", cancelled, cancelled)
    assert await DynamoOutbox(meddled, news).write([call("a")], [COUNT]) == [True]
    assert meddler.seen == ["TransactWriteItems"] * 3
    assert [stored and stored.value for stored in meddled.get_now(["tokens/run/a"])] == [b"1"]


async def test_a_transaction_that_can_never_be_done_is_not_tried_again(
    meddled: DynamoRecordStore, meddler: Meddler, news: SqliteQueue
) -> None:
    reasons = [{"Code": "ValidationError", "Message": "by the test"}, {"Code": "None"}]
    meddler.plan("TransactWriteItems", refuse("TransactionCanceledException", CancellationReasons=reasons))
    with pytest.raises(BackendUnavailable, match="TransactionCanceledException"):
        await DynamoOutbox(meddled, news).write([call("a")], [COUNT])
    assert await news.take(max_messages=1) == []


async def test_large_values_of_an_outbox_leave_no_object_behind(
    records: DynamoRecordStore, news: SqliteQueue, objects: Callable[[], list[str]]
) -> None:
    outbox = DynamoOutbox(records, news)
    assert await outbox.write([call("a", LARGE), call("a", LARGE), call("b", LARGE)], [COUNT] * 3) == [
        True,
        False,
        True,
    ]
    assert len(objects()) == 2
    entries = [call("a", LARGE + b"2", expected=1), call("b", b"small", expected=None), call("c", LARGE, expected=1)]
    assert await outbox.write(entries, [COUNT] * 3) == [True, True, False]
    assert len(objects()) == 1
    assert await outbox.write([call("a", None, expected=2)], [COUNT]) == [True]
    assert objects() == []


# ---------------------------------------------------------------- the same as embedded


KEYS = [f"kind/{partition}/{rest}" for partition in "pq" for rest in ("a", "a/", "a/b", "ä", "\U0010ffff", "z")]
VALUES = [b"", b"1", b"2" * 100, LARGE]


async def work_on_both(
    one: RecordStore, other: RecordStore, *, values: Sequence[bytes | None], seed: int, num_rounds: int
) -> None:
    """Random work on few keys, of which each store must say the same."""
    choose = random.Random(seed)
    for _ in range(num_rounds):
        writes = [
            Write(
                key=choose.choice(KEYS),
                value=choose.choice(values),
                expected=choose.choice([None, 0, 0, 1, 2, 3]),
            )
            for _ in range(choose.randint(1, 8))
        ]
        assert await one.write(writes) == await other.write(writes)
        wanted = choose.sample(KEYS, 5)
        assert await one.get(wanted) == await other.get(wanted)
        prefix = choose.choice(["kind/p/", "kind/q/", "kind/p/a", "kind/p/a/", "kind/q/\U0010ffff"])
        after, limit = choose.choice(["", *KEYS]), choose.randint(1, 6)
        assert await one.scan(prefix, after=after, limit=limit) == await other.scan(prefix, after=after, limit=limit)


async def test_random_work_ends_as_it_does_embedded(records: DynamoRecordStore, tmp_path: Path) -> None:
    other = SqliteRecordStore(tmp_path / "records")
    await work_on_both(records, other, values=[None, *VALUES], seed=20, num_rounds=60)
    other.close()


@pytest.mark.slow
async def test_random_work_through_faults_ends_as_it_does_embedded(
    emulator: Emulator, table: str, tmp_path: Path
) -> None:
    other = SqliteRecordStore(tmp_path / "records")
    faults = Faults(lose=0.08, refuse=0.04, throughput=0.02, throttle=0.02, expire=0.01, seed=3)
    with running_proxy(emulator.url, tmp_path / "proxy", faults) as proxy:
        clients = AwsClients(AwsSettings(name="tests", region=REGION, endpoint_url=proxy.url))
        faulty = DynamoRecordStore(clients, table, overflow=LargeValues(clients, table, "records/"))
        # Nothing is deleted: whether a record that is not there was written before, its answer lost, nobody can tell.
        assert all(await faulty.write([create(key) for key in KEYS]) + await other.write([create(key) for key in KEYS]))
        seeds = itertools.count(21)
        # How many requests a round takes depends on what comes first, and so does how many of them are disturbed.
        while min(proxy.counts().faults[name] for name in ("lose", "refuse")) < 3:
            await work_on_both(faulty, other, values=VALUES, seed=next(seeds), num_rounds=12)
        clients.close()
    other.close()
