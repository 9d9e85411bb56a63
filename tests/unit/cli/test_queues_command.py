"""`turnmill queues` and `check_all_queues`, on folders of runs that the embedded backend made."""

import asyncio
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import turnmill
from turnmill import check_all_queues
from turnmill.backends.embedded import open_root_records, open_run
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.cli.commands import turnmill as command
from turnmill.cli.errors import run_cli
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import Message, RunPorts
from turnmill.records import Run, RunStatus
from turnmill.wiring.reading.queues import QueueStatus, Reading, read_queues, with_rates
from turnmill.wiring.reading.runs import began

NAMES = ["rollout_request", "rollout_response", "generate_request", "generate_response"]
# Writes to a queue of the run until it is killed.
WRITER = """
import asyncio, sys
from pathlib import Path
from turnmill.backends.embedded import open_run
from turnmill.ports import Message
async def main():
    ports = open_run(Path(sys.argv[1]), "r1", num_replicas=2)
    for number in range(10**9):
        await ports.rollout_request.send([Message(body=b"x", group=str(number), dedup_id=None)])
        await ports.rollout_request.take(max_messages=1)
        if number == 20:
            print("writing", flush=True)
asyncio.run(main())
"""


def make_run(root: Path, run_id: str = "r1", *, status: RunStatus = RunStatus.ACTIVE) -> Run:
    run = Run(
        run_id=run_id,
        cause=f"test/{run_id}",
        status=status,
        created_at=time.time(),
        config={"max_steps": 2, "generation_replicas": 2},
        sources={},
        data_path="tasks.jsonl",
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )

    async def create() -> None:
        store = open_root_records(root)
        await RunRecord.create(store, run)
        store.close()

    asyncio.run(create())
    return run


def message(body: str) -> Message:
    return Message(body=body.encode(), group=body, dedup_id=None)


async def fill(ports: RunPorts) -> None:
    """3 requests, of which one is leased and one delayed; 1 for replica 1, and an answer."""
    await ports.rollout_request.send([message(body) for body in "abc"])
    leased = await ports.rollout_request.lease(max_messages=2, lease_s=1000.0)
    await ports.rollout_request.release([leased[0].receipt], delay_s=1000.0)
    await ports.generate_request[1].send([message("a")])
    await ports.generate_response.send([message("a")])


def filled(root: Path) -> None:
    async def work() -> None:
        ports = open_run(root, "r1", num_replicas=2)
        await fill(ports)
        ports.close()

    asyncio.run(work())


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and change time of every file."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        # The index of a -wal file has marks of readers in it, by design of SQLite.
        if path.is_file() and not path.name.endswith("-shm")
    }


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def numbers(status: QueueStatus) -> tuple[int, int, int, int]:
    return status.available, status.in_flight, status.delayed, status.dead_letters


def test_all_queues_of_the_one_active_run_are_told_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "ended", status=RunStatus.SUCCEEDED)
    make_run(tmp_path)
    filled(tmp_path)
    found = check_all_queues(root=tmp_path)
    assert list(found) == NAMES
    assert numbers(found["rollout_request"]) == (1, 1, 1, 0)
    assert numbers(found["generate_request"]) == (1, 0, 0, 0)
    assert [part.available for part in found["generate_request"].replicas] == [0, 1]
    assert numbers(found["rollout_response"]) == (0, 0, 0, 0) and found["rollout_response"].oldest_age_s is None
    assert found["generate_response"].available == 1 and found["generate_response"].oldest_age_s is not None
    assert capsys.readouterr().out == ""
    assert check_all_queues("r1", root=str(tmp_path), verbose=True).keys() == found.keys()
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*NAMES, "replica 1", "in flight", "oldest", "dead"))


async def test_it_may_be_called_where_an_event_loop_runs(tmp_path: Path) -> None:
    await asyncio.to_thread(make_run, tmp_path)
    assert list(check_all_queues(root=tmp_path)) == NAMES


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.setenv("TURNMILL_ROOT", str(tmp_path))
    assert list(check_all_queues()) == NAMES


def test_without_one_active_run_the_error_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no run in"):
        check_all_queues(root=tmp_path)
    make_run(tmp_path, "done", status=RunStatus.SUCCEEDED)
    with pytest.raises(NotFound, match=r"no run is active in .*: done"):
        check_all_queues(root=tmp_path)
    make_run(tmp_path, "one")
    make_run(tmp_path, "two")
    with pytest.raises(InvalidInput, match=r"several runs are active in .*: two, one"):
        check_all_queues(root=tmp_path)
    with pytest.raises(NotFound, match="did you mean done"):
        check_all_queues("doen", root=tmp_path)


def test_names_of_the_package_are_there_and_load_nothing_heavy() -> None:
    assert all(hasattr(turnmill, name) for name in turnmill.__all__)
    code = "import sys; from turnmill import check_all_queues; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "False False\n"
    assert not hasattr(turnmill, "check_all_queus")


def test_looking_at_a_finished_run_changes_no_file_and_makes_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, status=RunStatus.FAILED)
    filled(tmp_path)
    before = state_of(tmp_path)
    assert numbers(check_all_queues(run.run_id, root=tmp_path)["rollout_request"]) == (1, 1, 1, 0)
    assert state_of(tmp_path) == before
    assert sorted(os.listdir(tmp_path / "runs" / "r1" / "queues")) == sorted(
        f"{name}.db" for name in ("generate_request-1", "rollout_request")
    )


def test_looking_at_a_run_without_files_makes_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert {numbers(status) for status in read_queues(tmp_path, run).queues.values()} == {(0, 0, 0, 0)}
    assert not (tmp_path / "runs").exists()


async def test_looking_changes_nothing_and_waits_for_nobody_while_another_holds_the_write_lock(tmp_path: Path) -> None:
    run = await asyncio.to_thread(make_run, tmp_path)
    ports = open_run(tmp_path, "r1", num_replicas=2)
    await fill(ports)
    holder = sqlite3.connect(tmp_path / "runs" / "r1" / "queues" / "rollout_request.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("DELETE FROM messages")
    before = state_of(tmp_path / "runs")
    assert numbers(read_queues(tmp_path, run).queues["rollout_request"]) == (1, 1, 1, 0)
    assert state_of(tmp_path / "runs") == before
    holder.execute("COMMIT")
    holder.close()
    assert numbers(read_queues(tmp_path, run).queues["rollout_request"]) == (0, 0, 0, 0)
    ports.close()


def test_looking_again_and_again_while_another_process_writes_finds_whole_counts(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    run = make_run(tmp_path)
    readings = [read_queues(tmp_path, run) for _ in range(200)]
    sent = [reading.queues["rollout_request"].num_sent or 0 for reading in readings]
    assert sent == sorted(sent) and sent[-1] > sent[0]
    assert {reading.queues["rollout_request"].num_held for reading in readings} <= {0, 1}
    rates = with_rates(readings[0], readings[-1])["rollout_request"]
    assert rates.rate_in is not None and rates.rate_out is not None and rates.rate_in > 0 and rates.rate_out > 0
    assert writer.poll() is None


def test_what_a_killed_process_left_is_counted_and_stays_as_it_was(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    run = make_run(tmp_path)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    before = state_of(tmp_path / "runs")
    assert any(name.endswith("-wal") for name in before)
    found = read_queues(tmp_path, run).queues["rollout_request"]
    assert found.num_sent is not None and found.num_sent >= 20 and found.num_held in (0, 1)
    assert state_of(tmp_path / "runs") == before


def test_a_queue_of_an_earlier_build_is_counted_without_ages_and_rates(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    folder = tmp_path / "runs" / "r1" / "queues"
    filled(tmp_path)
    old = sqlite3.connect(folder / "rollout_request.db", isolation_level=None)
    old.execute("DROP TABLE totals")
    old.execute("UPDATE messages SET id = id % 7 + 1 WHERE state = 1")
    old.close()
    found = read_queues(tmp_path, run).queues["rollout_request"]
    assert numbers(found) == (1, 1, 1, 0) and found.oldest_age_s is None and found.num_sent is None


def test_a_queue_of_another_layout_is_an_error_that_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    filled(tmp_path)
    old = sqlite3.connect(tmp_path / "runs" / "r1" / "queues" / "rollout_request.db", isolation_level=None)
    old.execute("ALTER TABLE messages DROP COLUMN hidden_at")
    old.close()
    with pytest.raises(BackendUnavailable, match=r"rollout_request\.db was made by another build"):
        read_queues(tmp_path, run)


def test_a_file_that_is_no_queue_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    filled(tmp_path)
    path = tmp_path / "runs" / "r1" / "queues" / "rollout_request.db"
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(RecordCorrupt, match=r"rollout_request\.db"):
        read_queues(tmp_path, run)
    path.unlink()
    path.mkdir()
    with pytest.raises(BackendUnavailable, match=r"rollout_request\.db"):
        read_queues(tmp_path, run)


def test_rates_are_what_came_and_went_between_two_readings() -> None:
    empty = QueueStatus(available=0, in_flight=0, delayed=0, oldest_age_s=None, dead_letters=0, num_sent=10)
    before = Reading(at_s=5.0, queues={"q": replace(empty, available=4, num_sent=10), "unknown": empty})
    after = Reading(
        at_s=7.0,
        queues={
            "q": replace(empty, available=1, dead_letters=1, num_sent=30),
            "unknown": replace(empty, num_sent=None),
        },
    )
    found = with_rates(before, after)
    assert (found["q"].rate_in, found["q"].rate_out) == (10.0, 11.0)
    assert (found["unknown"].rate_in, found["unknown"].rate_out) == (None, None)
    assert with_rates(after, after)["q"].rate_in is None


# ---------------------------------------------------------------- the command


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(command, [*arguments, "--root", str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    return run


def test_the_command_shows_a_finished_run(tmp_path: Path, invoke: Callable[..., str]) -> None:
    make_run(tmp_path, status=RunStatus.SUCCEEDED)
    filled(tmp_path)
    shown = invoke("queues", "r1")
    assert "run r1 succeeded" in shown and all(name in shown for name in NAMES)
    assert max(len(line) for line in shown.splitlines()) <= 80
    found = json.loads(invoke("queues", "r1", "--json"))
    assert found["run_id"] == "r1" and list(found["queues"]) == NAMES
    request = found["queues"]["rollout_request"]
    assert (request["available"], request["in_flight"], request["delayed"], request["dead_letters"]) == (1, 1, 1, 0)
    # Nothing comes or goes any more: there is no second reading, and watching ends at once.
    assert request["rate_in"] is None
    assert len(invoke("queues", "r1", "--json", "--watch").splitlines()) == 1


def test_the_command_shows_rates_of_the_active_run(
    tmp_path: Path, invoke: Callable[..., str], writer: subprocess.Popen[str]
) -> None:
    make_run(tmp_path)
    found = json.loads(invoke("queues", "--json"))
    assert found["status"] == "active"
    assert found["queues"]["rollout_request"]["rate_in"] > 0 and found["queues"]["rollout_request"]["rate_out"] > 0
    assert found["queues"]["generate_response"]["rate_in"] == 0


def test_an_unknown_run_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert run_cli(command, ["queues", "r2", "--root", str(tmp_path)]) == 2
    assert "no run 'r2'" in capsys.readouterr().err
    assert run_cli(command, ["queues", "--root", str(tmp_path / "nowhere")]) == 2


async def test_a_queue_that_an_earlier_build_made_is_used_on(tmp_path: Path) -> None:
    """Its numbers counted from 1; later ones are times, and the order stays."""
    path = tmp_path / "queue.db"
    old = SqliteQueue(path, clock=lambda: 0.0)
    await old.send([message("a"), message("b")])
    old.close()
    queue = SqliteQueue(path)
    await queue.send([message("c")])
    assert (await queue.counts()).oldest_age_s is None
    assert [item.body for item in await queue.take(max_messages=10)] == [b"a", b"b", b"c"]
    queue.close()
