"""A write that was done, whose answer was lost, and that is sent again is not refused by its own condition."""

from collections.abc import Callable

import pytest

from tests.aws.meddling import CUT, LOST, Answer, Meddler, lose, refuse
from turnmill.backends.aws.outbox import DynamoOutbox
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.errors import BackendUnavailable
from turnmill.ports import Count, Message, Stored, Write

KEY = "kind/run/a"
CALL = "calls/run/train/s/0"


def write(value: bytes | None, expected: int | None) -> Write:
    return Write(key=KEY, value=value, expected=expected)


def others_write(records: DynamoRecordStore, first_version: int, times: int) -> Callable[[], None]:
    """What somebody else does with a record that has that version by then."""

    def work() -> None:
        for version in range(first_version, first_version + times):
            change = records.writes.put(KEY, b"others", expected=version, token=bytes(12))
            assert records.table.put(change, expected=version, token=bytes([version]))[0]

    return work


@pytest.mark.parametrize("instead", [LOST, CUT], ids=["error", "cut"])
async def test_a_creation_whose_answer_was_lost_is_applied(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, instead: Answer
) -> None:
    meddler.plan("PutItem", lose(instead))
    assert await meddled.write([write(b"mine", 0)]) == [True]
    assert meddler.seen == ["PutItem", "PutItem"]
    assert await records.get([KEY]) == [Stored(key=KEY, value=b"mine", version=1)]
    assert await meddled.write([write(b"again", 0)]) == [False]


@pytest.mark.parametrize("instead", [LOST, CUT], ids=["error", "cut"])
@pytest.mark.parametrize("expected", [2, None])
async def test_a_replacement_whose_answer_was_lost_is_applied_once(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, instead: Answer, expected: int | None
) -> None:
    await records.write([write(b"1", 0), write(b"2", 1)])
    meddler.plan("UpdateItem", lose(instead))
    assert await meddled.write([write(b"mine", expected)]) == [True]
    assert await records.get([KEY]) == [Stored(key=KEY, value=b"mine", version=3)]
    assert await meddled.write([write(b"again", 2)]) == [False]


@pytest.mark.parametrize("expected", [1, None])
async def test_a_deletion_whose_answer_was_lost_is_applied(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, expected: int | None
) -> None:
    await records.write([write(b"1", 0)])
    meddler.plan("TransactWriteItems", lose(LOST))
    assert await meddled.write([write(None, expected)]) == [True]
    assert await records.get([KEY]) == [None]
    assert await meddled.write([write(None, 1)]) == [False]


async def test_a_deletion_whose_answer_was_lost_spares_what_was_made_since(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler
) -> None:
    await records.write([write(b"1", 0)])
    meddler.plan("TransactWriteItems", lose(LOST, others_write(records, 0, 1)))
    assert await meddled.write([write(None, 1)]) == [True]
    assert await records.get([KEY]) == [Stored(key=KEY, value=b"others", version=1)]


@pytest.mark.parametrize("expected", [0, 1, None])
async def test_a_lost_answer_is_known_after_others_wrote_the_same_record(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, expected: int | None
) -> None:
    version = 0
    if expected != 0:
        await records.write([write(b"1", 0)])
        version = 1
    operation = "PutItem" if expected == 0 else "UpdateItem"
    meddler.plan(operation, lose(LOST, others_write(records, version + 1, 3)))
    assert await meddled.write([write(b"mine", expected)]) == [True]
    assert await records.get([KEY]) == [Stored(key=KEY, value=b"others", version=version + 4)]


@pytest.mark.parametrize("times", [1, 4])
async def test_a_write_that_was_never_done_is_refused_after_others_wrote(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, times: int
) -> None:
    await records.write([write(b"1", 0)])
    meddler.plan("UpdateItem", refuse("InternalServerError", status=500, then=others_write(records, 1, times)))
    assert await meddled.write([write(b"mine", 1)]) == [False]


async def test_where_nobody_can_tell_no_answer_is_made_up(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler
) -> None:
    await records.write([write(b"1", 0)])
    meddler.plan("UpdateItem", lose(LOST, others_write(records, 2, 4)))
    with pytest.raises(BackendUnavailable, match="is not known"):
        await meddled.write([write(b"mine", 1)])


async def test_a_write_that_meets_a_transaction_is_tried_again(meddled: DynamoRecordStore, meddler: Meddler) -> None:
    meddler.plan("PutItem", refuse("TransactionConflictException"), lose(LOST), refuse("TransactionConflictException"))
    assert await meddled.write([write(b"mine", 0)]) == [True]
    assert meddler.seen == ["PutItem"] * 4


@pytest.mark.parametrize("instead", [LOST, CUT], ids=["error", "cut"])
async def test_what_an_outbox_wrote_is_counted_and_told_once(
    records: DynamoRecordStore, meddled: DynamoRecordStore, meddler: Meddler, news: SqliteQueue, instead: Answer
) -> None:
    outbox = DynamoOutbox(meddled, news)
    entry = (Write(key=CALL, value=b"x", expected=0), Message(body=b"0", group="0", dedup_id=None))
    meddler.plan("TransactWriteItems", lose(instead))
    assert await outbox.write([entry], [Count(key="tokens/run/a", amount=5)]) == [True]
    assert await records.get(["tokens/run/a"]) == [Stored(key="tokens/run/a", value=b"5", version=1)]
    assert len(await news.take(max_messages=10)) == 1
    assert await outbox.write([entry], [Count(key="tokens/run/a", amount=5)]) == [False]
    assert await records.get(["tokens/run/a"]) == [Stored(key="tokens/run/a", value=b"5", version=1)]
