"""`turnmill tasks` on records that the embedded backend keeps."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.cli.test_queues_command import make_run
from turnmill.backends.embedded import open_run
from turnmill.cli.commands import turnmill
from turnmill.ports import Write
from turnmill.records import Batch, BatchState, Progress, Run, TaskOutcome, encode


def outcome(task_id: str, num_passed: int, *, num_invalid: int = 0, is_given_up: bool = False) -> TaskOutcome:
    return TaskOutcome(
        task_id=task_id,
        position=0,
        num_played=4 + num_invalid,
        num_valid=4,
        num_passed=num_passed,
        reward_sum=float(num_passed),
        has_signal=None if is_given_up else num_passed in (1, 2, 3),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    asyncio.run(record(tmp_path, make_run(tmp_path, "r1")))
    return tmp_path


async def record(root: Path, run: Run) -> None:
    """Two steps, and a third one that was given up."""
    ports = open_run(root, run.run_id, num_replicas=1)
    decided = (
        (outcome("easy", 4), outcome("odd", 2, num_invalid=1)),
        (outcome("odd", 0), outcome("hard", 0), outcome("broken", 1, num_invalid=9, is_given_up=True)),
        (outcome("gone", 4),),
    )
    for step, outcomes in enumerate(decided, start=1):
        batch = Batch(
            run_id=run.run_id,
            step=step,
            groups=(("a", "b"),),
            progress=Progress(outcomes=outcomes),
            state=BatchState.SUPERSEDED if step == 3 else BatchState.APPLIED,
        )
        await ports.records.write([Write(key=batch.key, value=encode(batch), expected=0)])
    ports.close()


def run_tasks(root: Path, *arguments: str) -> str:
    result = CliRunner().invoke(turnmill, ["tasks", "r1", "--root", str(root), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_tasks_are_shown_hardest_first_with_a_bar(root: Path) -> None:
    lines = run_tasks(root).splitlines()
    assert [line.split()[0] for line in lines if "░" in line or "█" in line or "unknown" in line] == [
        "broken",
        "hard",
        "odd",
        "easy",
    ]
    assert any(line.split()[:3] == ["odd", "██░░░░░░░░", "25%"] for line in lines)
    assert lines[-1] == "1 of 4 groups had signal"
    assert all(len(line) < 80 for line in lines)


def test_json_has_all_figures_of_each_task(root: Path) -> None:
    rows = [json.loads(line) for line in run_tasks(root, "--json").splitlines()]
    assert [row["task_id"] for row in rows] == ["broken", "hard", "odd", "easy"]
    odd = rows[2]
    assert (odd["num_played"], odd["num_valid"], odd["num_passed"], odd["reward_mean"]) == (9, 8, 2, 0.25)
    assert (odd["pass_rate"], odd["num_signal"], odd["num_no_signal"], odd["step"]) == (0.25, 1, 1, 2)
    assert rows[0]["pass_rate"] is None and rows[0]["num_abandoned"] == 1


def test_the_first_few_alone(root: Path) -> None:
    output = run_tasks(root, "--limit", "1")
    assert "broken" in output and "hard" not in output
    assert output.splitlines()[-1] == "1 of 4 tasks shown; 1 of 4 groups had signal"


def test_a_run_without_recorded_steps_says_so(tmp_path: Path) -> None:
    make_run(tmp_path, "r1")
    assert run_tasks(tmp_path) == "no group of run r1 is recorded yet\n"
