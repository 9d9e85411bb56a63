"""The proxies that share a run, over DynamoDB and SQS: what one process did is what the next one goes on from."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.aws.emulator import REGION, Emulator
from tests.aws.service_proxy import Faults, running_proxy
from tests.contracts.aws_queue import make_queue, open_queue
from tests.unit.conversation.conftest import CONFIG, World, open_external_world
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.aws.settings import AwsSettings
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.history import read_calls
from turnmill.conversation.responses import Outcome, record_message
from turnmill.conversation.shared import SharedSessions
from turnmill.ports import Leased, RunPorts
from turnmill.records import Purpose, SampleState, encode


def over(clients: AwsClients, records: DynamoRecordStore) -> Callable[[RunPorts], RunPorts]:
    """Puts records and queues on the emulator in the place of embedded ones."""

    def queue(name: str) -> SqsQueue:
        unique = f"{name}-{secrets.token_hex(4)}"
        make_queue(clients, unique)
        return open_queue(clients, unique)

    def replaced(ports: RunPorts) -> RunPorts:
        return replace(
            ports,
            records=records,
            rollout_request=queue("rollout_request"),
            rollout_response=queue("rollout_response"),
            generate_request=(queue("generate_request"),),
            generate_response=queue("generate_response"),
        )

    return replaced


@pytest.fixture
async def world(tmp_path: Path, clients: AwsClients, records: DynamoRecordStore) -> AsyncIterator[World]:
    """A run with a foreign trainer whose records and queues are those of the emulator."""
    async with open_external_world(tmp_path, over(clients, records)) as opened:
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

    async def answer(message: Leased) -> None:
        body = answer_to(msgspec.json.decode(message.body))
        for _ in range(2):
            # Known already, where the request came twice.
            assert await record_message(world.ports, world.run, body) in (Outcome.RECORDED, Outcome.KNOWN)

    while True:
        messages = await queue.lease(max_messages=10, lease_s=10, wait_s=1)
        await asyncio.gather(*map(answer, messages))
        await queue.ack([message.receipt for message in messages])


async def play(world: World, rollout: dict[str, Any], num_turns: int = 3) -> None:
    messages: list[Any] = []
    for turn in range(num_turns):
        messages.append(f"Guess {turn}.")
        headers = {"Prefer": "wait=20", "Idempotency-Key": f"{rollout['lease_token']}-{turn}"}
        answer = await world.chat(rollout, *messages, headers=headers)
        while answer.status == 202:
            # As any client does: asked once more, by its key, it is the same call.
            answer = await world.chat(rollout, *messages, headers=headers)
        assert answer.status == 200, answer
        messages.append(answer.body["choices"][0]["message"])
    assert (await world.report(rollout, 0.5)).status == 200


async def play_all(world: World, ids: Sequence[str]) -> list[str]:
    """Ask for each twice at once, play until all have ended; what the trainer was told."""
    await asyncio.gather(*(ask_for(world, sample_id) for sample_id in [*ids, *ids]))
    ended: list[str] = []
    while len(ended) < len(ids):
        rollouts = (await world.lease(max_rollouts=8, wait_s=1)).body["rollouts"]
        await asyncio.gather(*(play(world, rollout) for rollout in rollouts))
        ended += [response.sample_id for response in await world.news()]
    return sorted(ended)


@asynccontextmanager
async def generating(world: World) -> AsyncIterator[None]:
    running = asyncio.create_task(generate(world))
    yield
    running.cancel()
    (end,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(end, asyncio.CancelledError), end


async def test_conversations_are_played_from_end_to_end_and_the_same_ids_once_more(world: World) -> None:
    ids = [f"row/{number}_0" for number in range(4)]
    async with generating(world):
        assert await play_all(world, ids) == ids
        assert await play_all(world, ids) == ids
    sample = await world.sample("row/0_0~1")
    assert (sample.state, sample.wire_id, len(sample.calls)) == (SampleState.REPORTED, "row/0_0", 3)
    assert world.counts.num_forks == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "faults",
    [Faults(), Faults(throttle=0.02, throughput=0.02, refuse=0.02, lose=0.02, expire=0.005, seed=3)],
    ids=["none", "many"],
)
async def test_what_a_turn_costs_and_that_faults_change_nothing_else(
    emulator: Emulator,
    tmp_path: Path,
    clients: AwsClients,
    table: str,
    faults: Faults,
    record_property: Callable[[str, object], None],
) -> None:
    ids = [f"row_{number}" for number in range(8)]
    with running_proxy(emulator.url, tmp_path / "proxy", faults) as proxy:
        settings = AwsSettings(name="tests", region=REGION, endpoint_url=proxy.url)
        meddled = AwsClients(settings, max_tries=10)
        records = DynamoRecordStore(meddled, table, overflow=LargeValues(meddled, table, "records/"))
        config = replace(CONFIG, worker_lease_s=60.0, call_timeout_s=120.0)
        async with open_external_world(tmp_path / "root", over(meddled, records), config) as world:
            async with generating(world):
                assert await play_all(world, ids) == ids
            for sample_id in ids:
                sample = await world.sample(sample_id)
                assert (sample.state, sample.reward, len(sample.calls)) == (SampleState.REPORTED, 0.5, 3)
                calls = await read_calls(records, "run-1", Purpose.TRAIN, sample_id)
                assert {call.call_id for call in calls} >= set(sample.calls)
            assert world.counts.num_forks == 0
        meddled.close()
    counts = proxy.counts()
    num_requests = sum(count for name, count in counts.requests.items() if name.startswith("dynamodb."))
    record_property("figure", f"DynamoDB requests of a turn, faults {counts.faults.total()}: {num_requests / 24:.1f}")
    assert bool(counts.faults) is (faults != Faults())


async def test_as_many_processes_as_requests_use_no_number_twice(world: World) -> None:
    await ask_for(world, "row_0")
    rollout = await world.lease_one()
    secret = rollout["base_url"].split("/")[-2]

    async def one(number: int) -> str:
        service = SharedSessions(world.ports, run=world.run, config=world.config)
        body = encode({"messages": [{"role": "user", "content": f"Guess {number % 4}."}]})
        # Two tries of each request, at two processes.
        answer = await service.chat(secret, await service.parse(secret, body), key=str(number % 4))
        assert isinstance(answer, tuple)
        return answer[0].call_id

    async with generating(world):
        ids = await asyncio.gather(*map(one, range(8)))
    assert sorted(ids) == sorted(f"row_0_{number}" for number in [*range(4), *range(4)])
    assert ids[:4] == ids[4:]
    assert (await world.report(rollout)).status == 200
    assert sorted((await world.sample("row_0")).calls) == [f"row_0_{number}" for number in range(4)]
