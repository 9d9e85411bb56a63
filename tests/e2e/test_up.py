"""`turnmill up`: what is put into the folder trains by itself, and a kill changes nothing but the time."""

import json
import signal
from pathlib import Path

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.deployment import has_status, runs_of, start_up, turnmill
from tests.e2e.processes import PATIENCE_S, is_alive, wait_for
from tests.e2e.webhooks import SECRET, webhook
from turnmill import assets


def test_uploads_train_by_themselves_and_bad_ones_say_why(tmp_path: Path) -> None:
    """Defects 5 and 6: a nested key makes one run, and its data is looked at before anything is started."""
    root, sidecar = tmp_path / "root", tmp_path / "mine.toml"
    folder = root / "bucket" / "training-data"
    folder.mkdir(parents=True)
    with webhook(root) as told:
        _upload_and_serve(root, folder, sidecar)
        received = [item["alert"] for item in told]
        kinds = {(alert["kind"], alert["stage"]) for alert in received}
        assert kinds == {("ignored_upload", "notes.txt"), ("run_failed", "ValidateData"), ("run_failed", None)}
        (bad,) = [alert for alert in received if alert["stage"] == "ValidateData"]
    assert "metadata: is missing" in bad["error"] and bad["command"] == f"turnmill status {bad['run_id']} --root {root}"
    listed = json.loads(turnmill(root, "alerts", bad["run_id"], "--json").stdout)
    assert [(alert["alert_id"], alert["deliveries"][-1]["state"]) for alert in listed] == [
        (bad["alert_id"], "delivered")
    ]
    shown = turnmill(root, "alerts").stdout
    assert shown.count("next: turnmill ") == 3 and "ignored upload notes.txt" in shown and SECRET not in shown


def _upload_and_serve(root: Path, folder: Path, sidecar: Path) -> None:
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
        out, err = running.process.communicate(timeout=PATIENCE_S)
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
    assert started == ["control.log"], "no process was started for the bad one"


def test_a_killed_control_goes_on_with_its_run_and_a_stopped_one_with_those_that_wait(tmp_path: Path) -> None:
    """Defects 7 and 23: runs of one day share nothing, and the second one waits for its turn."""
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
        running.process.communicate(timeout=PATIENCE_S)
    states = {upload: run["status"] for upload, run in runs_of(root).items()}
    assert states == {"first.jsonl": "interrupted", "second.jsonl": "queued"}
    with start_up(root) as running:
        wait_for("the first's end", lambda: has_status(root, "first.jsonl", "succeeded"), running.process)
        wait_for("the second", lambda: has_status(root, "second.jsonl", "active"), running.process)
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=PATIENCE_S)
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


def test_runs_are_cancelled_while_they_wait_and_while_they_train(tmp_path: Path) -> None:
    root, sidecar = tmp_path / "root", tmp_path / "other.toml"
    sidecar.write_text("seed = 1\n")
    data = str(assets.wordle_data("train"))
    assert turnmill(root, "upload", data, "--name", "first.jsonl").returncode == 0
    assert turnmill(root, "upload", data, "--name", "second.jsonl", "--config", str(sidecar)).returncode == 0
    with start_up(root, max_steps="50") as running:
        wait_for("a step", running.num_steps_of_any, running.process)
        (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
        assert turnmill(root, "upload", str(tmp_path / "bad.jsonl")).returncode == 0
        wait_for("its refusal, without a slot", lambda: has_status(root, "bad.jsonl", "failed"), running.process)
        assert has_status(root, "first.jsonl", "active") and has_status(root, "second.jsonl", "queued")
        runs = runs_of(root)
        first, second = (runs[name]["run_id"] for name in ("first.jsonl", "second.jsonl"))
        pids = running.children()
        for run_id in (second, first):
            done = turnmill(root, "cancel", run_id)
            assert (done.returncode, done.stdout) == (0, f"run {run_id} is cancelled\n"), done.stderr
        again = turnmill(root, "cancel", first)
        assert again.returncode == 2 and "has ended already: cancelled" in again.stderr
        assert not any(is_alive(pid) for pid in pids)
        assert running.process.poll() is None, "the deployment goes on"
    assert {key: run["status"] for key, run in runs_of(root).items()} == {
        "first.jsonl": "cancelled",
        "second.jsonl": "cancelled",
        "bad.jsonl": "failed",
    }
