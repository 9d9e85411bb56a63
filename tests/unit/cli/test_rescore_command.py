"""`turnmill rescore`: what is asked for, shown, written and refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.wiring.rescoring_house import Played, played_run
from turnmill.cli.commands import turnmill
from turnmill.cli.errors import run_cli
from turnmill.config import load_config, to_dict
from turnmill.records import Run, RunStatus
from turnmill.wiring.rescoring.rescore import config_of


@dataclass
class Command:
    """The command beside the run's proxy, which goes on."""

    played: Played
    capsys: pytest.CaptureFixture[str]

    async def run(self, *arguments: str, run_id: str = "run-1") -> tuple[int, str, str]:
        """Exit code, what it printed, and what it said on standard error."""
        argv = ["rescore", run_id, *arguments, "--root", str(self.played.root)]
        code = await asyncio.to_thread(run_cli, turnmill, argv)
        out, err = self.capsys.readouterr()
        return code, out, err


@pytest.fixture
async def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Command]:
    monkeypatch.setenv("TURNMILL_UNSAFE_ENV", "1")
    async with played_run(tmp_path / "root") as played:
        yield Command(played, capsys)


async def test_what_is_different_is_shown_and_written(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--env-args", '{"letter": "o"}', "--output", str(file), "--success-threshold", "0.8"]
    code, out, err = await command.run(*arguments)
    assert code == 0, err
    for part in (
        'rescored 4 of 4 conversations of run run-1 with guessing {"letter": "o"}',
        "reward: 0.3750 → 0.7500, difference +0.3750 (95 % interval ",
        "4 of 4 changed; correlation ",
        "passes (reward at least 0.8): 25.0% → 75.0%",
        "groups with signal: 2 → 2 of 2 (0 gained it, 0 lost it)",
        "1 of 2 tasks changed",
        "changed most",
        "read one: turnmill conversations run-1 ",
    ):
        assert part in out, out
    # Without a terminal it says how far it is, on standard error.
    assert "4 of 4: 4 rescored" in err
    written = json.loads(file.read_text())
    assert (written["run_id"], written["environment"]["env_args"]) == ("run-1", {"letter": "o"})
    assert [(each["sample_id"], each["old"], each["new"]) for each in written["samples"]] == [
        ("t1_0", 1.0, 0.25),
        ("t1_1", 0.125, 0.875),
        ("t2_0", 0.125, 0.875),
        ("t2_1", 0.25, 1.0),
    ]
    code, out, _ = await command.run(*arguments, "--json")
    assert code == 0 and json.loads(out) == written


async def test_what_diverged_and_what_is_invalid_says_why(command: Command) -> None:
    code, out, _ = await command.run("--env-args", '{"told": "Other."}', "--sample", "t1_0")
    assert code == 1 and "rescored 0 of 1 conversations" in out and "1 diverged" in out
    assert "diverged t1_0: turn 2: messages[2] is user 'Other.', stored is user 'Again.'" in out
    assert "there is nothing to compare" in out
    code, out, _ = await command.run("--env-args", '{"is_broken": true}', "--limit", "1")
    assert code == 1 and "1 invalid (reward_error)" in out
    assert "invalid t2_1: reward_error: RewardFunctionFailed: reward function raising raised KeyError" in out


BAD: list[tuple[list[str], str]] = [
    (["--steps", "3:1"], "--steps 3:1: the first step is behind the last one"),
    (["--steps", "x"], "--steps x: must be A:B, A:, :B or one step"),
    (["--steps", "1:2"], "has no conversation that was brought to an end among 0 rollouts"),
    (["--sample", "nobody"], "--sample nobody: run run-1 has no such rollout for train"),
    (["--purpose", "eval"], "has no conversation that was brought to an end"),
    (["--env", "nowhere"], "there is no environment 'nowhere'"),
    (["--env-args", '{"letters": "o"}'], "has no argument 'letters'"),
    (["--env-args", "x"], "env_args"),
    (["--judges", "strict"], "strict"),
    (["--output", "/nowhere/result.json"], "there is no folder /nowhere"),
    (["--lr", "1"], "No such option"),
]


async def test_bad_input_is_exit_code_2(command: Command) -> None:
    for arguments, text in BAD:
        code, out, err = await command.run(*arguments)
        assert (code, out) == (2, "") and text in err and "Traceback" not in err, (arguments, err)


async def test_an_unknown_run_is_exit_code_2(command: Command) -> None:
    code, _, err = await command.run(run_id="run-2")
    assert code == 2 and "there is no run 'run-2'" in err and "did you mean run-1" in err


def run_with(**flags: Any) -> Run:
    return Run(
        run_id="r1",
        cause="test",
        status=RunStatus.SUCCEEDED,
        created_at=0.0,
        config=to_dict(load_config(flags=flags).config),
        sources={},
        data_path="tasks.jsonl",
    )


def test_what_is_not_said_is_as_it_was_for_the_run() -> None:
    run = run_with(env="sql-agent", env_args={"depth": 2}, temperature=0.5, lr=0.1)
    # Of variables, too, only what concerns the environment.
    same = config_of(run, load_config(environ={"TURNMILL_LR": "0.01"}))
    assert to_dict(same) == run.config
    deeper = config_of(run, load_config(flags={"env_args": {"depth": 3}}))
    assert (deeper.environment.env_id, deeper.environment.env_args, deeper.temperature) == (
        "sql-agent",
        {"depth": 3},
        0.5,
    )
    other = config_of(run, load_config(flags={"use_custom_env": True, "custom_env_id": "mine"}))
    assert (other.environment.env_id, other.environment.env_args) == ("mine", {})
