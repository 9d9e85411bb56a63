"""An agent framework, unmodified, in an environment: pydantic-ai on the rollout's endpoint.

It is skipped where the framework is not installed.
"""

from typing import Any

import pytest

from turnmill import openai_endpoint
from turnmill.environment import Chat, Environment, Outcome, Rollout, ScriptedChat, ScriptedTurn, call_of, reward
from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.errors import GenerationFailed
from turnmill.records import RolloutResult, StopReason, Task

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim[openai] is not installed")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_providers = pytest.importorskip("pydantic_ai.providers.openai")


def named(rollout: Rollout) -> float:
    return float("Rome" in rollout.turns[-1].reply.content or bool(rollout.turns[-1].reply.tool_calls))


class Framework(Environment):
    rewards = (reward(named),)

    async def play(self, task: Task, chat: Chat) -> Outcome:
        async with openai_endpoint(chat) as endpoint:
            provider = openai_providers.OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
            agent = pydantic_ai.Agent(openai_models.OpenAIChatModel(endpoint.model, provider=provider))

            @agent.tool_plain  # type: ignore[untyped-decorator]
            def degrees(city: str) -> str:
                """The weather of a city."""
                return "30"

            async with agent:
                await agent.run(task.metadata["prompt"])
        return Outcome(stop_reason=StopReason.END_OF_CONVERSATION)


async def played(*turns: ScriptedTurn | Exception) -> tuple[RolloutResult, WatchedChat]:
    chat = WatchedChat(ScriptedChat(turns))
    return await play_scored(Framework(), Task(id="t", metadata={"prompt": "Where is it warm?"}), chat), chat


async def test_its_tools_are_called_and_each_call_is_a_turn() -> None:
    result, chat = await played(call_of("degrees", city="Rome"), "In Rome.")
    tool: Any = chat.messages[2]
    assert (result.reward, result.detail, len(chat.turns)) == (1.0, None, 2)
    assert (tool["role"], tool["content"]) == ("tool", "30")


async def test_a_context_that_fills_up_is_scored_although_the_framework_has_its_own_error() -> None:
    full = GenerationFailed(CONTEXT_LENGTH_EXCEEDED, "the conversation is full")
    result, _ = await played(call_of("degrees", city="Rome"), full)
    assert (result.reward, result.stop_reason, result.detail) == (1.0, StopReason.MAX_LENGTH, None)
