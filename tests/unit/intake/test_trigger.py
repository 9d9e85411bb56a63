"""One run a cause, whatever is told twice or cut short."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_root_records
from turnmill.errors import BackendUnavailable, Conflict
from turnmill.intake.trigger import Intake
from turnmill.ports import RecordStore, Write
from turnmill.records import (
    RUN_PREFIX,
    TRIGGER_DEAD_LETTER_PREFIX,
    Cause,
    DeadTrigger,
    Run,
    RunStatus,
    Upload,
    decode,
    encode,
)


def upload_of(key: str, version: str = "1", ignored: str | None = None) -> Upload:
    return Upload(bucket="bucket", key=key, version=version, num_bytes=1, ignored=ignored)


class Plans:
    """Makes runs, and can be told not to."""

    def __init__(self, *errors: Exception, first: int = 1) -> None:
        self.errors = list(errors)
        self.made: list[str] = []
        self._numbers = count(first)

    def new_run_id(self) -> str:
        return f"run-{next(self._numbers)}"

    async def plan(self, upload: Upload, run_id: str) -> Run:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        self.made.append(run_id)
        return Run(
            run_id=run_id,
            cause=upload.cause,
            upload=upload.key,
            status=RunStatus.QUEUED,
            created_at=1.0,
            config={},
            sources={},
            data_path="data.jsonl",
        )


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[RecordStore]:
    store = open_root_records(tmp_path)
    yield store
    store.close()


def intake_of(records: RecordStore, plans: Plans) -> Intake:
    return Intake(records, new_run_id=plans.new_run_id, plan=plans.plan)


async def runs_of(records: RecordStore) -> list[Run]:
    return [decode(item.value, Run) for item in await records.scan(RUN_PREFIX, limit=10_000)]


async def test_a_thousand_doubled_events_in_any_order_make_the_runs_that_they_should(records: RecordStore) -> None:
    """Two deployments' worth of triggers at once: 50 files in 2 versions, each told ten times."""
    uploads = [upload_of(f"{number}.jsonl", version) for number in range(50) for version in ("1", "2")]
    events = uploads * 10
    random.Random(0).shuffle(events)
    # With ids that differ, as random ones do.
    intakes = [intake_of(records, plans) for plans in (Plans(), Plans(first=1000))]
    taken = []
    for start in range(0, len(events), 50):
        part = events[start : start + 50]
        taken += await asyncio.gather(*(intakes[n % 2].take(upload) for n, upload in enumerate(part)))
    runs = await runs_of(records)
    assert sorted(run.cause for run in runs) == sorted(upload.cause for upload in uploads)
    assert sum(item.is_new for item in taken) == len(uploads)
    by_cause = {run.cause: run.run_id for run in runs}
    assert all(item.run_id == by_cause[item.upload.cause] for item in taken)


async def test_a_run_that_a_killed_process_had_only_claimed_is_made_under_the_same_id(records: RecordStore) -> None:
    upload, plans = upload_of("tasks.jsonl"), Plans()
    cause = Cause(cause=upload.cause, bucket="bucket", created_at=1.0, run_id="claimed")
    await records.write([Write(key=cause.key, value=encode(cause), expected=0)])
    taken = await intake_of(records, plans).take(upload)
    assert (taken.run_id, taken.is_new) == ("claimed", True)
    assert [run.run_id for run in await runs_of(records)] == ["claimed"]


async def test_an_ignored_upload_is_told_once_and_makes_no_run(records: RecordStore) -> None:
    intake = intake_of(records, Plans())
    upload = upload_of("tasks.csv", ignored="only .jsonl files are trained on")
    first, second = await intake.take(upload), await intake.take(upload)
    assert (first.run_id, first.is_new, second.is_new) == (None, True, False)
    assert await runs_of(records) == []


async def test_content_that_is_gone_makes_no_run_and_what_can_not_be_read_now_is_tried_again(
    records: RecordStore,
) -> None:
    plans = Plans(BackendUnavailable("the disk is full"), Conflict("changed while it was taken"))
    intake = intake_of(records, plans)
    with pytest.raises(BackendUnavailable):
        await intake.take(upload_of("a.jsonl"))
    assert (await intake.take(upload_of("b.jsonl"))).run_id is None
    assert (await intake.take(upload_of("b.jsonl"))).is_new is False
    (stored,) = await records.scan(TRIGGER_DEAD_LETTER_PREFIX)
    letter = decode(stored.value, DeadTrigger)
    assert (letter.upload, letter.error, letter.place) == (upload_of("b.jsonl"), "changed while it was taken", None)
    assert (await intake.take(upload_of("a.jsonl"))).is_new is True
    assert [run.upload for run in await runs_of(records)] == ["a.jsonl"]


async def test_an_id_that_is_drawn_twice_loses_no_upload(records: RecordStore) -> None:
    """Defect 2: two uploads whose runs have the same name, and one of them is never trained."""
    ids = iter(["same", "same", "same", "other"])
    intake = Intake(records, new_run_id=lambda: next(ids), plan=(plans := Plans()).plan)
    one, two = [await intake.take(upload_of(key)) for key in ("one.jsonl", "two.jsonl")]
    assert (one.run_id, two.run_id, one.is_new, two.is_new) == ("same", "other", True, True)
    assert plans.made == ["same", "other"]
    again = Intake(records, new_run_id=lambda: "third", plan=plans.plan)
    assert (await again.take(upload_of("two.jsonl"))).run_id == "other"
    assert sorted(run.upload or "" for run in await runs_of(records)) == ["one.jsonl", "two.jsonl"]
