"""The control process dies by SIGKILL in every stage, at each point where its record differs: the run goes on.

One upload's run is killed in each stage once, by one test for each point within a stage: five times a stage in all.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.deployment import runs_of, start_up, turnmill
from tests.e2e.processes import PATIENCE_S, Running, is_alive, wait_for
from turnmill import assets
from turnmill.pipeline.engine import POINTS
from turnmill.pipeline.stages import STAGES

STAGE_NAMES = [stage.name for stage in STAGES]


def _attempts(root: Path) -> dict[int, list[dict[str, Any]]]:
    """The stages of the only run, by attempt."""
    (run,) = runs_of(root).values()
    record = json.loads(turnmill(root, "status", run["run_id"], "--json").stdout)
    found: dict[int, list[dict[str, Any]]] = {}
    for stage in record["stages"]:
        found.setdefault(stage["attempt"], []).append(stage)
    return found


def _is_gone(path: Path) -> Callable[[], bool]:
    return lambda: not path.exists()


def _is_dead(running: Running) -> Callable[[], bool]:
    return lambda: running.process.poll() is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", [POINTS[0], *(pytest.param(point, marks=pytest.mark.long) for point in POINTS[1:])])
def test_control_is_killed_in_every_stage_and_the_run_comes_to_its_end(
    tmp_path: Path, point: str, record_property: Callable[[str, object], None]
) -> None:
    """Defects 9, 12 and 13: a stage that is started again finds what it had started, and starts nothing twice."""
    root = tmp_path / "root"
    failpoints = root / "failpoints"
    failpoints.mkdir(parents=True)
    done = turnmill(
        root,
        "upload",
        str(assets.wordle_data("train")),
        "--eval-data",
        str(assets.wordle_data("eval")),
        "--name",
        "a.jsonl",
    )
    assert done.returncode == 0, done.stderr
    orphans: set[int] = set()
    for stage in STAGE_NAMES:
        armed = failpoints / f"{stage}-{point}"
        armed.touch()
        with start_up(root, max_steps="2") as running:
            wait_for(f"the kill in {stage}", _is_gone(armed))
            wait_for(f"its end in {stage}", _is_dead(running))
            running.process.communicate(timeout=PATIENCE_S)
            assert running.process.returncode == -9
    with start_up(root, max_steps="2") as running:
        wait_for(
            "the run's end", lambda: [r for r in runs_of(root).values() if r["status"] == "succeeded"], running.process
        )
        orphans.update(running.children())
    (run,) = runs_of(root).values()
    attempts = _attempts(root)
    last = attempts[max(attempts)]
    assert [stage["name"] for stage in last] == STAGE_NAMES
    assert {stage["state"] for stage in last} == {"done"}, "Teardown included"
    assert not any(is_alive(pid) for pid in orphans)
    assert run["steps"] == 2
    check_accounting(root, run)
    check_steps(root, run)
    num = len(STAGE_NAMES)
    record_property("figure", f"{num} of {num} kills of control made, {len(attempts)} attempts, run {run['status']}")
