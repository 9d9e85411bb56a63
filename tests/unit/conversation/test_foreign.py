"""Samples of a foreign trainer, by the messages that it knows and through the proxies that share their records."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.conversation.conftest import CONFIG, RUN, World, open_external_world
from tests.unit.conversation.foreign_peer import EXTERNAL, Generator, opened, rollout_request
from turnmill.conversation.foreign import MAX_STEPS, open_occurrence, step_id_of
from turnmill.conversation.history import read_calls
from turnmill.conversation.responses import Outcome
from turnmill.conversation.sessions import Sessions
from turnmill.errors import InvalidInput, InvalidRequest
from turnmill.ports import Message, Write
from turnmill.records import (
    DeadSample,
    InvalidReason,
    Occurrence,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    dead_letter_key,
    decode,
    encode,
    occurrence_key,
)
from turnmill.wiring.running.redriving import redrive_sample


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_external_world(tmp_path) as opened:
        yield opened


async def told(world: World) -> list[dict[str, Any]]:
    """Rollout responses, as the trainer takes them."""
    messages = await world.ports.rollout_response.lease(max_messages=64, lease_s=30)
    await world.ports.rollout_response.ack([message.receipt for message in messages])
    return [msgspec.json.decode(message.body) for message in messages]


# ---------------------------------------------------------------- rollout requests


async def test_a_rollout_request_is_on_its_way_to_a_worker(world: World) -> None:
    sample = await opened(world)
    assert (sample.state, sample.wire_id, sample.request.rewards) == (
        SampleState.REQUESTED,
        "row_0",
        {"range": [-1.0, 2.0]},
    )
    rollout = await world.lease_one()
    assert rollout["request"]["data"] == {"prompt": "Guess."}
    assert rollout["request"]["max_length"] == 512
    assert rollout["request"]["timestamp"] == "2026-01-01T00:00:00Z"


async def test_a_repeated_request_for_an_open_sample_is_no_second_rollout(world: World) -> None:
    first = await opened(world)
    assert await opened(world) == first
    assert await opened(world, data={"prompt": "Other."}) == first
    rollout = await world.lease_one()
    leased = await opened(world)
    assert (leased.sample_id, leased.state) == ("row_0", SampleState.LEASED)
    assert (await world.report(rollout)).status == 200
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert len(await told(world)) == 1


async def test_the_same_ids_sent_again_when_they_have_ended_are_as_many_rollouts_again(world: World) -> None:
    ids = [f"row-{row}_{index}" for row in range(8) for index in range(8)]
    answered: list[str] = []
    for score in (0.5, 1.5):
        await asyncio.gather(*(opened(world, sample_id) for sample_id in ids))
        num_played = 0
        while num_played < len(ids):
            rollouts = (await world.lease(max_rollouts=16)).body["rollouts"]
            answers = await asyncio.gather(*(world.report(rollout, score) for rollout in rollouts))
            assert {answer.status for answer in answers} == {200}
            num_played += len(rollouts)
        while len(responses := await told(world)) > 0:
            answered += [response["sample_id"] for response in responses]
            assert {response["rewards"]["aggregate_score"] for response in responses} == {score}
    assert sorted(answered) == sorted([*ids, *ids])
    samples = await world.ports.records.scan("samples/run-1/")
    assert len(samples) == 128
    assert {decode(stored.value, SampleRecord).reward for stored in samples} == {0.5, 1.5}


async def test_two_requests_at_once_for_an_ended_sample_open_one_occurrence(world: World) -> None:
    for index in range(3):
        samples = await asyncio.gather(*(opened(world) for _ in range(8)))
        assert {sample.sample_id for sample in samples} == {"row_0" if index == 0 else f"row_0~{index}"}
        await world.report(await world.lease_one())
        assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert len(await told(world)) == 3


async def test_a_request_goes_on_where_a_killed_one_stopped(world: World) -> None:
    request = RolloutRequest(
        sample_id="row_0",
        timestamp="2026-01-01T00:00:00Z",
        max_length=512,
        rewards={"range": [0.0, 1.0]},
        data={},
        run_id="run-1",
    )
    # Killed before the sample was made.
    occurrence = Occurrence(run_id="run-1", wire_id="row_0", index=0, request=request)
    await world.ports.records.write([Write(key=occurrence.key, value=encode(occurrence), expected=0)])
    sample = await opened(world)
    assert sample.request == request
    assert (await world.ports.rollout_request.counts()).available == 1
    # Killed before the message was sent.
    await world.ports.rollout_request.purge()
    await world.ports.records.write([Write(key=occurrence_key("run-1", "row_1"), value=None, expected=None)])
    other = replace(sample, sample_id="row_1", wire_id="row_1", request=replace(request, sample_id="row_1"))
    entry = replace(occurrence, wire_id="row_1", request=other.request)
    await world.ports.records.write([Write(key=item.key, value=encode(item), expected=0) for item in (entry, other)])
    assert await opened(world, "row_1") == other
    assert (await world.lease_one())["request"]["sample_id"] == "row_1"


async def test_ids_that_look_like_occurrences_of_others_are_samples_of_their_own(world: World) -> None:
    await opened(world, "a")
    await world.report(await world.lease_one())
    await opened(world, "a")
    await opened(world, "a~1")
    rollouts = (await world.lease()).body["rollouts"]
    assert len({rollout["request"]["sample_id"] for rollout in rollouts}) == 2
    for rollout in rollouts:
        assert (await world.report(rollout)).status == 200
    assert sorted(response["sample_id"] for response in await told(world)) == ["a", "a", "a~1"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": "v1"}, "version"),
        ({"sample_id": ""}, "sample_id"),
        ({"sample_id": 7}, "sample_id"),
        ({"sample_id": "x" * 257}, "sample_id"),
        ({"sample_id": "a\nb"}, "sample_id"),
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": "yesterday"}, "timestamp"),
        ({"timestamp": 7}, "timestamp"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": True}, "max_length"),
        ({"max_length": None}, "max_length"),
        ({"rewards": {"range": [1, 0]}}, "rewards"),
        ({"rewards": {"range": [0]}}, "rewards"),
        ({"rewards": {"range": [0, float("nan")]}}, "rewards"),
        ({"rewards": [0, 1]}, "rewards"),
        ({"rewards": None}, "rewards"),
        ({"data": []}, "data"),
        ({"data": None}, "data"),
    ],
)
async def test_a_bad_request_is_refused_with_the_name_of_its_field(
    world: World, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput, match=f"rollout request: {field} "):
        await open_occurrence(world.ports, EXTERNAL, world.config, rollout_request(**changes))
    assert (await world.ports.rollout_request.counts()).available == 0


async def test_a_run_of_our_own_takes_no_rollout_requests_and_one_process_alone_serves_no_foreign_trainer(
    world: World,
) -> None:
    with pytest.raises(InvalidInput, match="external"):
        await open_occurrence(world.ports, RUN, CONFIG, rollout_request())
    with pytest.raises(InvalidInput, match="foreign trainer"):
        Sessions(world.ports, run=EXTERNAL, config=CONFIG)


# ---------------------------------------------------------------- conversations


async def test_a_conversation_is_played_by_the_fields_of_v0_alone(world: World) -> None:
    await opened(world)
    rollout = await world.lease_one()
    generator = Generator(world.ports)
    running = asyncio.create_task(generator.run())
    first = await world.chat(rollout, {"role": "system", "content": "Play."}, "Guess.")
    assert first.text == "answer row_0_0"
    reply = first.body["choices"][0]["message"]
    second = await world.chat(rollout, {"role": "system", "content": "Play."}, "Guess.", reply, "Again.")
    assert second.text == "answer row_0_1"
    assert second.body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert (await world.report(rollout, 1.75, id="row_0")).status == 200
    running.cancel()
    asked = [(item["step_id"], [message["content"] for message in item["messages"]]) for item in generator.seen]
    assert asked == [
        ("row_0_0", ["Play.", "Guess."]),
        ("row_0_1", ["Play.", "Guess.", "answer row_0_0", "Again."]),
    ]
    (response,) = await told(world)
    assert {name: response[name] for name in ("version", "sample_id", "stop_reason", "rewards")} == {
        "version": "v0",
        "sample_id": "row_0",
        "stop_reason": "end_of_conversation",
        "rewards": {"aggregate_score": 1.75},
    }
    sample = await world.sample("row_0")
    assert sample.calls == ("row_0_0", "row_0_1")
    calls = await read_calls(world.ports.records, "run-1", Purpose.TRAIN, "row_0")
    assert [(call.token_ids, call.loss_mask, call.version) for call in calls] == [([5, 6, 7], [1, 1, 1], "4")] * 2
    assert calls[1].parent_digest == calls[0].digest


async def test_names_of_steps_are_not_used_again_and_late_answers_reach_no_live_call(world: World) -> None:
    generator = Generator(world.ports)
    await opened(world)
    first = await world.lease_one()
    async_ = {"Prefer": "respond-async"}
    assert (await world.chat(first, "Guess.", headers=async_)).status == 202
    (of_first,) = await generator.take()
    # The worker dies; its successor says something else.
    await world.ports.rollout_request.release([(await world.sample("row_0")).receipt or ""])
    second = await world.lease_one()
    step = (await world.chat(second, "Other.", headers=async_)).body["step_id"]
    (of_second,) = await generator.take()
    url = f"{second['base_url']}/chat/completions/{step}"
    assert await generator.tell(generator.answer(of_first, "late")) is Outcome.RECORDED
    assert (await world.get(url)).status == 202
    assert await generator.tell(generator.answer(of_second, "mine")) is Outcome.RECORDED
    assert (await world.get(url)).text == "mine"
    assert (await world.report(second)).status == 200

    # The next occurrence of the same id.
    await opened(world)
    third = await world.lease_one()
    assert (await world.chat(third, "Guess.", headers=async_)).status == 202
    (of_third,) = await generator.take()
    assert of_third["sample_id"] == "row_0"
    assert [item["step_id"] for item in (of_first, of_second, of_third)] == [
        "row_0_0",
        "row_0_1",
        f"row_0_{MAX_STEPS}",
    ]
    assert await generator.tell(generator.answer(of_first, "much later")) is Outcome.UNKNOWN
    assert await generator.tell(generator.answer(of_third, "right")) is Outcome.RECORDED
    assert await generator.tell(generator.answer(of_third, "twice")) is Outcome.KNOWN
    assert (await world.chat(third, "Guess.", headers={"x-stainless-retry-count": "1"})).text == "right"


async def test_a_sample_makes_no_more_calls_than_its_steps_have_names(world: World) -> None:
    sample = replace(await opened(world), call_bound=MAX_STEPS)
    assert step_id_of(sample, "row_0~1_5", 2 * MAX_STEPS - 1) == f"row_0_{2 * MAX_STEPS - 1}"
    with pytest.raises(InvalidRequest, match="more than are served"):
        step_id_of(sample, "row_0~1_5", 2 * MAX_STEPS)
    assert step_id_of(replace(sample, wire_id=None), "task_0_5", 10**6) == "task_0_5"


# ---------------------------------------------------------------- samples without a score


async def test_a_rollout_without_a_score_is_played_again_and_at_last_answered_with_its_reason(world: World) -> None:
    await opened(world)
    for attempt in range(1, world.config.max_attempts + 1):
        rollout = await world.lease_one()
        assert rollout["attempt"] == attempt
        for _ in range(2):
            # Its answer was lost: the worker says it once more.
            answer = await world.report(rollout, None, reason="env_error", detail=f"broke {attempt}")
            assert answer.status == 200
        if attempt < world.config.max_attempts:
            assert await told(world) == [] == world.dead
            assert (await world.report(rollout, 1.0)).status == 409
    (response,) = await told(world)
    assert (response["sample_id"], response["stop_reason"], response["rewards"]) == (
        "row_0",
        "env_error",
        {"aggregate_score": -1.0},
    )
    sample = await world.sample("row_0")
    assert (sample.state, sample.reason, sample.reward) == (SampleState.INVALID, InvalidReason.ENV_ERROR, None)
    assert {dead.sample_id for dead in world.dead} == {"row_0"}
    (stored,) = await world.ports.records.get([dead_letter_key("run-1", "train/row_0")])
    assert stored is not None
    letter = decode(stored.value, DeadSample)
    assert (letter.num_attempts, letter.detail) == (3, "broke 3")
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}


async def test_an_attempt_that_is_scored_after_one_that_was_not_counts(world: World) -> None:
    await opened(world)
    await world.report(await world.lease_one(), None, reason="reward_error", detail="broke")
    rollout = await world.lease_one()
    assert (await world.report(rollout, 0.5)).status == 200
    sample = await world.sample("row_0")
    assert (sample.state, sample.reward, sample.reason, sample.detail) == (SampleState.REPORTED, 0.5, None, None)
    assert world.dead == []


async def test_a_sample_whose_workers_die_is_answered_as_infra(world: World) -> None:
    await opened(world)
    for _ in range(world.config.max_attempts):
        await world.lease_one()
        await world.ports.rollout_request.release([(await world.sample("row_0")).receipt or ""])
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    (response,) = await told(world)
    assert (response["stop_reason"], response["rewards"]) == ("infra", {"aggregate_score": -1.0})
    assert [dead.sample_id for dead in world.dead] == ["row_0"]
    # It may be asked for again.
    assert (await opened(world)).sample_id == "row_0~1"


async def test_a_given_up_sample_is_not_redriven_since_its_trainer_was_answered(world: World) -> None:
    await world.ports.runs.write([Write(key=EXTERNAL.key, value=encode(EXTERNAL), expected=0)])
    await opened(world)
    for _ in range(world.config.max_attempts):
        await world.report(await world.lease_one(), None, reason="env_error")
    (stored,) = await world.ports.records.get([dead_letter_key("run-1", "train/row_0")])
    assert stored is not None
    with pytest.raises(InvalidInput, match="foreign trainer"):
        await redrive_sample(world.ports, decode(stored.value, DeadSample))


@pytest.mark.parametrize("score", [0.5, None])
async def test_who_dies_before_it_tells_is_followed_by_one_who_does_and_nobody_tells_twice(
    world: World, score: float | None
) -> None:
    sample = await opened(world)
    await world.lease_one()
    ended = replace(
        await world.sample("row_0"),
        state=SampleState.INVALID if score is None else SampleState.REPORTED,
        reason=InvalidReason.ENV_ERROR if score is None else None,
        reward=score,
    )
    await world.ports.records.write([Write(key=ended.key, value=encode(ended), expected=None)])
    await world.ports.rollout_request.release([ended.receipt or ""])
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert [item["rewards"] for item in await told(world)] == [{"aggregate_score": -1.0 if score is None else score}]
    assert [dead.sample_id for dead in world.dead] == (["row_0"] if score is None else [])
    assert (await world.sample("row_0")).is_told
    # Comes again, long after the queue has forgotten that it was told.
    again = Message(body=encode(sample.request), group="row_0", dedup_id="again")
    await world.ports.rollout_request.send([again])
    before = await world.ports.rollout_response.counts()
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert (await world.ports.rollout_response.counts()).num_sent == before.num_sent
