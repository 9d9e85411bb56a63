"""Runs in separate processes that are evaluated while they train, through kills, and held back where they got worse."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import Running, start_run
from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.records import AlertKind, Call, Metric, Purpose, SampleRecord, SampleState, decode, sample_prefix
from turnmill.training.history import scan_all
from turnmill.training.played import load_calls
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import read_metrics
from turnmill.wiring.watching.alarms import look_at_alerts

NUM_TASKS = 8


def held_out(folder: Path) -> str:
    """The path of a file of a few tasks."""
    path = folder / "held_out.jsonl"
    rows = assets.wordle_data("eval").read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:NUM_TASKS]))
    return str(path)


def played(root: Path, run_id: str) -> list[tuple[SampleRecord, list[Call]]]:
    """The rollouts of all evaluations, with their calls."""

    async def read() -> list[tuple[SampleRecord, list[Call]]]:
        ports = open_run(root, run_id, num_replicas=1)
        try:
            stored = await scan_all(ports.records, sample_prefix(run_id, Purpose.EVAL))
            samples = [decode(item.value, SampleRecord) for item in stored]
            return list(zip(samples, await load_calls(ports.records, samples), strict=True))
        finally:
            ports.close()

    found: list[tuple[SampleRecord, list[Call]]] = run_loop(read())
    return found


def metrics_of(root: Path, run_id: str) -> dict[int, Metric]:
    found: list[Metric] = run_loop(read_metrics(root, run_id, first=0))
    return {metric.step: metric for metric in found}


def turnmill(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "turnmill", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def arm(root: Path, *points: str) -> None:
    (root / "failpoints").mkdir(exist_ok=True)
    for point in points:
        (root / "failpoints" / point).touch()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_evaluated_greedily_while_it_trains_and_a_kill_repeats_nothing(tmp_path: Path) -> None:
    arm(tmp_path, "validation-played", "metric-written")
    held_out_file = held_out(tmp_path)
    changes: dict[str, Any] = {
        "max_steps": "2",
        "val_every": "1",
        "val_rollouts": "8",
        "val_temperature": "0",
        "eval_rollouts": "16",
    }
    with start_run(tmp_path, eval_data=held_out_file, baseline_rollouts="0", **changes) as running:
        figures = running.finish()
    run_id = figures["run_id"]
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    assert not list((tmp_path / "failpoints").iterdir()), "the trainer was killed twice"

    found = metrics_of(tmp_path, run_id)
    assert sorted(found) == [0, 1, 2] and all("val_solved" in metric.values for metric in found.values())
    _check_rollouts(played(tmp_path, run_id))

    told = json.loads(turnmill(tmp_path, "evaluations", run_id, "--json"))
    assert [one["name"] for one in told["evaluations"]] == ["before", "step 0", "step 1", "step 2", "after"]
    for one in told["evaluations"]:
        assert (one["num_valid"], one["num_tasks"], one["temperature"]) == (NUM_TASKS, NUM_TASKS, 0.0)
        step = {"step 0": 0, "step 1": 1, "step 2": 2}.get(one["name"])
        if step is not None:
            assert found[step].values["val_solved"] == one["solved"]
    assert len(told["tasks"]) == NUM_TASKS
    assert "step 1 (greedy)" in turnmill(tmp_path, "evaluations", run_id)
    assert figures["evaluations"]["after"]["comparison"]["num_worse"] >= 0


def _check_rollouts(rollouts: list[tuple[SampleRecord, list[Call]]]) -> None:
    """Each task once with the weights of each step; greedy, and of one version."""
    counts: Counter[str] = Counter()
    for sample, calls in rollouts:
        version, _, task_id = sample.group_id.partition("/")
        assert task_id == sample.task_id and {call.version for call in calls} == {version.removeprefix("v")}
        assert all(call.sampling.temperature == 0 and not any(call.loss_mask) for call in calls)
        assert sample.state is SampleState.REPORTED
        counts[version] += 1
    assert sorted(counts.values()) == [NUM_TASKS] * 3 and "v0.0" in counts


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_model_that_got_worse_is_held_back_with_the_tasks_that_say_why(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "max_steps": "1",
        "lr": "0.3",
        "min_lr": "0",
        "eval_rollouts": "1600",
        "baseline_rollouts": "0",
    }
    with start_run(tmp_path, eval_data=held_out(tmp_path), **changes) as running:
        figures = running.finish()
    assert (figures["status"], figures["published"]) == ("succeeded", None)
    promotion = figures["promotion"]
    assert (promotion["rule"], promotion["metric"], promotion["is_published"]) == ("not_worse", "solved", False)
    assert promotion["high"] < 0 and promotion["reason"].startswith("worse than its base on held-out tasks: -0.")
    assert promotion["num_worse"] == len(promotion["worse"]) > 0 and promotion["num_better"] == 0
    worst = promotion["worse"][0]
    assert worst["solved_before"] > worst["solved_after"] and worst["num_before"] == worst["num_after"] == 200
    losses = [task["solved_before"] - task["solved_after"] for task in promotion["worse"]]
    assert losses == sorted(losses, reverse=True)
    assert not (tmp_path / "bucket" / "models").exists() and Path(figures["checkpoint"]).is_dir()
    _check_told(tmp_path, running, figures, worst)


def _check_told(root: Path, running: Running, figures: dict[str, Any], worst: dict[str, Any]) -> None:
    """The same table wherever somebody looks."""
    row = f"{worst['solved_before']} of 200"
    shown = turnmill(root, "status", figures["run_id"])
    assert "not published (not_worse: worse than its base" in shown
    assert any(worst["task_id"] in line and row in line for line in shown.splitlines())
    (alert,) = [alert for alert in look_at_alerts(root, figures["run_id"]) if alert.kind is AlertKind.MODEL_HELD]
    assert "is not published (not_worse): worse than its base" in alert.summary
    assert alert.error is not None and worst["task_id"] in alert.error and row in alert.error
    told = json.loads(turnmill(root, "evaluations", figures["run_id"], "--json"))
    assert {task["task_id"]: task["solved_before"] for task in told["tasks"]}[worst["task_id"]] == worst[
        "solved_before"
    ]
