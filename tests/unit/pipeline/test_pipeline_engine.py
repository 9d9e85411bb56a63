"""The loop over the stage table: order, history, retries, time-outs, cancelling, and Teardown whatever happens."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import ProcessLauncher, open_root_records, open_run
from turnmill.config import Config
from turnmill.errors import (
    BackendUnavailable,
    BudgetExceeded,
    Cancelled,
    Conflict,
    DataError,
    Duplicate,
    EnvironmentFailed,
    InvalidInput,
    NoProgress,
    NotFound,
    RecordCorrupt,
    RoleFailed,
    StageFailed,
    StageTimeout,
)
from turnmill.evaluation import BackgroundEvaluations, Evaluation, Progress
from turnmill.pipeline.engine import RunRecord, load_run, walk
from turnmill.pipeline.failures import classify
from turnmill.pipeline.processes import (
    REPLICA_FINAL_EXIT_CODES,
    check_roles,
    poll_reward_workers,
    poll_training,
    start_reward_workers,
    start_training,
)
from turnmill.pipeline.stage import Done, Handle, Retry, Running, Stage, StageContext
from turnmill.pipeline.stages import STAGES, stages_of
from turnmill.ports import RecordStore, RoleSpec, Write
from turnmill.records import (
    ErrorClass,
    Purpose,
    Run,
    RunKind,
    RunStatus,
    TrainingStatus,
    Version,
    WorkerStatus,
    encode,
    training_key,
)


def new_run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "run_id": "r1",
        "cause": "cli/x",
        "status": RunStatus.ACTIVE,
        "created_at": 1.0,
        "config": {},
        "sources": {},
        "data_path": None,
    }
    return Run(**{**values, **changes})


@dataclass
class World:
    """A context on real ports, and what the stages of a test did."""

    ctx: StageContext
    runs: RecordStore
    record: RunRecord
    log: list[str] = field(default_factory=list)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async def validate(path: Path) -> dict[str, Any]:
        return {"path": str(path)}

    async def claim(digest: str, held_out: str | None) -> dict[str, Any]:
        return {"content_id": digest}

    async def quarantine(error: InvalidInput) -> InvalidInput:
        return error

    async def give_up_redriven() -> int:
        return 0

    async def play(name: str, path: Path, purpose: Purpose, version: Version, progress: Progress) -> Evaluation:
        raise AssertionError(f"{name}: no test here evaluates")

    runs = open_root_records(tmp_path)
    ports = open_run(tmp_path, "r1", num_replicas=1)
    record = await RunRecord.create(runs, new_run())
    ctx = StageContext(
        run=record.run,
        config=Config(),
        ports=ports,
        launcher=ProcessLauncher(tmp_path),
        evaluations=BackgroundEvaluations(play),
        validate=validate,
        quarantine=quarantine,
        claim=claim,
        give_up_redriven=give_up_redriven,
        worker_env={},
        check=lambda: None,
    )
    yield World(ctx=ctx, runs=runs, record=record)
    await ctx.launcher.close()
    ports.close()
    runs.close()


def stage(
    world: World, name: str, *, polls: int = 0, fail: Exception | None = None, fail_starts: int = 0, **changes: Any
) -> Stage:
    """A stage that logs its calls, fails its first `fail_starts` starts (or each poll), and is done after `polls`."""
    left = {"starts": fail_starts, "polls": polls}

    async def start(ctx: StageContext) -> Handle:
        world.log.append(f"start {name}")
        if left["starts"] > 0:
            left["starts"] -= 1
            assert fail is not None
            raise fail
        return {"of": name}

    async def poll(ctx: StageContext, handle: Handle) -> Running | Done:
        assert handle == {"of": name}
        if fail is not None and not fail_starts:
            raise fail
        left["polls"] -= 1
        return Running() if left["polls"] >= 0 else Done(result={"done": name})

    values: dict[str, Any] = {"timeout_s": lambda config: 30.0, "expected_s": 10.0}
    return Stage(name=name, start=start, poll=poll, **{**values, **changes})


async def test_stages_run_in_order_and_the_history_keeps_handles_and_results(world: World) -> None:
    table = [stage(world, "A", polls=1), stage(world, "B"), stage(world, "T", always=True)]
    run, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert error is None and run.status is RunStatus.SUCCEEDED and run.ended_at is not None
    assert world.log == ["start A", "start B", "start T"]
    stored = await load_run(world.runs, "r1")
    assert stored == run
    assert [(s.name, s.state, s.handle, s.result) for s in stored.stages] == [
        (name, "done", {"of": name}, {"done": name}) for name in ("A", "B", "T")
    ]
    assert all(s.ended_at is not None and s.ended_at >= s.started_at for s in stored.stages)


async def test_a_duplicate_is_torn_down_and_names_the_run_that_it_repeats(world: World) -> None:
    table = [stage(world, "A", fail=Duplicate("r0", "as run r0")), stage(world, "B"), stage(world, "T", always=True)]
    run, _ = await walk(world.ctx, table, world.record, asyncio.Event())
    assert (run.status, run.duplicate_of, run.error) == (RunStatus.DUPLICATE, "r0", "as run r0")
    assert world.log == ["start A", "start T"]


async def test_a_run_that_goes_on_later_waits_for_its_turn_when_it_is_stopped(world: World) -> None:
    cancel = asyncio.Event()
    cancel.set()
    table = [stage(world, "A"), stage(world, "T", always=True)]
    run, _ = await walk(world.ctx, table, world.record, cancel, when_cancelled=lambda: RunStatus.QUEUED)
    assert (run.status, run.ended_at, run.error) == (RunStatus.QUEUED, None, None)
    assert world.log == ["start T"]


async def test_a_run_that_is_walked_again_keeps_the_history_of_each_attempt(world: World) -> None:
    table = [stage(world, "A", fail=InvalidInput("no")), stage(world, "T", always=True)]
    await walk(world.ctx, table, world.record, asyncio.Event())
    record = await RunRecord.open(world.runs, "r1")
    await record.save(replace(record.run, status=RunStatus.ACTIVE, attempt=2))
    table = [stage(world, "A"), stage(world, "T", always=True)]
    run, error = await walk(world.ctx, table, record, asyncio.Event())
    assert error is None and run.status is RunStatus.SUCCEEDED
    assert [(s.name, s.attempt, s.state) for s in run.stages] == [
        ("A", 1, "failed"),
        ("T", 1, "done"),
        ("A", 2, "done"),
        ("T", 2, "done"),
    ]
    assert [s.attempt for s in run.current_stages] == [2, 2]
    with pytest.raises(NotFound):
        await RunRecord.open(world.runs, "nobody")


async def test_a_failed_stage_skips_the_rest_but_not_teardown(world: World) -> None:
    bad = InvalidInput("row 3 is bad")
    table = [stage(world, "A", fail=bad), stage(world, "B"), stage(world, "T", always=True)]
    run, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert error is bad and run.status is RunStatus.FAILED and run.error == "row 3 is bad"
    assert world.log == ["start A", "start T"]
    assert [(s.name, s.state, s.error) for s in run.stages] == [("A", "failed", "row 3 is bad"), ("T", "done", None)]


async def test_of_a_run_that_has_failed_before_only_teardown_is_left(world: World) -> None:
    table = [stage(world, "A"), stage(world, "B"), stage(world, "T", always=True)]
    used_up = BudgetExceeded("it is used up")
    run, failure = await walk(world.ctx, table, world.record, asyncio.Event(), failure=used_up)
    assert (run.status, run.error, failure) == (RunStatus.FAILED, "it is used up", used_up)
    assert [item.name for item in run.stages] == ["T"]


async def test_a_defect_in_a_stage_still_tears_down_and_is_raised(world: World) -> None:
    table = [stage(world, "A", fail=ZeroDivisionError("x")), stage(world, "T", always=True)]
    with pytest.raises(ZeroDivisionError):
        await walk(world.ctx, table, world.record, asyncio.Event())
    assert world.log == ["start A", "start T"]
    assert (await load_run(world.runs, "r1")).status is RunStatus.FAILED


async def test_a_stage_ends_when_the_control_process_can_not_serve_it_any_more_and_teardown_does_not(
    world: World,
) -> None:
    def check() -> None:
        raise BackendUnavailable("nobody answers chats any more")

    table = [stage(world, "A", polls=1_000_000), stage(world, "B"), stage(world, "T", polls=1, always=True)]
    run, error = await walk(replace(world.ctx, check=check), table, world.record, asyncio.Event())
    assert isinstance(error, BackendUnavailable) and run.status is RunStatus.FAILED
    assert run.error == "nobody answers chats any more"
    assert world.log == ["start A", "start T"]
    assert [(s.name, s.state) for s in run.stages] == [("A", "failed"), ("T", "done")]


async def test_transient_errors_are_retried_and_permanent_ones_never(world: World) -> None:
    """Defect 19: retries of whatever fails repeat errors that can't pass."""
    quick = Retry(first_delay_s=0.001)
    busy = BackendUnavailable("busy")
    table = [stage(world, "A", fail=busy, fail_starts=2, retry=quick)]
    run, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert error is None and world.log == ["start A"] * 3
    assert [(retry.error, retry.error_class) for retry in run.stages[0].retries] == [
        ("busy", ErrorClass.INFRASTRUCTURE)
    ] * 2
    assert (run.stages[0].state, run.stages[0].error, run.stages[0].error_class) == ("done", None, None)

    world.log.clear()
    permanent = stage(world, "B", fail=InvalidInput("no"), fail_starts=1, retry=quick)
    _, error = await walk(world.ctx, [permanent], world.record, asyncio.Event())
    assert isinstance(error, InvalidInput) and world.log == ["start B"]


async def test_retries_end(world: World) -> None:
    quick = Retry(first_delay_s=0.001, max_retries=2)
    table = [stage(world, "A", fail=BackendUnavailable("busy"), fail_starts=99, retry=quick)]
    _, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert isinstance(error, BackendUnavailable) and world.log == ["start A"] * 3
    assert world.record.run.stages[0].error_class is ErrorClass.INFRASTRUCTURE


async def test_a_poll_that_could_not_be_answered_is_asked_again_and_each_has_all_tries(world: World) -> None:
    """What passes by in a stage of hours ends no run: a busy disk, a process that could not be made."""
    failures = [1, 1, 0, 1, 1, 0]

    async def poll(ctx: StageContext, handle: Handle) -> Running | Done:
        if failures.pop(0):
            raise BackendUnavailable("busy")
        return Running() if failures else Done(result={})

    table = [replace(stage(world, "A", retry=Retry(first_delay_s=0.001, max_retries=2)), poll=poll)]
    run, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert error is None and world.log == ["start A"] and len(run.stages[0].retries) == 4

    quick = Retry(first_delay_s=0.001, max_retries=2)
    table = [stage(world, "B", fail=BackendUnavailable("gone"), retry=quick)]
    _, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert isinstance(error, BackendUnavailable) and len(world.record.run.stages[1].retries) == 2


async def test_a_retry_is_in_the_history_before_it_is_made(world: World) -> None:
    seen: list[int] = []

    async def start(ctx: StageContext) -> Handle:
        seen.append(len((await load_run(world.runs, "r1")).stages[0].retries))
        if len(seen) < 3:
            raise BackendUnavailable("busy")
        return {"of": "A"}

    table = [replace(stage(world, "A", retry=Retry(first_delay_s=0.001)), start=start)]
    await walk(world.ctx, table, world.record, asyncio.Event())
    assert seen == [0, 1, 2]


async def test_cancelling_ends_the_pause_before_a_retry(world: World) -> None:
    cancel = asyncio.Event()

    async def start(ctx: StageContext) -> Handle:
        world.log.append("start A")
        asyncio.get_running_loop().call_later(0.05, cancel.set)
        raise BackendUnavailable("busy")

    patient = Retry(first_delay_s=1e9, max_delay_s=1e9)
    table = [replace(stage(world, "A", retry=patient), start=start)]
    run, error = await asyncio.wait_for(walk(world.ctx, table, world.record, cancel), 20)
    assert isinstance(error, Cancelled) and run.status is RunStatus.CANCELLED and len(world.log) == 1


def test_no_table_can_retry_what_is_permanent() -> None:
    """Defect 19, impossible by construction."""
    for each in ErrorClass:
        if each.is_permanent:
            with pytest.raises(ValueError, match="would fail again"):
                Retry(classes=(each,))
        else:
            Retry(classes=(each,))


async def test_the_first_and_last_lines_of_a_stage_are_logged_while_it_goes_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the log of a stage shows them."""
    caplog.set_level("INFO")
    table = [stage(world, "A"), stage(world, "B", fail=InvalidInput("bad row"))]
    run, _ = await walk(world.ctx, table, world.record, asyncio.Event())
    lines = {
        name: [record for record in caplog.records if record.getMessage().startswith(f"stage {name} ")]
        for name in ("A", "B")
    }
    for entry in run.stages:
        times = [record.created for record in lines[entry.name]]
        assert len(times) == 2 and entry.ended_at is not None
        assert entry.started_at <= min(times) and max(times) <= entry.ended_at
    assert "is done after" in lines["A"][1].getMessage()
    assert lines["B"][1].getMessage() == "stage B failed (invalid_input): bad row"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("row 1"), ErrorClass.INVALID_INPUT),
        (EnvironmentFailed("gold"), ErrorClass.ENVIRONMENT),
        (BackendUnavailable("disk"), ErrorClass.INFRASTRUCTURE),
        (StageTimeout("late"), ErrorClass.TIMEOUT),
        (RoleFailed("died"), ErrorClass.ROLE_FAILED),
        (StageFailed("the trainer stopped"), ErrorClass.STAGE_FAILED),
        (NoProgress("no signal"), ErrorClass.STAGE_FAILED),
        (RecordCorrupt("digest"), ErrorClass.INTEGRITY),
        (Conflict("taken"), ErrorClass.CONFLICT),
        (Duplicate("r0", "as r0"), ErrorClass.DUPLICATE),
        (Cancelled("by the user"), ErrorClass.CANCELLED),
        (ZeroDivisionError("x"), ErrorClass.DEFECT),
        (TimeoutError("of somebody else"), ErrorClass.DEFECT),
    ],
)
async def test_each_failure_has_a_class_in_the_history(world: World, error: Exception, expected: ErrorClass) -> None:
    assert classify(error) is expected
    table = [stage(world, "A", fail=error, retry=Retry(first_delay_s=0.001))]
    if expected is ErrorClass.DEFECT:
        with pytest.raises(type(error)):
            await walk(world.ctx, table, world.record, asyncio.Event())
    else:
        await walk(world.ctx, table, world.record, asyncio.Event())
    assert (await load_run(world.runs, "r1")).stages[0].error_class is expected


async def test_a_stage_that_does_not_end_fails_with_its_time_out(world: World) -> None:
    table = [
        stage(world, "A", polls=10**6, timeout_s=lambda config: 0.05),
        stage(world, "T", always=True),
    ]
    run, error = await walk(world.ctx, table, world.record, asyncio.Event())
    assert isinstance(error, StageTimeout) and "A did not end within" in str(error)
    assert run.stages[0].error_class is ErrorClass.TIMEOUT
    assert run.status is RunStatus.FAILED and world.log == ["start A", "start T"]


async def test_cancelling_ends_the_stage_and_tears_down(world: World) -> None:
    cancel, started = asyncio.Event(), asyncio.Event()

    async def poll(ctx: StageContext, handle: Handle) -> Running | Done:
        started.set()
        return Running()

    endless = replace(stage(world, "A"), poll=poll)
    table = [endless, stage(world, "B"), stage(world, "T", polls=1, always=True)]
    walking = asyncio.create_task(walk(world.ctx, table, world.record, cancel))
    await asyncio.wait_for(started.wait(), 10)
    cancel.set()
    run, error = await walking
    assert isinstance(error, Cancelled) and run.status is RunStatus.CANCELLED
    assert world.log == ["start A", "start T"] and run.stages[-1].state == "done"


async def test_a_run_id_is_taken_once_and_another_writer_is_noticed(world: World) -> None:
    with pytest.raises(Conflict):
        await RunRecord.create(world.runs, new_run())
    stale = RunRecord(world.runs, world.record.run, 1)
    await world.record.save(new_run(error="first"))
    with pytest.raises(Conflict, match="another process"):
        await stale.save(new_run(error="second"))
    with pytest.raises(NotFound):
        await load_run(world.runs, "nobody")


def test_the_table_holds_the_stages_in_order_and_only_teardown_always_runs() -> None:
    names = [item.name for item in STAGES]
    assert names == [
        "ValidateData",
        "Preflight",
        "DeployRunInfra",
        "StartGeneration",
        "StartRewardWorkers",
        "SubmitTraining",
        "Evaluate",
        "Publish",
        "Teardown",
    ]
    assert [item.name for item in STAGES if item.always] == ["Teardown"]
    assert [item.name for item in stages_of(RunKind.EVAL)] == [
        name for name in names if name not in ("SubmitTraining", "Publish")
    ]


TABLE = """
ValidateData       train,eval  timeout   600  expected   5  retries 3: infrastructure
Preflight          train,eval  timeout   300  expected  10  retries 3: infrastructure
DeployRunInfra     train,eval  timeout   900  expected   5  retries 3: infrastructure
StartGeneration    train,eval  timeout   600  expected  60  retries 3: infrastructure
StartRewardWorkers train,eval  timeout   120  expected  10  retries 3: infrastructure
SubmitTraining     train       timeout 86520  expected 600  retries 3: infrastructure
Evaluate           train,eval  timeout 86520  expected 120  retries 3: infrastructure
Publish            train       timeout  3600  expected  30  retries 3: infrastructure
Teardown           train,eval  timeout   120  expected  20  retries 3: infrastructure
"""


def test_the_table_is_as_it_was() -> None:
    rows = [
        f"{row.name:18} {','.join(row.kinds):10}  timeout {row.timeout_s(Config()):5.0f}"
        f"  expected {row.expected_s:3.0f}  retries {row.retry.max_retries}: {','.join(row.retry.classes)}"
        for row in STAGES
    ]
    assert "\n".join(["", *rows, ""]) == TABLE
    assert all(row.does.endswith(".") for row in STAGES) and all(each.meaning for each in ErrorClass)


@pytest.mark.parametrize(
    ("name", "is_an_end"), [("trainer", True), ("preflight-1", True), ("worker-0", False), ("replica-0", False)]
)
async def test_only_jobs_may_come_to_an_end_by_themselves(tmp_path: Path, name: str, is_an_end: bool) -> None:
    launcher = ProcessLauncher(tmp_path, command=["true"])
    await launcher.start(RoleSpec(role="any", name=name, run_id="r1", max_restarts=5))
    while True:
        [status] = await launcher.statuses()
        if status.state != "running":
            break
        await asyncio.sleep(0.01)
    if is_an_end:
        await check_roles(launcher)
    else:
        with pytest.raises(RoleFailed, match=f"{name} ended with exit code 0"):
            await check_roles(launcher)
    await launcher.close()


async def test_a_replica_that_can_not_use_its_parameters_is_not_started_again(tmp_path: Path) -> None:
    """`resume` alone would not help: the run wants other parameters."""
    launcher = ProcessLauncher(tmp_path, command=["sh", "-c", "echo 'Error: lora_targets: no'; exit 2"])
    exit_codes = REPLICA_FINAL_EXIT_CODES
    await launcher.start(
        RoleSpec(role="replica", name="replica-0", run_id="r1", max_restarts=5, final_exit_codes=exit_codes)
    )
    while True:
        [status] = await launcher.statuses()
        if status.state != "running":
            break
        await asyncio.sleep(0.01)
    assert (status.state, status.num_restarts) == ("failed", 0)
    with pytest.raises(StageFailed, match="lora_targets: no"):
        await check_roles(launcher)
    await launcher.close()


async def test_what_an_earlier_trainer_said_does_not_end_the_training_that_goes_on(
    world: World, tmp_path: Path
) -> None:
    async def say(state: str, incarnation: int) -> None:
        status = TrainingStatus(
            run_id="r1",
            state=state,
            step=7,
            max_steps=9,
            incarnation=incarnation,
            updated_at=1.0,
            error="out of patience",
            version=Version(incarnation=1, n=7),
        )
        await world.ctx.ports.records.write([Write(key=training_key("r1"), value=encode(status), expected=None)])

    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    config = Config(baseline_rollouts=0)
    ctx = replace(world.ctx, config=config, launcher=ProcessLauncher(tmp_path, command=[str(program)]))
    await say("failed", 1)
    handle = await start_training(ctx)
    assert await poll_training(ctx, handle) == Running(detail="the trainer is starting")
    await say("running", 2)
    assert await poll_training(ctx, handle) == Running(detail="step 7 of 9")
    # Killed and started again in between, it is the third.
    await say("failed", 3)
    with pytest.raises(StageFailed, match="stopped at step 7: out of patience"):
        await poll_training(ctx, handle)
    await say("succeeded", 3)
    assert isinstance(await poll_training(ctx, handle), Done)
    await ctx.launcher.close()


async def test_workers_are_there_when_each_has_asked_for_work_and_not_when_they_were_started(
    world: World, tmp_path: Path
) -> None:
    """Defect 10: a launch that nobody looks after counts as done."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    ctx = replace(world.ctx, launcher=ProcessLauncher(tmp_path, command=[str(program)]))
    handle = await start_reward_workers(ctx)
    assert await start_reward_workers(ctx) == handle, "started again it starts nothing twice"
    assert len(await ctx.launcher.statuses()) == 1
    assert await poll_reward_workers(ctx, handle) == Running(detail="0 of 1 workers are ready")
    (name,) = handle["workers"]
    status = WorkerStatus(run_id="r1", worker=name, since=1.0)
    await ctx.ports.records.write([Write(key=status.key, value=encode(status), expected=None)])
    assert isinstance(await poll_reward_workers(ctx, handle), Done)
    await ctx.launcher.close()


async def test_a_proxy_with_a_process_of_its_own_is_started_before_the_workers(world: World, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$TURNMILL_PROXY_URL"\nexec sleep 600\n')
    program.chmod(0o700)
    launcher = ProcessLauncher(tmp_path, command=[str(program)])
    ctx = replace(world.ctx, launcher=launcher, proxy_env={"TURNMILL_PROXY_URL": "http://127.0.0.1:9"})
    assert await start_reward_workers(ctx) == {"workers": ["worker-0"], "proxies": ["proxy"]}
    assert [role.name for role in await launcher.statuses()] == ["proxy", "worker-0"]
    log = tmp_path / "runs" / "r1" / "logs" / "proxy.log"
    for _ in range(1000):
        if log.read_text():
            break
        await asyncio.sleep(0.01)
    assert log.read_text() == "http://127.0.0.1:9\n"
    await launcher.close()
