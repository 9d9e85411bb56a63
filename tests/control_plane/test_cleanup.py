"""`turnmill cleanup`: after a run was left at a bad moment, nothing of it remains but what was to be kept."""

import asyncio
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import PATIENCE_S, is_alive, start_run, start_turnmill, wait_for
from turnmill import assets
from turnmill.backends.embedded import open_bucket, open_root_records, open_run, processes_of
from turnmill.intake.claims import Claim, claim
from turnmill.intake.trigger import Intake
from turnmill.ports import Message
from turnmill.records import Run, RunStatus, decode, run_key
from turnmill.wiring.running.foreground import removing, using

DATA = assets.wordle_data("train")


def turnmill(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "turnmill", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def clean(root: Path, *arguments: str) -> dict[str, Any]:
    done = turnmill(root, "cleanup", *arguments, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["remains"] == {name: [] for name in found["remains"]}
    assert set(found["remains"]) == {
        "processes",
        "ports",
        "temporary_folders",
        "queues",
        "files",
        "records",
        "elsewhere",
    }
    return found


def digest_of_tree(root: Path) -> str:
    """Over names, content and times of everything below."""
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        hasher.update(f"{path}\0{status.st_mode}\0{status.st_mtime_ns}\0{status.st_ino}\0".encode())
        if path.is_file():
            hasher.update(path.read_bytes())
    return hasher.hexdigest()


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


async def make_upload_run(root: Path, name: str, *, status: RunStatus = RunStatus.FAILED, folder: bool = True) -> Run:
    """The run of an upload as intake records it, with full queues, a claim and whatever else a run leaves."""
    bucket = open_bucket(root)
    bucket.put(DATA, name)
    runs = open_root_records(root)
    try:
        bucket.look()
        uploads: list[Any] = []
        while not uploads:
            uploads, _ = bucket.look()
            await asyncio.sleep(0.05)
        (upload,) = [one for one in uploads if one.key == name]

        async def plan(upload: Any, run_id: str) -> Run:
            return Run(
                run_id=run_id,
                cause=upload.cause,
                status=status,
                created_at=time.time(),
                config={},
                sources={},
                data_path=None,
                upload=upload.key,
            )

        run_id = f"run-of-{name.removesuffix('.jsonl')}"
        await Intake(runs, new_run_id=lambda: run_id, plan=plan).take(upload)
        await claim(runs, f"content-{name}", run_id)
        (stored,) = await runs.get([run_key(run_id)])
        assert stored is not None
        run = decode(stored.value, Run)
    finally:
        runs.close()
    if folder:
        await fill(root, run_id)
    return run


async def fill(root: Path, run_id: str) -> None:
    """Queues that are full, and what a process that was killed leaves aside."""
    ports = open_run(root, run_id, num_replicas=2)
    try:
        for queue in (ports.rollout_request, ports.rollout_response, *ports.generate_request, ports.generate_response):
            await queue.send([Message(body=b"x" * 100, group=str(n), dedup_id=None) for n in range(200)])
            await queue.lease(max_messages=50, lease_s=600.0)
    finally:
        ports.close()
    folder = root / "runs" / run_id
    (folder / "checkpoints" / ".step-3-abc" / "new").mkdir(parents=True)
    (folder / "checkpoints" / ".step-3-abc" / "new" / "model.safetensors").write_bytes(b"half")
    (folder / ".1-0.tmp").write_bytes(b"half")


def stop_between_writes(folder: Path, pids: list[int]) -> None:
    """Pause processes while none of them holds a lock, for which `fill` would have to wait."""
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if not any(map(is_locked, folder.rglob("*.db"))):
            return
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


def is_locked(path: Path) -> bool:
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return True
    finally:
        connection.close()
    return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("retain", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_remains_of_a_run_that_was_killed_at_a_bad_moment(tmp_path: Path, retain: bool) -> None:
    # Made by `up` of an upload, so that it has data: that alone remains where it is to be retained.
    root = tmp_path / "root"
    assert turnmill(root, "upload", str(DATA), "--name", "team/tasks.jsonl").returncode == 0
    flags = ["--max-steps", "50", "--global-batch-size", "16", "--number-generation", "4"]
    with start_turnmill(root, ["up", "--root", str(root), *flags]) as running:
        wait_for("a step", running.num_steps_of_any, running.process)
        run_id = next((root / "runs").iterdir()).name
        pids = running.children()
        assert len(pids) == 3
        # The roles can't even notice that control is gone.
        stop_between_writes(root / "runs" / run_id, pids)
        running.process.kill()
        running.process.communicate(timeout=PATIENCE_S)
    asyncio.run(fill(root, run_id))
    listed = processes_of(root, run_id)
    assert sorted(one.pid for one in listed) == sorted(pids)
    found = clean(root, run_id, *(["--retain-data"] if retain else []))
    assert sorted(one["pid"] for one in found["processes"]) == sorted(pids)
    assert not any(is_alive(pid) for pid in pids)
    assert not processes_of(root, run_id)
    assert not (root / "runs" / run_id).exists()
    assert turnmill(root, "runs", "--json").stdout == "[]\n"
    assert files_in(root / "bucket") == (["training-data/team/tasks.jsonl"] if retain else [])
    with start_turnmill(root, ["up", "--root", str(root), *flags]) as running:
        # Cleaning up begins no run: the file that still lies there is not trained again.
        time.sleep(2.0)
        assert running.process.poll() is None
        assert turnmill(root, "runs", "--json").stdout == "[]\n"
        done = turnmill(root, "cleanup", "--all", "--yes")
        assert done.returncode == 1 and f"(pid {running.process.pid})" in done.stderr
    clean(root, "--all", *(["--retain-data"] if retain else []))
    assert files_in(root) == (["bucket/training-data/team/tasks.jsonl"] if retain else []) if root.exists() else True
    assert root.exists() is retain


def test_a_run_that_trains_is_cancelled_first_and_its_deployment_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert turnmill(root, "upload", str(DATA), "--name", "tasks.jsonl").returncode == 0
    with start_turnmill(root, ["up", "--root", str(root), "--max-steps", "50"]) as running:
        wait_for("three roles", lambda: len(running.children()) == 3, running.process)
        run_id = next((root / "runs").iterdir()).name
        pids = running.children()
        found = clean(root, run_id, "--retain-data")
        assert found["runs"] == [run_id] and {one["name"] for one in found["processes"]} >= {"trainer", "worker-0"}
        assert not any(is_alive(pid) for pid in pids) and running.process.poll() is None
        assert turnmill(root, "runs", "--json").stdout == "[]\n"
        assert not (root / "runs" / run_id).exists()


def test_the_process_of_a_run_that_is_stopped_is_ended_with_its_roles(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="50") as running:
        wait_for("three roles", lambda: len(running.children()) == 3, running.process)
        assert running.folder is not None
        run_id, pids = running.folder.name, running.children()
        for pid in (running.process.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        found = clean(tmp_path, run_id)
        control = next(one for one in found["processes"] if one["name"] == "control")
        assert control["pid"] == running.process.pid and len(control["ports"]) == 1, "the proxy's"
        running.process.communicate(timeout=PATIENCE_S)
        assert not any(is_alive(pid) for pid in pids)
    assert files_in(tmp_path / "runs") == []


def test_a_run_in_the_foreground_is_cancelled_and_its_process_ends_by_itself(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="50") as running:
        wait_for("three roles", lambda: len(running.children()) == 3, running.process)
        assert running.folder is not None
        clean(tmp_path, running.folder.name)
        running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 130
    assert files_in(tmp_path / "runs") == []


async def test_a_dry_run_changes_nothing_and_no_terminal_means_no(tmp_path: Path) -> None:
    run = await make_upload_run(tmp_path, "tasks.jsonl")
    before = digest_of_tree(tmp_path)
    for arguments in ([run.run_id], ["--all"], [run.run_id, "--retain-data"]):
        done = turnmill(tmp_path, "cleanup", *arguments, "--dry-run")
        assert done.returncode == 0 and "nothing was changed" in done.stdout, done.stderr
        assert "queues" in done.stdout or arguments == ["--all"]
        done = turnmill(tmp_path, "cleanup", *arguments)
        assert done.returncode == 2 and "--yes" in done.stderr
    assert digest_of_tree(tmp_path) == before


@pytest.mark.parametrize("arguments", [[], ["one", "--all"], ["no-such-run"], [".."], ["../x"]])
async def test_what_names_no_run_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    await make_upload_run(tmp_path, "tasks.jsonl")
    before = digest_of_tree(tmp_path)
    done = turnmill(tmp_path, "cleanup", *arguments, "--yes")
    assert done.returncode == 2 and done.stderr.startswith("Error: ") and "Traceback" not in done.stderr
    assert digest_of_tree(tmp_path) == before


async def test_other_runs_and_what_is_not_turnmills_stay(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("")
    one, other = [await make_upload_run(tmp_path, name) for name in ("one.jsonl", "other.jsonl")]
    clean(tmp_path, one.run_id)
    assert files_in(tmp_path / "bucket") == ["training-data/other.jsonl"]
    assert (tmp_path / "runs" / other.run_id / "queues").is_dir()
    clean(tmp_path, "--all")
    assert files_in(tmp_path) == ["turnmill.toml"]


async def test_an_upload_that_was_changed_since_is_not_the_runs_data(tmp_path: Path) -> None:
    run = await make_upload_run(tmp_path, "tasks.jsonl")
    open_bucket(tmp_path).put(DATA, "tasks.jsonl")
    clean(tmp_path, run.run_id)
    assert files_in(tmp_path / "bucket") == ["training-data/tasks.jsonl"]


async def test_the_claim_goes_with_the_run_and_the_cause_says_why_there_is_none(tmp_path: Path) -> None:
    run = await make_upload_run(tmp_path, "tasks.jsonl", status=RunStatus.SUCCEEDED)
    clean(tmp_path, run.run_id, "--retain-data")
    runs = open_root_records(tmp_path)
    try:
        (held,) = await runs.get([Claim(content_id="content-tasks.jsonl", run_id="").key])
        assert held is None
        assert await claim(runs, "content-tasks.jsonl", "another") is None, "the same content trains again"
        bucket = open_bucket(tmp_path)
        uploads: list[Any] = []
        while not uploads:
            uploads, _ = bucket.look()
            await asyncio.sleep(0.05)

        async def never(*_: Any) -> Run:
            raise AssertionError("the file that lies there is trained again")

        taken = await Intake(runs, new_run_id=lambda: "new", plan=never).take(uploads[0])
        assert (taken.run_id, taken.is_new) == (None, False)
    finally:
        runs.close()


@pytest.mark.parametrize("num_lines", [1, 3, 5, 6])
def test_a_cleanup_that_was_killed_is_completed_by_the_next_one(tmp_path: Path, num_lines: int) -> None:
    """Whatever was removed already: the record that names the run is the last thing of it."""
    run = asyncio.run(make_upload_run(tmp_path, "tasks.jsonl"))
    for name in ("queues", "records", "checkpoints", "data", "logs"):
        for number in range(200):
            # More than a moment's work.
            (tmp_path / "runs" / run.run_id / name / str(number)).mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "turnmill", "cleanup", run.run_id, "--yes", "--root", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += line.startswith("removing")
        if seen == num_lines:
            break
    process.kill()
    process.communicate()
    assert seen == num_lines
    left = [one["run_id"] for one in json.loads(turnmill(tmp_path, "runs", "--json").stdout)]
    assert left == [run.run_id] or not (tmp_path / "runs" / run.run_id).exists()
    if left:
        clean(tmp_path, run.run_id)
    assert files_in(tmp_path / "runs") == [] and files_in(tmp_path / "bucket") == []


async def test_folders_of_somebody_else_with_such_names_stay(tmp_path: Path) -> None:
    """A deployment in a project's own folder: `runs`, `logs`, `records` are names that others use too."""
    others = ["runs/tb-1/events", "logs/app.log", "records/2025.txt", "bucket/photos/x.jpg", "locks/x", "control.json"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    found = json.loads(turnmill(tmp_path, "cleanup", "--all", "--yes", "--json").stdout)
    assert found["removed"] == [] and files_in(tmp_path) == sorted(others)
    run = await make_upload_run(tmp_path, "tasks.jsonl")
    (tmp_path / "logs" / "control.log").write_text("ours")
    assert clean(tmp_path, "--all")["runs"] == [run.run_id]
    assert files_in(tmp_path) == sorted(others)


async def test_a_root_that_is_a_link_or_whose_runs_are_one_is_emptied(tmp_path: Path) -> None:
    real, big, link = tmp_path / "real", tmp_path / "big", tmp_path / "link"
    real.mkdir()
    big.mkdir()
    (big / "notes.txt").write_text("not ours")
    (real / "runs").symlink_to(big)
    link.symlink_to(real)
    run = await make_upload_run(link, "tasks.jsonl")
    assert (big / run.run_id / "queues").is_dir()
    clean(link, "--all")
    assert files_in(real) == [] and files_in(big) == ["notes.txt"]


async def test_held_out_tasks_are_data_of_the_upload_beside_them(tmp_path: Path) -> None:
    run = await make_upload_run(tmp_path, "tasks.jsonl")
    folder = open_bucket(tmp_path).folder
    for name in ("tasks.eval.jsonl", "tasks.config.toml", "other.eval.jsonl"):
        (folder / name).write_text("")
    clean(tmp_path, run.run_id, "--retain-data")
    assert len(files_in(folder)) == 4
    other = await make_upload_run(tmp_path, "tasks.jsonl")
    clean(tmp_path, other.run_id)
    assert files_in(folder) == ["other.eval.jsonl"]


async def test_a_deployment_is_not_removed_under_a_run_and_none_begins_while_it_is(tmp_path: Path) -> None:
    run = await make_upload_run(tmp_path, "tasks.jsonl")
    before = files_in(tmp_path / "runs")
    with using(tmp_path), using(tmp_path):
        done = turnmill(tmp_path, "cleanup", "--all", "--yes")
        assert done.returncode == 1 and "a run in the foreground still uses" in done.stderr, done.stderr
        assert files_in(tmp_path / "runs") == before
    with removing(tmp_path):
        done = turnmill(tmp_path, "demo")
        assert done.returncode == 1 and f"(pid {os.getpid()})" in done.stderr and "Traceback" not in done.stderr
    assert clean(tmp_path, "--all")["runs"] == [run.run_id]


def test_a_mirror_whose_control_process_was_killed_is_a_process_of_the_run(tmp_path: Path) -> None:
    """It goes on for some seconds then, to send what is left."""
    run = asyncio.run(make_upload_run(tmp_path, "tasks.jsonl"))
    (tmp_path / "turnmill.toml").write_text('[mlflow]\ntracking_uri = "http://127.0.0.1:1"\n')
    command = [sys.executable, "-m", "turnmill.wiring.mirror_process", str(tmp_path)]
    mirrors = [subprocess.Popen([*command, name], stdin=subprocess.PIPE) for name in (run.run_id, "another")]
    try:
        found = clean(tmp_path, run.run_id)
        assert [(one["name"], one["pid"]) for one in found["processes"]] == [("mlflow", mirrors[0].pid)]
        assert mirrors[0].wait(30) != 0 and mirrors[1].poll() is None
    finally:
        for mirror in mirrors:
            mirror.kill()
            mirror.communicate()
