"""What is shown of a run, and what becomes of a run in the foreground when nobody can see it any more."""

import asyncio
import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.cli.terminal import turnmill_command
from turnmill import assets
from turnmill.backends.embedded import open_root_records, open_run
from turnmill.cli.commands import turnmill
from turnmill.cli.errors import run_cli
from turnmill.cli.view import WarningsShown, show
from turnmill.pipeline.engine import RunRecord
from turnmill.records import Metric, Run, RunKind, RunStatus, StageRecord


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A deployment with one run of 30 steps that has ended."""
    asyncio.run(make_run(tmp_path))
    return tmp_path


async def make_run(root: Path) -> None:
    store = open_root_records(root)
    stages = [("SubmitTraining", 0.0, {}), ("Evaluate", 30.5, evaluations()), ("Teardown", 40.0, {})]
    await RunRecord.create(
        store,
        Run(
            run_id="r1",
            cause="test",
            kind=RunKind.TRAIN,
            status=RunStatus.SUCCEEDED,
            created_at=0.0,
            config={"max_steps": 30, "seed": 3},
            sources={},
            data_path="tasks.jsonl",
            stages=tuple(
                StageRecord(name=name, state="done", started_at=at, ended_at=at + 1, result=result)
                for name, at, result in stages
            ),
        ),
    )
    store.close()
    ports = open_run(root, "r1", num_replicas=0)
    for step in range(1, 31):
        await ports.metrics.write(Metric(run_id="r1", step=step, time=float(step), values={"reward_mean": step / 100}))
    ports.close()


def evaluations() -> dict[str, object]:
    result = {
        "solved": 0.25,
        "solved_low": 0.15,
        "solved_high": 0.38,
        "num_valid": 50,
        "num_tasks": 10,
        "num_invalid": 0,
    }
    return {"before": result, "after": {**result, "solved": 0.75, "solved_low": 0.6, "solved_high": 0.85}}


def test_without_a_terminal_stages_and_some_steps_get_a_line_in_order(root: Path) -> None:
    text = io.StringIO()
    asyncio.run(show(root, "r1", Console(file=text)))
    starts = [" ".join(line.split()[:2]) for line in text.getvalue().splitlines()]
    steps = [f"step {n}/30" for n in (1, *range(3, 31, 3))]
    assert starts == ["stage SubmitTraining", *steps, "stage Evaluate", "stage Teardown"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_in_a_terminal_ends_with_the_final_state_and_fits(root: Path, width: int) -> None:
    text = io.StringIO()
    asyncio.run(show(root, "r1", Console(file=text, force_terminal=True, color_system=None, width=width)))
    last = text.getvalue()
    assert "run r1  succeeded" in last and "step 30/30" in last
    assert all(len(line) <= width for line in last.splitlines())


def test_watch_prints_one_object_a_step_and_the_figures_last(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(turnmill, ["watch", "r1", "--root", str(root), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines[:-1]] == list(range(1, 31))
    assert lines[-1]["status"] == "succeeded"


def test_watch_without_a_terminal_ends_with_the_status(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(turnmill, ["watch", "r1", "--root", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "run r1 succeeded"


def test_runs_fit_into_80_columns(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_cli(turnmill, ["runs", "--root", str(root)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "r1" in line]
    assert row.split() == ["r1", "train", "succeeded", "30/30", "0.255", "0.250", "→", "0.750"]


def test_runs_and_status_print_json_and_nothing_else(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(turnmill, ["runs", "--root", str(root), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["kind"], listed["eval_before"], listed["eval_after"]) == ("train", 0.25, 0.75)
    assert listed["evaluations"]["after"]["num_valid"] == 50
    assert run_cli(turnmill, ["status", "r1", "--root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"] == listed


def test_status_shows_what_the_evaluations_gave(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(turnmill, ["status", "r1", "--root", str(root)]) == 0
    line = "held-out after training: 0.750 solved (95 % interval 0.600 to 0.850; 50 rollouts, 10 tasks, 0 invalid)"
    assert line in capsys.readouterr().out


def test_warnings_of_the_pipeline_are_shown_and_errors_are_left_to_the_end() -> None:
    text = io.StringIO()
    logger = logging.getLogger("turnmill.pipeline.engine")
    with WarningsShown(Console(file=text, width=200)):
        logger.warning("stage %s is slow", "Evaluate")
        logger.error("stage Evaluate failed")
    logger.warning("later")
    assert text.getvalue() == "warning: stage Evaluate is slow\n"


# ---------------------------------------------------------------- in the foreground


@pytest.fixture
def evaluation(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An evaluation of its own process, just started; what it says comes through pipes."""
    command = ["eval", "wordle-tiny", "--data", str(assets.wordle_data("eval")), "--root", str(tmp_path)]
    process = subprocess.Popen(turnmill_command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:  # closes the pipes
        try:
            yield process
        finally:
            process.kill()


def only_run(root: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", "runs", "--root", str(root), "--json"], stdout=subprocess.PIPE, check=True
    )
    (found,) = json.loads(done.stdout)
    return dict(found)


def processes_of(root: Path) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(root) in line and " role " in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_the_run_in_order_and_says_so(
    evaluation: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    assert evaluation.stdout is not None and evaluation.stderr is not None
    assert evaluation.stdout.readline().startswith("run ")
    evaluation.send_signal(number)
    out, error = evaluation.stdout.read(), evaluation.stderr.read()
    assert evaluation.wait(timeout=60) == 130
    assert error == "Interrupted.\n"
    assert out.startswith("model wordle-tiny\nits recipe.toml: ")
    assert "stopping" in out and "cancelled; every process that was started has ended" in out
    assert only_run(tmp_path)["status"] == RunStatus.CANCELLED
    assert processes_of(tmp_path) == []
    (log,) = tmp_path.glob("runs/*/logs/control.log")
    assert "cancelled by the user" in log.read_text()


def test_a_closed_pipe_ends_the_run_in_order(evaluation: subprocess.Popen[str], tmp_path: Path) -> None:
    assert evaluation.stdout is not None and evaluation.stderr is not None
    evaluation.stdout.readline()
    evaluation.stdout.close()
    assert evaluation.wait(timeout=60) == 1
    assert evaluation.stderr.read() == ""
    assert only_run(tmp_path)["status"] == RunStatus.CANCELLED
    assert processes_of(tmp_path) == []
