"""A process that serves a request is killed between two of its writes, by SIGKILL; the next request goes on there."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.conversation.conftest import World, open_external_world
from tests.unit.conversation.talking import request_of, secret_of, user
from turnmill import failpoints
from turnmill.conversation.attempts import Pending
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.shared import SharedSessions
from turnmill.records import SampleState, encode

REQUEST = {
    "timestamp": "2026-01-01T00:00:00Z",
    "sample_id": "row_0",
    "max_length": 512,
    "rewards": {"range": [0.0, 1.0]},
    "data": {},
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_external_world(tmp_path / "root") as opened:
        yield opened


async def killed_at(point: str, world: World, tmp_path: Path, request: dict[str, Any]) -> None:
    """Have the request served by a process that dies at the failpoint."""
    armed = tmp_path / "armed"
    armed.mkdir(exist_ok=True)
    (armed / point).touch()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.conversation.shared_child", str(world.root), encode(request).decode()),
        env={**os.environ, failpoints.VARIABLE: str(armed)},
        cwd=Path(__file__).parents[3],
    )
    assert await child.wait() == -signal.SIGKILL


async def requests_of(world: World) -> list[dict[str, Any]]:
    """What a generator is asked for."""
    messages = await world.ports.generate_request[0].lease(max_messages=8, lease_s=30)
    return [msgspec.json.decode(message.body) for message in messages]


@pytest.mark.parametrize("point", ["occurrence-opened", "occurrence-requested"])
async def test_a_rollout_that_was_asked_for_by_a_killed_process_is_played_once(
    world: World, tmp_path: Path, point: str
) -> None:
    await killed_at(point, world, tmp_path, {"open": REQUEST})
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    sample = await open_occurrence(world.ports, world.run, world.config, REQUEST)
    assert sample.sample_id == "row_0"
    assert (await world.report(await world.lease_one())).status == 200
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert len(await world.news()) == 1


async def test_a_call_whose_proxy_was_killed_before_it_asked_is_asked_for_by_the_next(
    world: World, tmp_path: Path
) -> None:
    await open_occurrence(world.ports, world.run, world.config, REQUEST)
    rollout = await world.lease_one()
    secret = rollout["base_url"].split("/")[-2]
    await killed_at("ask-claimed", world, tmp_path, {"chat": secret, "text": "Guess.", "key": "k"})
    assert await requests_of(world) == []
    patient = {"Prefer": "respond-async", "Idempotency-Key": "k"}
    assert (await world.chat(rollout, "Guess.", headers=patient)).body["step_id"] == "row_0_0"
    assert await requests_of(world) == []
    impatient = SharedSessions(world.ports, run=world.run, config=world.config, resend_s=0.0)
    await impatient.step(secret, "row_0_0")
    (asked,) = await requests_of(world)
    assert (asked["step_id"], asked["epoch"]) == ("row_0_0", 1)
    assert (await world.chat(rollout, "Guess.", headers={"Prefer": "respond-async"})).body["step_id"] == "row_0_1"


async def test_all_choices_of_a_request_whose_proxy_was_killed_before_it_asked_are_asked_for(
    world: World, tmp_path: Path
) -> None:
    await open_occurrence(world.ports, world.run, world.config, REQUEST)
    rollout = await world.lease_one()
    secret = secret_of(rollout)
    await killed_at("ask-claimed", world, tmp_path, {"chat": secret, "text": "Guess.", "key": "k", "choices": 3})
    assert await requests_of(world) == []
    impatient = SharedSessions(world.ports, run=world.run, config=world.config, resend_s=0.0)
    again = request_of([user("Guess.")], num_choices=3)
    assert await impatient.chat(secret, again, key="k", hold_s=0) == Pending(step_id="row_0_0")
    asked = await requests_of(world)
    assert [(item["step_id"], item["epoch"]) for item in asked] == [(f"row_0_{number}", 1) for number in range(3)]
    # No number of theirs is given to anybody else.
    assert (await world.chat(rollout, "Other.", headers={"Prefer": "respond-async"})).body["step_id"] == "row_0_3"


async def test_a_report_whose_proxy_was_killed_before_it_told_is_told_once(world: World, tmp_path: Path) -> None:
    await open_occurrence(world.ports, world.run, world.config, REQUEST)
    rollout = await world.lease_one()
    body = {"id": "row_0", "aggregate_reward_score": 0.5, "metrics_list": []}
    await killed_at("sample-reported", world, tmp_path, {"report": rollout["report_secret"], "body": body})
    assert (await world.sample("row_0")).state is SampleState.REPORTED
    assert await world.news() == []
    # The worker, which has no answer, says it again; so does the message, whose lease runs out.
    assert (await world.report(rollout, 0.5, metrics_list=[])).status == 200
    assert [response.rewards for response in await world.news()] == [{"aggregate_score": 0.5}]
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert (await world.ports.rollout_response.counts()).num_sent == 1
