"""Preflight and DeployRunInfra as stages, on real ports and processes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import ProcessLauncher, open_run
from turnmill.config import Config
from turnmill.errors import BackendUnavailable, EnvironmentFailed, InvalidInput, RoleFailed
from turnmill.evaluation import BackgroundEvaluations, Evaluation, Progress
from turnmill.pipeline.capacity import bytes_to_keep, num_parameters, num_trained, shown
from turnmill.pipeline.preparing import poll_preflight, report_key, start_deploy, start_preflight
from turnmill.pipeline.stage import Done, StageContext
from turnmill.pipeline.stages import start_teardown
from turnmill.ports import Message
from turnmill.records import PreflightReport, Purpose, Run, RunKind, RunStatus, Version, decode

CHILD = Path(__file__).parent.parent / "wiring" / "preflight_child.py"
Open = Callable[[str], StageContext]


@pytest.fixture
async def open_context(tmp_path: Path) -> AsyncIterator[Open]:
    """Of a run whose environment does what it is told."""
    data = tmp_path / "tasks.jsonl"
    rows = [{"id": f"t{index}", "metadata": {"prompt": "Say it.", "answer": str(index)}} for index in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def report(path: Path) -> dict[str, Any]:
        raise AssertionError("no test here validates")

    async def claim(digest: str, held_out: str | None) -> dict[str, Any]:
        raise AssertionError("no test here claims")

    async def quarantine(error: InvalidInput) -> InvalidInput:
        raise AssertionError("no test here has an upload")

    async def give_up_redriven() -> int:
        return 0

    async def play(name: str, path: Path, purpose: Purpose, version: Version, progress: Progress) -> Evaluation:
        raise AssertionError("no test here evaluates")

    async with AsyncExitStack() as stack:

        def open_one(do: str) -> StageContext:
            ports = open_run(tmp_path, "r1", num_replicas=1)
            launcher = ProcessLauncher(tmp_path, command=[sys.executable, str(CHILD)])
            stack.callback(ports.close)
            stack.push_async_callback(launcher.close)
            run = Run(
                run_id="r1",
                cause="cli/x",
                status=RunStatus.ACTIVE,
                created_at=1.0,
                config={},
                sources={},
                data_path=str(data),
            )
            return StageContext(
                run=run,
                config=Config(env_args={"do": do}, training_timeout=0.5),
                ports=ports,
                launcher=launcher,
                evaluations=BackgroundEvaluations(play),
                validate=report,
                quarantine=quarantine,
                claim=claim,
                give_up_redriven=give_up_redriven,
                worker_env={},
                check=lambda: None,
            )

        yield open_one


async def to_its_end(ctx: StageContext) -> dict[str, Any]:
    return await until_done(ctx, json.loads(json.dumps(await start_preflight(ctx))))


async def until_done(ctx: StageContext, handle: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            outcome = await poll_preflight(ctx, handle)
            if isinstance(outcome, Done):
                return outcome.result
            await asyncio.sleep(0.02)


async def test_a_good_environment_leaves_its_report_in_the_result_and_among_the_blobs(open_context: Open) -> None:
    ctx = open_context("well")
    result = await to_its_end(ctx)
    assert {check["state"] for check in result["checks"]} == {"ok"}
    assert [check["name"] for check in result["checks"]][-2:] == ["disk", "slots"]
    assert result["mean_rewards"] == {"gold": 1.0, "garbage": 0.0} and result["tasks"] == ["t0", "t1", "t2"]
    stored = decode(await ctx.ports.blobs.get(report_key("preflight-1")), PreflightReport)
    assert stored.failed == () and stored.tasks == ("t0", "t1", "t2")
    log = (await ctx.launcher.statuses())[0].log_tail
    assert any("preflight: gold: ok" in line for line in log)


async def test_a_failed_check_fails_the_stage_and_says_which_and_why(open_context: Open) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        await to_its_end(open_context("blind"))
    text = str(caught.value)
    assert text.startswith("environment wordle can't be trained on with this data:\n  gold: the gold answer earns 0.5")
    assert isinstance(caught.value, InvalidInput)


async def test_a_check_that_warns_is_told_and_the_run_goes_on(
    open_context: Open, caplog: pytest.LogCaptureFixture
) -> None:
    result = await to_its_end(open_context("count"))
    assert {check["name"]: check["state"] for check in result["checks"]}["repeats"] == "warning"
    (told,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert told.startswith("preflight: repeats: the same words said twice") and "game 2" in told


async def test_a_preflight_that_is_killed_is_played_again(open_context: Open) -> None:
    """Any role may be killed at any moment: of memory that was short, for instance."""
    ctx = open_context("well")
    handle = await start_preflight(ctx)
    (role,) = await ctx.launcher.statuses()
    assert role.pid is not None
    os.kill(role.pid, signal.SIGKILL)
    assert (await until_done(ctx, handle))["tasks"] == ["t0", "t1", "t2"]
    assert [role.num_restarts for role in await ctx.launcher.statuses()] == [1]


@pytest.mark.parametrize(("do", "place"), [("block", "in block"), ("spin", "in spin"), ("ignore cancelling", "in ")])
async def test_an_environment_that_keeps_its_process_is_cut_off_and_the_place_is_named(
    open_context: Open, do: str, place: str
) -> None:
    """What hangs ends its stage, and control goes on meanwhile."""
    with pytest.raises(EnvironmentFailed) as caught:
        await to_its_end(open_context(do))
    text = str(caught.value)
    assert "limits: task t0, garbage: the process is not given back within 1 s; it is at " in text
    assert place in text


@pytest.mark.parametrize(("do", "code"), [("crash", -11), ("exit", 0)])
async def test_an_environment_that_ends_its_process_is_no_success(open_context: Open, do: str, code: int) -> None:
    with pytest.raises(RoleFailed) as caught:
        await to_its_end(open_context(do))
    assert "preflight-1 ended" in str(caught.value)
    if code:
        # The log says what was played.
        assert f"exit code {code}" in str(caught.value) and "task t0, garbage" in str(caught.value)


@pytest.mark.parametrize(
    ("do", "text"), [("refuse", "do = refuse is refused"), ("break", "ImportError: no module named gym")]
)
async def test_an_environment_that_does_not_load_is_named(open_context: Open, do: str, text: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"loads: .*{text}"):
        await to_its_end(open_context(do))


async def test_each_attempt_has_a_report_of_its_own(open_context: Open) -> None:
    with pytest.raises(EnvironmentFailed):
        await to_its_end(open_context("blind"))
    again = open_context("well")
    result = await to_its_end(replace(again, run=replace(again.run, attempt=2)))
    assert result["mean_rewards"]["gold"] == 1.0


async def test_a_disk_without_room_is_told_before_any_process_is_started(open_context: Open, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1000, 10**12], "data_offsets": [0, 4 * 10**15]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    ctx = open_context("well")
    ctx = replace(ctx, config=replace(ctx.config, base_model=str(model)))
    with pytest.raises(BackendUnavailable, match=r"the disk has .* free and weights and checkpoints may take .* TiB"):
        await start_preflight(ctx)
    assert await ctx.launcher.statuses() == [] and await ctx.ports.blobs.list() == []


def test_the_estimate_counts_versions_and_checkpoints() -> None:
    config = Config(max_steps=100, save_steps=10, save_top_k=5)
    # Four versions, seven checkpoints of three copies, the final weights; an evaluation has the base alone.
    assert bytes_to_keep(config, RunKind.TRAIN, 10, 10) == 40 * (4 + 7 * 3 + 1)
    assert bytes_to_keep(replace(config, max_steps=20), RunKind.TRAIN, 10, 10) == 40 * (4 + 2 * 3 + 1)
    assert bytes_to_keep(config, RunKind.EVAL, 10, 10) == 40
    # Of an adapter of four parameters, versions and checkpoints hold those; the final weights are merged.
    assert bytes_to_keep(config, RunKind.TRAIN, 10, 4) == 16 * (4 + 7 * 3) + 40
    # Off policy more versions are kept, and a renewed reference is a part of each checkpoint.
    ahead = replace(config, rollout_strategy="off_policy_async", age_tolerance=4, kl_coeff=0.1, kl_refresh_steps=5)
    assert bytes_to_keep(ahead, RunKind.TRAIN, 10, 10) == 40 * (7 + 7 * 4 + 1)
    assert shown(40) == "40 B" and shown(1536) == "1.5 KiB" and shown(3 * 2**40) == "3.0 TiB"


def test_an_adapter_has_a_column_and_a_row_of_its_rank_for_each_matrix(tmp_path: Path) -> None:
    shapes = {"a": [30, 50], "b": [7]}
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    config = Config(lora_rank=4)
    assert num_parameters(tmp_path) == num_trained(config, tmp_path) == 1507
    assert num_trained(replace(config, training_method="RFT_MULTITURN_LORA"), tmp_path) == 4 * (30 + 50)


def test_a_model_file_that_is_none_is_named(tmp_path: Path) -> None:
    for content in (b"", b"\xff" * 64, (4).to_bytes(8, "little") + b"[1]x", (7).to_bytes(8, "little") + b'{"a":1}'):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(InvalidInput, match=r"model\.safetensors is no safetensors file"):
            num_parameters(tmp_path)


async def test_teardown_removes_what_waits_twice_as_well_as_once(open_context: Open) -> None:
    ctx = open_context("well")
    assert (await start_deploy(ctx))["deployed"] == (await start_deploy(ctx))["deployed"]
    await ctx.ports.rollout_request.send([Message(body=b"m", group="g", dedup_id=None)])
    assert (await start_teardown(ctx))["removed_messages"] == 1
    assert (await start_teardown(ctx))["removed_messages"] == 0
