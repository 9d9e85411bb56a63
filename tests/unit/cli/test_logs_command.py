"""`turnmill logs`, on files as the roles of a run write them."""

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.unit.cli.terminal import turnmill_command
from turnmill.backends.embedded import open_root_records
from turnmill.cli.commands import turnmill as command
from turnmill.cli.errors import run_cli
from turnmill.cli.logs import _texts
from turnmill.errors import ConfigError
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import Write
from turnmill.records import Run, RunKind, RunStatus, StageRecord, encode
from turnmill.telemetry import configure_logging
from turnmill.wiring.reading.logs import LogRecord, MergedLogs, Tail, matches
from turnmill.wiring.reading.runs import began
from turnmill.wiring.variables import log_format

# 2026-01-02 03:04:05 of this machine's time zone.
BEGIN_S = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
CONTROL = """\
2026-01-02 03:04:05,000 control INFO turnmill.pipeline.engine: stage ValidateData
2026-01-02 03:04:20,500 control ERROR turnmill.conversation: it failed
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ValueError: no
2026-01-02 03:04:40,000 control INFO turnmill.pipeline.engine: the end
"""
REPLICA = """\
a library says hello
2026-01-02 03:04:10,000 replica-{index} INFO turnmill.generation: serves with token=abcdefghijklmnopqrstuvwxyz
2026-01-02 03:04:30,000 replica-{index} WARNING turnmill.generation: slow
"""
STAGES = (
    StageRecord(name="ValidateData", state="done", started_at=BEGIN_S + 0.0004, ended_at=BEGIN_S + 8),
    StageRecord(name="StartGeneration", state="done", started_at=BEGIN_S + 10, ended_at=BEGIN_S + 20),
    StageRecord(name="StartGeneration", state="done", started_at=BEGIN_S + 30, ended_at=BEGIN_S + 36, attempt=2),
)


def make_run(root: Path, *, status: RunStatus = RunStatus.SUCCEEDED, stages: tuple[StageRecord, ...] = STAGES) -> Run:
    run = Run(
        run_id="r1",
        cause="test",
        status=status,
        created_at=BEGIN_S,
        ended_at=None if status is RunStatus.ACTIVE else BEGIN_S + 100,
        config={"max_steps": 2, "generation_replicas": 3},
        sources={},
        data_path="tasks.jsonl",
        stages=stages,
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )

    async def create() -> None:
        store = open_root_records(root)
        await RunRecord.create(store, run)
        store.close()

    asyncio.run(create())
    return run


def put_run(root: Path, run: Run) -> None:
    async def write() -> None:
        store = open_root_records(root)
        await store.write([Write(key=run.key, value=encode(run), expected=None)])
        store.close()

    asyncio.run(write())


def end_run(root: Path, run: Run) -> None:
    put_run(root, replace(run, status=RunStatus.SUCCEEDED, ended_at=time.time()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of a run that ended."""
    make_run(tmp_path)
    logs = tmp_path / "runs" / "r1" / "logs"
    logs.mkdir(parents=True)
    (logs / "control.log").write_text(CONTROL)
    for index in range(2):
        (logs / f"replica-{index}.log").write_text(REPLICA.format(index=index))
    return logs


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(command, ["logs", "r1", "--root", str(tmp_path), *arguments], catch_exceptions=False)
        assert done.exit_code == 0
        return str(done.stdout)

    return run


def entries(text: str) -> list[str]:
    """Role and last word of each line."""
    return [f"{line.split()[0]} {line.split()[-1]}" for line in text.splitlines()]


def test_logs_are_merged_by_time_and_a_traceback_stays_with_its_line(folder: Path, invoke: Callable[..., str]) -> None:
    assert entries(invoke()) == [
        "replica-0 hello",
        "replica-1 hello",
        "control ValidateData",
        "replica-0 token=***",
        "replica-1 token=***",
        "control failed",
        "control last):",
        "control <module>",
        "control no",
        "replica-0 slow",
        "replica-1 slow",
        "control end",
    ]


def test_a_role_is_one_process_or_all_of_its_kind(folder: Path, invoke: Callable[..., str]) -> None:
    assert {line.split()[0] for line in invoke("--role", "replica").splitlines()} == {"replica-0", "replica-1"}
    assert {line.split()[0] for line in invoke("--role", "replica-1").splitlines()} == {"replica-1"}
    both = invoke("--role", "replica-1", "--role", "control")
    assert {line.split()[0] for line in both.splitlines()} == {"replica-1", "control"}
    assert invoke("--role", "trainer") == ""
    assert matches("replica-10", ["replica"]) and not matches("replica-10", ["replica-1"])


def test_a_stage_cuts_to_its_intervals_of_all_attempts(folder: Path, invoke: Callable[..., str]) -> None:
    assert entries(invoke("--stage", "ValidateData")) == [
        "control ValidateData",
        "replica-0 token=***",
        "replica-1 token=***",
    ]
    assert entries(invoke("--stage", "startgeneration", "--role", "control")) == [
        "control failed",
        "control last):",
        "control <module>",
        "control no",
        "control end",
    ]


def test_the_last_entries_come_with_their_tracebacks(folder: Path, invoke: Callable[..., str]) -> None:
    assert entries(invoke("--lines", "3")) == ["replica-0 slow", "replica-1 slow", "control end"]
    assert len(invoke("-n", "2", "--role", "control").splitlines()) == 5
    assert invoke("-n", "0") == ""


def test_json_is_one_object_an_entry(folder: Path, invoke: Callable[..., str]) -> None:
    found = [json.loads(line) for line in invoke("--json").splitlines()]
    assert [entry["role"] for entry in found[:3]] == ["replica-0", "replica-1", "control"]
    assert found[0] == {"run": "r1", "role": "replica-0", "message": "a library says hello"}
    failed = found[5]
    assert failed["time"] == BEGIN_S + 15.5 and failed["level"] == "ERROR"
    assert failed["message"].splitlines()[0] == "it failed" and failed["message"].endswith("ValueError: no")


def test_unknown_names_list_what_there_is(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*arguments: str) -> str:
        assert run_cli(command, ["logs", *arguments, "--root", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "no role 'judge'; roles: control, replica-0, replica-1, replica-2, trainer, worker-0" in error_of(
        "r1", "--role", "judge"
    )
    assert "no stage 'Deploy'; stages: ValidateData, StartGeneration" in error_of("r1", "--stage", "Deploy")
    # Of a run that ended nothing begins any more, also for those who would follow it.
    assert "no stage 'Teardown'" in error_of("r1", "--stage", "Teardown", "--follow")
    assert "no run 'r2'" in error_of("r2")


def test_bad_bytes_and_control_characters_do_no_harm(folder: Path, invoke: Callable[..., str]) -> None:
    with (folder / "trainer.log").open("wb") as file:
        file.write(b"2026-01-02 03:04:50,000 trainer INFO x: bad \xff\xfe \x1b[31m bytes\r\n\x00\nand no end of line")
    shown = invoke("--role", "trainer").splitlines()
    assert shown[0].endswith("x: bad \ufffd\ufffd \ufffd[31m bytes") and shown[2] == "trainer  and no end of line"


def test_on_a_terminal_each_role_has_its_colour() -> None:
    record = LogRecord(role="replica-0", time=BEGIN_S, level="ERROR", logger="x", at="run/1", lines=("a", "b"))
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system="standard", width=200)
    for line in _texts(record, 12, "cyan"):
        console.print(line)
    first, second = text.getvalue().splitlines()
    assert first.startswith("\x1b[36mreplica-0     ") and second.startswith("\x1b[36mreplica-0     ")
    assert "\x1b[31mERROR" in first and "a [run/1]" in first


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_text_and_json_logs_are_shown_alike(
    folder: Path, invoke: Callable[..., str], root_logger: logging.Logger
) -> None:
    for role, form in (("trainer", "text"), ("worker-0", "json")):
        with (folder / f"{role}.log").open("w") as file:
            configure_logging(role, stream=file, run_id="r1", form=form)
            logging.getLogger("turnmill.test").info("one\nand a half, secret=abcdefghijklmnopqrst", extra={"at": "a/b"})
            try:
                raise ValueError("token: abcdefghijklmnopqrst")
            except ValueError:
                logging.getLogger("turnmill.test").exception("two")
    written = json.loads((folder / "worker-0.log").read_text().splitlines()[0])
    assert {key: written[key] for key in ("run", "role", "at", "level")} == {
        "run": "r1",
        "role": "worker-0",
        "at": "a/b",
        "level": "INFO",
    }
    text, other = (invoke("--role", role) for role in ("trainer", "worker-0"))
    assert len(text.splitlines()) == len(other.splitlines()) >= 6
    assert "ValueError: token: ***" in text and "ValueError: token: ***" in other and "secret=***" in other
    [first, *_] = [json.loads(line) for line in invoke("--role", "worker", "--json").splitlines()]
    assert first["at"] == "a/b" and abs(first["time"] - time.time()) < 600
    # Other programs' JSON belongs to the entry before it.
    with (folder / "worker-0.log").open("a") as file:
        file.write('{"a": 1}\n{"time": 3}\n[1]\n{\n')
    assert len(invoke("--role", "worker", "--json").splitlines()) == 2


def test_a_form_of_logs_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_format() == "text"
    monkeypatch.setenv("TURNMILL_LOG_FORMAT", "json")
    assert log_format() == "json"
    monkeypatch.setenv("TURNMILL_LOG_FORMAT", "yaml")
    with pytest.raises(ConfigError, match="must be one of text, json"):
        log_format()


# ---------------------------------------------------------------- growing files


def test_a_tail_reads_a_line_when_it_is_whole_through_rotation_and_truncation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\nhalf")
    assert list(tail.lines()) == ["two", "three"]
    with path.open("ab") as file:
        file.write(b" a line\nold end")
    path.rename(tmp_path / "a.log.1")
    path.write_bytes(b"new\n")
    assert list(tail.lines()) == ["half a line", "old end", "new"]
    path.write_bytes(b"x\n")
    assert list(tail.lines()) == ["x"]
    path.unlink()
    assert list(tail.lines()) == []
    path.write_bytes(b"again\nand")
    assert list(tail.lines(to_the_end=True)) == ["again", "and"]
    tail.close()


def test_an_entry_is_complete_when_the_next_begins_or_after_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "control.log"
    head, *more = CONTROL.splitlines(keepends=True)
    merged = MergedLogs(tmp_path)
    assert list(merged.read()) == []
    path.write_text(head)
    assert list(merged.read()) == []
    with path.open("a") as file:
        file.write("".join(more[:3]))
    assert [record.lines for record in merged.read()] == [("stage ValidateData",)]
    with path.open("a") as file:
        file.write(more[3])
    assert list(merged.read()) == []
    assert [len(record.lines) for record in merged.read()] == [4]
    assert list(merged.read()) == []
    # What is printed later has the time of what was before it.
    with path.open("a") as file:
        file.write("printed\n")
    assert [(record.lines, record.time) for record in merged.read(pause=True)] == [(("printed",), BEGIN_S + 15.5)]
    merged.close()


def started(root: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        turnmill_command("logs", "r1", "--root", str(root), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_following_waits_for_logs_and_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, status=RunStatus.ACTIVE)
    process = started(tmp_path, "--follow", "--role", "trainer", "--role", "control")
    assert process.stdout is not None and process.stderr is not None
    logs = tmp_path / "runs" / "r1" / "logs"
    logs.mkdir(parents=True)
    head, *more = CONTROL.splitlines(keepends=True)
    (logs / "control.log").write_text(head)
    assert process.stdout.readline().endswith("stage ValidateData\n")
    (logs / "trainer.log").write_text(head.replace("control", "trainer").replace("ValidateData", "of the trainer"))
    assert process.stdout.readline().endswith("stage of the trainer\n")
    with (logs / "control.log").open("a") as file:
        file.write("".join(more).rstrip("\n"))
    end_run(tmp_path, run)
    rest = process.stdout.read()
    assert process.wait() == 0 and process.stderr.read() == ""
    assert len(rest.splitlines()) == 5 and rest.endswith("the end\n")
    process.stdout.close()
    process.stderr.close()


def test_a_stage_that_did_not_begin_yet_can_be_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path, status=RunStatus.ACTIVE, stages=())
    process = started(tmp_path, "--follow", "--stage", "SubmitTraining")
    assert process.stdout is not None and process.stderr is not None
    run = replace(run, stages=(StageRecord(name="SubmitTraining", state="running", started_at=BEGIN_S + 10),))
    put_run(tmp_path, run)
    logs = tmp_path / "runs" / "r1" / "logs"
    logs.mkdir(parents=True)
    (logs / "control.log").write_text(CONTROL)
    end_run(tmp_path, run)
    out, error = process.communicate()
    assert (process.returncode, error) == (0, "")
    assert entries(out)[0] == "control failed" and entries(out)[-1] == "control end"


def test_a_closed_pipe_ends_it_quietly(folder: Path, tmp_path: Path) -> None:
    with (folder / "worker-0.log").open("w") as file:
        for number in range(50_000):
            file.write(f"2026-01-02 03:05:00,000 worker-0 INFO turnmill.rollout: line {number}\n")
    process = started(tmp_path)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_following_a_silent_log_ends_when_the_pipe_is_closed(tmp_path: Path) -> None:
    make_run(tmp_path, status=RunStatus.ACTIVE)
    logs = tmp_path / "runs" / "r1" / "logs"
    logs.mkdir(parents=True)
    (logs / "control.log").write_text(CONTROL)
    process = started(tmp_path, "--follow")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_ctrl_c_ends_following_as_it_ends_other_commands(tmp_path: Path) -> None:
    make_run(tmp_path, status=RunStatus.ACTIVE)
    logs = tmp_path / "runs" / "r1" / "logs"
    logs.mkdir(parents=True)
    (logs / "control.log").write_text(CONTROL)
    process = started(tmp_path, "--follow")
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130 and error.strip() == "Interrupted."


def test_an_evaluation_has_no_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    end_run(tmp_path, replace(run, kind=RunKind.EVAL))
    assert run_cli(command, ["logs", "r1", "--role", "trainer", "--root", str(tmp_path)]) == 2
    assert "roles: control, replica-0" in capsys.readouterr().err
