"""Runs in separate processes that play a baseline, evaluate, decide and publish, also through kills."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import PARAMETERS, PATIENCE_S, Running, start_resume, start_run, start_turnmill, wait_for
from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.records import DropReason, Purpose, Run, RunStatus, SampleRecord, SampleState, decode, sample_prefix
from turnmill.training.history import scan_all
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import look_at_runs


def status_of(root: Path, run_id: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "turnmill", "status", run_id, "--root", str(root), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def samples_of(root: Path, run_id: str, purpose: Purpose) -> list[SampleRecord]:
    async def read() -> list[SampleRecord]:
        ports = open_run(root, run_id, num_replicas=1)
        try:
            found = await scan_all(ports.records, sample_prefix(run_id, purpose))
            return [decode(item.value, SampleRecord) for item in found]
        finally:
            ports.close()

    samples: list[SampleRecord] = run_loop(read())
    return samples


def arm(root: Path, point: str) -> None:
    (root / "failpoints").mkdir(exist_ok=True)
    (root / "failpoints" / point).touch()


def end_by_kill(running: Running) -> str:
    """Wait for the armed kill; the id of the run."""
    running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == -9 and running.folder is not None
    return running.folder.name


def test_a_run_ends_with_a_published_model_that_loads_and_whose_card_holds_its_figures(tmp_path: Path) -> None:
    """Not so in the reference system: its pipeline ends when training was submitted (defect 14)."""
    with start_run(tmp_path, evaluate=True, promotion="always") as running:
        figures = running.finish()
    folder = Path(figures["published"])
    assert folder.parent == tmp_path / "bucket" / "models" / figures["run_id"]
    check_accounting(tmp_path, figures)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() > 200_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("crane")) == "crane"

    baseline, before, after = figures["baseline"], *(figures["evaluations"][name] for name in ("before", "after"))
    card = (folder / "README.md").read_text()
    for title, share, found in (
        ("baseline, tasks of the training data", baseline["pass_rate"], baseline),
        ("held-out, before training", before["solved"], before),
        ("held-out, after training", after["solved"], after),
    ):
        (line,) = [line for line in card.splitlines() if line.startswith(f"| {title} |")]
        assert f"| {share:.3f} |" in line and f"| {found['reward_mean']:.3f} |" in line
    assert figures["promotion"]["reason"] in card and "| data | train.jsonl | 150 |" in card
    lineage = json.loads((folder / "lineage.json").read_text())
    assert lineage["evaluations"] == figures["evaluations"] and lineage["baseline"] == baseline
    assert len(lineage["training"]["rewards"]) == figures["steps"] == 4

    status = status_of(tmp_path, figures["run_id"])
    assert (baseline["num_rollouts"], baseline["verdict"]) in {(64, "signal"), (384, "signal")}
    assert sum(task["num_rollouts"] for task in status["baseline"]["tasks"]) == baseline["num_rollouts"]
    played = samples_of(tmp_path, figures["run_id"], Purpose.BASELINE)
    assert [sample.state for sample in played] == [SampleState.REPORTED] * baseline["num_rollouts"]
    shown = subprocess.run(
        [sys.executable, "-m", "turnmill", "status", figures["run_id"], "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "rollouts of the base model pass" in shown and f"published: {folder} (always: " in shown


def test_a_model_that_is_not_shown_to_be_better_is_held_and_its_run_has_succeeded(tmp_path: Path) -> None:
    with start_run(tmp_path, evaluate=True, promotion="better", max_steps="1", lr="1e-9", min_lr="0") as running:
        figures = running.finish()
    assert (figures["status"], figures["published"]) == ("succeeded", None)
    promotion = figures["promotion"]
    assert (promotion["rule"], promotion["is_published"]) == ("better", False) and promotion["low"] <= 0
    assert not (tmp_path / "bucket" / "models").exists() and Path(figures["checkpoint"]).is_dir()


def test_tasks_that_the_base_model_never_passes_stop_the_run_before_its_first_step(tmp_path: Path) -> None:
    """A reward that is always the same, whatever is answered (defect 42), is noticed here at the latest."""
    with start_run(tmp_path, success_threshold="2") as running:
        out, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 1 and "Traceback" not in err
    figures = json.loads(out.splitlines()[-1])
    assert "too hard for the base model: none of 384 rollouts passed (at most 0.8 % would)" in figures["error"]
    assert "rewards were 0 to 1" in figures["error"] and "ignore_baseline = true" in figures["error"]
    assert running.folder is not None and not (running.folder / "logs" / "trainer.log").exists()
    assert status_of(tmp_path, figures["run_id"])["baseline"]["verdict"] == "too_hard"


def test_a_verdict_can_be_ignored_and_that_is_recorded(tmp_path: Path) -> None:
    command = ["run", "--json", "--root", str(tmp_path), "--max-steps", "1", "--global-batch-size", "8"]
    command += ["--number-generation", "4", "--max-refill-rounds", "50", "--success-threshold", "2"]
    command += ["--baseline-rollouts", "8", "--baseline-max-rollouts", "16", "--ignore-baseline"]
    with start_turnmill(tmp_path, [*command, "--data", str(assets.wordle_data("train"))]) as running:
        figures = running.finish()
    baseline = figures["baseline"]
    assert (baseline["verdict"], baseline["is_ignored"], baseline["num_rollouts"]) == ("too_hard", True, 16)
    assert figures["published"] and "not evaluated" in figures["promotion"]["reason"]


def test_a_baseline_that_was_half_played_is_played_anew_and_one_that_was_recorded_is_not(tmp_path: Path) -> None:
    arm(tmp_path, "baseline-played")
    with start_run(tmp_path, max_steps="1") as running:
        run_id = end_by_kill(running)
    arm(tmp_path, "baseline-recorded")
    with start_resume(tmp_path, run_id) as running:
        end_by_kill(running)
    with start_resume(tmp_path, run_id) as running:
        figures = running.finish()
    assert figures["steps"] == 1 and figures["baseline"]["verdict"] == "signal"
    check_accounting(tmp_path, figures)
    played = samples_of(tmp_path, run_id, Purpose.BASELINE)
    assert len(played) == 2 * figures["baseline"]["num_rollouts"], "twice, and not a third time"
    assert status_of(tmp_path, run_id)["attempt"] == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_control_process_that_is_killed_in_the_middle_of_a_baseline_goes_on_with_it(tmp_path: Path) -> None:
    def half() -> bool:
        if running.folder is None or not (running.folder / "records").is_dir():
            return False
        played = samples_of(tmp_path, running.folder.name, Purpose.BASELINE)
        return any(sample.state is SampleState.REPORTED for sample in played)

    with start_run(tmp_path, max_steps="1", baseline_rollouts="1000", baseline_max_rollouts="1000") as running:
        wait_for("a rollout of the baseline", half, running.process)
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
        assert running.folder is not None
        run_id = running.folder.name
    with start_resume(tmp_path, run_id) as running:
        figures = running.finish()
    assert figures["baseline"]["num_rollouts"] == 1000
    check_accounting(tmp_path, figures)
    played = samples_of(tmp_path, run_id, Purpose.BASELINE)
    assert not [sample.key for sample in played if sample.state.is_open]
    assert {sample.drop_reason for sample in played if sample.state is SampleState.DROPPED} == {DropReason.SUPERSEDED}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_between_the_writes_of_publishing_a_run_has_one_version_in_the_end(tmp_path: Path) -> None:
    arm(tmp_path, "model-copied")
    with start_run(tmp_path, max_steps="1") as running:
        run_id = end_by_kill(running)
    arm(tmp_path, "model-published")
    with start_resume(tmp_path, run_id) as running:
        end_by_kill(running)
    with start_resume(tmp_path, run_id) as running:
        figures = running.finish()
    models = tmp_path / "bucket" / "models"
    assert [path.relative_to(models).as_posix() for path in sorted(models.glob("*/*"))] == [
        Path(figures["published"]).relative_to(models).as_posix()
    ]
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)


def test_an_upload_brings_its_held_out_tasks(tmp_path: Path) -> None:
    """What it has learned is measured on tasks that it was not trained on, also for uploads (defect 43)."""
    root, held_out = tmp_path / "root", tmp_path / "held_out.jsonl"
    rows = assets.wordle_data("eval").read_text().splitlines(keepends=True)
    held_out.write_text("".join(rows[:12]))
    command = ["upload", str(assets.wordle_data("train")), "--eval-data", str(held_out), "--root", str(root)]
    done = subprocess.run([sys.executable, "-m", "turnmill", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    flags = [part for name, value in {**PARAMETERS, "max-steps": "1"}.items() for part in (f"--{name}", value)]
    with start_turnmill(root, ["up", "--root", str(root), *flags]) as running:
        run: Run = wait_for(
            "its end", lambda: next((run for run in look_at_runs(root) if run.status.is_final), None), running.process
        )
    assert run.status is RunStatus.SUCCEEDED, run.error
    results = {stage.name: stage.result for stage in run.stages}
    assert [results["Evaluate"][name]["num_tasks"] for name in ("before", "after")] == [12, 12]
    card = (Path(results["Publish"]["location"]) / "README.md").read_text()
    assert "| upload | train.jsonl |" in card and "| eval_data | train.eval.jsonl | 12 |" in card
