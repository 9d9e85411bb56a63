"""Agents with OpenAI's client, unmodified, in an environment: each call is one of the rollout."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.unit.rollout.boxes import make_package
from tests.unit.rollout.test_boxed_runner import boxed, settings_of
from tests.unit.rollout.test_runner import leased, refusing
from turnmill import openai_endpoint
from turnmill.environment import Chat, Environment, Outcome, Rollout, ScriptedChat, ScriptedTurn, call_of, reward
from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.registry import find
from turnmill.errors import BackendUnavailable, GenerationFailed, InvalidInput
from turnmill.records import EnvironmentChoice, InvalidReason, RolloutResult, StopReason, Task
from turnmill.rollout.endpoint import Endpoint

TASK = Task(id="t", metadata={"prompt": "Where is it warm?", "answer": "Rome"})
QUESTION: Any = [{"role": "user", "content": "Where is it warm?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "degrees", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
Agent = Callable[[Endpoint], Awaitable[None]]


def named(rollout: Rollout) -> float:
    return float(any("Rome" in turn.reply.content for turn in rollout.turns))


class Playing(Environment):
    """Hands the rollout's endpoint to an agent."""

    rewards = (reward(named),)

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def play(self, task: Task, chat: Chat) -> Outcome:
        async with openai_endpoint(chat) as endpoint:
            await self.agent(endpoint)
        return Outcome(stop_reason=StopReason.END_OF_CONVERSATION)


async def played(agent: Agent, *turns: ScriptedTurn | Exception) -> tuple[RolloutResult, WatchedChat]:
    chat = WatchedChat(ScriptedChat(turns))
    return await play_scored(Playing(agent), TASK, chat), chat


def client_of(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


async def said(endpoint: Endpoint, messages: Any = QUESTION, **params: Any) -> Any:
    async with client_of(endpoint) as client:
        return await client.chat.completions.create(model=endpoint.model, messages=messages, **params)


async def test_an_agent_with_tools_plays_and_the_rollout_knows_each_call() -> None:
    async def agent(endpoint: Endpoint) -> None:
        messages: list[Any] = list(QUESTION)
        async with client_of(endpoint) as client:
            while True:
                completion = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[TOOL])
                message = completion.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return
                for call in message.tool_calls:
                    assert call.type == "function"
                    assert json.loads(call.function.arguments) == {"city": "Rome"}
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "30"})

    result, chat = await played(agent, call_of("degrees", city="Rome"), "In Rome.")

    assert (result.reward, result.metrics) == (1.0, {"named": 1.0})
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert len(chat.turns) == 2


async def test_the_id_of_a_completion_is_that_of_the_call_by_which_its_turn_is_given_a_reward() -> None:
    async def agent(endpoint: Endpoint) -> None:
        assert (await said(endpoint)).id == "call-1"

    _, chat = await played(agent, "In Rome.")

    assert [turn.reply.call_id for turn in chat.turns] == ["call-1"]


async def test_a_synchronous_agent_plays_in_a_thread() -> None:
    async def agent(endpoint: Endpoint) -> None:
        def ask() -> str | None:
            with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                completion = client.chat.completions.create(model=endpoint.model, messages=QUESTION)
                return completion.choices[0].message.content

        assert await asyncio.to_thread(ask) == "In Rome."

    result, _ = await played(agent, "In Rome.")

    assert result.reward == 1.0


async def test_sub_agents_side_by_side_are_turns_of_one_rollout() -> None:
    async def agent(endpoint: Endpoint) -> None:
        questions = [[{"role": "user", "content": f"Question {number}"}] for number in range(20)]
        await asyncio.gather(*(said(endpoint, question) for question in questions))

    result, chat = await played(agent, *(["In Oslo."] * 19), "In Rome.")

    assert result.reward == 1.0
    assert {turn.messages[0]["content"] for turn in chat.turns} == {f"Question {number}" for number in range(20)}


async def test_streams_tell_text_tool_calls_and_tokens() -> None:
    async def agent(endpoint: Endpoint) -> None:
        async with client_of(endpoint) as client:
            stream = await client.chat.completions.create(
                model=endpoint.model,
                messages=QUESTION,
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function] == ["degrees"]
        assert chunks[-1].usage is not None
        completion = await said(endpoint, logprobs=True, extra_body={"return_token_ids": True})
        assert completion.choices[0].token_ids == list(b"In Rome.")
        assert len(completion.choices[0].logprobs.content) == len(b"In Rome.")

    result, _ = await played(agent, call_of("degrees", city="Rome"), "In Rome.")

    assert result.reward == 1.0


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_a_full_context_is_scored_also_where_the_agent_s_client_says_so(is_wrapped: bool) -> None:
    async def agent(endpoint: Endpoint) -> None:
        await said(endpoint)
        try:
            await said(endpoint)
        except openai.BadRequestError as error:
            if is_wrapped:
                raise RuntimeError("the framework's own error") from error
            raise

    full = GenerationFailed(CONTEXT_LENGTH_EXCEEDED, "the conversation is full")
    result, _ = await played(agent, "In Rome.", full)

    assert (result.reward, result.stop_reason) == (1.0, StopReason.MAX_LENGTH)


@pytest.mark.parametrize("error", [GenerationFailed("call_timeout", "too late"), BackendUnavailable("proxy is away")])
async def test_a_model_that_fails_is_infra_though_the_agent_goes_on(error: Exception) -> None:
    num_asked = 0

    async def agent(endpoint: Endpoint) -> None:
        nonlocal num_asked
        with pytest.raises(openai.InternalServerError):
            await said(endpoint)
        num_asked += 1

    result, chat = await played(agent, error, "In Rome.")

    assert (result.reward, result.reason, num_asked) == (None, InvalidReason.INFRA, 1)
    # What may be tried again was tried below: the client asks once.
    assert chat.turns == []


async def test_what_is_not_served_is_the_agent_s_fault_and_said_by_its_client() -> None:
    async def agent(endpoint: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError, match="ask n times"):
            await said(endpoint, n=2)
        with pytest.raises(openai.BadRequestError, match="not empty"):
            await said(endpoint, [])
        with pytest.raises(openai.NotFoundError, match="chat/completions"):
            async with client_of(endpoint) as client:
                await client.completions.create(model=endpoint.model, prompt="Where")
        async with client_of(endpoint) as client:
            assert [model.id async for model in client.models.list()] == [endpoint.model]
        await said(endpoint, temperature=0.2)

    result, _ = await played(agent, InvalidInput("temperature = 0.2 is not served: leave it out"))

    assert result.reason is InvalidReason.ENV_ERROR
    assert "temperature = 0.2 is not served" in (result.detail or "")


async def test_a_script_that_ends_is_named_in_the_agent_s_error() -> None:
    result, _ = await played(lambda endpoint: said(endpoint))

    assert result.reason is InvalidReason.ENV_ERROR
    assert "the script ended before call 1" in (result.detail or "")


async def test_after_the_rollout_nothing_is_answered() -> None:
    left: list[Endpoint] = []

    async def agent(endpoint: Endpoint) -> None:
        left.append(endpoint)
        await said(endpoint)

    await played(agent, "In Rome.")

    with pytest.raises(openai.APIConnectionError):
        async with openai.AsyncOpenAI(base_url=left[0].base_url, api_key="none", max_retries=0) as client:
            await client.chat.completions.create(model="turnmill", messages=QUESTION)


class Silent:
    """A model that never answers."""

    def __init__(self) -> None:
        self.is_asked, self.is_left = asyncio.Event(), asyncio.Event()

    async def complete(self, messages: Any, **params: Any) -> Any:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_left.set()


async def test_calls_that_are_under_way_are_given_up_when_the_rollout_ends() -> None:
    chat = Silent()
    async with openai_endpoint(chat) as endpoint:
        asking = asyncio.create_task(said(endpoint))
        await chat.is_asked.wait()

    assert chat.is_left.is_set()
    with pytest.raises(openai.AuthenticationError, match="it is over"):
        await asking


async def test_a_call_whose_agent_goes_away_is_given_up() -> None:
    chat = Silent()
    async with openai_endpoint(chat) as endpoint:
        asking = asyncio.create_task(said(endpoint))
        await chat.is_asked.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(30):
            await chat.is_left.wait()


AGENT = """
import openai
from turnmill import openai_endpoint
from turnmill.environment import Environment, Outcome, opening_messages
from turnmill.records import StopReason


class Own(Environment):
    async def play(self, task, chat):
        async with openai_endpoint(chat) as endpoint:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                completion = await client.chat.completions.create(model="turnmill", messages=opening_messages(task))
        is_right = completion.choices[0].message.content == task.metadata["answer"]
        return Outcome(stop_reason=StopReason.END_OF_CONVERSATION, reward=float(is_right))


def load_environment():
    return Own()
"""


async def said_over_http(request: web.Request) -> web.StreamResponse:
    choice = {"message": {"role": "assistant", "content": "crane"}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


async def test_in_a_box_it_is_the_only_address_that_the_agent_needs(tmp_path: Path) -> None:
    make_package(tmp_path, "own-agent", source=AGENT)
    found = find(EnvironmentChoice(env_id="own-agent"), root=tmp_path)
    settings = replace(settings_of(tmp_path, found))
    async with boxed(settings, said_over_http) as (server, runner):
        result = await runner.run(leased(server))
    assert (result.reward, result.detail) == (1.0, None)

    async with boxed(settings, refusing(500, "engine_failed")) as (server, runner):
        result = await runner.run(leased(server))
    assert result.reason is InvalidReason.INFRA


BLOCKING = """
import openai
from turnmill import openai_endpoint
from turnmill.environment import Environment


class Own(Environment):
    async def play(self, task, chat):
        async with openai_endpoint(chat) as endpoint:
            client = openai.OpenAI(base_url=endpoint.base_url, api_key="none")
            client.chat.completions.create(model="turnmill", messages=[{"role": "user", "content": "?"}])


def load_environment():
    return Own()
"""


async def test_a_synchronous_client_on_the_event_loop_is_found_with_the_package_s_line(tmp_path: Path) -> None:
    make_package(tmp_path, "own-agent", source=BLOCKING)
    found = find(EnvironmentChoice(env_id="own-agent"), root=tmp_path)
    async with boxed(replace(settings_of(tmp_path, found), block_s=1.0), said_over_http) as (server, runner):
        result = await runner.run(leased(server))

    assert result.reason is InvalidReason.ENV_ERROR
    assert "own_agent.py:11 in play" in (result.detail or "")
    assert "what blocks belongs in a thread" in (result.detail or "")
