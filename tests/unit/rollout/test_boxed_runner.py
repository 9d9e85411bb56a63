"""Rollouts in boxes: what is played, refused and given back. What harm environments do is in the hostile tests."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from tests.unit.rollout.boxes import boxed_worker, hostile_settings, make_package
from tests.unit.rollout.small_proxy import TOKEN, small_proxy
from tests.unit.rollout.test_runner import Chatting, Proxy, leased, proxy, refusing, saying, silence
from turnmill.config import Config
from turnmill.conversation.http import HttpClient
from turnmill.environment.registry import EnvironmentKind, FoundEnvironment, find
from turnmill.errors import InvalidInput, LeaseLost, RolloutGivenBack
from turnmill.records import EnvironmentChoice, InvalidReason, StopReason
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.box.order import Isolation
from turnmill.rollout.boxed import BoxedRunner
from turnmill.rollout.worker import run_worker

WORDLE = FoundEnvironment(
    choice=EnvironmentChoice(env_id="wordle"), kind=EnvironmentKind.BUILT_IN, module="turnmill.environment.wordle"
)


def settings_of(tmp_path: Path, found: FoundEnvironment = WORDLE) -> Settings:
    """Not closed, so that it can be made anywhere."""
    return Settings(
        found=found, isolation=Isolation.NONE, log=tmp_path / "environment.log", call_timeout_s=60.0, block_s=5.0
    )


@asynccontextmanager
async def boxed(
    settings: Settings, chatting: Chatting, *, timeout_s: float = 60.0
) -> AsyncIterator[tuple[Proxy, BoxedRunner]]:
    """A proxy that answers so, and a runner for it."""
    async with (
        proxy(chatting) as server,
        HttpClient() as session,
        BoxedRunner(settings, session, num_slots=4, max_attempts=3, training_timeout_s=timeout_s) as runner,
    ):
        yield server, runner


async def test_a_game_is_played_and_scored_as_in_the_worker_s_own_process(tmp_path: Path) -> None:
    async with boxed(settings_of(tmp_path), saying("crane")) as (server, runner):
        result = await runner.run(leased(server))

    assert (result.reward, result.stop_reason) == (1.0, StopReason.END_OF_CONVERSATION)
    assert result.metrics == {"turns": 1, "greens": 5, "invalid_guesses": 0}


async def test_a_full_context_is_valid_and_scored(tmp_path: Path) -> None:
    async with boxed(settings_of(tmp_path), refusing(400, "context_length_exceeded")) as (server, runner):
        result = await runner.run(leased(server))

    assert (result.reward, result.reason, result.stop_reason) == (0.0, None, StopReason.MAX_LENGTH)


@pytest.mark.parametrize(("status", "code"), [(504, "call_timeout"), (500, "server_error"), (401, "invalid_api_key")])
async def test_a_model_that_fails_is_infra_whatever_the_box_says(tmp_path: Path, status: int, code: str) -> None:
    async with boxed(settings_of(tmp_path), refusing(status, code)) as (server, runner):
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
    assert server.num_calls == 1


WANTS_TOKENS = """
from turnmill.environment.base import Environment, Outcome, opening_messages

class WantsTokens(Environment):
    async def play(self, task, chat):
        try:
            await chat.complete(opening_messages(task), return_token_ids=True)
        except Exception:
            pass
        return Outcome(reward=1.0)

def load_environment():
    return WantsTokens()
"""


async def test_missing_tokens_are_infra_as_in_the_worker_s_own_process(tmp_path: Path) -> None:
    make_package(tmp_path, "wants-tokens", source=WANTS_TOKENS)
    found = find(EnvironmentChoice(env_id="wants-tokens"), root=tmp_path)
    async with boxed(settings_of(tmp_path, found), saying("crane")) as (server, runner):
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
    assert "has not the tokens" in (result.detail or "")


GRADED = """
from turnmill.environment.base import Environment, Outcome, opening_messages

class Graded(Environment):
    def __init__(self, worth):
        self.worth = worth

    async def play(self, task, chat):
        reply = await chat.complete(opening_messages(task))
        outcome = Outcome(reward=1.0, turn_rewards={reply.call_id: 0.25})
        # What no honest player says.
        if self.worth is not None:
            object.__setattr__(outcome, "turn_rewards", {reply.call_id: float(self.worth)})
        return outcome

def load_environment(worth=None):
    return Graded(worth)
"""


async def test_what_turns_are_worth_comes_out_of_a_box_and_is_checked(tmp_path: Path) -> None:
    make_package(tmp_path, "graded", source=GRADED)
    for worth, expected in ((None, {"t_0_5": 0.25}), ("nan", None)):
        found = find(EnvironmentChoice(env_id="graded", env_args={"worth": worth}), root=tmp_path)
        async with boxed(settings_of(tmp_path, found), saying("crane", call_id="t_0_5")) as (server, runner):
            result = await runner.run(leased(server))
        if expected is not None:
            assert (result.reward, result.turn_rewards) == (1.0, expected)
        else:
            assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)
            assert "turn reward of 't_0_5' must be finite" in (result.detail or "")


async def test_a_lost_lease_is_told_to_the_worker(tmp_path: Path) -> None:
    async with boxed(settings_of(tmp_path), refusing(409, "attempt_over")) as (server, runner):
        with pytest.raises(LeaseLost):
            await runner.run(leased(server))


async def test_a_deadline_while_a_call_is_pending_is_infra(tmp_path: Path) -> None:
    async with boxed(settings_of(tmp_path), silence, timeout_s=1.0) as (server, runner):
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)


async def test_a_deadline_that_is_over_is_infra(tmp_path: Path) -> None:
    async with boxed(settings_of(tmp_path), saying("crane")) as (server, runner):
        result = await runner.run(leased(server, in_s=-1.0))

    assert result.reason is InvalidReason.INFRA
    assert server.num_calls == 0


async def test_a_cancelled_rollout_ends_in_its_box(tmp_path: Path) -> None:
    async with boxed(settings_of(tmp_path), silence) as (server, runner):
        playing = asyncio.create_task(runner.run(leased(server)))
        assert server.was_called is not None
        await server.was_called.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        server.chatting = saying("crane")
        assert (await runner.run(leased(server))).reward == 1.0


CRASHING = """
import os
from turnmill.environment.base import Environment, Outcome, opening_messages

class Crashing(Environment):
    async def play(self, task, chat):
        await chat.complete(opening_messages(task))
        os._exit(7)

def load_environment(*, answer=0):
    print("loaded with", answer)
    return Crashing()
"""


async def test_of_several_in_a_box_that_ends_none_is_blamed_and_all_are_given_back(tmp_path: Path) -> None:
    make_package(tmp_path, "crashing", source=CRASHING)
    found = find(EnvironmentChoice(env_id="crashing", env_args={"answer": 42}), root=tmp_path)
    answer = saying("crane")
    both_asked = asyncio.Barrier(2)

    async def together(request: web.Request) -> web.StreamResponse:
        await both_asked.wait()
        return await answer(request)

    async with boxed(settings_of(tmp_path, found), together) as (server, runner):
        both = [asyncio.create_task(runner.run(leased(server))) for _ in range(2)]
        ends = await asyncio.gather(*both, return_exceptions=True)
        server.chatting = answer
        alone = await runner.run(leased(server))

    assert [type(end) for end in ends] == [RolloutGivenBack] * 2
    assert (alone.reason, "exit code 7" in str(alone.detail)) == (InvalidReason.ENV_ERROR, True)
    assert "loaded with 42" in (tmp_path / "environment.log").read_text()


async def test_a_task_that_was_found_out_is_played_alone_from_then_on(tmp_path: Path) -> None:
    source = CRASHING.replace("os._exit(7)", "return Outcome(reward=1.0) if task.metadata.get('task') else os._exit(7)")
    make_package(tmp_path, "crashing", source=source)
    found = find(EnvironmentChoice(env_id="crashing"), root=tmp_path)
    async with boxed(settings_of(tmp_path, found), saying("crane")) as (server, runner):
        assert (await runner.run(leased(server))).reason is InvalidReason.ENV_ERROR
        good = replace(leased(server), request=replace(leased(server).request, data={"prompt": "x", "task": "good"}))
        ends = await asyncio.gather(*(runner.run(each) for each in [leased(server), good, leased(server), good]))

    assert [end.reward for end in ends] == [None, 1.0, None, 1.0]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", "KeyError: 'load'"),
        ("exit", "SystemExit: 3"),
        ("print", "what went wrong"),
        ("hang", "not loaded within"),
    ],
)
async def test_an_environment_that_does_not_load_is_an_error_of_the_worker(
    tmp_path: Path, fault: str, text: str
) -> None:
    settings = hostile_settings(
        tmp_path / "root", Isolation.NONE, env_args={"fault": fault}, load_s=2.0 if fault == "hang" else 60.0
    )
    async with small_proxy() as server:
        with pytest.raises(InvalidInput, match="can't be loaded in its box") as caught:
            await run_worker(
                proxy_url=server.url,
                worker_token=TOKEN,
                name="w",
                config=Config(),
                environment=settings,
                stop=asyncio.Event(),
            )
    assert text in str(caught.value)
    assert server.leases == []


async def test_output_bears_the_rollout_that_wrote_it(tmp_path: Path) -> None:
    source = CRASHING.replace("os._exit(7)", "print('one', task.id); print('two'); return Outcome(reward=1.0)")
    make_package(tmp_path, "talking", source=source)
    found = find(EnvironmentChoice(env_id="talking"), root=tmp_path)
    async with boxed_worker(settings_of(tmp_path, found)) as run:
        run.proxy.add("t_0")
        run.proxy.add("t_1")
        reports = await run.reports(2)

    assert {report["aggregate_reward_score"] for report in reports.values()} == {1.0}
    lines = (tmp_path / "environment.log").read_text().splitlines()
    # As the other logs of a run, which `turnmill logs` reads as one.
    heads, said = zip(*(line.split(" environment INFO output: ") for line in lines), strict=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", head) for head in heads)
    assert sorted(said) == ["[-] loaded with 0", "[t_0] one t_0", "[t_0] two", "[t_1] one t_1", "[t_1] two"]


async def test_what_a_box_says_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    settings = hostile_settings(tmp_path / "root", Isolation.NONE, env_args={"fault": "say_what_terminals_do"})
    with pytest.raises(InvalidInput) as refused:
        async with boxed(settings, saying("crane")):
            raise AssertionError("it must not load")
    assert "owned" in str(refused.value) and "\x1b" not in str(refused.value)
