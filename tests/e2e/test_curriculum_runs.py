"""A curriculum in a run of real processes that is killed: what is drawn follows from the recorded batches alone."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting
from tests.e2e.processes import read_records, start_resume, start_run, start_turnmill, wait_for
from turnmill import assets
from turnmill.config import from_dict
from turnmill.records import Batch, Progress, Run, Task
from turnmill.training.task_order import order_of
from turnmill.training.task_statistics import TaskTable
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import list_runs

NUM_TASKS = 12


def check_draws(run: Run, tasks: list[Task], batches: list[Batch]) -> int:
    """Every decided group had its turn, by what the batches before say; how many turns were passed over."""
    table, progress, num_passed_over = TaskTable(), Progress(), 0
    for batch in batches:
        order = order_of(from_dict(run.config), tasks, table.statistics)
        position, turns = progress.position, []
        while position < batch.progress.position:
            turn = order.turn(position)
            num_passed_over += turn.position - position
            turns.append((turn.task.id, turn.position))
            position = turn.position + 1
        decided = [(outcome.task_id, outcome.position) for outcome in batch.progress.outcomes]
        assert decided[: len(turns)] == turns, f"step {batch.step}: all groups up to the last one taken"
        assert all(order.turn(place).task.id == task_id for task_id, place in decided), f"step {batch.step}: surplus"
        table.add(batch)
        progress = batch.progress
    return num_passed_over


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_killed_goes_on_in_the_order_that_its_batches_give(tmp_path: Path) -> None:
    data, root = tmp_path / "tasks.jsonl", tmp_path / "root"
    rows = list(islice(assets.wordle_data("train").read_text().splitlines(keepends=True), NUM_TASKS))
    data.write_text("".join(rows))
    with start_run(
        root,
        data=data,
        max_steps="6",
        curriculum="pass_rate",
        curriculum_low="0.2",
        curriculum_high="0.8",
        curriculum_revisit="3",
        success_threshold="0.3",
        baseline_rollouts="0",
    ) as running:
        wait_for("two steps", lambda: running.num_steps() >= 2, running.process)
        assert running.folder is not None
        run_id = running.folder.name
        running.process.kill()
        running.process.communicate(timeout=60)
    with start_resume(root, run_id) as running:
        figures = running.finish()
    check_accounting(root, figures)

    (run,) = run_loop(list_runs(root))
    tasks = [Task(id=json.loads(row)["id"], metadata={}) for row in rows]
    _, batches = read_records(root, run_id)
    assert len(batches) == 6
    assert {batch.incarnation for batch in batches} == {1, 2}, "both trainers made some of them"
    assert check_draws(run, tasks, batches) > 0

    with start_turnmill(root, ["tasks", run_id, "--json", "--root", str(root)]) as shown:
        out, err = shown.process.communicate(timeout=120)
    assert shown.process.returncode == 0, err
    found: dict[str, Any] = {row["task_id"]: row for row in map(json.loads, out.splitlines())}
    expected = {task_id: known.as_object() for task_id, known in TaskTable.of(batches).statistics.items()}
    assert found == expected
    final = sorted(root.glob(f"runs/{run_id}/checkpoints/step-6/tasks.json"))
    assert [{row["task_id"]: row for row in json.loads(path.read_text())} for path in final] == [expected]
