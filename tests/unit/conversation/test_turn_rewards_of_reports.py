"""What single calls are worth, from a report to the sample's record, in both forms of a run's sessions."""

from typing import TYPE_CHECKING, Any

import pytest

from turnmill.conversation.reports import MAX_TURN_REWARDS
from turnmill.records import SampleState

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World


async def two_turns(world: "World") -> tuple[dict[str, Any], list[str]]:
    """A rollout with two calls, and the ids of their completions."""
    rollout = await world.begin()
    first = await world.chat(rollout, "Guess.")
    second = await world.chat(rollout, "Guess.", first.body["choices"][0]["message"], "Again.")
    return rollout, [first.body["id"], second.body["id"]]


async def test_they_are_recorded_by_the_ids_of_the_completions(world: "World") -> None:
    rollout, ids = await two_turns(world)
    assert (await world.report(rollout, 0.5, turn_rewards={ids[1]: -2, ids[0]: 0.25})).status == 200
    sample = await world.sample()
    assert (sample.state, sample.reward) == (SampleState.REPORTED, 0.5)
    assert sample.turn_rewards == {ids[0]: 0.25, ids[1]: -2.0} and set(sample.turn_rewards) == set(sample.calls)
    assert sample.report_digest == sample.expected_report_digest()


async def test_the_same_ones_again_are_no_error_and_others_are_a_conflict(world: "World") -> None:
    rollout, ids = await two_turns(world)
    for _ in range(2):
        assert (await world.report(rollout, 0.5, turn_rewards={ids[0]: 1})).status == 200
    for other in ({}, {"turn_rewards": {ids[0]: 0.5}}, {"turn_rewards": {ids[1]: 1}}):
        assert (await world.report(rollout, 0.5, **other)).code == "reported_otherwise"


async def test_a_report_without_them_is_as_it_was(world: "World") -> None:
    for sample_id, more in (("task_0", {}), ("task_1", {"turn_rewards": {}}), ("task_2", {"turn_rewards": None})):
        rollout = await world.begin(sample_id)
        assert (await world.report(rollout, 0.5, **more)).status == 200
        assert (await world.sample(sample_id)).turn_rewards == {}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"task_0_7": 1.0}, "the attempt has no call 'task_0_7'"),
        ([1.0], "must be an object"),
        ({"task_0_0": "1"}, "must be a finite number"),
        ({"task_0_0": True}, "must be a finite number"),
        ({f"c{index}": 0.0 for index in range(MAX_TURN_REWARDS + 1)}, "at most 10000 are taken"),
    ],
)
async def test_a_wrong_one_is_400_and_records_nothing(world: "World", said: Any, text: str) -> None:
    rollout, _ = await two_turns(world)
    answer = await world.report(rollout, 0.5, turn_rewards=said)
    assert answer.status == 400 and text in answer.body["error"]["message"]
    assert answer.body["error"]["param"].startswith("turn_rewards")
    assert (await world.sample()).state is SampleState.LEASED


async def test_numbers_that_json_has_no_words_for_are_400(world: "World") -> None:
    rollout, ids = await two_turns(world)
    body = b'{"id": "task_0", "aggregate_reward_score": 1, "metrics_list": [], "turn_rewards": {"%b": 1e999}}'
    answer = await world.post("/v1/rollouts/report", body % ids[0].encode(), token=rollout["report_secret"])
    assert answer.status == 400
    assert (await world.sample()).state is SampleState.LEASED


async def test_a_rollout_without_a_score_has_none(world: "World") -> None:
    rollout, ids = await two_turns(world)
    answer = await world.report(rollout, None, reason="env_error", turn_rewards={ids[0]: 1.0})
    assert answer.status == 400 and "has no turn_rewards" in answer.body["error"]["message"]


async def test_each_of_several_choices_is_a_call_of_its_own_and_says_which(world: "World") -> None:
    rollout = await world.begin()
    completion = (await world.chat(rollout, "Guess.", n=3)).body
    ids = [choice["call_id"] for choice in completion["choices"]]
    assert len(set(ids)) == 3 and ids[0] == completion["id"]
    assert (await world.report(rollout, 0.5, turn_rewards={ids[2]: 1.0})).status == 200
    assert (await world.sample()).turn_rewards == {ids[2]: 1.0}


async def test_a_call_that_only_an_earlier_attempt_heard_is_none_of_the_report(lone_world: "World") -> None:
    world = lone_world
    rollout, ids = await two_turns(world)
    await world.lose_lease()
    again = await world.lease_one()
    assert (await world.chat(again, "Guess.")).body["id"] == ids[0]
    assert (await world.report(again, 0.5, turn_rewards={ids[1]: 1.0})).status == 400
    assert (await world.report(again, 0.5, turn_rewards={ids[0]: 1.0})).status == 200
    assert (await world.report(rollout, 0.5)).status == 409
