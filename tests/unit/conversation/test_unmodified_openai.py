"""OpenAI's own clients, unmodified, on the proxy: tools, streams, choices, errors, retries."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.unit.conversation.speech import WEATHER, calling, spoken
from turnmill.conversation.admission import Limits
from turnmill.conversation.streaming import Pace

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

MODEL = "turnmill"
QUESTION: list[Any] = [{"role": "user", "content": "Where is it warmest: Rome, Oslo or Cairo?"}]
DEGREES = {"Rome": 18, "Oslo": 4, "Cairo": 30}
SCRIPT = [
    calling(("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}), content="Let me see."),
    calling(("weather", {"city": "Cairo"})),
    "In Cairo.",
]


def scripted(world: "World", script: list[str]) -> None:
    """The model says these, one call after the other."""
    world.replica.make = spoken
    world.replica.reply = lambda request: script[int(request.step_id.rpartition("_")[2])]


def results_of(calls: Any) -> list[Any]:
    """What a program answers to calls of its tool."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": str(DEGREES[json.loads(call.function.arguments)["city"]]),
        }
        for call in calls
    ]


def async_client(rollout: dict[str, Any], **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": rollout["base_url"], "api_key": "none", **options})


async def check_history(world: "World", rollout: dict[str, Any]) -> None:
    """Three calls, each of which goes on from the one before with the new messages alone."""
    assert [request.parent for request in world.replica.requests] == [None, "task_0_0", "task_0_1"]
    assert [len(request.messages) for request in world.replica.requests] == [1, 2, 1]
    assert world.counts.num_forks == 0
    assert (await world.report(rollout)).status == 200
    assert (await world.sample()).calls == ("task_0_0", "task_0_1", "task_0_2")


# ---------------------------------------------------------------- tools


async def test_an_async_agent_loops_over_tools(world: "World") -> None:
    scripted(world, SCRIPT)
    rollout = await world.begin()
    messages = list(QUESTION)
    async with async_client(rollout) as client:
        while True:
            completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
            choice = completion.choices[0]
            # The library's own object goes back into the history.
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                break
            messages += results_of(choice.message.tool_calls)
    assert choice.message.content == "In Cairo."
    await check_history(world, rollout)


async def test_a_synchronous_agent_loops_over_tools(world: "World") -> None:
    scripted(world, SCRIPT)
    rollout = await world.begin()

    def play() -> str:
        messages = list(QUESTION)
        with openai.OpenAI(base_url=rollout["base_url"], api_key="none") as client:
            while True:
                completion = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return str(message.content)
                messages.extend(results_of(message.tool_calls))

    assert await asyncio.to_thread(play) == "In Cairo."
    await check_history(world, rollout)


@pytest.mark.parametrize("has_usage", [False, True])
async def test_an_agent_that_streams_puts_the_same_conversation_together(world: "World", has_usage: bool) -> None:
    scripted(world, SCRIPT)
    rollout = await world.begin()
    messages = list(QUESTION)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if has_usage else {}
    async with async_client(rollout) as client:
        for _ in SCRIPT:
            async with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=[WEATHER], **options
            ) as stream:
                events = [event.type async for event in stream]
                completion = await stream.get_final_completion()
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in messages[-1].get("tool_calls", []):
                call["function"].pop("parsed_arguments", None)
            messages += results_of(message.tool_calls or [])
            assert (completion.usage is not None) == has_usage
    assert message.content == "In Cairo."
    assert "content.done" in events
    await check_history(world, rollout)


async def test_a_synchronous_stream_is_read_to_its_end(world: "World") -> None:
    scripted(world, SCRIPT)
    rollout = await world.begin()

    def play() -> list[Any]:
        with openai.OpenAI(base_url=rollout["base_url"], api_key="none") as client:
            return list(client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], stream=True))

    chunks = await asyncio.to_thread(play)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "weather")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_tool_that_is_named_or_required_is_asked_for(world: "World") -> None:
    scripted(world, [calling(("weather", {"city": "Rome"}))] * 2 + ["No."])
    rollout = await world.begin()
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}, "none"]
    async with async_client(rollout) as client:
        for choice in choices:
            await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice=choice)
    assert [request.tool_choice for request in world.replica.requests] == ["required", "function:weather", "none"]


# ---------------------------------------------------------------- choices, tokens, texts, models


async def test_choices_log_probs_and_token_ids(world: "World") -> None:
    rollout = await world.begin()
    async with async_client(rollout) as client:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            n=3,
            stop=["\n\n"],
            seed=7,
            max_completion_tokens=32,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in completion.choices}) == 3
    first = completion.choices[0]
    assert first.logprobs is not None and first.logprobs.content is not None
    assert [(item.token, item.logprob) for item in first.logprobs.content] == [("token_id:7", -0.5)] * 2
    assert (first.model_extra or {})["token_ids"] == [7, 7]
    assert (completion.model_extra or {})["prompt_token_ids"] == [7] * 5
    assert completion.usage is not None and completion.usage.completion_tokens == 6


async def test_texts_and_models(world: "World") -> None:
    rollout = await world.begin()
    async with async_client(rollout) as client:
        text = await client.completions.create(model=MODEL, prompt="Once", n=2, max_tokens=8)
        assert [choice.text for choice in text.choices] == ["answer task_0_0", "answer task_0_1"]
        stream = await client.completions.create(model=MODEL, prompt="Once", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "answer task_0_2"
        assert [model.id async for model in client.models.list()] == ["turnmill", "wordle-tiny"]
        assert (await client.models.retrieve("wordle-tiny")).id == "wordle-tiny"


async def test_the_secret_may_be_the_api_key(world: "World") -> None:
    rollout = await world.begin()
    secret = rollout["base_url"].split("/")[-2]
    async with async_client(rollout, base_url=f"{world.url}/v1", api_key=secret) as client:
        completion = await client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert completion.choices[0].message.content == "answer task_0_0"


# ---------------------------------------------------------------- errors


async def test_each_error_is_the_librarys_own(world: "World") -> None:
    rollout = await world.begin()
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
        (openai.BadRequestError, "unsupported_value", {"temperature": 0.1}),
        (openai.BadRequestError, "unsupported_value", {"messages": image}),
        (openai.BadRequestError, "unsupported_value", {"response_format": {"type": "json_object"}}),
        (openai.BadRequestError, "invalid_request", {"tool_choice": "required"}),
        (openai.BadRequestError, "invalid_request", {"extra_body": {"tempreature": 1}}),
        (openai.NotFoundError, "model_not_found", {"model": "gpt-judge"}),
    ]
    async with async_client(rollout) as client:
        for expected, code, changes in cases:
            with pytest.raises(expected) as caught:
                await client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **changes})
            assert (caught.value.code, caught.value.type) == (code, "invalid_request_error"), changes
            assert caught.value.param
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-judge")
    assert world.replica.requests == []
    async with async_client(rollout, base_url=f"{world.url}/v1", api_key="x" * 43) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=MODEL, messages=QUESTION)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_conversation_that_is_too_long_and_a_generation_that_fails(world: "World", is_streamed: bool) -> None:
    errors = [
        {"code": "context_length_exceeded", "message": "the prompt has 2000 tokens, at most 1000 fit"},
        {"code": "engine_failed", "message": "out of luck"},
    ]
    world.replica.reply = lambda request: errors[int(request.step_id.rpartition("_")[2])]
    rollout = await world.begin()
    async with async_client(rollout) as client:
        with pytest.raises(openai.BadRequestError, match="at most 1000") as caught:
            await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=is_streamed)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=is_streamed)
    # Neither was asked for again: the answer to the call is known.
    assert len(world.replica.requests) == 2


async def test_an_attempt_that_is_over_is_a_conflict_and_not_asked_again(world: "World") -> None:
    rollout = await world.begin()
    await world.report(rollout)
    sent: list[str] = []

    async def note(request: httpx2.Request) -> None:
        sent.append(request.method)

    http = httpx2.AsyncClient(event_hooks={"request": [note]})
    async with async_client(rollout, http_client=http) as client:
        with pytest.raises(openai.ConflictError, match="the attempt is over"):
            await client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert sent == ["POST"]


async def test_too_many_calls_are_rate_limited_and_the_library_comes_back(world: "World") -> None:
    rollout = await world.begin()
    async with world.beside(limits=Limits(per_attempt=1)) as limited:
        world.replica.may_answer.clear()
        async with async_client(limited.here(rollout)) as client:
            first = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=QUESTION))
            await world.replica.was_asked.wait()
            with pytest.raises(openai.RateLimitError) as caught:
                await client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=QUESTION)
            assert caught.value.code == "rate_limit_exceeded"
            assert caught.value.response.headers["retry-after"] == "1"
            second = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=QUESTION))
            await asyncio.sleep(0.05)
            world.replica.may_answer.set()
            assert (await first).choices[0].message.content == "answer task_0_0"
            # The one that was refused and came again is a call of its own, however equal to the first.
            assert (await second).choices[0].message.content == "answer task_0_1"


async def test_an_error_in_the_middle_of_a_stream_is_the_librarys_own(lone_world: "World") -> None:
    lone_world.replica.reply = lambda request: {"code": "engine_failed", "message": "out of luck"}
    rollout = await lone_world.begin()
    lone_world.replica.may_answer.clear()
    pace = Pace(first_s=0.02, every_s=0.02)
    async with lone_world.beside(pace=pace) as other, async_client(other.here(rollout)) as client:
        # It comes back with the first sign of life, before there is an answer.
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        lone_world.replica.may_answer.set()
        with pytest.raises(openai.APIError, match="out of luck") as caught:
            [chunk async for chunk in stream]
    assert caught.value.code == "engine_failed"


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_library_asks_again_after_a_time_out_and_nothing_is_sampled_twice(
    world: "World", is_streamed: bool
) -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()

    async def answer_late() -> None:
        await world.replica.was_asked.wait()
        await asyncio.sleep(0.5)
        world.replica.may_answer.set()

    late = asyncio.create_task(answer_late())
    async with async_client(rollout, timeout=0.3, max_retries=10) as client:
        created: Any = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=is_streamed)
        if is_streamed:
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in created])
        else:
            said = created.choices[0].message.content
    await late
    assert said == "answer task_0_0"
    assert len(world.replica.requests) == 1
    assert world.counts.num_retries >= 1
