"""What is left of a run's time is left of its training, too."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.infra import RunResources, StackRunInfra
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.embedded import ProcessLauncher, open_root_records, open_run
from turnmill.budget import Meter
from turnmill.config import Config, to_dict
from turnmill.errors import InvalidInput
from turnmill.evaluation import BackgroundEvaluations, Evaluation, Progress
from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.stage import StageContext
from turnmill.ports import Write
from turnmill.records import Metric, Purpose, Run, RunClock, RunStatus, StageRecord, Version, encode
from turnmill.wiring.watching.checks.metrics import RecentMetrics
from turnmill.wiring.watching.checks.slow_stages import SlowStages

CONFIG = Config(max_steps=100, max_runtime_s=600.0, training_timeout=20.0, call_timeout_s=10.0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[StageContext, RunRecord]]:
    """The second attempt of a run, whose first one took 450 s; its training began 20 s ago and has made ten steps."""
    now = time.time()
    run = Run(
        run_id="r1",
        cause="test/r1",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config=to_dict(CONFIG),
        sources={},
        data_path=None,
        attempt=2,
        stages=(StageRecord(name="SubmitTraining", state="running", started_at=now - 20.0, attempt=2),),
    )
    runs, ports = open_root_records(tmp_path), open_run(tmp_path, "r1", num_replicas=1)
    earlier = RunClock(run_id="r1", attempt=1, began_at=1.0, seconds=450.0)
    await ports.records.write([Write(key=earlier.key, value=encode(earlier), expected=0)])
    for step in range(1, 11):
        await ports.metrics.write(Metric(run_id="r1", step=step, time=now - 20.0 + 1.9 * step, values={}))
    meter = Meter(ports.records, run, root=tmp_path)
    await meter.start()
    yield _context(tmp_path, run, ports, meter), await RunRecord.create(runs, run)
    await meter.close()
    ports.close()
    runs.close()


def _context(root: Path, run: Run, ports: Any, meter: Meter) -> StageContext:
    async def nothing(*_: object) -> dict[str, Any]:
        return {}

    async def quarantine(error: InvalidInput) -> InvalidInput:
        return error

    async def give_up_redriven() -> int:
        return 0

    async def play(name: str, path: Path, purpose: Purpose, version: Version, progress: Progress) -> Evaluation:
        raise AssertionError(f"{name}: no test here evaluates")

    return StageContext(
        run=run,
        config=CONFIG,
        ports=ports,
        launcher=ProcessLauncher(root),
        evaluations=BackgroundEvaluations(play),
        validate=nothing,
        quarantine=quarantine,
        claim=nothing,
        give_up_redriven=give_up_redriven,
        worker_env={},
        check=lambda: None,
        meter=meter,
    )


async def test_a_training_is_slow_where_the_time_that_earlier_attempts_left_does_not_do(
    tmp_path: Path, world: tuple[StageContext, RunRecord]
) -> None:
    ctx, record = world
    # 90 steps of 1.9 s do not fit into 600 - 450 s.
    (finding,) = await SlowStages(tmp_path, ctx, record, RecentMetrics(ctx.ports, "r1")).look()
    assert "90 steps are left at 1.9 s each" in finding.summary and "max_runtime_s ends it after 1" in finding.summary
    roomy = replace(ctx, config=replace(CONFIG, max_runtime_s=900.0))
    assert await SlowStages(tmp_path, roomy, record, RecentMetrics(ctx.ports, "r1")).look() == []


async def test_how_long_the_infrastructure_may_take_is_a_matter_of_what_it_is_made_on(
    tmp_path: Path, world: tuple[StageContext, RunRecord]
) -> None:
    ctx, record = world
    settings = AwsSettings(region="us-east-1")
    stack = StackRunInfra(AwsClients(settings), settings, "r1", {}, RunResources(num_replicas=1))
    on_aws = replace(ctx, ports=replace(ctx.ports, infra=stack))

    async def slow(ctx: StageContext, taken_s: float) -> list[str]:
        stage = StageRecord(name="DeployRunInfra", state="running", started_at=time.time() - taken_s, attempt=2)
        await record.stage(stage)
        found = await SlowStages(tmp_path, ctx, record, RecentMetrics(ctx.ports, "r1")).look()
        return [finding.summary for finding in found]

    (summary,) = await slow(ctx, 60.0)
    assert "5 s are expected" in summary
    assert await slow(on_aws, 60.0) == []
    (summary,) = await slow(on_aws, 400.0)
    assert "300 s are expected" in summary


async def test_an_evaluation_is_expected_to_take_as_long_as_those_before(
    tmp_path: Path, world: tuple[StageContext, RunRecord]
) -> None:
    ctx, record = world
    run = replace(ctx.run, eval_path="held_out.jsonl")
    every = replace(ctx, run=run, config=replace(CONFIG, val_every=11, max_runtime_s=90_000.0))
    now = time.time()
    for step, seconds in ((0, 100.0), (10, 300.0)):
        values = {"val_solved": 0.5, "val_s": seconds}
        await ctx.ports.metrics.write(Metric(run_id="r1", step=step, time=now - 1200.0, values=values))
    await record.stage(StageRecord(name="SubmitTraining", state="running", started_at=now - 1210.0, attempt=2))
    # Step 11 is due: 600 s are much for the step, 60 + 3 x 200 s for the evaluation.
    assert await SlowStages(tmp_path, every, record, RecentMetrics(ctx.ports, "r1")).look() == []
    for changed in (
        replace(every, config=replace(every.config, val_every=50)),
        replace(every, run=replace(run, eval_path=None)),
    ):
        (finding,) = await SlowStages(tmp_path, changed, record, RecentMetrics(ctx.ports, "r1")).look()
        assert "the step that is being made takes 1200 s so far; 600 s would be much" in finding.summary
