"""The gate before the first step: what lets a run train, what stops it, and what is not played again."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import ProcessLauncher, open_run
from turnmill.config import Config
from turnmill.errors import InvalidInput, NoProgress, StageFailed
from turnmill.pipeline.baseline import explain, pass_baseline, unseen_bound
from turnmill.pipeline.stage import BASE_VERSION, Running, StageContext
from turnmill.ports import Write
from turnmill.records import Baseline, BaselineVerdict, Batch, Purpose, Run, RunStatus, TaskBaseline, Version, encode


async def unused_quarantine(error: InvalidInput) -> InvalidInput:
    return error


async def nothing_redriven() -> int:
    return 0


def baseline(verdict: BaselineVerdict = BaselineVerdict.SIGNAL, **changes: Any) -> Baseline:
    values: dict[str, Any] = {
        "run_id": "r1",
        "attempt": 1,
        "verdict": verdict,
        "is_ignored": False,
        "threshold": 1.0,
        "num_rollouts": 384,
        "num_passed": {BaselineVerdict.TOO_HARD: 0, BaselineVerdict.TOO_EASY: 384}.get(verdict, 9),
        "num_invalid": 0,
        "low": 0.0,
        "high": 0.0,
        "reward_min": 0.0,
        "reward_mean": 0.0,
        "reward_max": 0.0,
        "num_rewards": 1,
        "tasks": (TaskBaseline(task_id="t", num_rollouts=384, num_passed=9, low=0.0, high=0.1, reward_mean=0.0),),
    }
    return Baseline(**{**values, **changes})


class Played:
    """Evaluations in which the baseline goes on for ever, or raises `error`."""

    def __init__(self) -> None:
        self.started: list[tuple[str, Path, Purpose]] = []
        self.error: Exception | None = None

    async def start(
        self, name: str, path: Path, purpose: Purpose = Purpose.EVAL, version: Version = BASE_VERSION
    ) -> None:
        if not self.started:
            self.started.append((name, path, purpose))

    def poll(self, name: str) -> dict[str, Any] | None:
        if self.error is not None:
            raise self.error
        return None

    def compare(self, before: str, after: str, *, by: str) -> dict[str, Any]:
        raise AssertionError(before)

    def progress(self, name: str) -> str:
        return "40 of 64"


@dataclass
class World:
    ctx: StageContext
    played: Played

    async def record(self, found: Baseline) -> None:
        await self.ctx.ports.records.write([Write(key=found.key, value=encode(found), expected=None)])


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async def nothing(*_: object) -> dict[str, Any]:
        raise AssertionError("the gate asks for the baseline only")

    run = Run(
        run_id="r1",
        cause="c",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config={},
        sources={},
        data_path="tasks.jsonl",
    )
    ports = open_run(tmp_path, "r1", num_replicas=1)
    played = Played()
    ctx = StageContext(
        run=run,
        config=Config(),
        ports=ports,
        launcher=ProcessLauncher(tmp_path),
        evaluations=played,
        validate=nothing,
        quarantine=unused_quarantine,
        claim=nothing,
        give_up_redriven=nothing_redriven,
        worker_env={},
        check=lambda: None,
    )
    yield World(ctx=ctx, played=played)
    ports.close()


async def test_the_baseline_is_played_on_the_training_tasks_and_its_record_lets_the_run_train(world: World) -> None:
    assert await pass_baseline(world.ctx) == Running(detail="baseline 40 of 64")
    assert world.played.started == [("baseline", Path("tasks.jsonl"), Purpose.BASELINE)]
    await world.record(baseline())
    assert await pass_baseline(world.ctx) == baseline()


async def test_what_ends_the_baseline_ends_the_stage(world: World) -> None:
    world.played.error = NoProgress("evaluation baseline: 65 rollouts were invalid")
    with pytest.raises(NoProgress, match="65 rollouts were invalid"):
        await pass_baseline(world.ctx)


async def test_one_that_passed_is_not_played_again_when_the_run_is_resumed(world: World) -> None:
    await world.record(baseline())
    resumed = replace(world.ctx, run=replace(world.ctx.run, attempt=3))
    assert await pass_baseline(resumed) == baseline() and world.played.started == []


async def test_one_that_stopped_the_run_is_played_again_when_it_is_resumed(world: World) -> None:
    await world.record(baseline(BaselineVerdict.TOO_HARD))
    with pytest.raises(StageFailed, match="too hard for the base model"):
        await pass_baseline(world.ctx)
    resumed = replace(world.ctx, run=replace(world.ctx.run, attempt=2))
    assert isinstance(await pass_baseline(resumed), Running)
    await world.record(baseline(BaselineVerdict.TOO_HARD, attempt=2))
    with pytest.raises(StageFailed):
        await pass_baseline(resumed)


async def test_a_verdict_that_is_ignored_lets_the_run_train(world: World) -> None:
    await world.record(baseline(BaselineVerdict.TOO_EASY, is_ignored=True))
    found = await pass_baseline(world.ctx)
    assert isinstance(found, Baseline) and found.figures()["verdict"] == "too_easy" and found.figures()["is_ignored"]


async def test_none_is_due_where_it_is_switched_off_or_the_run_has_steps(world: World) -> None:
    assert await pass_baseline(replace(world.ctx, config=Config(baseline_rollouts=0))) is None
    batch = Batch(run_id="r1", step=1, groups=())
    await world.ctx.ports.records.write([Write(key=batch.key, value=encode(batch), expected=0)])
    assert await pass_baseline(world.ctx) is None and world.played.started == []


def test_a_share_of_which_nothing_was_seen_in_384_is_at_most_eight_in_a_thousand() -> None:
    # 0.05^(1/384) = exp(ln 0.05 / 384) = exp(-2.995732 / 384) = 0.992229
    assert unseen_bound(384) == pytest.approx(1 - 0.992229, abs=1e-6)
    # The rule of three: about 3 / n.
    assert unseen_bound(3000) == pytest.approx(0.001, rel=2e-3)


def test_the_error_says_what_was_seen_and_what_to_do() -> None:
    text = explain(baseline(BaselineVerdict.TOO_HARD))
    assert "too hard for the base model: none of 384 rollouts passed (at most 0.8 % would)" in text
    assert "every reward was 0: does the reward tell good from bad?" in text and "ignore_baseline = true" in text
    partial = baseline(BaselineVerdict.TOO_HARD, reward_min=0.1, reward_mean=0.25, reward_max=0.6, num_rewards=4)
    assert (
        "rewards were 0.1 to 0.6, 0.25 in the mean, 4 different ones, and 1 is a pass: set success_threshold"
        in explain(partial)
    )
    easy = explain(baseline(BaselineVerdict.TOO_EASY, reward_mean=1.0))
    assert "too easy for the base model: all of 384 rollouts passed (at most 0.8 % would fail)" in easy
    assert "give harder tasks" in easy
