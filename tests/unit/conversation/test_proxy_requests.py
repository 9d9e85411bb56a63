"""What the proxy takes and refuses: reports, chat parameters, messages, sizes and routes."""

from typing import TYPE_CHECKING, Any

import pytest

from turnmill.conversation.asgi import MAX_BODY_BYTES
from turnmill.records import DropReason, InvalidReason, SampleState

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World


# ---------------------------------------------------------------- reports


async def test_the_same_report_twice_is_recorded_once(world: "World") -> None:
    rollout = await world.begin()
    assert [(await world.report(rollout, 0.5)).status for _ in range(2)] == [200, 200]
    assert world.counts.num_reports == 1
    assert len(await world.news()) == 1
    assert (await world.report(rollout, 0.75)).code == "reported_otherwise"
    assert (await world.sample()).reward == 0.5
    await world.alter(state=SampleState.DROPPED, drop_reason=DropReason.NO_SIGNAL)
    assert (await world.report(rollout, 0.5)).status == 200


async def test_a_report_does_not_undo_what_was_written_since_the_lease(world: "World") -> None:
    rollout = await world.begin()
    await world.alter(call_bound=500)
    assert (await world.report(rollout, 0.5)).status == 200
    assert ((await world.sample()).state, (await world.sample()).call_bound) == (SampleState.REPORTED, 500)


async def test_a_report_about_a_sample_that_was_dropped_is_409(world: "World") -> None:
    rollout = await world.begin()
    await world.alter(state=SampleState.DROPPED, drop_reason=DropReason.CANCELLED)
    assert (await world.report(rollout, 0.5)).status == 409
    assert (await world.sample()).state is SampleState.DROPPED
    assert await world.news() == []


async def test_an_attempt_of_many_calls_is_reported_with_all_of_them(world: "World") -> None:
    rollout = await world.begin()
    for number in range(70):
        await world.chat(rollout, f"Guess {number}.")
    assert (await world.report(rollout, 0.5)).status == 200
    sample = await world.sample()
    assert len(sample.calls) == 70
    assert not world.is_lone or sample.call_bound == 128


async def test_a_null_reward_is_recorded_with_its_reason(world: "World") -> None:
    rollout = await world.begin()
    assert (await world.report(rollout, None, reason="env_error", detail="it broke")).status == 200
    sample = await world.sample()
    assert (sample.state, sample.reward, sample.reason, sample.detail) == (
        SampleState.INVALID,
        None,
        InvalidReason.ENV_ERROR,
        "it broke",
    )
    (response,) = await world.news()
    assert response.reason is InvalidReason.ENV_ERROR


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"aggregate_reward_score": None}, "reason"),
        ({"aggregate_reward_score": 0.5, "reason": "infra"}, "reason"),
        ({"aggregate_reward_score": None, "reason": "bad_luck"}, "reason"),
        ({"aggregate_reward_score": 1.5}, "aggregate_reward_score"),
        ({"aggregate_reward_score": -0.1}, "aggregate_reward_score"),
        ({"aggregate_reward_score": "1"}, "aggregate_reward_score"),
        ({"aggregate_reward_score": "NaN"}, "aggregate_reward_score"),
        ({"aggregate_reward_score": True}, "aggregate_reward_score"),
        ({"aggregate_reward_score": 10**400}, "aggregate_reward_score"),
        ({"id": "task_1"}, "sample_id"),
        ({"id": None}, "id"),
        ({"metrics_list": {}}, "metrics_list"),
        ({"metrics_list": [{"name": "a", "value": 1}]}, "metrics_list[0]"),
        ({"metrics_list": [{"name": "a", "value": None, "type": "Metric"}]}, "metrics_list[0].value"),
        ({"metrics_list": [{"name": "a", "value": 1, "type": "Other"}]}, "metrics_list[0].type"),
        ({"metrics_list": [{"name": "a", "value": True, "type": "Reward"}]}, "metrics_list[0].value"),
        ({"metrics_list": [{"name": "", "value": 1, "type": "Reward"}]}, "metrics_list[0].name"),
        ({"metrics_list": [{"name": "a", "value": 1, "type": "Metric"}] * 2}, "metrics_list[1].name"),
        ({"reward": 1.0}, "reward"),
    ],
)
async def test_a_wrong_report_is_400_and_records_nothing(world: "World", changes: dict[str, Any], param: str) -> None:
    rollout = await world.begin()
    body = {"id": "task_0", "aggregate_reward_score": 0.5, "metrics_list": [], **changes}
    answer = await world.post("/v1/rollouts/report", body, token=rollout["report_secret"])
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert (await world.sample()).state is SampleState.LEASED


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "task_0", "aggregate_reward_score": NaN, "metrics_list": []}',
        b'{"id": "task_0", "aggregate_reward_score": Infinity, "metrics_list": []}',
        b'{"id": "task_0", "aggregate_reward_score": -Infinity, "metrics_list": []}',
        b'{"id": "task_0", "aggregate_reward_score": [1], "metrics_list": []}',
        b'{"id": "task_0", "aggregate_reward_score": 1, "metrics_list": [{"name":"a","value":NaN,"type":"Metric"}]}',
        b'{"id": "task_0", "aggregate_reward_score": 1, "metrics_list": [{"name":"a","value":1e999,"type":"Metric"}]}',
        b'{"id": "task_0", "aggregate_reward_score": 1e999, "metrics_list": []}',
        b'{"id": "task_0", "metrics_list": []}',
        b'{"id": "task_0", "aggregate_reward_score": 1}',
        b'{"aggregate_reward_score": 1, "metrics_list": []}',
        b"[]",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
async def test_a_malformed_report_is_400(world: "World", body: bytes) -> None:
    rollout = await world.begin()
    assert (await world.post("/v1/rollouts/report", body, token=rollout["report_secret"])).status == 400
    assert (await world.sample()).state is SampleState.LEASED


# ---------------------------------------------------------------- refused requests


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": "yes"},
        {"n": 17},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"temperature": 0.5},
        {"temperature": True},
        {"top_p": 0.9},
        {"top_k": 20},
        {"stop": [""]},
        {"seed": 1.5},
        {"logprobs": 3},
        {"top_logprobs": 2},
        {"stream_options": {"include_usage": True}},
        {"frequency_penalty": 0.1},
        {"max_tokens": 65},
        {"max_completion_tokens": 0},
        {"response_format": {"type": "json_object"}},
        {"tempreature": 1.0},
        {"sample_id": "task_1"},
        {"messages": []},
    ],
)
async def test_a_parameter_that_is_not_served_is_refused_by_name(world: "World", changes: dict[str, Any]) -> None:
    rollout = await world.begin()
    answer = await world.chat(rollout, "Guess.", **changes)
    (key,) = changes
    assert (answer.status, answer.body["error"]["param"]) == (400, "tools[0]" if key == "tools" else key)
    assert key in answer.body["error"]["message"] or key == "sample_id"
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert not world.replica.requests


async def test_parameters_that_ask_for_what_happens_anyway_are_fine(world: "World") -> None:
    rollout = await world.begin()
    answer = await world.chat(
        rollout, "Guess.", temperature=1, top_p=1.0, top_k=0, n=1, stream=False, tools=None, max_tokens=16, user="me"
    )
    assert answer.status == 200
    assert world.replica.requests[0].sampling.max_new_tokens == 16


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "x", "audio": {"id": "1"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "x"}, "messages"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}, "messages[0].content"),
        (5, "messages[0]"),
    ],
)
async def test_a_message_that_is_not_served_is_refused_by_name(world: "World", message: Any, param: str) -> None:
    rollout = await world.begin()
    body = {"model": "turnmill", "messages": [message]}
    answer = await world.post(f"{rollout['base_url']}/chat/completions", body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


async def test_text_parts_are_one_text(world: "World") -> None:
    rollout = await world.begin()
    parts = [{"type": "text", "text": "Gue"}, {"type": "text", "text": "ss."}]
    await world.chat(rollout, {"role": "user", "content": parts})
    assert world.replica.requests[0].messages == [{"role": "user", "content": "Guess."}]


async def test_a_body_that_is_too_large_is_413(world: "World") -> None:
    rollout = await world.begin()
    answer = await world.chat(rollout, "x" * MAX_BODY_BYTES)
    assert (answer.status, answer.code) == (413, "body_too_large")


async def test_unknown_routes_and_methods_are_told(world: "World") -> None:
    assert (await world.post("/v1/other", {})).status == 404
    async with world.http.get(f"{world.url}/v1/rollouts/lease") as response:
        assert response.status == 405
    async with world.http.get(f"{world.url}/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "body",
    [
        {"worker": "", "max_rollouts": 1, "wait_s": 0},
        {"worker": "w", "max_rollouts": 0, "wait_s": 0},
        {"worker": "w", "max_rollouts": True, "wait_s": 0},
        {"worker": "w", "max_rollouts": 1, "wait_s": -1},
        {"worker": "w", "max_rollouts": 1},
        # A whole number that no float holds.
        {"worker": "w", "max_rollouts": 1, "wait_s": 10**400},
    ],
)
async def test_a_wrong_lease_request_is_400(world: "World", body: dict[str, Any]) -> None:
    assert (await world.post("/v1/rollouts/lease", body, token="worker-token-0123456789")).status == 400
