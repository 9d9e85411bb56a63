"""`turnmill doctor` on folders of runs: whom it is about, what it prints, and its exit code."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from turnmill.backends.embedded import only_one, open_root_records, open_run
from turnmill.cli.commands import turnmill
from turnmill.cli.errors import run_cli
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import Write
from turnmill.records import ReplicaStatus, Run, RunStatus, StageRecord, Version, encode, replica_key
from turnmill.wiring.event_loop import run_loop

# No process has it.
NO_PID = 2**22 + 1


def make_run(root: Path, run_id: str, status: RunStatus, error: str | None = None, *, pid: int = NO_PID) -> Run:
    state = "failed" if status is RunStatus.FAILED else "running"
    run = Run(
        run_id=run_id,
        cause=f"test/{run_id}",
        status=status,
        created_at=time.time(),
        config={},
        sources={},
        data_path="tasks.jsonl",
        stages=(StageRecord(name="SubmitTraining", state=state, started_at=time.time(), error=error),),
        error=error,
        pid=pid,
    )

    async def write() -> None:
        store = open_root_records(root)
        try:
            await RunRecord.create(store, run)
        finally:
            store.close()

    run_loop(write())
    return run


def doctor(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(turnmill, ["doctor", *arguments, "--root", str(root)])


def test_without_a_name_it_is_about_the_run_that_goes_on_also_when_its_control_is_gone(tmp_path: Path) -> None:
    make_run(tmp_path, "old", RunStatus.SUCCEEDED)
    make_run(tmp_path, "r1", RunStatus.ACTIVE)
    result = doctor(tmp_path, "--json")
    report = json.loads(result.output)
    assert (result.exit_code, report["run_id"], report["role"]) == (1, "r1", "control")
    assert report["diagnoses"][0]["commands"] == [f"turnmill resume r1 --root {tmp_path}"]


def test_a_failed_run_is_explained_with_its_last_log_lines_and_what_to_do(tmp_path: Path) -> None:
    make_run(
        tmp_path, "r1", RunStatus.FAILED, "worker-0 ended with exit code 1 after 5 restarts; its last log lines:\n x"
    )
    logs = tmp_path / "runs/r1/logs"
    logs.mkdir(parents=True)
    (logs / "worker-0.log").write_text("the last words /a/abcdefghijklmnopqrstuvwxyz/v1\n")
    result = doctor(tmp_path, "r1")
    assert result.exit_code == 1
    for text in ("ended badly", "worker-0: SubmitTraining failed", "the last words /a/***", "turnmill resume r1"):
        assert text in result.output, result.output


def test_log_lines_that_say_what_the_error_says_are_not_told_again(tmp_path: Path) -> None:
    why = "NoProgress: 5 groups in a row without signal. These tasks are too hard for this model"
    make_run(tmp_path, "r1", RunStatus.FAILED, f"the trainer stopped at step 0: {why}")
    logs = tmp_path / "runs/r1/logs"
    logs.mkdir(parents=True)
    text = why.partition(": ")[2]
    (logs / "trainer.log").write_text(
        f"loaded: model\n12:00 trainer ERROR loop: stopped at step 0: {text}\nError: {text}\n"
    )
    result = doctor(tmp_path, "r1")
    assert result.output.count("5 groups in a row") == 1 and "loaded: model" in result.output, result.output
    assert json.loads(doctor(tmp_path, "r1", "--json").output)["diagnoses"][0]["log_lines"][-1] == f"Error: {text}"


@pytest.mark.parametrize("status", [RunStatus.SUCCEEDED, RunStatus.CANCELLED, RunStatus.QUEUED])
def test_what_is_as_it_should_be_has_exit_code_0(tmp_path: Path, status: RunStatus) -> None:
    make_run(tmp_path, "r1", status)
    with only_one(tmp_path / "locks" / "control.lock", "it is served"):
        result = doctor(tmp_path, "r1", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output)["healthy"] is True


def test_without_a_name_and_with_nothing_going_on_it_is_about_the_run_that_waits(tmp_path: Path) -> None:
    make_run(tmp_path, "old", RunStatus.FAILED)
    make_run(tmp_path, "next", RunStatus.QUEUED)
    make_run(tmp_path, "later", RunStatus.QUEUED)
    result = doctor(tmp_path)
    assert result.exit_code == 1 and "run next queued: something is wrong" in result.output
    assert f"turnmill up --root {tmp_path}" in result.output


def test_a_run_that_is_not_there_is_a_user_s_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(turnmill, ["doctor", "--root", str(tmp_path)]) == 2
    make_run(tmp_path, "r1", RunStatus.SUCCEEDED)
    assert run_cli(turnmill, ["doctor", "r2", "--root", str(tmp_path)]) == 2
    assert "did you mean r1?" in capsys.readouterr().err


def test_a_look_at_a_run_that_ended_makes_no_file(tmp_path: Path) -> None:
    make_run(tmp_path, "r1", RunStatus.SUCCEEDED)
    before = sorted(tmp_path.rglob("*"))
    doctor(tmp_path, "r1")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_replica_says_of_itself_is_shown_by_doctor_and_status(tmp_path: Path) -> None:
    make_run(tmp_path, "r1", RunStatus.ACTIVE, pid=os.getpid())
    status = ReplicaStatus(
        run_id="r1",
        replica="replica-0",
        version=Version(incarnation=1, n=4),
        next_version=Version(incarnation=1, n=5),
        fingerprints={},
        updated_at=time.time(),
        pid=NO_PID,
    )

    async def write() -> None:
        ports = open_run(tmp_path, "r1", num_replicas=1)
        try:
            key = replica_key("r1", status.replica)
            await ports.records.write([Write(key=key, value=encode(status), expected=0)])
        finally:
            ports.close()

    run_loop(write())
    words = "replica-0 serves version 1.4; draining to load version 1.5; heard of"
    assert words in doctor(tmp_path, "r1").output
    assert words in CliRunner().invoke(turnmill, ["status", "r1", "--root", str(tmp_path)]).output
    (told,) = json.loads(doctor(tmp_path, "r1", "--json").output)["replicas"]
    assert (told["state"], told["version"], told["next_version"]) == ("serving", "1.4", "1.5")
    asked = CliRunner().invoke(turnmill, ["status", "r1", "--json", "--root", str(tmp_path)])
    (told,) = json.loads(asked.output)["replicas"]
    assert (told["replica"], told["state"]) == ("replica-0", "serving")
