"""The proxy over HTTP: leases, chats, reports, and every way to be refused."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from turnmill.errors import BackendUnavailable
from turnmill.records import (
    DeadSample,
    DropReason,
    InvalidReason,
    Purpose,
    SampleState,
    WorkerStatus,
    dead_letter_key,
    decode,
    worker_key,
)

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World, WorldOf

USER = {"role": "user", "content": "Guess."}


# ---------------------------------------------------------------- the way of one sample


async def test_a_sample_is_leased_played_and_reported(world: "World") -> None:
    rollout = await world.begin()
    assert rollout["attempt"] == 1
    assert rollout["request"]["data"] == {"prompt": [USER]}
    assert rollout["base_url"].startswith(tuple(f"{url}/a/" for url in world.urls))
    first = await world.chat(rollout, "Guess.")
    second = await world.chat(rollout, "Guess.", first.body["choices"][0]["message"], "Again.")
    assert (await world.report(rollout, 0.5)).body == {"status": "recorded"}

    sample = await world.sample()
    assert sample.state is SampleState.REPORTED
    assert (sample.reward, sample.metrics, sample.stop_reason) == (0.5, {"turns": 2.0}, "end_of_conversation")
    assert sample.calls == (first.body["id"], second.body["id"]) == ("task_0_0", "task_0_1")
    (response,) = await world.news()
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
    assert world.counts.num_forks == 0


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


async def test_memory_holds_open_attempts_only(lone_world: "World") -> None:
    for index in range(20):
        await lone_world.add_sample(f"task_{index}")
    rollouts: list[dict[str, Any]] = []
    while len(rollouts) < 20:
        rollouts += (await lone_world.lease()).body["rollouts"]
    assert lone_world.sessions.num_attempts == 20
    await asyncio.gather(*(lone_world.chat(rollout, "Guess.") for rollout in rollouts))
    await asyncio.gather(*(lone_world.report(rollout) for rollout in rollouts))
    assert lone_world.sessions.num_attempts == 0


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


async def test_the_name_of_an_attempt_opens_nothing(world: "World") -> None:
    rollout = await world.begin()
    chat_secret = rollout["base_url"].split("/")[-2]
    assert chat_secret[:16] == rollout["report_secret"][:16] == rollout["lease_token"][:16]

    async def is_refused(by: "World") -> None:
        for guess in (chat_secret[:16], chat_secret[:16] + "x" * 43, chat_secret[:-1] + "-"):
            assert (await by.chat({**rollout, "base_url": f"{by.url}/a/{guess}/v1"}, "Guess.")).status == 401
        for guess in (chat_secret[:16], chat_secret[:16] + "x" * 43, "ü" * 16, "/" * 59):
            assert (await by.report({**rollout, "report_secret": guess})).status == 401
            body = {"worker": "worker-0", "lease_tokens": [guess, ""]}
            answer = await by.post("/v1/rollouts/heartbeat", body, token="worker-token-0123456789")
            assert answer.body == {"lost": [guess, ""]}

    await is_refused(world)
    async with world.restarted() as second:
        # There it is found by its record only.
        await is_refused(second)
        assert (await world.chat(second.here(rollout), "Guess.")).status == 200
    assert (await world.report(rollout)).status == 200


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
    assert not world.is_lone or world.sessions.num_attempts == 0
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
        (response,) = await world.news()
        assert (response.rewards, response.reason) == ({"aggregate_score": None}, InvalidReason.INFRA)
        counts = await world.ports.rollout_request.counts()
        assert (counts.available, counts.in_flight, counts.dead) == (0, 0, 0)


async def test_a_message_about_an_ended_sample_is_acked_and_its_end_told_again(world: "World") -> None:
    await world.add_sample()
    await world.alter(state=SampleState.INVALID, reason=InvalidReason.INFRA)
    assert (await world.lease(wait_s=0)).body == {"rollouts": []}
    assert [response.sample_id for response in await world.news()] == ["task_0"]
    assert (await world.ports.rollout_request.counts()).in_flight == 0


async def until_polling(is_wanted: bool) -> None:
    """Until a lease request waits in the server, or none does any more: inside the server that has no event."""
    while any(task.get_name() == "sessions-take" for task in asyncio.all_tasks()) != is_wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_worker_that_went_away_uses_up_no_attempt(world: "World") -> None:
    waiting = asyncio.create_task(world.lease(wait_s=20))
    await until_polling(True)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until_polling(False)
    assert (await world.begin())["attempt"] == 1


# ---------------------------------------------------------------- closing


async def test_who_waits_when_the_proxy_closes_gets_503(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with world.restarted() as second:
        calls = [asyncio.create_task(second.chat(second.here(rollout), "Guess.")) for _ in range(3)]
        lease = asyncio.create_task(second.lease(wait_s=20))
        await world.replica.was_asked.wait()
        await until_polling(True)
    assert [answer.status for answer in await asyncio.gather(*calls)] == [503, 503, 503]
    assert (await lease).body == {"rollouts": []}


async def test_without_its_backend_the_proxy_refuses_at_once_and_says_so(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    lone_world.replica.may_answer.clear()
    waiting = asyncio.create_task(lone_world.chat(rollout, "Guess."))
    await lone_world.replica.was_asked.wait()
    lone_world.sessions.check()
    lone_world.ports.close()
    assert (await waiting).status == 503
    with pytest.raises(BackendUnavailable):
        lone_world.sessions.check()
    assert (await lone_world.chat(rollout, "Guess.")).status == 503
    assert (await lone_world.report(rollout)).status == 503
    assert (await lone_world.lease(wait_s=20)).status == 503
    async with lone_world.http.get(f"{lone_world.url}/healthz") as response:
        assert response.status == 503


async def test_a_file_that_cannot_be_written_ends_the_serving_instead_of_letting_workers_wait(
    lone_world: "World",
) -> None:
    rollout = await lone_world.begin()
    lone_world.sessions.check()
    (lone_world.root / "runs" / "run-1" / "queues" / "rollout_response.db").mkdir()
    assert (await lone_world.report(rollout)).status == 503
    with pytest.raises(BackendUnavailable, match=r"rollout_response\.db can't be used"):
        lone_world.sessions.check()
    assert (await lone_world.lease(wait_s=20)).status == 503


async def test_five_hundred_connections_are_served_at_once(lone_world: "World") -> None:
    rollouts = [await lone_world.begin(f"task_{index}") for index in range(10)]
    lone_world.replica.may_answer.clear()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        many = replace(lone_world, http=http)
        calls = [asyncio.create_task(many.chat(rollouts[index % 10], f"Guess {index}.")) for index in range(500)]
        await lone_world.replica.was_asked.wait()
        lone_world.replica.may_answer.set()
        answers = await asyncio.gather(*calls)
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body["id"] for answer in answers}) == 500
