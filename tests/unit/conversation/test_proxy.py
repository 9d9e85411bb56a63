"""The proxy over HTTP: leases, chats, reports, and every way to be refused."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from turnmill.conversation.proxy import MAX_BODY_BYTES
from turnmill.errors import BackendUnavailable
from turnmill.records import (
    DeadSample,
    DropReason,
    InvalidReason,
    Purpose,
    RolloutResponse,
    SampleState,
    WorkerStatus,
    dead_letter_key,
    decode,
    worker_key,
)

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World, WorldOf

USER = {"role": "user", "content": "Guess."}


async def news(world: "World") -> list[RolloutResponse]:
    messages = await world.ports.rollout_response.lease(max_messages=64, lease_s=30)
    return [decode(message.body, RolloutResponse) for message in messages]


# ---------------------------------------------------------------- the way of one sample


async def test_a_sample_is_leased_played_and_reported(world: "World") -> None:
    rollout = await world.begin()
    assert rollout["attempt"] == 1
    assert rollout["request"]["data"] == {"prompt": [USER]}
    assert rollout["base_url"].startswith(f"{world.url}/a/")
    first = await world.chat(rollout, "Guess.")
    second = await world.chat(rollout, "Guess.", first.body["choices"][0]["message"], "Again.")
    assert (await world.report(rollout, 0.5)).body == {"status": "recorded"}

    sample = await world.sample()
    assert sample.state is SampleState.REPORTED
    assert (sample.reward, sample.metrics, sample.stop_reason) == (0.5, {"turns": 2.0}, "end_of_conversation")
    assert sample.calls == (first.body["id"], second.body["id"]) == ("task_0_0", "task_0_1")
    (response,) = await news(world)
    assert (response.sample_id, response.rewards) == ("task_0", {"aggregate_score": 0.5})
    counts = await world.ports.rollout_request.counts()
    assert (counts.available, counts.in_flight) == (0, 0)


async def test_an_answer_has_the_openai_shape(world: "World") -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "Guess.")
    assert first.body["object"] == "chat.completion"
    assert first.body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    second = await world.chat(rollout, "Guess.", first.body["choices"][0]["message"], "Again.")
    assert second.body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "answer task_0_1"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert second.body["usage"] == {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}


async def test_a_continuation_sends_only_the_new_messages(world: "World") -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, {"role": "system", "content": "Play."}, "Guess.")
    # As clients send it back: other white space, fields with null.
    reply = {"role": "assistant", "content": f" {first.text}\n", "refusal": None, "tool_calls": None}
    await world.chat(rollout, {"role": "system", "content": "Play."}, "Guess.", reply, "Again.")
    start, continuation = world.replica.requests
    assert (start.parent, [message["content"] for message in start.messages]) == (None, ["Play.", "Guess."])
    assert (continuation.parent, continuation.messages) == ("task_0_0", [{"role": "user", "content": "Again."}])
    assert continuation.max_length == world.config.max_length
    assert world.sessions.counts.num_forks == 0


async def test_an_empty_lease_comes_back_after_the_wait(world: "World") -> None:
    assert (await world.lease(wait_s=0.05)).body == {"rollouts": []}
    (stored,) = await world.ports.records.get([worker_key("run-1", "worker-0")])
    assert stored is not None
    assert decode(stored.value, WorkerStatus).worker == "worker-0"


async def test_a_waiting_worker_is_woken_by_a_request(world: "World") -> None:
    waiting = asyncio.create_task(world.lease(wait_s=20))
    await world.add_sample()
    assert len((await waiting).body["rollouts"]) == 1


async def test_samples_of_equal_ids_and_different_purposes_do_not_meet(world: "World") -> None:
    await world.add_sample(purpose=Purpose.TRAIN)
    train = await world.lease_one()
    await world.chat(train, "Guess.")
    await world.report(train, 0.0)
    await world.add_sample(purpose=Purpose.EVAL)
    evaluation = await world.lease_one()
    await world.chat(evaluation, "Guess.")
    await world.report(evaluation, 1.0)
    assert (await world.sample(purpose=Purpose.TRAIN)).reward == 0.0
    assert (await world.sample(purpose=Purpose.EVAL)).reward == 1.0


async def test_memory_holds_open_attempts_only(world: "World") -> None:
    for index in range(20):
        await world.add_sample(f"task_{index}")
    rollouts: list[dict[str, Any]] = []
    while len(rollouts) < 20:
        rollouts += (await world.lease()).body["rollouts"]
    assert world.sessions.num_attempts == 20
    await asyncio.gather(*(world.chat(rollout, "Guess.") for rollout in rollouts))
    await asyncio.gather(*(world.report(rollout) for rollout in rollouts))
    assert world.sessions.num_attempts == 0


# ---------------------------------------------------------------- secrets


async def test_wrong_secrets_are_401(world: "World") -> None:
    rollout = await world.begin()
    stranger = {**rollout, "base_url": f"{world.url}/a/{'x' * 43}/v1", "report_secret": "y" * 43}
    assert (await world.chat(stranger, "Guess.")).status == 401
    assert (await world.report(stranger)).status == 401
    assert (await world.lease(token="z" * 43)).status == 401
    body = {"worker": "worker-0", "lease_tokens": []}
    assert (await world.post("/v1/rollouts/heartbeat", body, token="z" * 43)).status == 401
    assert (await world.post("/v1/rollouts/heartbeat", body)).status == 401
    assert (await world.post("/v1/rollouts/heartbeat", body, Authorization="Basic abc")).status == 401


async def test_a_secret_opens_nothing_but_its_own_door(world: "World") -> None:
    rollout = await world.begin()
    chat_secret = rollout["base_url"].split("/")[-2]
    secrets = [chat_secret, rollout["report_secret"], rollout["lease_token"]]
    for secret in secrets[1:]:
        assert (await world.chat({**rollout, "base_url": f"{world.url}/a/{secret}/v1"}, "Guess.")).status == 401
    for secret in (chat_secret, rollout["lease_token"]):
        assert (await world.report({**rollout, "report_secret": secret})).status == 401
    for secret in secrets:
        assert (await world.lease(token=secret)).status == 401


async def test_secrets_are_in_no_log_and_in_no_file(world: "World", caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rollout = await world.begin()
    await world.chat(rollout, "Guess.")
    await world.chat(rollout, "Guess.")
    await world.lose_lease()
    again = await world.lease_one()
    await world.chat(rollout, "Guess.")
    await world.report(rollout)
    await world.report(again)
    assert caplog.records
    secrets = [
        secret
        for item in (rollout, again)
        for secret in (item["base_url"].split("/")[-2], item["report_secret"], item["lease_token"])
    ]
    logged = "\n".join([f"{record.getMessage()} {record.__dict__}" for record in caplog.records])
    stored = await world.stored_bytes()
    assert b"task_0" in stored
    for secret in secrets:
        assert secret not in logged
        assert secret.encode() not in stored


# ---------------------------------------------------------------- attempts


async def test_a_superseded_attempt_is_409(world: "World") -> None:
    first = await world.begin()
    await world.lose_lease()
    second = await world.lease_one()
    assert second["attempt"] == 2
    assert (await world.chat(first, "Guess.")).status == 409
    assert (await world.report(first)).status == 409
    assert (await world.report(second, 0.25)).status == 200
    assert ((await world.sample()).reward, (await world.sample()).attempt) == (0.25, 2)


async def test_a_call_that_waits_while_its_attempt_is_superseded_is_409(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    waiting = asyncio.create_task(world.chat(rollout, "Guess."))
    await world.replica.was_asked.wait()
    await world.lose_lease()
    await world.lease_one()
    world.replica.may_answer.set()
    assert (await waiting).status == 409


async def test_a_dropped_sample_is_409_after_the_heartbeat(world: "World") -> None:
    rollout = await world.begin()
    await world.alter(state=SampleState.DROPPED, drop_reason=DropReason.CANCELLED)
    body = {"worker": "worker-0", "lease_tokens": [rollout["lease_token"]]}
    assert (await world.post("/v1/rollouts/heartbeat", body, token="worker-token-0123456789")).body == {
        "lost": [rollout["lease_token"]]
    }
    assert (await world.chat(rollout, "Guess.")).status == 409
    assert (await world.report(rollout)).status == 409
    assert (await world.sample()).state is SampleState.DROPPED


async def test_a_dropped_sample_of_a_dead_worker_is_forgotten(world: "World") -> None:
    await world.begin()
    await world.alter(state=SampleState.DROPPED, drop_reason=DropReason.CANCELLED)
    await world.lose_lease()
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert world.sessions.num_attempts == 0
    assert (await world.ports.rollout_request.counts()).in_flight == 0


async def test_heartbeats_keep_a_lease_and_a_lost_one_is_told(world_of: "WorldOf") -> None:
    async with world_of(worker_lease_s=1.0) as world:
        rollout = await world.begin()
        body = {"worker": "worker-0", "lease_tokens": [rollout["lease_token"], "unknown"]}
        for _ in range(5):
            answer = await world.post("/v1/rollouts/heartbeat", body, token="worker-token-0123456789")
            assert answer.body == {"lost": ["unknown"]}
            await asyncio.sleep(0.25)
        assert (await world.lease(wait_s=0)).body == {"rollouts": []}
        again = await world.lease_one()
        assert again["attempt"] == 2
        answer = await world.post("/v1/rollouts/heartbeat", body, token="worker-token-0123456789")
        assert answer.body == {"lost": [rollout["lease_token"], "unknown"]}


async def test_after_the_last_attempt_the_sample_is_invalid_with_a_dead_letter(world_of: "WorldOf") -> None:
    async with world_of(max_attempts=2) as world:
        await world.begin()
        await world.lose_lease()
        assert (await world.lease_one())["attempt"] == 2
        await world.lose_lease()
        assert (await world.lease(wait_s=0)).body == {"rollouts": []}
        sample = await world.sample()
        assert (sample.state, sample.reason, sample.reward) == (SampleState.INVALID, InvalidReason.INFRA, None)
        (stored,) = await world.ports.records.get([dead_letter_key("run-1", "train/task_0")])
        assert stored is not None
        letter = decode(stored.value, DeadSample)
        assert (letter.num_attempts, letter.request.sample_id) == (2, "task_0")
        (response,) = await news(world)
        assert (response.rewards, response.reason) == ({"aggregate_score": None}, InvalidReason.INFRA)
        counts = await world.ports.rollout_request.counts()
        assert (counts.available, counts.in_flight, counts.dead) == (0, 0, 0)


async def test_a_message_about_an_ended_sample_is_acked_and_its_end_told_again(world: "World") -> None:
    await world.add_sample()
    await world.alter(state=SampleState.INVALID, reason=InvalidReason.INFRA)
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert [response.sample_id for response in await news(world)] == ["task_0"]
    assert (await world.ports.rollout_request.counts()).in_flight == 0


async def test_a_worker_that_went_away_uses_up_no_attempt(world: "World") -> None:
    def is_polling() -> bool:
        return any(task.get_name() == "sessions-take" for task in asyncio.all_tasks())

    waiting = asyncio.create_task(world.lease(wait_s=20))
    while not is_polling():  # noqa: ASYNC110 - a poll inside the server has no event
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    while is_polling():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)
    assert (await world.begin())["attempt"] == 1


# ---------------------------------------------------------------- reports


async def test_the_same_report_twice_is_recorded_once(world: "World") -> None:
    rollout = await world.begin()
    assert [(await world.report(rollout, 0.5)).status for _ in range(2)] == [200, 200]
    assert world.sessions.counts.num_reports == 1
    assert len(await news(world)) == 1
    assert (await world.report(rollout, 0.75)).code == "reported_otherwise"
    assert (await world.sample()).reward == 0.5
    await world.alter(state=SampleState.DROPPED, drop_reason=DropReason.NO_SIGNAL)
    assert (await world.report(rollout, 0.5)).status == 200


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
    (response,) = await news(world)
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
        ({"aggregate_reward_score": True}, "aggregate_reward_score"),
        ({"id": "task_1"}, "sample_id"),
        ({"id": None}, "id"),
        ({"metrics_list": {}}, "metrics_list"),
        ({"metrics_list": [{"name": "a", "value": 1}]}, "metrics_list[0]"),
        ({"metrics_list": [{"name": "a", "value": None, "type": "Metric"}]}, "metrics_list[0].value"),
        ({"metrics_list": [{"name": "a", "value": 1, "type": "Other"}]}, "metrics_list[0].type"),
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
        {"stream": True},
        {"n": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"temperature": 0.5},
        {"temperature": True},
        {"top_p": 0.9},
        {"top_k": 20},
        {"stop": ["\n"]},
        {"seed": 1},
        {"logprobs": True},
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
    assert (answer.status, answer.body["error"]["param"]) == (400, key)
    assert key in answer.body["error"]["message"] or key == "sample_id"
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
        (5, "messages[0]"),
    ],
)
async def test_a_message_that_is_not_served_is_refused_by_name(world: "World", message: Any, param: str) -> None:
    rollout = await world.begin()
    body = {"model": "policy", "messages": [message]}
    answer = await world.post(f"{rollout['base_url']}/chat/completions", body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


async def test_text_parts_are_one_text(world: "World") -> None:
    rollout = await world.begin()
    parts = [{"type": "text", "text": "Gue"}, {"type": "text", "text": "ss."}]
    await world.chat(rollout, {"role": "user", "content": parts})
    assert world.replica.requests[0].messages == [USER]


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
    ],
)
async def test_a_wrong_lease_request_is_400(world: "World", body: dict[str, Any]) -> None:
    assert (await world.post("/v1/rollouts/lease", body, token="worker-token-0123456789")).status == 400


# ---------------------------------------------------------------- closing


async def test_who_waits_when_the_proxy_closes_gets_503(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with world.restarted() as second:
        calls = [asyncio.create_task(second.chat(second.here(rollout), "Guess.")) for _ in range(3)]
        lease = asyncio.create_task(second.lease(wait_s=20))
        await world.replica.was_asked.wait()
    assert [answer.status for answer in await asyncio.gather(*calls)] == [503, 503, 503]
    assert (await lease).body == {"rollouts": []}


async def test_without_its_backend_the_proxy_refuses_at_once_and_says_so(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    waiting = asyncio.create_task(world.chat(rollout, "Guess."))
    await world.replica.was_asked.wait()
    world.ports.close()
    with pytest.raises(BackendUnavailable):
        await world.sessions.watch()
    assert (await waiting).status == 503
    assert (await world.chat(rollout, "Guess.")).status == 503
    assert (await world.report(rollout)).status == 503
    assert (await world.lease(wait_s=20)).status == 503
    async with world.http.get(f"{world.url}/healthz") as response:
        assert response.status == 503


async def test_five_hundred_connections_are_served_at_once(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        many = replace(world, http=http)
        calls = [asyncio.create_task(many.chat(rollout, f"Guess {index}.")) for index in range(500)]
        await world.replica.was_asked.wait()
        world.replica.may_answer.set()
        answers = await asyncio.gather(*calls)
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body["id"] for answer in answers}) == 500
