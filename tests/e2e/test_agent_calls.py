"""Every kind of call that OpenAI's clients make, answered by the CPU engine: what is told is what is recorded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from tests.e2e.house import TOKEN, open_house
from turnmill.conversation.client import ChatClient, LeasedRollout, RolloutApi
from turnmill.conversation.history import read_calls
from turnmill.conversation.http import HttpClient
from turnmill.records import Call, Purpose, Task
from turnmill.rollout.scheduler import Scheduler

TASK = Task(id="drawn", metadata={"prompt": "Guess the five-letter word.", "answer": "crane"})
MODEL = "turnmill"
OPENING: list[Any] = [{"role": "user", "content": "Guess the five-letter word."}]


class Played:
    """One leased rollout, and what is recorded of it."""

    def __init__(self, leased: LeasedRollout, house: Any) -> None:
        self.leased = leased
        self._house = house

    async def calls(self) -> list[Call]:
        """In their order."""
        ports, run_id = self._house.ports, self._house.run.run_id
        return await read_calls(ports.records, run_id, Purpose.EVAL, self.leased.request.sample_id)


@asynccontextmanager
async def played(root: Path) -> AsyncIterator[Played]:
    async with open_house(root, has_worker=False) as house, HttpClient() as session:
        ports, run_id = house.ports, house.run.run_id
        scheduler = Scheduler(
            ports.records, ports.rollout_request, ports.rollout_response, run_id, Purpose.EVAL, house.config
        )
        await scheduler.start()
        await scheduler.request([(TASK, "g")])
        api = RolloutApi(session, house.sessions.base_url, TOKEN)
        (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=10)
        try:
            yield Played(leased, house)
        finally:
            await scheduler.close()


async def test_choices_streams_texts_and_tokens_are_those_of_the_records(tmp_path: Path) -> None:
    async with (
        played(tmp_path) as rollout,
        openai.AsyncOpenAI(base_url=rollout.leased.base_url, api_key="none") as client,
        HttpClient() as http,
    ):
        several = await client.chat.completions.create(
            model=MODEL, messages=OPENING, n=3, logprobs=True, extra_body={"return_token_ids": True}
        )
        stream = await client.chat.completions.create(model=MODEL, messages=OPENING, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        text = await client.completions.create(model=MODEL, prompt="crane", max_tokens=4)
        chat = ChatClient(http, rollout.leased.base_url, timeout_s=60, deadline=float("inf"))
        reply = await chat.complete(OPENING, return_token_ids=True)
        calls = await rollout.calls()

    assert len(calls) == 6
    for choice, call in zip(several.choices, calls, strict=False):
        extra: dict[str, Any] = choice.model_extra or {}
        assert choice.message.content == call.reply["content"]
        assert extra["token_ids"] == call.token_ids[-call.num_sampled :]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [item.logprob for item in choice.logprobs.content] == call.logprobs
        assert (several.model_extra or {})["prompt_token_ids"] == call.token_ids[: -call.num_sampled]
    assert len({tuple(call.token_ids) for call in calls[:3]}) > 1
    assert streamed == calls[3].reply["content"]
    assert text.choices[0].text == calls[4].reply["content"]
    assert calls[4].num_sampled <= 4
    assert reply.tokens is not None
    assert [*reply.tokens.prompt_ids, *reply.tokens.sampled_ids] == calls[5].token_ids
    assert reply.tokens.logprobs == calls[5].logprobs
