"""Uploads as a file system tells of them, doubled and out of order, and what the same key means later."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import has_status, runs_of, start_up, turnmill
from tests.e2e.processes import PATIENCE_S, wait_for
from turnmill import assets

NUM_FILES = 50
# Per file and version, so that there are a thousand in all.
NUM_EVENTS = 10
TASKS = assets.wordle_data("train").read_text().splitlines(keepends=True)


def _all_runs(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(turnmill(root, "runs", "--json").stdout)
    return found


def _put(folder: Path, name: str, text: str) -> None:
    """Whole, as `turnmill upload` does it."""
    (folder / f"{name}.tmp").write_text(text)
    (folder / f"{name}.tmp").rename(folder / name)


def _disturb(path: Path, how: int) -> int:
    """Events about a file whose content stays; how many."""
    if how == 0:
        path.chmod(0o600)
        return 1
    if how == 1:
        path.open("ab").close()
        return 1
    # Gone and there again: a removal and a creation in either order, for those who look late.
    aside = path.with_name(f".{path.name}")
    path.rename(aside)
    aside.rename(path)
    return 2


def _storm(folder: Path, names: list[str], text: Callable[[str], str], rng: random.Random) -> int:
    """Put the files there and disturb them, all mixed; how many events there were."""
    num_events = 0
    todo = [name for name in names for _ in range(NUM_EVENTS)]
    rng.shuffle(todo)
    put: set[str] = set()
    for name in todo:
        if name in put:
            num_events += _disturb(folder / name, rng.randrange(3))
        else:
            _put(folder, name, text(name))
            put.add(name)
            num_events += 1
    return num_events


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_doubled_and_disordered_events_make_exactly_the_runs_that_they_should(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Faults 1 and 2: another version of a key is another run, and no two keys are taken for one."""
    root, rng = tmp_path / "root", random.Random(0)
    folder = root / "bucket" / "training-data" / "team"
    folder.mkdir(parents=True)
    names = [f"{number}.jsonl" for number in range(NUM_FILES)]
    num_events = 0
    with start_up(root) as running:
        num_events += _storm(folder, names, lambda name: "".join(TASKS[int(name.split(".")[0]) :]), rng)
        wait_for("some runs", lambda: len(_all_runs(root)) >= 5, running.process)
        # In the middle of taking them.
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
    with start_up(root) as running:
        wait_for("all runs", lambda: len(_all_runs(root)) >= NUM_FILES, running.process)
        # Changed in reverse: as long as before, so that only content and time differ.
        num_events += _storm(folder, names, lambda name: "".join(TASKS[int(name.split(".")[0]) :][::-1]), rng)
        wait_for("all runs again", lambda: len(_all_runs(root)) >= 2 * NUM_FILES, running.process)
        for name in names:
            os.chmod(folder / name, 0o644)
        _put(folder, "last.jsonl", TASKS[0])
        wait_for("the last", lambda: len(_all_runs(root)) > 2 * NUM_FILES, running.process)
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=PATIENCE_S)
    found = sorted(run["upload"] for run in _all_runs(root))
    assert found == sorted(["team/last.jsonl", *(f"team/{name}" for name in names * 2)])
    assert num_events >= 1000
    record_property("figure", f"{num_events} events about {NUM_FILES} files in 2 versions: {len(found) - 1} runs")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_changed_file_trains_again_and_a_failed_one_is_a_new_attempt(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Fault 1: the same key is no reason to do nothing, neither with new content nor after a failure."""
    root, sidecar = tmp_path / "root", tmp_path / "strict.toml"
    folder = root / "bucket" / "training-data"
    folder.mkdir(parents=True)
    # No trainer agrees with a sampler so closely: the first step is refused.
    sidecar.write_text("audit_mean_tolerance = 1e-15\naudit_max_tolerance = 1e-15\n")
    data = tmp_path / "b.jsonl"
    data.write_text("".join(TASKS))
    with start_up(root) as running:
        _put(folder, "a.jsonl", "".join(TASKS))
        wait_for("the first", lambda: has_status(root, "a.jsonl", "succeeded"), running.process)
        _put(folder, "a.jsonl", "".join(TASKS[1:]))
        wait_for("the changed one", lambda: len(_all_runs(root)) == 2 and has_status(root, "a.jsonl", "succeeded"))
        assert turnmill(root, "upload", str(data), "--config", str(sidecar)).returncode == 0
        wait_for("its failure", lambda: has_status(root, "b.jsonl", "failed"), running.process)
        assert turnmill(root, "upload", str(data), "--config", str(sidecar)).returncode == 0
        wait_for("it again", lambda: len(_all_runs(root)) == 4 and has_status(root, "b.jsonl", "failed"))
    runs = _all_runs(root)
    assert [run["status"] for run in runs] == ["succeeded", "succeeded", "failed", "failed"]
    record = json.loads(turnmill(root, "status", runs_of(root)["b.jsonl"]["run_id"], "--json").stdout)
    assert record["stages"][0]["result"]["data"]["earlier"] == runs[2]["run_id"], "a new attempt at the same content"
    record_property("figure", "a changed file: 2 runs; a failed one again: a new attempt after the first")
