"""`turnmill up`: what is put into the folder trains by itself, and a kill changes nothing but the time."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import PARAMETERS, Running, is_alive, start_turnmill, wait_for
from turnmill import assets


@contextmanager
def start_up(root: Path, **changes: str) -> Iterator[Running]:
    parameters = {**PARAMETERS, "max-steps": "1", **{name.replace("_", "-"): value for name, value in changes.items()}}
    flags = [part for name, value in parameters.items() for part in (f"--{name}", value)]
    with start_turnmill(root, ["up", "--root", str(root), *flags]) as running:
        yield running


def turnmill(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "turnmill", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def runs_of(root: Path) -> dict[str, dict[str, Any]]:
    """The runs' figures by upload."""
    found: list[dict[str, Any]] = json.loads(turnmill(root, "runs", "--json").stdout)
    return {run["upload"]: run for run in found}


def has_status(root: Path, upload: str, status: str) -> bool:
    return runs_of(root).get(upload, {}).get("status") == status


def test_uploads_train_by_themselves_and_bad_ones_say_why(tmp_path: Path) -> None:
    root, sidecar = tmp_path / "root", tmp_path / "mine.toml"
    folder = root / "bucket" / "training-data"
    folder.mkdir(parents=True)
    # One from before the start, one without a valid row, one that is not meant for us, one whose sidecar is wrong.
    (folder / "bad.jsonl").write_text('{"id": "a"}\n')
    (folder / "notes.txt").write_text("not a task\n")
    (folder / "wrong.config.toml").write_text("lr = 5\n")
    (folder / "wrong.jsonl").write_bytes(assets.wordle_data("train").read_bytes())
    sidecar.write_text("max_steps = 2\n")
    done = turnmill(
        root, "upload", str(assets.wordle_data("train")), "--name", "team/good.jsonl", "--config", str(sidecar)
    )
    assert done.returncode == 0, done.stderr
    with start_up(root) as running:
        wait_for("its end", lambda: has_status(root, "team/good.jsonl", "succeeded"), running.process)
        # The same once more.
        turnmill(root, "upload", str(assets.wordle_data("train")), "--name", "copy.jsonl", "--config", str(sidecar))
        wait_for("the duplicate", lambda: has_status(root, "copy.jsonl", "duplicate"), running.process)
        again = turnmill(root, "up")
        assert again.returncode == 1 and f"(pid {running.process.pid})" in again.stderr
        running.process.send_signal(signal.SIGINT)
        out, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 0, err
    assert out.count("ignored upload notes.txt: only .jsonl files are trained on") == 1
    runs = runs_of(root)
    assert {upload: run["status"] for upload, run in runs.items()} == {
        "team/good.jsonl": "succeeded",
        "bad.jsonl": "failed",
        "wrong.jsonl": "failed",
        "copy.jsonl": "duplicate",
    }
    assert runs["copy.jsonl"]["duplicate_of"] == runs["team/good.jsonl"]["run_id"]
    assert "bad.jsonl:1: metadata: is missing" in runs["bad.jsonl"]["error"]
    assert "lr = 5 (" in runs["wrong.jsonl"]["error"] and "wrong.config.toml:1" in runs["wrong.jsonl"]["error"]
    good = runs["team/good.jsonl"]
    assert good["steps"] == 2, "the sidecar's"
    check_accounting(root, good)
    started = [path.name for path in (root / "runs" / runs["bad.jsonl"]["run_id"]).glob("logs/*")]
    assert started == [], "no process was started for the bad one"


def test_a_killed_control_goes_on_with_its_run_and_a_stopped_one_with_those_that_wait(tmp_path: Path) -> None:
    root = tmp_path / "root"
    sidecar = tmp_path / "other.toml"
    sidecar.write_text("seed = 1\n")
    data = str(assets.wordle_data("train"))
    assert turnmill(root, "upload", data, "--name", "first.jsonl").returncode == 0
    assert turnmill(root, "upload", data, "--name", "second.jsonl", "--config", str(sidecar)).returncode == 0
    with start_up(root, max_steps="2") as running:
        wait_for("a step", running.num_steps_of_any, running.process)
        pids = running.children()
        running.process.kill()
        running.process.communicate(timeout=60)
    states = {upload: run["status"] for upload, run in runs_of(root).items()}
    assert states == {"first.jsonl": "interrupted", "second.jsonl": "queued"}
    with start_up(root) as running:
        wait_for("the first's end", lambda: has_status(root, "first.jsonl", "succeeded"), running.process)
        wait_for("the second", lambda: has_status(root, "second.jsonl", "active"), running.process)
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=60)
    assert not any(is_alive(pid) for pid in pids)
    assert runs_of(root)["second.jsonl"]["status"] == "queued", "stopped, not cancelled"
    with start_up(root) as running:
        wait_for("the second's end", lambda: has_status(root, "second.jsonl", "succeeded"), running.process)
    runs = runs_of(root)
    assert len(json.loads(turnmill(root, "runs", "--json").stdout)) == 2
    assert [runs[name]["steps"] for name in ("first.jsonl", "second.jsonl")] == [2, 2], "as they were uploaded"
    for run in runs.values():
        check_accounting(root, run)
        check_steps(root, run)
