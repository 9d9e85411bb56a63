"""Runs whose trainer or control process is killed, and that go on: in the same run, or by `turnmill resume`."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import PATIENCE_S, Running, is_alive, read_records, start_resume, start_run, wait_for
from turnmill.records import DropReason
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import read_metrics


def run_id_of(running: Running) -> str:
    assert running.folder is not None
    return running.folder.name


def turnmill(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "turnmill", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def status_of(root: Path, run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(turnmill(root, "status", run_id, "--json").stdout)
    return found


def test_a_trainer_that_is_killed_twice_goes_on_and_no_step_is_made_twice(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="5", save_steps="2") as running:
        for num_steps in (1, 3):
            running.wait_for_steps(num_steps)
            running.wait_for_death("trainer", running.kill("trainer"))
        figures = running.finish()
    assert (figures["status"], figures["steps"]) == ("succeeded", 5)
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)


def test_a_run_whose_control_process_was_killed_is_resumed_to_its_end(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="3", save_steps="2", evaluate=True) as running:
        wait_for("first step", running.num_steps, running.process)
        run_id, pids = run_id_of(running), running.children()
        refused = turnmill(tmp_path, "resume", run_id)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert f"is active: its control process {running.process.pid} is running" in refused.stderr
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
    status = status_of(tmp_path, run_id)
    assert status["status"] == "interrupted" and f"turnmill resume {run_id}" in status["error"]
    # Its orphans may still be ending: the new control process waits for them.
    with start_resume(tmp_path, run_id) as resumed:
        figures = resumed.finish()
    assert not any(is_alive(pid) for pid in pids)
    assert (figures["run_id"], figures["status"], figures["steps"]) == (run_id, "succeeded", 3)
    assert figures["eval_before"] is not None and figures["eval_after"] is not None
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    attempts = [(stage["name"], stage["attempt"]) for stage in status_of(tmp_path, run_id)["stages"]]
    assert ("SubmitTraining", 1) in attempts and ("SubmitTraining", 2) in attempts and ("Evaluate", 1) not in attempts


def test_a_stopped_run_goes_on_from_its_last_step(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="3", save_steps="2") as running:
        running.wait_for_steps(1)
        run_id = run_id_of(running)
        running.process.send_signal(signal.SIGINT)
        _, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 130 and f"turnmill resume {run_id}" in err
    with start_resume(tmp_path, run_id) as resumed:
        figures = resumed.finish()
    assert (figures["status"], figures["steps"]) == ("succeeded", 3)
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)


def test_a_run_that_succeeded_goes_on_from_an_earlier_step_only(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="3", save_steps="2") as running:
        first = running.finish()
    run_id = first["run_id"]
    refused = turnmill(tmp_path, "resume", run_id)
    assert refused.returncode == 2 and "has succeeded" in refused.stderr and "--from STEP" in refused.stderr
    beyond = turnmill(tmp_path, "resume", run_id, "--from", "4")
    assert beyond.returncode == 2 and "has made 3 steps; give 0 to 3" in beyond.stderr
    with start_resume(tmp_path, run_id, "--from", "1") as resumed:
        figures = resumed.finish()
    assert (figures["status"], figures["steps"]) == ("succeeded", 3)
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    samples, batches = read_records(tmp_path, run_id)
    assert [str(batch.version) for batch in batches] == ["1.1", "2.2", "2.3"]
    assert sum(sample.drop_reason is DropReason.SUPERSEDED for sample in samples) >= 2 * 16


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    rows = [
        {"id": f"t{i}", "metadata": {"prompt": "Guess.", "answer": word}} for i, word in enumerate(("crane", "slate"))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with start_run(tmp_path, data=data, max_steps="500") as running:
        wait_for("trainer", lambda: running.role_pid("trainer"), running.process)
        run_id = run_id_of(running)
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
    data.write_text(data.read_text().replace("slate", "stale"))
    refused = turnmill(tmp_path, "resume", run_id)
    assert refused.returncode == 2 and f"{data} has changed since the run began" in refused.stderr
    data.unlink()
    refused = turnmill(tmp_path, "resume", run_id)
    assert refused.returncode == 2 and f"{data} can't be read any more" in refused.stderr
    assert status_of(tmp_path, run_id)["status"] == "interrupted"


def test_resuming_an_unknown_run_is_bad_input(tmp_path: Path) -> None:
    refused = turnmill(tmp_path, "resume", "nobody")
    assert refused.returncode == 2 and "there is no run 'nobody'" in refused.stderr


# Between any two writes of a step: where a batch is closed, recorded, made known to its samples, trained, its weights
# stored, applied, pointed to, its samples told, its metric, checkpoint and status written.
POINTS = (
    "batch-closed",
    "batch-recorded",
    "samples-batched",
    "step-made",
    "weights-stored",
    "batch-applied",
    "weights-pointed",
    "samples-trained",
    "metric-written",
    "checkpoint-written",
    "checkpoint-saved",
    "status-written",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("points", [POINTS[:4], POINTS[4:8], POINTS[8:]], ids=lambda points: points[0])
def test_a_trainer_killed_between_any_two_writes_of_a_step_makes_it_once(
    tmp_path: Path, points: tuple[str, ...]
) -> None:
    with start_run(tmp_path, max_steps="8", save_steps="1", save_top_k="2") as running:
        running.kill_trainer_at(points)
        figures = running.finish()
    assert (figures["status"], figures["steps"]) == ("succeeded", 8)
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    folder = tmp_path / "runs" / figures["run_id"] / "checkpoints"
    assert {"final", "step-7", "step-8"} <= {path.name for path in folder.iterdir()}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_from_the_checkpoint_of_step_10_the_batches_of_steps_11_to_20_give_the_same_bits(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="20") as running:
        run_id = running.finish()["run_id"]
    folder = tmp_path / "runs" / run_id
    before = run_loop(read_metrics(tmp_path, run_id))
    manifest = (folder / "checkpoints" / "step-20" / "checkpoint.json").read_bytes()
    # Without the later checkpoint and metrics, all that is left of these steps is their batches.
    shutil.rmtree(folder / "checkpoints" / "step-20")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:10]))
    with start_resume(tmp_path, run_id, "--from", "20") as resumed:
        figures = resumed.finish()
    assert figures["steps"] == 20
    check_accounting(tmp_path, figures)
    log = (folder / "logs" / "trainer.log").read_text()
    assert "step 10 made again" not in log
    for step in range(11, 21):
        assert log.count(f"step {step} made again from its batch: same weights") == 1
    # Digests of weights and of optimizer and random state.
    assert (folder / "checkpoints" / "step-20" / "checkpoint.json").read_bytes() == manifest
    again = run_loop(read_metrics(tmp_path, run_id))
    for name in ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "lr", "audit_max", "num_trained_tokens"):
        assert [metric.values[name] for metric in again] == [metric.values[name] for metric in before]
