"""The proxies that share a run, over DynamoDB and SQS: what one process did is what the next one goes on from."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.contracts.aws_queue import make_queue, open_queue
from tests.unit.conversation.conftest import World, open_external_world
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.conversation.attempts import Answer
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.responses import Outcome, record_message
from turnmill.conversation.shared import SharedSessions
from turnmill.ports import RunPorts
from turnmill.records import SampleState, encode


@pytest.fixture
async def world(tmp_path: Path, clients: AwsClients, records: DynamoRecordStore) -> AsyncIterator[World]:
    """A run with a foreign trainer whose records and queues are those of the emulator."""

    def over(ports: RunPorts) -> RunPorts:
        queues = {}
        for name in ("rollout_request", "rollout_response", "generate_request", "generate_response"):
            queue = f"{name}-{secrets.token_hex(4)}"
            make_queue(clients, queue)
            queues[name] = open_queue(clients, queue)
        generate_request = queues.pop("generate_request")
        return replace(ports, records=records, generate_request=(generate_request,), **queues)

    async with open_external_world(tmp_path, over) as opened:
        yield opened


async def ask_for(world: World, sample_id: str) -> None:
    request = {
        "timestamp": "2026-01-01T00:00:00Z",
        "sample_id": sample_id,
        "max_length": 512,
        "rewards": {"range": [0.0, 1.0]},
        "data": {"prompt": "Guess."},
    }
    await open_occurrence(world.ports, world.run, world.config, request)


def answer_to(request: Mapping[str, Any]) -> bytes:
    content = [{"token": f"token_id:{number}", "logprob": -0.5} for number in range(3)]
    choice = {"message": {"content": f"to {request['step_id']}"}, "logprobs": {"content": content}}
    names = {name: request[name] for name in ("version", "sample_id", "step_id")}
    return encode({**names, "data": {"choices": [choice], "serving_model_num": 1}, "finish_reason": "stop"})


async def generate(world: World) -> None:
    """A foreign generator, and what is called with its answers: each comes twice."""
    queue = world.ports.generate_request[0]
    while True:
        messages = await queue.lease(max_messages=10, lease_s=30, wait_s=1)
        for message in messages:
            body = answer_to(msgspec.json.decode(message.body))
            assert await record_message(world.ports, world.run, body) is Outcome.RECORDED
            assert await record_message(world.ports, world.run, body) is Outcome.KNOWN
        await queue.ack([message.receipt for message in messages])


async def test_conversations_are_played_from_end_to_end_and_the_same_ids_once_more(world: World) -> None:
    running = asyncio.create_task(generate(world))
    ids = [f"row/{number}_0" for number in range(4)]

    async def play(rollout: dict[str, Any]) -> None:
        messages: list[Any] = []
        for turn in range(3):
            messages.append(f"Guess {turn}.")
            answer = await world.chat(rollout, *messages, headers={"Prefer": "wait=20"})
            assert answer.status == 200, answer
            messages.append(answer.body["choices"][0]["message"])
        assert (await world.report(rollout, 0.5)).status == 200

    ended: list[str] = []
    for _ in range(2):
        await asyncio.gather(*(ask_for(world, sample_id) for sample_id in [*ids, *ids]))
        num_played = 0
        while num_played < len(ids):
            rollouts = (await world.lease(max_rollouts=4)).body["rollouts"]
            await asyncio.gather(*map(play, rollouts))
            num_played += len(rollouts)
        while len(ended) % len(ids) or not ended or num_played:
            news = await world.news()
            ended += [response.sample_id for response in news]
            num_played = max(0, num_played - len(news))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sorted(ended) == sorted([*ids, *ids])
    sample = await world.sample("row/0_0~1")
    assert (sample.state, sample.wire_id, len(sample.calls)) == (SampleState.REPORTED, "row/0_0", 3)
    assert world.counts.num_forks == 0


async def test_as_many_processes_as_requests_use_no_number_twice(world: World) -> None:
    running = asyncio.create_task(generate(world))
    await ask_for(world, "row_0")
    rollout = await world.lease_one()
    secret = rollout["base_url"].split("/")[-2]

    async def one(number: int) -> str:
        service = SharedSessions(world.ports, run=world.run, config=world.config)
        body = encode({"messages": [{"role": "user", "content": f"Guess {number % 4}."}]})
        # Two tries of each request, at two processes.
        answer = await service.chat(secret, service.parse(secret, body), key=str(number % 4))
        assert isinstance(answer, Answer)
        return answer.call_id

    ids = await asyncio.gather(*map(one, range(8)))
    assert sorted(ids) == sorted(f"row_0_{number}" for number in [*range(4), *range(4)])
    assert ids[:4] == ids[4:]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await world.report(rollout)).status == 200
    assert sorted((await world.sample("row_0")).calls) == [f"row_0_{number}" for number in range(4)]
