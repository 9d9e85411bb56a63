"""Judges: what they are asked, with which secret, and what becomes of a rollout whose judge is away."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.environment.judge_server import SECRET, JudgeServer, judge_server
from turnmill.config.deployment import load_deployment, load_judges
from turnmill.config.judges import JudgeSettings
from turnmill.environment import Chat, Environment, Outcome
from turnmill.environment.base import ScriptedChat, opening_messages
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.judges import Judge, check_secrets, judge, known_judges, passed_on, settings_variable
from turnmill.environment.outcomes import Rollout
from turnmill.environment.rewards import reward
from turnmill.environment.watching import JudgeUnavailable
from turnmill.errors import ConfigError, InvalidInput
from turnmill.records import InvalidReason, RolloutResult, Task

TASK = Task(id="t_0", metadata={"prompt": "hello", "answer": "GOOD"})


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as state:
        yield state


def settings_of(server: JudgeServer, **changes: Any) -> JudgeSettings:
    values: dict[str, Any] = {
        "name": "strict",
        "base_url": server.base_url,
        "model": "grader",
        "api_key_env": "JUDGE_KEY",
        "timeout_s": 10.0,
        "max_retries": 2,
    }
    return JudgeSettings(**{**values, **changes})


def judge_of(server: JudgeServer, **changes: Any) -> Judge:
    return Judge(settings_of(server, **changes), secret=SECRET, first_pause_s=0.01)


class Judged(Environment):
    """Worth 1.0 where the judge says the answer."""

    def __init__(self, judge: Judge, *, swallow: bool = False) -> None:
        self._judge, self._swallow = judge, swallow
        self.rewards = (reward(self.graded),)

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await chat.complete(opening_messages(task))
        return Outcome()

    async def graded(self, rollout: Rollout) -> float:
        try:
            said = await self._judge.complete([{"role": "user", "content": rollout.turns[-1].reply.content}])
        except JudgeUnavailable:
            if self._swallow:
                return 0.0
            raise
        return float(said == rollout.task.metadata["answer"])


async def result_of(judge: Judge, said: str = "good", *, swallow: bool = False) -> RolloutResult:
    return await play_scored(Judged(judge, swallow=swallow), TASK, WatchedChat(ScriptedChat([said])))


async def test_a_judge_is_asked_with_its_model_its_secret_and_its_limits(server: JudgeServer) -> None:
    assert (await result_of(judge_of(server))).reward == 1.0
    assert (await result_of(judge_of(server), "bad")).reward == 0.0
    assert server.received[0] == {
        "model": "grader",
        "max_tokens": 1024,
        "messages": [{"role": "user", "content": "good"}],
    }
    await judge_of(server).complete([{"role": "user", "content": "x"}], temperature=0, max_tokens=5)
    assert (server.received[-1]["temperature"], server.received[-1]["max_tokens"]) == (0, 5)


async def test_a_judge_that_is_busy_is_asked_again_when_it_says_so(server: JudgeServer) -> None:
    server.failures = [(503, {}), (429, {"Retry-After": "0"})]
    assert (await result_of(judge_of(server))).reward == 1.0
    assert len(server.received) == 3


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize(
    ("failures", "num_asked", "text"),
    [
        ([(500, {})] * 3, 3, "judge strict: HTTP 500: overloaded"),
        ([(302, {"Location": "http://127.0.0.1:1/elsewhere"})], 1, "judge strict: HTTP 302"),
        ([(400, {})], 1, "judge strict: HTTP 400"),
    ],
)
async def test_a_judge_that_fails_makes_the_rollout_invalid_and_never_worth_zero(
    server: JudgeServer, failures: list[tuple[int, dict[str, str]]], num_asked: int, text: str, swallow: bool
) -> None:
    server.failures = list(failures)
    result = await result_of(judge_of(server), swallow=swallow)
    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
    assert text in str(result.detail) and len(server.received) == num_asked


@pytest.mark.parametrize("body", ["no json", "{}", '{"choices": []}', '{"choices": [{"message": {"content": null}}]}'])
async def test_an_answer_without_a_text_is_none(server: JudgeServer, body: str) -> None:
    server.body = body
    result = await result_of(judge_of(server))
    assert result.reason is InvalidReason.INFRA and "judge strict" in str(result.detail)


async def test_a_judge_that_is_not_there_or_does_not_answer_is_infra(server: JudgeServer) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        away = judge_of(server, base_url=f"http://127.0.0.1:{port}/v1", max_retries=1)
        assert "can't be reached" in str((await result_of(away)).detail)
    server.answers.clear()
    silent = await result_of(judge_of(server, timeout_s=0.1, max_retries=0))
    assert silent.reason is InvalidReason.INFRA and "no answer within 0.1 s" in str(silent.detail)


async def test_a_secret_that_the_judge_says_back_is_not_shown(server: JudgeServer) -> None:
    wrong = Judge(settings_of(server), secret="sk-wrong-but-secret")
    result = await result_of(wrong)
    assert "HTTP 401" in str(result.detail) and "sk-wrong-but-secret" not in str(result.detail)


async def test_a_judge_counts_as_a_pending_call_and_bounds_its_requests(server: JudgeServer) -> None:
    server.answers.clear()
    asked = judge_of(server, max_concurrent=2)
    chats = [WatchedChat(ScriptedChat(["good"])) for _ in range(5)]
    playing = [asyncio.create_task(play_scored(Judged(asked), TASK, chat)) for chat in chats]
    for _ in range(2):
        assert await asyncio.to_thread(server.arrived.acquire, timeout=30)
    # A deadline that is met now is the judge's fault, not the environment's.
    assert [chat.num_pending for chat in chats] == [1] * 5
    server.answers.set()
    assert [result.reward for result in await asyncio.gather(*playing)] == [1.0] * 5
    assert server.most_at_once == 2 and [chat.num_pending for chat in chats] == [0] * 5


# ---------------------------------------------------------------- settings, secrets, egress


GOOD = """
[[judges]]
name = "strict"
base_url = "https://judge.example/v1"
model = "grader"
api_key_env = "JUDGE_KEY"
max_retries = 5

[[judges]]
name = "local"
base_url = "http://127.0.0.1:8000/v1"
model = "small"
"""


def test_judges_are_read_from_the_deployment_s_file(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text(GOOD)
    strict, local = load_deployment(tmp_path, {}).judges
    assert (strict.name, strict.api_key_env, strict.max_retries) == ("strict", "JUDGE_KEY", 5)
    assert (strict.endpoint, local.endpoint) == (("judge.example", 443), ("127.0.0.1", 8000))
    assert load_judges(tmp_path, ("local",)) == (local,) and load_judges(tmp_path / "none", ()) == ()
    with pytest.raises(ConfigError, match=r"judges: .*turnmill.toml has no judge 'strickt'; did you mean strict\?"):
        load_judges(tmp_path, ("strickt",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('name = "a b"', r"judges\[1\].name: must be 1 to 64 letters"),
        ('api_key = "sk-secret"', r"judges\[1\].api_key: no such key; did you mean api_key_env\?"),
        ('api_key_env = "sk-secret-itself"', r"judges\[1\].api_key_env: must be the name of an environment variable"),
        ('api_key_env = "TURNMILL_LR"', "names that begin with TURNMILL_"),
        ('base_url = "http://judge.example/v1"', "must be https: a secret is sent there"),
        ('base_url = "ftp://judge.example"', "must be an https URL"),
        ('base_url = "https://user:pw@judge.example"', "must hold no user"),
        ('model = ""', r"judges\[1\].model: must be the name of a model"),
        ("timeout_s = 0", "timeout_s: = 0 must be a number from 1 to 3600"),
        ("max_retries = true", "max_retries: = True must be a number"),
        ("max_concurrent = 1.5", "max_concurrent: = 1.5 must be a number"),
    ],
)
def test_what_is_wrong_with_a_judge_is_named_and_no_secret_is_shown(tmp_path: Path, line: str, message: str) -> None:
    key = line.split(" ")[0]
    lines = [each for each in GOOD.split("\n\n")[0].splitlines() if not each.startswith(f"{key} ")]
    (tmp_path / "turnmill.toml").write_text("\n".join([*lines, line]))
    with pytest.raises(ConfigError, match=message) as caught:
        load_deployment(tmp_path, {})
    assert "sk-secret" not in str(caught.value)


def test_judges_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text(GOOD.replace('"local"', '"strict"'))
    with pytest.raises(ConfigError, match=r"judges\[2\].name: 'strict' is taken"):
        load_deployment(tmp_path, {})


def test_a_box_is_given_the_secrets_of_the_run_s_judges_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text(GOOD)
    environ = {
        "JUDGE_KEY": SECRET,
        "AWS_SECRET_ACCESS_KEY": "another",
        "TURNMILL_WORKER_TOKEN": "another",
        **settings_variable(load_judges(tmp_path, ("strict",))),
    }
    assert SECRET not in environ["TURNMILL_JUDGE_SETTINGS"]
    boxed = passed_on(environ)
    assert set(boxed) == {"JUDGE_KEY", "TURNMILL_JUDGE_SETTINGS"} and known_judges(boxed)[0].name == "strict"
    assert passed_on({"JUDGE_KEY": SECRET}) == {} == settings_variable([])


def test_a_judge_that_the_run_has_not_or_whose_secret_is_missing_is_told(server: JudgeServer) -> None:
    known = settings_variable([settings_of(server)])
    with pytest.raises(InvalidInput, match=r"asks 'mild', and the run has strict: describe it as \[\[judges\]\]"):
        judge("mild", {**known, "JUDGE_KEY": SECRET})
    with pytest.raises(InvalidInput, match="the run has none"):
        judge("strict", {})
    with pytest.raises(InvalidInput, match="variable JUDGE_KEY with its secret is not set"):
        judge("strict", known)
    with pytest.raises(InvalidInput, match="JUDGE_KEY"):
        check_secrets([settings_of(server)], {"JUDGE_KEY": "two\nlines"})
    check_secrets([settings_of(server, api_key_env="")], {})


async def test_a_process_with_nothing_but_what_is_passed_on_can_ask(server: JudgeServer) -> None:
    code = (
        "import asyncio, os\n"
        "from turnmill.environment.judges import judge\n"
        "said = asyncio.run(judge('strict').complete([{'role': 'user', 'content': 'hello'}]))\n"
        "print(said, sorted(name for name in os.environ if 'SECRET' in name))\n"
    )
    environ = passed_on(
        {"JUDGE_KEY": SECRET, "OTHER_SECRET": "x", **settings_variable([settings_of(server)]), "PATH": ""}
    )
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout.split("\n")[0] == "HELLO []"
