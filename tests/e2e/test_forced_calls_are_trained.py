"""Forced calls, choices, tools and a client's own sampling, from a request to the gradient: audited and trained."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.house import CONFIG, House, open_house
from tests.unit.generation.families import TOOLS
from tests.unit.generation.scripted import save_random
from turnmill.conversation.attempts import Answer
from turnmill.conversation.leases import Lease
from turnmill.conversation.reports import parse_report
from turnmill.generation.renderer import Renderer
from turnmill.records import encode
from turnmill.training.played import load_calls
from turnmill.training.samples import rows_of

TOOL_CONFIG = replace(CONFIG, max_length=1500, max_new_tokens=12, max_refill_rounds=20, client_sampling="record")
NAMED = {"type": "function", "function": {"name": "add"}}
# Of the calls that are gone on from, one after the other.
TURNS: list[dict[str, Any]] = [
    {"tool_choice": "required", "n": 3, "temperature": 0.3},
    {"temperature": 0.01, "stop": ["e"]},
    {"tool_choice": NAMED, "max_tokens": 1},
    {"tool_choice": "none"},
]


class Player:
    """Plays what it leases."""

    def __init__(self, house: House) -> None:
        self.house = house
        # By sample: the calls of the one branch that is trained.
        self.chosen: dict[str, list[Answer]] = {}

    async def run(self) -> None:
        while True:
            leases = await self.house.sessions.lease("player", 8, 5.0)
            await asyncio.gather(*map(self.play, leases))

    async def ask(self, lease: Lease, messages: list[dict[str, Any]], **body: Any) -> tuple[Answer, ...]:
        sessions = self.house.sessions
        body = {"messages": messages, "tools": TOOLS, "return_token_ids": True, **body}
        request = await sessions.parse(lease.chat_secret, encode(body))
        answers = await sessions.chat(lease.chat_secret, request)
        assert isinstance(answers, tuple)
        return answers

    async def play(self, lease: Lease) -> None:
        said: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
        chosen: list[Answer] = []
        for turn in TURNS:
            # Drawn greedily: used, and never trained.
            await self.ask(lease, said, temperature=0)
            choices = await self.ask(lease, said, **turn)
            # Of equal ones, the first is gone on from.
            chosen.append(next(answer for answer in choices if answer.reply == choices[-1].reply))
            calls = chosen[-1].reply.get("tool_calls", ())
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"} for call in calls]
            said += [chosen[-1].reply, *(results or [{"role": "user", "content": "go on"}])]
        self.chosen[lease.request.sample_id] = chosen
        score = sum(map(ord, chosen[-1].reply["content"])) % 2
        report = {"id": lease.request.sample_id, "aggregate_reward_score": score, "metrics_list": []}
        await self.house.sessions.report(lease.report_secret, parse_report(encode(report)))


@pytest.mark.slow
async def test_forced_calls_and_a_clients_own_sampling_pass_the_audit_and_are_trained_exactly(tmp_path: Path) -> None:
    save_random(tmp_path / "model", "chatml")
    async with open_house(tmp_path / "root", TOOL_CONFIG, has_worker=False, model=tmp_path / "model") as house:
        player = Player(house)
        playing = asyncio.create_task(player.run())
        # Raises, if the trainer's log-probs of the trained tokens are not the sampler's.
        await house.train()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        by_id = {sample.sample_id: sample for sample in await house.samples()}
        batched = [sample_id for batch in await house.batches() for sample_id in batch.sample_ids]
        loaded = await load_calls(house.ports.records, [by_id[sample_id] for sample_id in batched])
        assert len(batched) == TOOL_CONFIG.max_steps * TOOL_CONFIG.global_batch_size
    renderer = Renderer(tmp_path / "model")
    begun = [renderer.begun("required", TOOLS), "", renderer.begun("function:add", TOOLS), ""]
    for sample_id, calls in zip(batched, loaded, strict=True):
        chosen = player.chosen[sample_id]
        (row,) = rows_of(by_id[sample_id], calls)
        assert row.token_ids == [*(chosen[-1].prompt_ids or ()), *chosen[-1].sampled_ids]
        assert [span.call_id for span in row.spans] == [answer.call_id for answer in chosen]
        for span, answer, turn, opener in zip(row.spans, chosen, TURNS, begun, strict=True):
            num, mask = len(answer.sampled_ids), row.loss_mask[span.start : span.end]
            assert row.token_ids[span.end - num : span.end] == list(answer.sampled_ids)
            assert mask == [0] * (len(mask) - num) + [1] * num
            # What opens a call was not sampled.
            assert renderer.template.tokenizer.decode(row.token_ids[: span.end - num]).endswith(opener)
            assert set(row.temperatures[span.end - num : span.end]) == {turn.get("temperature", 1.0)}
