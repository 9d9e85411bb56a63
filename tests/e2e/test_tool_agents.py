"""An agent for OpenAI that calls tools, over proxy, queues, replica and records: its tokens are the template's."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.house import CONFIG, TOKEN, House, open_house
from tests.unit.generation.families import TOOLS
from tests.unit.generation.scripted import save_scripted
from turnmill import AsyncTurnmillClient
from turnmill.conversation.client import RolloutApi
from turnmill.conversation.history import read_calls
from turnmill.conversation.http import HttpClient
from turnmill.generation.renderer import Renderer
from turnmill.records import Call, Purpose, Task
from turnmill.rollout.scheduler import Scheduler

TASK = Task(id="drawn", metadata={"prompt": "What is the weather?", "answer": "20 degrees"})
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather?"}
TOOL_CONFIG = replace(CONFIG, max_length=1024, max_new_tokens=40)


@dataclass
class Playing:
    """An attempt that is under way."""

    house: House
    # `openai.AsyncOpenAI`, whose types know a dictionary only by its literal.
    client: Any
    sample_id: str

    async def calls(self) -> list[Call]:
        return await read_calls(self.house.ports.records, self.house.run.run_id, Purpose.EVAL, self.sample_id)


@asynccontextmanager
async def playing(folder: Path, model: Path) -> AsyncIterator[Playing]:
    async with open_house(folder, TOOL_CONFIG, has_worker=False, model=model) as house, HttpClient() as session:
        ports, run_id = house.ports, house.run.run_id
        scheduler = Scheduler(
            ports.records, ports.rollout_request, ports.rollout_response, run_id, Purpose.EVAL, house.config
        )
        await scheduler.start()
        try:
            await scheduler.request([(TASK, "g")])
            api = RolloutApi(session, house.sessions.base_url, TOKEN)
            (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=10)
            async with AsyncTurnmillClient(base_url=leased.base_url, report_secret=leased.report_secret) as client:
                yield Playing(house=house, client=client, sample_id=leased.request.sample_id)
        finally:
            await scheduler.close()


def results_of(message: Any) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "20 degrees"} for call in message.tool_calls]


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
async def test_an_openai_agent_calls_tools_over_several_turns(family: str, tmp_path: Path) -> None:
    save_scripted(tmp_path / "model", family)
    messages: list[Any] = [QUESTION]
    async with playing(tmp_path / "root", tmp_path / "model") as play:
        for _ in range(3):
            completion = await play.client.chat.completions.create(model="turnmill", messages=messages, tools=TOOLS)
            choice = completion.choices[0]
            assert choice.finish_reason == "tool_calls"
            # As the library has it: objects, with fields that are null.
            messages += [choice.message, *results_of(choice.message)]
            assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
        calls = await play.calls()
        assert play.house.sessions.counts.num_forks == 0
    assert [call.parent for call in calls] == [None, *(call.call_id for call in calls[:-1])]
    assert [call.tools is None for call in calls] == [False, True, True]
    renderer = Renderer(tmp_path / "model")
    said: list[dict[str, Any]] = []
    for call in calls:
        said += [*call.messages, call.reply]
    stored = [token for call in calls for token in call.token_ids]
    # Where nothing is stripped, the tokens are those of a rendering in one go.
    last = said[:-1]
    assert stored[: -calls[-1].num_sampled] == renderer.turn_by_turn(last, calls[0].tools)
    assert stored[: -calls[-1].num_sampled] == renderer.one_go(last, calls[0].tools)


async def test_forced_calls_streams_and_choices_come_from_the_same_replica(tmp_path: Path) -> None:
    save_scripted(tmp_path / "model", "mistral")
    async with playing(tmp_path / "root", tmp_path / "model") as play:
        create = play.client.chat.completions.create
        forced = await create(model="turnmill", messages=[QUESTION], tools=TOOLS, tool_choice="required")
        assert forced.choices[0].message.tool_calls[0].id == "sampled12"
        stream = await create(model="turnmill", messages=[QUESTION], tools=TOOLS, tool_choice="required", stream=True)
        deltas = [chunk.choices[0] async for chunk in stream if chunk.choices]
        told = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        assert "".join(call.function.name or "" for call in told) == "get_weather"
        assert json.loads("".join(call.function.arguments or "" for call in told)) == {"city": "Paris"}
        assert deltas[-1].finish_reason == "tool_calls"
        several = await create(model="turnmill", messages=[QUESTION], tools=TOOLS, tool_choice="required", n=2)
        assert [choice.finish_reason for choice in several.choices] == ["tool_calls"] * 2
        with pytest.raises(openai.BadRequestError):
            await create(
                model="turnmill",
                messages=[QUESTION],
                tools=TOOLS[:1],
                tool_choice={"type": "function", "function": {"name": "add"}},
            )
        calls = await play.calls()
    assert [(call.tool_choice, call.choice, call.num_choices) for call in calls] == [
        ("required", 0, 1), ("required", 0, 1), ("required", 0, 2), ("required", 1, 2)
    ]  # fmt: skip
    for call in calls:
        num_prompt = len(call.token_ids) - call.num_sampled
        assert call.loss_mask == [0] * num_prompt + [1] * call.num_sampled


async def test_a_text_goes_on_over_completions(tmp_path: Path) -> None:
    save_scripted(tmp_path / "model", "chatml")
    async with playing(tmp_path / "root", tmp_path / "model") as play:
        first = await play.client.completions.create(model="turnmill", prompt="The weather is", max_tokens=3)
        assert first.object == "text_completion" and isinstance(first.choices[0].text, str)
        (call,) = await play.calls()
    renderer = Renderer(tmp_path / "model")
    assert call.token_ids[: -call.num_sampled] == renderer.plain("The weather is")
    assert renderer.decode(call.token_ids[-call.num_sampled :]) == first.choices[0].text
