"""One attempt, played against a real HTTP server that answers chat completions."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from turnmill.conversation.client import LeasedRollout
from turnmill.conversation.http import HttpClient
from turnmill.environment.base import Chat, Environment, Message, Outcome, Score
from turnmill.environment.wordle import Wordle
from turnmill.errors import LeaseLost
from turnmill.records import InvalidReason, RolloutRequest, StopReason, Task
from turnmill.rollout.runner import InProcessRunner, Runner

Chatting = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Proxy:
    """Answers calls by `chatting`; counts them."""

    chatting: Chatting
    url: str = ""
    num_calls: int = 0
    was_called: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_calls += 1
        if self.was_called is not None:
            self.was_called.set()
        return await self.chatting(request)


def saying(text: str, *, call_id: str | None = None) -> Chatting:
    async def answer(request: web.Request) -> web.StreamResponse:
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"id": call_id, "choices": [choice], "usage": {}})

    return answer


def refusing(status: int, code: str) -> Chatting:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": code}}, status=status)

    return answer


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def proxy(chatting: Chatting) -> AsyncIterator[Proxy]:
    server = Proxy(chatting, was_called=asyncio.Event())
    app = web.Application()
    app.router.add_post("/a/{secret}/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def leased(server: Proxy, *, in_s: float = 60.0) -> LeasedRollout:
    request = RolloutRequest(
        sample_id="t_0",
        timestamp="2026-01-01T00:00:00Z",
        max_length=100,
        rewards={"range": [0.0, 1.0]},
        data={"prompt": "Guess.", "answer": "crane"},
    )
    return LeasedRollout(
        request=request,
        attempt=1,
        base_url=f"{server.url}/a/chatsecret0123456789/v1",
        report_secret="reportsecret0123456789",
        deadline=time.time() + in_s,
        lease_token="leasetoken0123456789",
        lease_s=15,
    )


@asynccontextmanager
async def runner_of(environment: Environment, *, training_timeout_s: float = 60.0) -> AsyncIterator[Runner]:
    async with HttpClient() as session:
        yield InProcessRunner(environment, session, call_timeout_s=60.0, training_timeout_s=training_timeout_s)


class Custom(Environment):
    """Plays by a function; remembers whether its code was ended."""

    def __init__(self, play: Callable[[Chat], Awaitable[Outcome]]) -> None:
        self._play = play
        self.num_ended = 0

    async def play(self, task: Task, chat: Chat) -> Outcome:
        try:
            return await self._play(chat)
        finally:
            self.num_ended += 1

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        return Score(reward=0.5, metrics={"messages": len(messages)})


async def ask(chat: Chat) -> Outcome:
    await chat.complete([{"role": "user", "content": "hello"}])
    return Outcome()


async def think_forever(chat: Chat) -> Outcome:
    await asyncio.Event().wait()
    return Outcome()


async def test_a_game_is_played_over_http_and_scored() -> None:
    async with proxy(saying("crane")) as server, runner_of(Wordle()) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.stop_reason) == (1.0, StopReason.END_OF_CONVERSATION)
    assert result.metrics == {"turns": 1, "greens": 5, "invalid_guesses": 0}


async def test_the_task_carries_the_metadata_of_the_row() -> None:
    seen: list[Task] = []

    class Looking(Custom):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            seen.append(task)
            return Outcome()

    async with proxy(saying("crane")) as server, runner_of(Looking(ask)) as runner:
        await runner.run(leased(server))

    assert seen == [Task(id="t_0", metadata={"prompt": "Guess.", "answer": "crane"})]


async def test_an_exception_of_the_environment_is_an_env_error() -> None:
    async def fail(chat: Chat) -> Outcome:
        raise KeyError("word")

    async with proxy(saying("crane")) as server, runner_of(Custom(fail)) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR)
    assert "KeyError: 'word'" in str(result.detail)
    assert "in fail" in str(result.detail)


async def test_a_full_context_is_valid_and_scored() -> None:
    chatting = refusing(400, "context_length_exceeded")
    async with proxy(chatting) as server, runner_of(Custom(ask)) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.reason, result.stop_reason) == (0.5, None, StopReason.MAX_LENGTH)


@pytest.mark.parametrize(("status", "code"), [(504, "call_timeout"), (500, "server_error"), (401, "invalid_api_key")])
async def test_a_model_that_fails_is_infra(status: int, code: str) -> None:
    async with proxy(refusing(status, code)) as server, runner_of(Custom(ask)) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)


async def test_a_refused_request_is_an_env_error() -> None:
    async with proxy(refusing(400, "invalid_request")) as server, runner_of(Custom(ask)) as runner:
        assert (await runner.run(leased(server))).reason is InvalidReason.ENV_ERROR


async def test_an_attempt_that_is_not_current_is_a_lost_lease() -> None:
    async with proxy(refusing(409, "conflict")) as server, runner_of(Custom(ask)) as runner:
        with pytest.raises(LeaseLost):
            await runner.run(leased(server))


async def test_a_reward_outside_the_range_of_the_request_is_a_reward_error() -> None:
    async def play(chat: Chat) -> Outcome:
        return Outcome(reward=2.0)

    async with proxy(saying("crane")) as server, runner_of(Custom(play)) as runner:
        assert (await runner.run(leased(server))).reason is InvalidReason.REWARD_ERROR


async def test_a_deadline_with_a_pending_call_is_infra() -> None:
    environment = Custom(ask)
    async with proxy(silence) as server, runner_of(environment, training_timeout_s=0.2) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
    assert environment.num_ended == 1


async def test_a_deadline_in_the_environments_own_code_is_an_env_error() -> None:
    environment = Custom(think_forever)
    async with proxy(saying("hi")) as server, runner_of(environment, training_timeout_s=0.3) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR)
    assert "0 calls pending" in str(result.detail)
    assert environment.num_ended == 1


async def test_the_deadline_of_the_lease_counts_when_it_is_earlier() -> None:
    async with proxy(saying("hi")) as server, runner_of(Custom(think_forever)) as runner:
        assert (await runner.run(leased(server, in_s=0.3))).reason is InvalidReason.ENV_ERROR


async def test_a_lease_that_is_past_its_deadline_is_infra_and_not_played() -> None:
    async with proxy(saying("hi")) as server, runner_of(Custom(ask)) as runner:
        result = await runner.run(leased(server, in_s=-1.0))

        assert result.reason is InvalidReason.INFRA
        assert server.num_calls == 0


async def test_an_environment_that_swallows_its_end_gets_no_reward_for_it() -> None:
    async def stubborn(chat: Chat) -> Outcome:
        try:
            return await think_forever(chat)
        except BaseException:
            return Outcome(reward=1.0)

    async with proxy(saying("hi")) as server, runner_of(Custom(stubborn), training_timeout_s=0.3) as runner:
        result = await runner.run(leased(server))

    assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR)


async def test_an_environment_that_cancels_itself_is_an_env_error() -> None:
    async def cancel(chat: Chat) -> Outcome:
        raise asyncio.CancelledError

    async with proxy(saying("hi")) as server, runner_of(Custom(cancel)) as runner:
        assert (await runner.run(leased(server))).reason is InvalidReason.ENV_ERROR


async def test_a_cancelled_rollout_ends_the_environments_code_first() -> None:
    environment = Custom(ask)
    async with proxy(silence) as server, runner_of(environment) as runner:
        running = asyncio.create_task(runner.run(leased(server)))
        assert server.was_called is not None
        await server.was_called.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    assert environment.num_ended == 1


async def test_a_model_that_can_not_be_reached_is_infra() -> None:
    with socket.socket() as deaf:
        # Bound, but not listening: connections are refused.
        deaf.bind(("127.0.0.1", 0))
        server = Proxy(silence, url=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        async with runner_of(Custom(ask), training_timeout_s=0.3) as runner:
            result = await runner.run(leased(server))

    assert result.reason is InvalidReason.INFRA
    assert "chatsecret" not in str(result.detail)
