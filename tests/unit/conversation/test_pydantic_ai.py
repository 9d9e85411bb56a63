"""An agent framework, unmodified, on the proxy: pydantic-ai with tools, streams and structured output.

It is skipped where the framework is not installed.
"""

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.unit.conversation.speech import calling, spoken
from turnmill import PollingHttpClient

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim[openai] is not installed")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_providers = pytest.importorskip("pydantic_ai.providers.openai")

DEGREES = {"Rome": 18, "Oslo": 4, "Cairo": 30}
QUESTION = "Where is it warmest?"


class Forecast(BaseModel):
    """What an agent finds out."""

    city: str
    degrees: int


def scripted(world: "World", *script: str) -> None:
    """The model says these, one call after the other."""
    world.replica.make = spoken
    world.replica.reply = lambda request: script[int(request.step_id.rpartition("_")[2])]


def agent_on(rollout: dict[str, Any], http_client: Any = None, **options: Any) -> Any:
    """An agent with a tool, as the framework's users write it."""
    provider = openai_providers.OpenAIProvider(
        base_url=rollout["base_url"], api_key="none", **({"http_client": http_client} if http_client else {})
    )
    agent = pydantic_ai.Agent(openai_models.OpenAIChatModel("turnmill", provider=provider), **options)

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"{DEGREES[city]} degrees"

    return agent


async def _output(agent: Any, is_streamed: bool) -> Any:
    if not is_streamed:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


async def check_history(world: "World", rollout: dict[str, Any], num_calls: int) -> None:
    """Each call goes on from the one before; nothing was said twice."""
    call_ids = [f"task_0_{c}" for c in range(num_calls)]
    assert [request.parent for request in world.replica.requests] == [None, *call_ids[:-1]]
    assert all(request.tools for request in world.replica.requests)
    assert world.counts.num_forks == 0
    assert (await world.report(rollout)).status == 200
    assert (await world.sample()).calls == tuple(call_ids)


async def test_an_agent_calls_tools_in_parallel_and_over_several_turns(world: "World") -> None:
    scripted(
        world,
        calling(("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}), content="Let me see."),
        calling(("weather", {"city": "Cairo"})),
        "In Cairo.",
    )
    rollout = await world.begin()
    async with agent_on(rollout, system_prompt="Use the tool.") as agent:
        result = await agent.run(QUESTION)
    assert result.output == "In Cairo."
    assert result.usage.requests == 3
    opening, second, third = world.replica.requests
    assert [message["role"] for message in opening.messages] == ["system", "user"]
    assert [message["content"] for message in second.messages] == ["18 degrees", "4 degrees"]
    assert [message["content"] for message in third.messages] == ["30 degrees"]
    assert opening.tool_choice == "auto"
    await check_history(world, rollout, 3)


async def test_an_agent_streams(world: "World") -> None:
    scripted(world, calling(("weather", {"city": "Cairo"})), "It is 30 degrees in Cairo.")
    rollout = await world.begin()
    async with agent_on(rollout) as agent, agent.run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert "".join(pieces) == "It is 30 degrees in Cairo."
    assert result.usage.output_tokens == 4
    await check_history(world, rollout, 2)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_structured_output_is_a_tool_that_is_required(world: "World", is_streamed: bool) -> None:
    scripted(
        world, calling(("weather", {"city": "Cairo"})), calling(("final_result", {"city": "Cairo", "degrees": 30}))
    )
    rollout = await world.begin()
    async with agent_on(rollout, output_type=Forecast) as agent:
        output = await _output(agent, is_streamed)
    assert output == Forecast(city="Cairo", degrees=30)
    assert {request.tool_choice for request in world.replica.requests} == {"required"}
    names = [tool["function"]["name"] for tool in world.replica.requests[0].tools or []]
    assert names == ["weather", "final_result"]
    await check_history(world, rollout, 2)


async def test_arguments_that_do_not_fit_are_told_to_the_model_which_mends_them(world: "World") -> None:
    scripted(
        world,
        calling(("final_result", {"city": "Cairo", "degrees": "hot"})),
        calling(("final_result", {"city": "Cairo", "degrees": 30})),
    )
    rollout = await world.begin()
    async with agent_on(rollout, output_type=Forecast) as agent:
        result = await agent.run(QUESTION)
    assert result.output.degrees == 30
    (complaint,) = world.replica.requests[1].messages
    assert complaint["role"] == "tool" and "valid integer" in complaint["content"]
    await check_history(world, rollout, 2)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_agent_plays_on_a_proxy_that_answers_later(world: "World", is_streamed: bool) -> None:
    scripted(world, calling(("weather", {"city": "Cairo"})), "In Cairo.")
    rollout = await world.begin()
    async with world.beside(hold_s=0.0) as other, PollingHttpClient() as http:
        assert await _output(agent_on(other.here(rollout), http), is_streamed) == "In Cairo."
    await check_history(world, rollout, 2)


async def test_a_model_of_another_name_is_an_error_of_the_frameworks_own(world: "World") -> None:
    rollout = await world.begin()
    provider = openai_providers.OpenAIProvider(base_url=rollout["base_url"], api_key="none")
    judge = pydantic_ai.Agent(openai_models.OpenAIChatModel("gpt-judge", provider=provider))
    async with judge:
        with pytest.raises(pydantic_ai.ModelHTTPError, match="not served here") as caught:
            await judge.run("Is it right?")
    assert caught.value.status_code == 404
    assert world.replica.requests == []
