"""Uploads that can't be trained: each is held with a report that says why, costs no process, and keeps nothing back."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.control_plane.malformed import GOOD, MALFORMED, ROWS
from tests.e2e.accounts import check_accounting
from tests.e2e.deployment import has_status, runs_of, start_up, turnmill
from tests.e2e.processes import PATIENCE_S, wait_for

# Each starts processes, several times over, where other tests do the same.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GOOD_FILES = {"good.jsonl": GOOD, "team/good.jsonl": b"".join(ROWS[1:]), "last.jsonl": b"".join(ROWS[:-1])}


def letters_of(root: Path, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(turnmill(root, "dlq", "list", "--json", *arguments).stdout)
    return found


def test_malformed_uploads_are_held_with_reports_and_all_good_ones_of_the_batch_train(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Defects 3, 4 and 6 of the reference system: validation that never ran, or ran behind the infrastructure."""
    root = tmp_path / "root"
    folder = root / "bucket" / "training-data"
    for name, data in GOOD_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for bad in MALFORMED:
        if bad.sidecar is not None:
            (folder / f"{bad.name}.config.toml").write_text(bad.sidecar)
        (folder / f"{bad.name}.jsonl").write_bytes(bad.data)
    with start_up(root, global_batch_size="8", max_parallel_runs="2") as running:
        # One after the other: each of them has the patience of a wait.
        for name in GOOD_FILES:
            wait_for(f"the success of {name}", partial(has_status, root, name, "succeeded"), running.process)
        for bad in MALFORMED:
            wait_for(f"the end of {bad.name}", partial(has_status, root, f"{bad.name}.jsonl", "failed"))
    runs = runs_of(root)
    for name in GOOD_FILES:
        assert runs[name]["status"] == "succeeded", name
        check_accounting(root, runs[name])
    letters = {letter["input"]["key"]: letter for letter in letters_of(root, "--kind", "trigger")}
    assert len(letters) == len(MALFORMED)
    for bad in MALFORMED:
        run = runs[f"{bad.name}.jsonl"]
        assert run["status"] == "failed", bad.name
        check_held(root, bad.name, run["run_id"], letters[f"{bad.name}.jsonl"])
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")) == sorted(GOOD_FILES)
    good = f"{len(GOOD_FILES)} of {len(GOOD_FILES)} good ones of the batch trained"
    record_property("figure", f"{len(MALFORMED)} malformed uploads held with reports, 0 processes for them; {good}")


def check_held(root: Path, name: str, run_id: str, letter: dict[str, Any]) -> None:
    """The upload lies in quarantine as it came, its report is right, and nothing was started for it."""
    (bad,) = [one for one in MALFORMED if one.name == name]
    held = Path(letter["input"]["held_in"])
    assert held == root / "bucket" / "quarantine" / run_id
    assert (held / f"{name}.jsonl").read_bytes() == bad.data
    sidecar = held / f"{name}.config.toml"
    assert (sidecar.read_text() if sidecar.exists() else None) == bad.sidecar
    report = json.loads((held / "report.json").read_text())
    found = [(problem["rule"], problem["line"]) for problem in report["problems"]]
    assert (bad.rule, bad.line) in found, (name, found)
    assert report["digest"] == letter["input"]["digest"] and report["num_problems"] >= 1
    assert f"{name}.jsonl was not trained on" in (held / "report.md").read_text()
    status = json.loads(turnmill(root, "status", run_id, "--json").stdout)
    # It speaks of the upload, not of the copy that was read, and says what to do.
    assert str(held) in status["error"] and f"turnmill dlq redrive trigger/{run_id} --root {root}" in status["error"]
    assert f"runs/{run_id}/data" not in status["error"]
    started = {"Preflight", "StartGeneration", "StartRewardWorkers", "SubmitTraining"}
    assert not started & {stage["name"] for stage in status["stages"]}
    # What the control process itself did for the run.
    logs = {path.name for path in (root / "runs" / run_id / "logs").glob("*")}
    assert logs <= {"control.log"}, "a process was started for it"


POINTS = ("quarantine-reported", "quarantine-sidecar-moved", "quarantine-moved", "quarantine-lettered")


@pytest.mark.parametrize("is_sidecar_bad", [False, True])
def test_a_kill_at_any_moment_of_a_quarantine_is_made_good_by_the_next_start(
    tmp_path: Path, is_sidecar_bad: bool
) -> None:
    root = tmp_path / "root"
    folder = root / "bucket" / "training-data" / "team"
    folder.mkdir(parents=True)
    (root / "failpoints").mkdir()
    for point in POINTS:
        (folder / f"{point}.config.toml").write_text("lr = 5\n" if is_sidecar_bad else "max_steps = 1\n")
        (folder / f"{point}.jsonl").write_bytes(GOOD if is_sidecar_bad else b'{"id": "a"}\n')
        (root / "failpoints" / point).write_text("")
        key = f"team/{point}.jsonl"
        with start_up(root) as running:
            running.process.communicate(timeout=PATIENCE_S)
            assert runs_of(root)[key]["status"] in ("queued", "interrupted")
        with start_up(root) as running:
            wait_for("its end", partial(has_status, root, key, "failed"), running.process)
        held = root / "bucket" / "quarantine" / runs_of(root)[key]["run_id"]
        expected = {f"{point}.jsonl", f"{point}.config.toml", "report.json", "report.md"}
        assert {path.name for path in held.iterdir()} == expected
    assert len(letters_of(root)) == len(runs_of(root)) == len(POINTS)
    assert list(folder.iterdir()) == []


def test_an_upload_with_bad_held_out_tasks_is_held_with_them_and_corrected_as_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = root / "bucket" / "training-data" / "team"
    folder.mkdir(parents=True)
    (folder / "mine.eval.jsonl").write_bytes(b'{"id": "a"}\n')
    (folder / "mine.jsonl").write_bytes(GOOD)
    with start_up(root) as running:
        wait_for("its end", partial(has_status, root, "team/mine.jsonl", "failed"), running.process)
        run = runs_of(root)["team/mine.jsonl"]
        held = root / "bucket" / "quarantine" / run["run_id"]
        first, where, problem = run["error"].splitlines()[:3]
        assert first == "team/mine.eval.jsonl: 1 problem in the data:" and str(held) in where
        assert problem == "  team/mine.eval.jsonl:1: metadata: is missing [required]"
        report = json.loads((held / "report.json").read_text())
        assert (report["file"], report["num_rows"]) == ("mine.eval.jsonl", len(GOOD.splitlines()))
        assert {path.name for path in held.iterdir()} == {"mine.jsonl", "mine.eval.jsonl", "report.json", "report.md"}
        assert list(folder.iterdir()) == []
        (letter,) = letters_of(root)
        (held / "mine.eval.jsonl").write_bytes(ROWS[0])
        assert turnmill(root, "dlq", "redrive", letter["letter_id"]).returncode == 0
        wait_for("its success", partial(has_status, root, "team/mine.jsonl", "succeeded"), running.process)
    assert {path.name for path in folder.iterdir()} == {"mine.jsonl", "mine.eval.jsonl"}


def test_a_corrected_upload_that_is_redriven_is_taken_anew_and_a_purged_one_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = root / "bucket" / "training-data"
    (folder / "team").mkdir(parents=True)
    for key in ("team/mine.jsonl", "other.jsonl"):
        (folder / key).write_bytes(b'{"id": "a"}\n')
    with start_up(root) as running:
        wait_for("both letters", lambda: len(letters_of(root)) == 2, running.process)
        mine, other = sorted(letters_of(root), key=lambda letter: letter["input"]["key"], reverse=True)
        wait_for("both ends", lambda: all(run["status"] == "failed" for run in runs_of(root).values()))
        held = Path(mine["input"]["held_in"])
        shown = turnmill(root, "dlq", "show", mine["letter_id"]).stdout
        assert "metadata: is missing" in shown and str(held) in shown and "version of code" in shown
        (held / "mine.jsonl").write_bytes(GOOD)
        done = turnmill(root, "dlq", "redrive", mine["letter_id"])
        assert done.returncode == 0 and "is uploaded again" in done.stdout, done.stderr
        wait_for("its success", lambda: runs_of(root)["team/mine.jsonl"]["status"] == "succeeded", running.process)
    assert not held.exists() and mine["letter_id"] not in {letter["letter_id"] for letter in letters_of(root)}
    refused = turnmill(root, "dlq", "purge", other["letter_id"])
    assert refused.returncode == 2 and "give --yes" in refused.stderr and other["input"]["held_in"] in refused.stderr
    purged = turnmill(root, "dlq", "purge", "--all", "--yes")
    assert purged.returncode == 0 and purged.stdout == "removed 1\n"
    assert letters_of(root) == [] and list((root / "bucket" / "quarantine").iterdir()) == []


def test_a_failed_run_of_an_upload_is_retried_with_other_parameters_by_the_deployment(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = root / "bucket" / "training-data"
    folder.mkdir(parents=True)
    with start_up(root, max_steps="1000") as running:
        (folder / "a.jsonl").write_bytes(GOOD)
        wait_for("its training", running.num_steps_of_any, running.process)
        first = runs_of(root)["a.jsonl"]["run_id"]
        assert "it is active" in turnmill(root, "retry", first).stderr
        assert turnmill(root, "cancel", first).returncode == 0
        (folder / "a.jsonl").unlink()
        done = turnmill(root, "retry", first, "--max-steps", "1")
        assert done.returncode == 0, done.stderr
        again = turnmill(root, "retry", first)
        assert again.returncode == 2 and "is retried as" in again.stderr
        second = json.loads(turnmill(root, "status", first, "--json").stdout)["retried_as"]

        def status() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(turnmill(root, "status", second, "--json").stdout)
            return found

        wait_for("its success", lambda: status()["status"] == "succeeded", running.process)
    found = status()
    assert (found["retry_of"], found["cause"], found["config"]["max_steps"]) == (first, f"retry/{first}/1", 1)
    validated = next(stage["result"]["data"] for stage in found["stages"] if stage["name"] == "ValidateData")
    # Other parameters are another content: the first run keeps its own claim.
    assert validated["earlier"] is None
    assert "has succeeded" in turnmill(root, "retry", first).stderr
