"""Chats that are answered later: 202 and a step that is asked for, in both forms of the proxy."""

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from turnmill.conversation.hosting import serve
from turnmill.conversation.proxy import create_app
from turnmill.records import SampleState

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import HttpAnswer, World, WorldOf

ASYNC = {"Prefer": "respond-async"}


def steps_of(rollout: dict[str, Any]) -> str:
    url = rollout["base_url"]
    assert isinstance(url, str)
    return f"{url}/chat/completions/"


def step_in(answer: "HttpAnswer") -> str:
    assert answer.status == 202, answer
    assert answer.body["status"] == "pending"
    step = answer.body["step_id"]
    assert isinstance(step, str)
    return step


async def test_a_client_may_ask_for_the_answer_later(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    step = step_in(await world.chat(rollout, "Guess.", headers=ASYNC))
    await world.replica.was_asked.wait()
    assert step_in(await world.get(steps_of(rollout) + step)) == step
    world.replica.may_answer.set()
    answer = await world.get(steps_of(rollout) + step, Prefer="wait=20")
    assert (answer.status, answer.body["object"], answer.text) == (200, "chat.completion", f"answer {step}")
    assert answer.body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert await world.get(steps_of(rollout) + step) == answer
    again = await world.chat(rollout, "Guess.", answer.body["choices"][0]["message"], "Again.")
    assert again.body["usage"]["prompt_tokens"] == 12
    assert (await world.report(rollout)).status == 200
    assert (await world.sample()).calls == (step, again.body["id"])


async def test_a_client_that_would_wait_is_answered_at_once_where_it_can_be(world: "World") -> None:
    rollout = await world.begin()
    for wish in ("wait=20", "respond-async, wait=20", 'handling=lenient, wait="20"'):
        assert (await world.chat(rollout, "Guess.", headers={"Prefer": wish})).status == 200
    assert (await world.chat(rollout, "Guess.", headers={"Prefer": "return=minimal"})).status == 200


async def test_a_retry_of_a_pending_call_is_the_same_step(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    headers = {**ASYNC, "Idempotency-Key": "k"}
    steps = {step_in(await world.chat(rollout, "Guess.", headers=headers)) for _ in range(3)}
    steps.add(step_in(await world.chat(rollout, "Guess.", headers=ASYNC | {"x-stainless-retry-count": "1"})))
    by_id = {step_in(await world.chat(rollout, "Guess.", headers=ASYNC, request_id="r")) for _ in range(2)}
    assert (len(steps), len(by_id), len(steps | by_id)) == (1, 1, 2)
    assert (await world.chat(rollout, "Other.", headers=headers)).code == "key_reused"
    world.replica.may_answer.set()
    # One that waits meets those that do not.
    answer = await world.chat(rollout, "Guess.", headers={"Idempotency-Key": "k"})
    assert answer.body["id"] == steps.pop()
    assert (await world.get(steps_of(rollout) + by_id.pop(), Prefer="wait=20")).status == 200
    assert len({request.step_id for request in world.replica.requests}) == len(world.replica.requests) == 2


async def test_a_failure_is_told_to_whoever_asks_for_the_step(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    world.replica.reply = lambda request: {"code": "context_length_exceeded", "message": "too long"}
    step = step_in(await world.chat(rollout, "Guess.", headers=ASYNC))
    world.replica.may_answer.set()
    for _ in range(3):
        answer = await world.get(steps_of(rollout) + step, Prefer="wait=20")
        assert (answer.status, answer.code) == (400, "context_length_exceeded")
        assert answer.body["error"]["message"] == "too long"


async def test_a_step_of_another_attempt_is_not_found_and_one_of_a_dead_attempt_is_409(world: "World") -> None:
    first = await world.begin()
    step = (await world.chat(first, "Guess.", headers={"Prefer": "wait=20"})).body["id"]
    other = await world.begin("task_1")
    for unknown in (step, "task_1_0", "a/b", "%2e"):
        answer = await world.get(steps_of(other) + unknown)
        assert (answer.status, answer.code) == (404, "not_found")
    stranger = await world.get(f"{world.url}/a/{'x' * 43}/v1/chat/completions/{step}")
    assert stranger.status == 401
    assert (await world.get(steps_of(first) + step)).status == 200
    await world.lose_lease()
    await world.lease_one()
    assert (await world.get(steps_of(first) + step)).status == 409


async def test_a_pending_step_of_an_attempt_that_ends_is_409(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    step = step_in(await world.chat(rollout, "Guess.", headers=ASYNC))
    await world.lose_lease()
    await world.lease_one()
    world.replica.may_answer.set()
    assert (await world.get(steps_of(rollout) + step, Prefer="wait=20")).status == 409


async def test_the_time_of_a_call_that_nobody_waits_for_is_over_too(world_of: "WorldOf") -> None:
    async with world_of(call_timeout_s=0.3) as world:
        rollout = await world.begin()
        world.replica.may_answer.clear()
        step = step_in(await world.chat(rollout, "Guess.", headers=ASYNC))
        answer = await world.get(steps_of(rollout) + step, Prefer="wait=20")
        assert (answer.status, answer.code) == (504, "call_timeout")
        world.replica.may_answer.set()
        while (answer := await world.get(steps_of(rollout) + step, Prefer="wait=1")).status != 200:
            assert answer.status in (202, 504)
        assert answer.text == f"answer {step}"


async def test_the_secret_may_come_as_a_bearer_token(world: "World") -> None:
    rollout = await world.begin()
    secret = rollout["base_url"].split("/")[-2]
    body = {"model": "turnmill", "messages": [{"role": "user", "content": "Guess."}], "sample_id": "task_0"}
    answer = await world.post("/v1/chat/completions", body, token=secret, Prefer="wait=20")
    assert (answer.status, answer.body["id"]) == (200, "task_0_0")
    assert (await world.get("/v1/chat/completions/task_0_0", token=secret)).body["choices"] == answer.body["choices"]
    assert (await world.post("/v1/chat/completions", body)).status == 401
    assert (await world.post("/v1/chat/completions", body, token="x" * 43)).status == 401
    assert (await world.post("/v1/chat/completions", body, token=rollout["report_secret"])).status == 401
    assert (await world.get("/v1/chat/completions", token=secret)).status == 405
    assert (await world.post("/v1/chat/completions/task_0_0", body, token=secret)).status == 405


async def test_a_step_of_a_sample_whose_id_is_no_path_is_found(world: "World") -> None:
    rollout = await world.begin("task/ä 1?%2F")
    world.replica.may_answer.clear()
    step = step_in(await world.chat(rollout, "Guess.", headers=ASYNC))
    world.replica.may_answer.set()
    answer = await world.get(steps_of(rollout) + quote(step, safe=""), Prefer="wait=20")
    assert (answer.status, answer.body["id"]) == (200, "task/ä 1?%2F_0")


async def test_the_server_holds_nobody_for_longer_than_it_says(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with serve(create_app(world.services[0], hold_s=0.05)) as port:
        path = rollout["base_url"].removeprefix(world.urls[0]).removeprefix(world.urls[-1])
        url = f"http://127.0.0.1:{port}{path}/chat/completions"
        body = {"model": "turnmill", "messages": [{"role": "user", "content": "Guess."}]}
        step = step_in(await world.post(url, body))
        assert step_in(await world.post(url, body, Prefer="wait=100")) != step
        assert step_in(await world.get(f"{url}/{step}", Prefer="wait=100")) == step
        world.replica.may_answer.set()
        while (answer := await world.get(f"{url}/{step}", Prefer="wait=100")).status == 202:
            assert step_in(answer) == step
        assert answer.text == f"answer {step}"


async def test_a_client_that_asks_for_no_answer_has_made_its_call_all_the_same(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    lone_world.replica.may_answer.clear()
    step = step_in(await lone_world.chat(rollout, "Guess.", headers=ASYNC))
    lone_world.replica.may_answer.set()
    while not lone_world.sessions.calls.counts.num_told:  # noqa: ASYNC110 - inside the server that has no event
        await asyncio.sleep(0.01)
    assert (await lone_world.report(rollout)).status == 200
    sample = await lone_world.sample()
    assert (sample.state, sample.calls) == (SampleState.REPORTED, (step,))


@pytest.mark.parametrize("wish", ["wait=-1", "wait=x", "wait=", "", "wait=1.5", "respond"])
async def test_a_wish_that_is_none_is_ignored(lone_world: "World", wish: str) -> None:
    rollout = await lone_world.begin()
    assert (await lone_world.chat(rollout, "Guess.", headers={"Prefer": wish})).status == 200


async def test_after_a_restart_steps_that_were_answered_are_known(world: "World") -> None:
    rollout = await world.begin()
    answered = await world.chat(rollout, "Guess.", headers={"Prefer": "wait=20"})
    world.replica.may_answer.clear()
    pending = step_in(await world.chat(rollout, "Other.", headers=ASYNC))
    async with world.restarted() as later:
        steps = steps_of(later.here(rollout))
        assert (await later.get(steps + answered.body["id"])).text == answered.text
        # One process has it in memory only.
        assert (await later.get(steps + pending)).status == (404 if world.is_lone else 202)
