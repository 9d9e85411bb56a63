"""The same content is trained once, unless it came to nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_root_records
from turnmill.errors import Duplicate
from turnmill.intake.claims import claim, content_id, digest_of_weights
from turnmill.ports import RecordStore, Write
from turnmill.records import Run, RunStatus, encode


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[RecordStore]:
    store = open_root_records(tmp_path)
    yield store
    store.close()


async def save(records: RecordStore, run_id: str, status: RunStatus) -> None:
    run = Run(
        run_id=run_id, cause=run_id, status=status, created_at=1.0, config={}, sources={}, data_path=None, upload="a"
    )
    await records.write([Write(key=run.key, value=encode(run), expected=None)])


async def test_the_first_run_has_the_content_and_may_claim_it_again(records: RecordStore) -> None:
    await save(records, "a", RunStatus.ACTIVE)
    assert await claim(records, "content", "a") is None
    assert await claim(records, "content", "a") is None
    assert await claim(records, "other", "a") is None


@pytest.mark.parametrize("status", [RunStatus.QUEUED, RunStatus.ACTIVE, RunStatus.SUCCEEDED])
async def test_a_run_that_is_on_its_way_or_has_succeeded_is_named(records: RecordStore, status: RunStatus) -> None:
    await save(records, "a", status)
    await claim(records, "content", "a")
    with pytest.raises(Duplicate, match=f"run a \\({status}\\)") as caught:
        await claim(records, "content", "b")
    assert caught.value.run_id == "a"


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED])
async def test_after_a_run_that_came_to_nothing_the_content_is_tried_again(
    records: RecordStore, status: RunStatus
) -> None:
    await save(records, "a", status)
    await claim(records, "content", "a")
    await save(records, "b", RunStatus.ACTIVE)
    assert await claim(records, "content", "b") == "a"
    with pytest.raises(Duplicate, match="run b"):
        await claim(records, "content", "c")


async def test_of_many_at_once_one_has_it(records: RecordStore) -> None:
    names = [f"run-{number}" for number in range(40)]
    for name in names:
        await save(records, name, RunStatus.ACTIVE)
    outcomes = await asyncio.gather(*(claim(records, "content", name) for name in names), return_exceptions=True)
    assert outcomes.count(None) == 1
    winner = names[outcomes.index(None)]
    assert {error.run_id for error in outcomes if isinstance(error, Duplicate)} == {winner}


def test_the_content_is_data_held_out_tasks_configuration_and_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    weights = digest_of_weights(tmp_path)
    same = content_id(data="d", config={"lr": 1.0, "env": "wordle"}, base_weights=weights)
    assert same == content_id(data="d", config={"env": "wordle", "lr": 1.0}, base_weights=weights)
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    others = [
        content_id(data="d", held_out="h", config={"lr": 1.0, "env": "wordle"}, base_weights=weights),
        content_id(data="e", config={"lr": 1.0, "env": "wordle"}, base_weights=weights),
        content_id(data="d", config={"lr": 2.0, "env": "wordle"}, base_weights=weights),
        content_id(data="d", config={"lr": 1.0, "env": "wordle"}, base_weights=digest_of_weights(tmp_path)),
    ]
    assert len({same, *others}) == 5
