"""Failpoints: nothing at all in an ordinary process, SIGKILL where a test armed one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from turnmill import failpoints

PROGRAM = """
from turnmill import failpoints
failpoints.hit("other")
print("other passed", flush=True)
failpoints.hit("point")
print("point passed", flush=True)
"""


def start(folder: Path | None) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != failpoints.VARIABLE}
    if folder is not None:
        environment[failpoints.VARIABLE] = str(folder)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)


def test_an_armed_point_kills_one_process_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "point").touch()
    killed = start(tmp_path)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "other passed\n")
    assert list(tmp_path.iterdir()) == []
    again = start(tmp_path)
    assert (again.returncode, again.stdout) == (0, "other passed\npoint passed\n")


def test_without_the_variable_no_file_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "point").touch()
    assert start(None).returncode == 0
    assert start(tmp_path / "missing").returncode == 0
    assert failpoints.hit is failpoints._ignore


WAITER = """
import asyncio
from turnmill import failpoints
print("begun", flush=True)
asyncio.run(failpoints.wait("point"))
print("passed", flush=True)
"""


def test_who_waits_at_an_armed_point_goes_on_when_it_is_disarmed(tmp_path: Path) -> None:
    (tmp_path / "point").touch()
    environment = {**os.environ, failpoints.VARIABLE: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", WAITER], env=environment, stdout=subprocess.PIPE, text=True) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "begun\n"
        assert waiter.poll() is None
        (tmp_path / "point").unlink()
        assert waiter.stdout.read() == "passed\n"


async def test_without_the_variable_nobody_waits() -> None:
    await failpoints.wait("point")
