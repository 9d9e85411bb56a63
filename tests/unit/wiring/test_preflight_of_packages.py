"""The preflight role itself, in its process: a package of the deployment is found, loaded and played."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.unit.environment.judge_server import SECRET, judge_server
from turnmill.backends.embedded import open_run
from turnmill.config.deployment import load_judges
from turnmill.environment.judges import settings_variable
from turnmill.pipeline.preparing import report_key, request_key
from turnmill.records import (
    CheckState,
    EnvironmentChoice,
    EnvironmentOrigin,
    PreflightReport,
    PreflightRequest,
    decode,
    encode,
)

ECHO = """
from turnmill.environment import Environment, Outcome, judge, opening_messages, reward

class Judged(Environment):
    def __init__(self, judge):
        self._judge = judge
        self.rewards = (reward(self.graded),)

    async def play(self, task, chat):
        await chat.complete(opening_messages(task))
        return Outcome()

    async def graded(self, rollout):
        said = rollout.turns[-1].reply.content if rollout.turns else "nothing"
        return float(await self._judge.complete([{"role": "user", "content": said}]) == rollout.task.metadata["answer"])

def load_environment():
    return Judged(judge("strict"))
"""


async def report_of(root: Path, code: str, **environ: str) -> PreflightReport:
    """Of the package `echo`, in the deployment at `root`."""
    folder = root / "custom-environments" / "echo"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "echo"\nversion = "1"\n')
    (folder / "echo.py").write_text(code)
    data = root / "tasks.jsonl"
    rows: list[Any] = [{"id": f"t{n}", "metadata": {"prompt": "Say it.", "answer": f"WORD {n}"}} for n in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = PreflightRequest(
        environment=EnvironmentChoice(env_id="echo", origin=EnvironmentOrigin.CUSTOM),
        data_path=str(data),
        seed=0,
        max_length=1000,
        play_s=20.0,
        total_s=60.0,
    )
    ports = open_run(root, "r1", num_replicas=0)
    try:
        await ports.blobs.put(request_key("preflight-1"), encode(request))
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, *"-m turnmill role preflight --run r1 --name preflight-1 --root".split(), str(root)],
            # Also where nothing can close a box.
            env={**os.environ, "TURNMILL_UNSAFE_ENV": "1", **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert ended.returncode == 0, ended.stderr
        return decode(await ports.blobs.get(report_key("preflight-1")), PreflightReport)
    finally:
        ports.close()


async def test_a_package_and_its_judge_are_asked_before_a_run(tmp_path: Path) -> None:
    with judge_server() as server:
        (tmp_path / "turnmill.toml").write_text(
            f'[[judges]]\nname = "strict"\nbase_url = "{server.base_url}"\nmodel = "m"\napi_key_env = "JUDGE_KEY"\n'
        )
        environ = settings_variable(load_judges(tmp_path, ("strict",)))
        report = await report_of(tmp_path, ECHO, JUDGE_KEY=SECRET, **environ)
    assert {check.state for check in report.checks} == {CheckState.OK}
    assert report.mean_rewards == {"gold": 1.0, "garbage": 0.0} and len(server.received) >= 6


async def test_a_package_without_its_judge_and_one_that_fails_are_told(tmp_path: Path) -> None:
    (loads,) = (await report_of(tmp_path / "a", ECHO)).checks
    assert (loads.name, loads.state) == ("loads", CheckState.FAILED)
    assert "the environment asks 'strict', and the run has none" in loads.detail
    (loads,) = (await report_of(tmp_path / "b", "import no_such_module_anywhere\n")).checks
    assert "custom_env_id: echo" in loads.detail and "echo.py:1 in <module>" in loads.detail
