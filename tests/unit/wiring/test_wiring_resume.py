"""Which runs may be resumed; how they go on is in tests/e2e/test_resume.py."""

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.config import Config, to_dict
from turnmill.errors import DataError, InvalidInput
from turnmill.ports import Write
from turnmill.records import Metric, Run, RunKind, RunStatus, StageRecord, TrainingStatus, encode, training_key
from turnmill.wiring.reading.runs import read_metrics
from turnmill.wiring.running.resume import check_run

# No packages of environments are there.
ROOT = Path("no-deployment")


def run(**changes: Any) -> Run:
    """A run on the shipped words that failed while it trained."""
    data = assets.wordle_data("train")
    report = {"path": str(data), "rows": 1, "digest": hashlib.sha256(data.read_bytes()).hexdigest()}
    values: dict[str, Any] = {
        "run_id": "r1",
        "cause": "test",
        "status": RunStatus.FAILED,
        "created_at": time.time(),
        "config": to_dict(Config()),
        "sources": dict.fromkeys(to_dict(Config()), "default"),
        "data_path": str(data),
        "stages": (StageRecord(name="ValidateData", state="done", started_at=1.0, result={"data": report}),),
    }
    return Run(**{**values, **changes})


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED])
@pytest.mark.parametrize("from_step", [None, 0, 3])
def test_a_run_that_ended_early_may_go_on(status: RunStatus, from_step: int | None) -> None:
    check_run(ROOT, run(status=status), from_step)


def test_an_active_run_is_left_to_its_process() -> None:
    with pytest.raises(InvalidInput, match=f"r1 is active: its control process {os.getpid()} is running"):
        check_run(ROOT, run(status=RunStatus.ACTIVE, pid=os.getpid()), None)
    # Resumed long after it was created, it has a process that began long after, too.
    resumed = run(status=RunStatus.ACTIVE, pid=os.getpid(), created_at=1.0, resumed_at=time.time(), attempt=2)
    with pytest.raises(InvalidInput, match="r1 is active"):
        check_run(ROOT, resumed, None)


def test_a_run_that_succeeded_goes_on_from_an_earlier_step_only() -> None:
    with pytest.raises(InvalidInput, match=r"r1 has succeeded.*--from STEP"):
        check_run(ROOT, run(status=RunStatus.SUCCEEDED), None)
    check_run(ROOT, run(status=RunStatus.SUCCEEDED), 3)


def test_an_evaluation_has_no_steps_to_go_on_from() -> None:
    evaluation = run(kind=RunKind.EVAL, data_path=None, eval_path=str(assets.wordle_data("eval")), stages=())
    check_run(ROOT, evaluation, None)
    with pytest.raises(InvalidInput, match="r1 is an evaluation"):
        check_run(ROOT, evaluation, 0)


def test_the_data_must_be_what_was_validated(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_bytes(assets.wordle_data("train").read_bytes() + b"\n")
    stage = run().stages[0]
    moved = replace(stage, result={"data": {**stage.result["data"], "path": str(data)}})
    with pytest.raises(InvalidInput, match="has changed since the run began"):
        check_run(ROOT, run(data_path=str(data), stages=(moved,)), None)
    # The last file that was found valid counts.
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    later = replace(stage, attempt=2, result={"data": {**moved.result["data"], "digest": digest}})
    check_run(ROOT, run(data_path=str(data), stages=(moved, later)), None)


def test_a_file_that_was_never_found_valid_may_have_been_corrected(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    failed = StageRecord(name="ValidateData", state="failed", started_at=1.0)
    data.write_text("{")
    with pytest.raises(DataError):
        check_run(ROOT, run(data_path=str(data), stages=(failed,)), None)
    data.write_bytes(assets.wordle_data("train").read_bytes())
    check_run(ROOT, run(data_path=str(data), stages=(failed,)), None)


@pytest.mark.parametrize("status", [RunStatus.QUEUED, RunStatus.FAILED])
def test_an_upload_with_wrong_parameters_never_goes_on_with_others(status: RunStatus) -> None:
    """What its record has are those of the deployment, without its sidecar."""
    with pytest.raises(InvalidInput, match=r"r1 had wrong parameters and can't go on: lr = 5 is too much"):
        check_run(ROOT, run(status=status, refused="lr = 5 is too much", stages=()), None)


async def test_figures_of_steps_that_were_given_up_are_not_shown(tmp_path: Path) -> None:
    ports = open_run(tmp_path, "r1", num_replicas=0)
    for step in (1, 2, 3):
        await ports.metrics.write(Metric(run_id="r1", step=step, time=1.0, values={}))
    status = TrainingStatus(run_id="r1", state="running", step=2, max_steps=9, incarnation=2, updated_at=1.0)
    await ports.records.write([Write(key=training_key("r1"), value=encode(status), expected=0)])
    ports.close()
    assert [metric.step for metric in await read_metrics(tmp_path, "r1")] == [1, 2]
