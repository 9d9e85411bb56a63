"""Budgets in real processes: a run stops within one batch, in order, and goes on under a higher budget."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import (
    PARAMETERS,
    PATIENCE_S,
    Running,
    is_alive,
    start_resume,
    start_run,
    start_turnmill,
    wait_for,
)
from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.budget import num_tokens
from turnmill.records import Call, Purpose, SampleRecord, SampleState, call_prefix, decode, sample_prefix
from turnmill.training.history import scan_all
from turnmill.wiring.event_loop import run_loop

# Several runs in one test, on machines that have other things to do.
pytestmark = pytest.mark.timeout(300)
# Six guesses of at most eight tokens each.
MOST_PER_SAMPLE = 6 * 8
BATCH = 16 * MOST_PER_SAMPLE
# For about two steps; three would not do with it.
BUDGET = 2500


def turnmill(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "turnmill", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def reading(root: Path, *arguments: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(turnmill(root, *arguments, "--json").stdout)


def run_id_of(running: Running) -> str:
    folder = wait_for("the run", lambda: running.folder, running.process)
    return str(folder.name)


def counted(root: Path, run_id: str) -> tuple[dict[str, int], dict[str, int]]:
    """Generated tokens by purpose: as counted, and as the sum over all recorded calls."""

    async def read() -> tuple[dict[str, int], dict[str, int]]:
        ports = open_run(root, run_id, num_replicas=1)
        try:
            sums: dict[str, int] = {}
            for purpose in Purpose:
                for sample in await scan_all(ports.records, sample_prefix(run_id, purpose)):
                    sample_id = decode(sample.value, SampleRecord).sample_id
                    for call in await scan_all(ports.records, call_prefix(run_id, purpose, sample_id)):
                        sums[purpose] = sums.get(purpose, 0) + decode(call.value, Call).num_sampled
            return await num_tokens(ports.records, run_id), sums
        finally:
            ports.close()

    found: tuple[dict[str, int], dict[str, int]] = run_loop(read())
    return found


def open_samples(root: Path, run_id: str) -> list[str]:
    """Training samples that nobody has decided about."""

    async def read() -> list[str]:
        ports = open_run(root, run_id, num_replicas=1)
        try:
            found = await scan_all(ports.records, sample_prefix(run_id, Purpose.TRAIN))
            samples = [decode(stored.value, SampleRecord) for stored in found]
            final = (SampleState.TRAINED, SampleState.DROPPED, SampleState.INVALID)
            return [sample.key for sample in samples if sample.state not in final]
        finally:
            ports.close()

    return list(run_loop(read()))


def check_breach(root: Path, run_id: str, budget: int, *, num_batches: int = 1) -> dict[str, Any]:
    """The run has stopped in order, at most so many batches beyond its budget; its record."""
    exact, sums = counted(root, run_id)
    assert exact == sums
    assert budget <= exact["train"] < budget + num_batches * BATCH
    assert open_samples(root, run_id) == []
    status: dict[str, Any] = reading(root, "status", run_id)
    assert status["status"] == "failed"
    assert (
        f"budget_tokens = {budget} (" in status["error"] and f"{exact['train']:,} tokens generated" in status["error"]
    )
    assert f"turnmill resume {run_id} --budget-tokens " in status["error"] and f"--root {root}" in status["error"]
    current = {stage["name"]: stage["state"] for stage in status["stages"] if stage["attempt"] == status["attempt"]}
    # Also where the process was killed at the breach: the next one starts nothing and removes what is left.
    assert current["Teardown"] == "done"
    assert status["cost"]["num_tokens"] == sum(exact.values())
    return status


def test_a_budget_of_tokens_stops_within_one_batch_and_a_higher_one_goes_on_to_the_end(tmp_path: Path) -> None:
    """Defect 35: a run without a guard goes on for as long as somebody pays."""
    with start_run(tmp_path, max_steps="4", baseline_rollouts="0", budget_tokens=str(BUDGET)) as running:
        out, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 1 and "Traceback" not in err
    run_id = json.loads(out.splitlines()[-1])["run_id"]
    status = check_breach(tmp_path, run_id, BUDGET)
    steps = status["summary"]["steps"]
    assert 0 < steps < 4
    checkpoint = tmp_path / "runs" / run_id / "checkpoints" / "final"
    assert f"stopped at step {steps} of 4, checkpoint {checkpoint}" in status["error"]
    assert (checkpoint / "model.safetensors").is_file() and "forecast: " in err

    refused = turnmill(tmp_path, "resume", run_id)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"budget_tokens = {BUDGET} (--budget-tokens) is used up: " in refused.stderr
    lower = turnmill(tmp_path, "resume", run_id, "--budget-tokens", "10")
    assert lower.returncode == 2 and f"the run has {BUDGET}, and a budget is only raised" in lower.stderr

    with start_resume(tmp_path, run_id, "--budget-tokens", "1000000") as resumed:
        figures = resumed.finish()
    assert (figures["status"], figures["steps"]) == ("succeeded", 4)
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    exact, sums = counted(tmp_path, run_id)
    assert exact == sums
    status = reading(tmp_path, "status", run_id)
    assert (status["config"]["budget_tokens"], status["sources"]["budget_tokens"]) == (1000000, "resume")
    cost = reading(tmp_path, "cost", run_id)
    assert cost["tokens"] == exact and cost["stage_hours"]["SubmitTraining"] > 0
    assert reading(tmp_path, "cost") == [cost]

    # What was measured is what the next one is judged by.
    found = reading(
        tmp_path,
        "cost",
        "--forecast",
        "--no-eval",
        "--baseline-rollouts",
        "0",
        "--max-steps",
        "4",
        "--global-batch-size",
        "16",
    )
    assert found["is_measured"] and found["tokens"]["low"] < exact["train"]
    little = turnmill(tmp_path, "run", "--data", str(assets.wordle_data("train")), "--budget-tokens", "2000")
    assert little.returncode == 2 and "budget_tokens = 2000 (--budget-tokens) is not enough" in little.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer", "replica-0", "worker-0"])
def test_a_role_that_is_killed_before_the_breach_loses_no_count_and_doubles_none(tmp_path: Path, victim: str) -> None:
    with start_run(tmp_path, max_steps="4", baseline_rollouts="0", budget_tokens=str(BUDGET)) as running:
        wait_for("first step", running.num_steps, running.process)
        running.kill(victim)
        running.process.communicate(timeout=PATIENCE_S)
        run_id = run_id_of(running)
    # What the dead one had under way is played again, beside what its heirs ask for.
    check_breach(tmp_path, run_id, BUDGET, num_batches=2)


@pytest.mark.slow
def test_a_control_process_that_is_killed_at_the_breach_leaves_a_run_that_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "bucket" / "training-data"
    folder.mkdir(parents=True)
    (folder / "tasks.jsonl").write_bytes(assets.wordle_data("train").read_bytes())
    flags = [
        part
        for name, value in {**PARAMETERS, "max-steps": "4", "baseline-rollouts": "0"}.items()
        for part in (f"--{name}", value)
    ]
    command = ["up", "--root", str(tmp_path), *flags, "--budget-tokens", str(BUDGET)]
    with start_turnmill(tmp_path, command) as running:
        wait_for("first step", running.num_steps, running.process)
        run_id = run_id_of(running)
        trainer = running.role_pid("trainer")
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
    wait_for("end of the trainer", lambda: trainer is None or not is_alive(trainer))
    with start_turnmill(tmp_path, command) as again:
        wait_for("breach", lambda: reading(tmp_path, "status", run_id)["status"] == "failed", again.process)
        status = check_breach(tmp_path, run_id, BUDGET, num_batches=2)
        wait_for("alert", lambda: reading(tmp_path, "alerts", run_id), again.process)
        again.process.kill()
        again.process.communicate(timeout=PATIENCE_S)
    (alert,) = reading(tmp_path, "alerts", run_id)
    assert (alert["kind"], alert["command"]) == ("budget_breach", f"turnmill cost {run_id} --root {tmp_path}")
    assert "is used up" in alert["error"] and alert["log_lines"]
    # It is final: the next one leaves it alone.
    with start_turnmill(tmp_path, command) as third:
        wait_for("start", lambda: (tmp_path / "logs" / "control.log").exists(), third.process)
        assert reading(tmp_path, "status", run_id) == status


@pytest.mark.slow
def test_a_sidecar_raises_no_ceiling_and_a_run_without_a_budget_gets_it(tmp_path: Path) -> None:
    folder = tmp_path / "bucket" / "training-data"
    folder.mkdir(parents=True)
    (tmp_path / "turnmill.toml").write_text("[ceilings]\ngenerated_tokens = 600\n")
    for name in ("greedy", "plain"):
        (folder / f"{name}.jsonl").write_bytes(assets.wordle_data("train").read_bytes() + b"\n" * (name == "plain"))
    (folder / "greedy.config.toml").write_text("budget_tokens = 601\n")
    flags = [part for name, value in {**PARAMETERS, "baseline-rollouts": "0"}.items() for part in (f"--{name}", value)]

    def runs() -> dict[str, dict[str, Any]]:
        found = {run["upload"]: run for run in reading(tmp_path, "runs")}
        return found if len(found) == 2 and {run["status"] for run in found.values()} == {"failed"} else {}

    with start_turnmill(tmp_path, ["up", "--root", str(tmp_path), *flags]) as running:
        found = wait_for("two failed runs", runs, running.process)
        greedy, plain = found["greedy.jsonl"], found["plain.jsonl"]
        asked = "budget_tokens = 601 (sidecar greedy.config.toml) is more than this deployment allows"
        assert asked in greedy["error"] and "generated_tokens = 600 ([ceilings] of turnmill.toml)" in greedy["error"]
        assert counted(tmp_path, greedy["run_id"]) == ({}, {})
        status = check_breach(tmp_path, plain["run_id"], 600)
        assert (status["config"]["budget_tokens"], status["sources"]["budget_tokens"]) == (600, "turnmill.toml")
        assert "it is the ceiling of this deployment" in status["error"]
        wait_for("alerts", lambda: len(reading(tmp_path, "alerts")) == 2, running.process)
        kinds = {alert["run_id"]: alert["kind"] for alert in reading(tmp_path, "alerts")}
        assert kinds == {greedy["run_id"]: "run_failed", plain["run_id"]: "budget_breach"}
    beyond = turnmill(tmp_path, "resume", plain["run_id"], "--budget-tokens", "601")
    assert beyond.returncode == 2 and "budget_tokens = 601 (resume) is more than" in beyond.stderr
    flag = turnmill(tmp_path, "up", "--budget-tokens", "601")
    assert flag.returncode == 2 and "budget_tokens = 601 (--budget-tokens) is more than" in flag.stderr


def test_an_evaluation_stops_between_rollouts(tmp_path: Path) -> None:
    data = str(assets.wordle_data("eval"))
    stopped = turnmill(tmp_path, "eval", "wordle-tiny", "--data", data, "--budget-tokens", "700")
    assert stopped.returncode == 1 and "budget_tokens = 700 (--budget-tokens) is used up" in stopped.stderr
    (run,) = reading(tmp_path, "runs")
    exact, sums = counted(tmp_path, run["run_id"])
    assert exact == sums and 700 <= exact["eval"] < 700 + 64 * MOST_PER_SAMPLE
    assert run["status"] == "failed" and "the evaluation stopped" in run["error"]


@pytest.mark.slow
def test_dollars_run_out_also_while_the_trainer_hangs_and_the_checkpoint_is_that_of_its_last_steps(
    tmp_path: Path,
) -> None:
    """One dollar a second, so that a budget of dollars is one of seconds as well."""
    # Long enough to start, too short for its steps.
    with start_run(
        tmp_path, max_steps="1000", save_steps="1", baseline_rollouts="0", usd_per_hour="3600", budget_usd="60"
    ) as running:
        run_id = run_id_of(running)
        # A metric comes before the trainer's word about the step.
        wait_for("step", lambda: reading(tmp_path, "status", run_id)["summary"]["steps"], running.process)
        trainer = running.role_pid("trainer")
        assert trainer is not None
        os.kill(trainer, signal.SIGSTOP)
        _, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 1 and "budget_usd = 60 (--budget-usd) is used up" in err
    assert not is_alive(trainer)
    status = reading(tmp_path, "status", run_id)
    assert status["cost"]["usd"] >= 60 and "stopped at step " in status["error"]
    assert turnmill(tmp_path, "resume", run_id).returncode == 2
    with start_resume(tmp_path, run_id, "--budget-usd", str(status["cost"]["usd"] + 40)) as resumed:
        _, err = resumed.process.communicate(timeout=PATIENCE_S)
    again = reading(tmp_path, "status", run_id)
    assert "(resume) is used up" in err and again["cost"]["usd"] >= status["cost"]["usd"] + 40
    assert again["summary"]["steps"] > status["summary"]["steps"] and "checkpoint " in again["error"]
    assert sum(stage["attempt"] == 2 for stage in again["stages"]) >= 4
