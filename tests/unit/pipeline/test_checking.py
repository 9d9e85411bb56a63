"""ValidateData: what it refuses, and what it lets pass with a word about it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pipeline.publishing_child import opened, prepare
from turnmill.config import Config
from turnmill.errors import DataError, InvalidInput
from turnmill.pipeline.checking import poll_validate, start_validate
from turnmill.pipeline.stage import Done, StageContext


@pytest.fixture
async def ctx(tmp_path: Path) -> AsyncIterator[StageContext]:
    """Of a run begun by hand, whose files have their names as digests."""

    async def validate(path: Path) -> dict[str, Any]:
        if path.name == "bad":
            raise DataError(f"{path}: no")
        return {"path": str(path), "rows": 1, "digest": path.name}

    await prepare(tmp_path)
    async with opened(tmp_path) as found:
        yield replace(found, run=replace(found.run, upload=None, data_path="/a/tasks"), validate=validate)


async def check(ctx: StageContext, *, eval_path: str | None, config: Config) -> dict[str, Any]:
    ctx = replace(ctx, run=replace(ctx.run, eval_path=eval_path), config=config)
    handle = await start_validate(ctx)
    while not isinstance(done := await poll_validate(ctx, handle), Done):
        pass
    return done.result


@pytest.mark.parametrize(
    ("eval_path", "config", "doubt"),
    [
        ("/b/other", Config(promotion="better"), None),
        (None, Config(), None),
        ("/b/tasks", Config(), "/b/tasks holds the training data"),
        (None, Config(promotion="better"), "there are no held-out tasks: what is trained will not be published"),
    ],
)
async def test_what_will_disappoint_in_hours_is_told_now(
    ctx: StageContext, caplog: pytest.LogCaptureFixture, eval_path: str | None, config: Config, doubt: str | None
) -> None:
    result = await check(ctx, eval_path=eval_path, config=config)
    assert set(result) == {"data"} | ({"eval_data"} if eval_path else set())
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (doubt is not None) and (doubt is None or doubt in told[0])


@pytest.mark.parametrize(
    ("eval_path", "sources", "told"),
    [
        (None, {"val_every": "--val-every", "promotion_metric": "run.toml"}, ["val_every, promotion_metric"]),
        (None, {"val_every": "recipe.toml", "eval_rollouts": "default", "promotion": "--promotion"}, []),
        ("/b/other", {"val_every": "--val-every"}, []),
    ],
)
async def test_what_was_set_for_held_out_tasks_is_told_where_there_are_none(
    ctx: StageContext, caplog: pytest.LogCaptureFixture, eval_path: str | None, sources: dict[str, str], told: list[str]
) -> None:
    await check(replace(ctx, run=replace(ctx.run, sources=sources)), eval_path=eval_path, config=Config())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = "there are no held-out tasks, so what was set for them does nothing"
    assert warnings == [f"{text}: {names}" for names in told]


async def test_bad_held_out_tasks_hold_the_upload_that_they_came_with(ctx: StageContext) -> None:
    held: list[str] = []

    async def quarantine(error: InvalidInput) -> InvalidInput:
        held.append(str(error))
        return error

    with pytest.raises(DataError):
        await check(replace(ctx, quarantine=quarantine), eval_path="/b/bad", config=Config())
    assert held == ["/b/bad: no"]
