"""Runs in separate processes, as users start them: to the end, through kills, and stopped by Ctrl-C."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.accounts import check_accounting
from tests.e2e.processes import PATIENCE_S, Running, is_alive, read_records, start_run, wait_for
from turnmill.records import SampleState


def test_a_run_trains_evaluates_and_leaves_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    with start_run(tmp_path, evaluate=True) as running:
        pids = wait_for("three roles", lambda: len(found := running.children()) == 3 and found, running.process)
        figures = running.finish()
    assert figures["status"] == "succeeded" and figures["steps"] == 4
    assert figures["eval_before"] is not None and figures["eval_after"] is not None
    check_accounting(tmp_path, figures)
    assert not any(is_alive(pid) for pid in pids)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(figures["checkpoint"])
    tokenizer = AutoTokenizer.from_pretrained(figures["checkpoint"])
    assert model.num_parameters() > 200_000
    assert tokenizer.decode(tokenizer.encode("crane")) == "crane"

    listed = subprocess.run(
        [sys.executable, "-m", "turnmill", "status", figures["run_id"], "--root", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    status = json.loads(listed.stdout)
    assert status["status"] == "succeeded" and status["sources"]["max_steps"] == "--max-steps"
    assert status["sources"]["lr"] == "recipe.toml" and status["sources"]["max_attempts"] == "default"
    assert "worker_token_hash" not in status
    for log in (running.folder / "logs").iterdir() if running.folder else []:
        assert "/a/" not in log.read_text() or "/a/***" in log.read_text()


@pytest.mark.parametrize("name", ["worker-0", "replica-0"])
def test_a_killed_role_is_started_again_and_nothing_is_lost_or_doubled(tmp_path: Path, name: str) -> None:
    """Defect 11: nobody starts a worker again that died."""
    with start_run(tmp_path) as running:
        wait_for("first step", running.num_steps, running.process)
        killed = running.kill(name)
        wait_for(f"another {name}", lambda: running.role_pid(name) not in (None, killed), running.process)
        figures = running.finish()
    assert figures["steps"] == 4
    check_accounting(tmp_path, figures)
    samples, batches = read_records(tmp_path, figures["run_id"])
    assert sum(len(batch.sample_ids) for batch in batches) == 4 * 16
    assert not [sample.key for sample in samples if sample.state is SampleState.INVALID]


def test_ctrl_c_stops_everything_and_says_what_was_kept(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="500") as running:
        wait_for("first step", running.num_steps, running.process)
        pids = running.children()
        running.process.send_signal(signal.SIGINT)
        out, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 130
    figures = json.loads(out.splitlines()[-1])
    assert figures["status"] == "cancelled" and figures["steps"] >= 1
    assert "kept:" in err and f"turnmill resume {figures['run_id']} --root {tmp_path}" in err and "Traceback" not in err
    assert len(pids) == 3 and not any(is_alive(pid) for pid in pids)
    check_no_pipes(running)


def check_no_pipes(running: Running) -> None:
    """No wake-up pipe is left behind."""
    assert running.folder is not None
    assert not [path for path in running.folder.rglob("*") if path.is_fifo()]


def test_roles_end_when_the_control_process_is_killed(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="500") as running:
        wait_for("first step", running.num_steps, running.process)
        pids = running.children()
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
        wait_for("end of the orphans", lambda: not any(is_alive(pid) for pid in pids))


def test_a_file_like_the_references_sample_runs_to_its_end(tmp_path: Path) -> None:
    words = ["apple", "bread", "chair", "dream", "eagle", "flame", "grape", "house", "juice", "knife"]
    prompt = "You are playing a word game. Find the secret word of five letters; each guess is answered with marks."
    data = tmp_path / "sample.jsonl"
    rows = [
        {"id": f"sample-{i:03d}", "metadata": {"prompt": prompt, "answer": words[i % len(words)]}} for i in range(300)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with start_run(tmp_path / "root", data=data, max_steps="1", max_length="320", max_refill_rounds="2") as running:
        figures = running.finish()
    assert figures["status"] == "succeeded"
    check_accounting(tmp_path / "root", figures)
