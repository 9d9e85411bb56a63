"""Conversations that branch in every way, trained: each row is what was said, each sampled token is in one of them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.house import CONFIG, MODEL, open_house
from tests.e2e.one_go import in_one_go
from turnmill.environment.base import Chat, Environment, Outcome, opening_messages
from turnmill.generation.renderer import Renderer
from turnmill.records import Call, Task
from turnmill.training.played import load_calls
from turnmill.training.samples import rows_of

# Per sample: three turns, one for each way to change what was said, and two sub-agents of two turns each.
NUM_CALLS = 3 + 4 + 4


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Branching(Environment):
    """Drops a turn, edits a prompt and a reply, sums up, and has two agents work side by side."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        said: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, *opening_messages(task)]
        texts = []
        for turn in range(3):
            reply = await chat.complete(said)
            texts.append(reply.content)
            said += [dict(reply.message), user(f"turn {turn}")]
        changed = [
            [*said[:3], *said[5:]],
            [{"role": "system", "content": "Be short."}, *said[1:]],
            [*said[:-2], {"role": "assistant", "content": "edited"}, said[-1]],
            [said[0], user("summed up"), *said[-2:]],
        ]
        texts += [reply.content for reply in await asyncio.gather(*map(chat.complete, changed))]
        texts += await asyncio.gather(*(self._work(chat, number) for number in range(2)))
        return Outcome(reward=float(sum(map(ord, "".join(texts))) % 2))

    async def _work(self, chat: Chat, number: int) -> str:
        said = [user(f"You are worker {number}.")]
        for _ in range(2):
            reply = await chat.complete(said)
            said += [dict(reply.message), user("go on")]
        return reply.content


@pytest.mark.slow
async def test_a_run_of_conversations_that_branch_trains_each_sampled_token_once(tmp_path: Path) -> None:
    config = replace(CONFIG, max_length=300, max_new_tokens=4, max_steps=2, max_refill_rounds=20)
    async with open_house(tmp_path, config, environment=Branching()) as house:
        # The audit of each step compares the trainer's log-prob of each trained token with the sampler's.
        await house.train()
        by_id = {sample.sample_id: sample for sample in await house.samples()}
        batches = await house.batches()
        metrics = await house.metrics()
        recorded = {
            sample_id: (await load_calls(house.ports.records, [by_id[sample_id]]))[0]
            for batch in batches
            for sample_id in batch.sample_ids
        }
    assert [batch.step for batch in batches] == [1, 2]
    renderer = Renderer(MODEL)
    for batch, metric in zip(batches, metrics, strict=True):
        num_trained = 0
        for sample_id in batch.sample_ids:
            calls = recorded[sample_id]
            assert len(calls) == NUM_CALLS
            by_call: dict[str, Call] = {call.call_id: call for call in calls}
            rows = rows_of(by_id[sample_id], calls)
            for row in rows:
                assert row.token_ids == in_one_go(renderer, [by_call[span.call_id] for span in row.spans])
            # The straight one, one a change (the edited reply goes on from the second turn), and the two agents.
            assert len(rows) == 1 + 4 + 2
            sampled = sum(call.num_sampled for call in calls)
            assert sum(row.num_trained for row in rows) == sampled
            num_trained += sampled
        assert metric.values["num_trained_tokens"] == num_trained
