"""Calls behind the chat route: repeats, retries, forks, replay, lost messages, time-outs, restarts."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from msgspec import structs

from turnmill.conversation.history import read_calls, write_calls
from turnmill.ports import Message, Write
from turnmill.records import Call, GenerateResponse, Purpose, SampleState, call_key, encode

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import HttpAnswer, World, WorldOf


def message(answer: "HttpAnswer") -> dict[str, Any]:
    reply = answer.body["choices"][0]["message"]
    assert isinstance(reply, dict)
    return reply


# ---------------------------------------------------------------- repeats


async def test_an_identical_request_is_a_new_call(world: "World") -> None:
    rollout = await world.begin()
    answers = [await world.chat(rollout, "Guess.") for _ in range(2)]
    assert [answer.body["id"] for answer in answers] == ["task_0_0", "task_0_1"]
    await world.report(rollout)
    assert (await world.sample()).calls == ("task_0_0", "task_0_1")


async def test_one_idempotency_key_is_one_call(world: "World") -> None:
    rollout = await world.begin()
    for headers, more in (({"Idempotency_Key": "k"}, {}), ({}, {"request_id": "r"})):
        answers = [await world.chat(rollout, "Guess.", headers=headers, **more) for _ in range(2)]
        assert answers[0] == answers[1]
    assert len(world.replica.requests) == 2
    assert world.counts.num_retries == 2
    await world.report(rollout)
    assert (await world.sample()).calls == ("task_0_0", "task_0_1")


async def test_a_retry_count_repeats_the_latest_equal_request(world: "World") -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "Guess.", headers={"x_stainless_retry_count": "0"})
    second = await world.chat(rollout, "Guess.", headers={"x_stainless_retry_count": "0"})
    retry = await world.chat(rollout, "Guess.", headers={"x_stainless_retry_count": "1"})
    assert (retry, retry == first) == (second, False)
    # The first try never arrived: there is nothing to repeat.
    other = await world.chat(rollout, "Other.", headers={"x_stainless_retry_count": "1"})
    assert other.body["id"] == "task_0_2"


async def test_a_retry_beside_the_waiting_first_try_gets_the_same_call(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    tries = [asyncio.create_task(world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"})) for _ in range(3)]
    await world.replica.was_asked.wait()
    # One client gives up: the others must still be answered.
    tries[0].cancel()
    world.replica.may_answer.set()
    answers = await asyncio.gather(*tries[1:])
    assert answers[0] == answers[1]
    assert len(world.replica.requests) == 1


async def test_a_key_belongs_to_its_request_and_its_attempt(world: "World") -> None:
    rollout = await world.begin()
    await world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"})
    other = await world.chat(rollout, "Other.", headers={"Idempotency_Key": "k"})
    assert (other.status, other.code) == (400, "key_reused")
    await world.report(rollout)
    again = await world.begin("task_1")
    answer = await world.chat(again, "Other.", headers={"Idempotency_Key": "k"})
    assert answer.body["id"] == "task_1_0"


# ---------------------------------------------------------------- branches


async def test_a_history_that_nobody_said_forks_and_is_counted(world: "World") -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "Guess.")
    edited = {"role": "assistant", "content": "something else"}
    await world.chat(rollout, "Guess.", edited, "Again.")
    fork = world.replica.requests[1]
    assert (fork.parent, [item["content"] for item in fork.messages]) == (
        None,
        ["Guess.", "something else", "Again."],
    )
    assert world.counts.num_forks == 1
    # The unedited branch still goes on.
    await world.chat(rollout, "Guess.", message(first), "Again.")
    assert world.replica.requests[2].parent == "task_0_0"
    assert world.counts.num_forks == 1


async def test_edited_text_late_in_a_conversation_is_context_after_the_last_true_reply(world: "World") -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "Guess.")
    await world.chat(rollout, "Guess.", message(first), "Again.")
    await world.chat(rollout, "Guess.", message(first), "Again.", {"role": "assistant", "content": "edited"}, "More.")
    assert world.replica.requests[2].parent == "task_0_0"
    assert [item["role"] for item in world.replica.requests[2].messages] == ["user", "assistant", "user"]
    assert world.counts.num_forks == 1


async def test_equal_answers_that_are_both_gone_on_from_make_two_branches(world: "World") -> None:
    world.replica.reply = lambda request: "same"
    rollout = await world.begin()
    answers = [await world.chat(rollout, "Guess.") for _ in range(2)]
    for answer in answers:
        await world.chat(rollout, "Guess.", message(answer), "Again.")
    assert [request.parent for request in world.replica.requests] == [None, None, "task_0_0", "task_0_1"]


# ---------------------------------------------------------------- replay


async def play(world: "World", rollout: dict[str, Any], *users: str) -> list[str]:
    """One linear conversation; the ids of its calls."""
    messages: list[Any] = []
    ids: list[str] = []
    for user in users:
        answer = await world.chat(rollout, *messages, user)
        assert answer.status == 200, answer
        messages += [user, message(answer)]
        ids.append(answer.body["id"])
    return ids


async def test_a_second_attempt_replays_until_the_first_difference(world: "World") -> None:
    first = await world.begin()
    assert await play(world, first, "a", "b", "c") == ["task_0_0", "task_0_1", "task_0_2"]
    await world.lose_lease()
    second = await world.lease_one()
    # Another third message, then the old fourth one: below the difference everything is live.
    assert await play(world, second, "a", "b", "x", "c") == ["task_0_0", "task_0_1", "task_0_3", "task_0_4"]
    assert world.counts.num_replayed == 2
    assert len(world.replica.requests) == 5
    assert [request.attempt for request in world.replica.requests] == [1, 1, 1, 2, 2]
    await world.report(second)
    sample = await world.sample()
    assert sample.calls == ("task_0_0", "task_0_1", "task_0_3", "task_0_4")
    assert not world.is_lone or sample.first_call == 3


async def test_replay_gives_each_recorded_answer_once_and_in_order(world: "World") -> None:
    first = await world.begin()
    for _ in range(2):
        await world.chat(first, "Guess.")
    await world.lose_lease()
    second = await world.lease_one()
    answers = [await world.chat(second, "Guess.") for _ in range(3)]
    assert [answer.body["id"] for answer in answers] == ["task_0_0", "task_0_1", "task_0_2"]
    await world.lose_lease()
    third = await world.lease_one()
    answers = [await world.chat(third, "Guess.") for _ in range(4)]
    assert [answer.body["id"] for answer in answers] == [f"task_0_{c}" for c in range(4)]


async def test_other_sampling_parameters_are_not_replayed(world: "World") -> None:
    first = await world.begin()
    await world.chat(first, "Guess.", max_tokens=8)
    await world.lose_lease()
    second = await world.lease_one()
    assert (await world.chat(second, "Guess.", max_tokens=9)).body["id"] == "task_0_1"


async def test_only_what_the_reporting_attempt_consumed_is_in_the_sample(world: "World") -> None:
    first = await world.begin()
    await play(world, first, "a", "b")
    await world.lose_lease()
    second = await world.lease_one()
    ids = await play(world, second, "other")
    await world.report(second)
    assert (await world.sample()).calls == tuple(ids) == ("task_0_2",)


# ---------------------------------------------------------------- lost, late and doubled answers


async def test_an_answer_whose_message_is_lost_is_found_in_the_records(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    lone_world.replica.tells = False
    assert (await lone_world.chat(rollout, "Guess.")).text == "answer task_0_0"
    assert (lone_world.sessions.calls.counts.num_found, lone_world.sessions.calls.counts.num_told) == (1, 0)


async def test_of_two_answers_the_first_stands(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    waiting = asyncio.create_task(world.chat(rollout, "Guess."))
    await world.replica.was_asked.wait()
    texts = iter(["first", "second"])
    world.replica.reply = lambda request: next(texts)
    await world.replica.answer(world.replica.requests[0])
    world.replica.may_answer.set()
    assert (await waiting).text == "first"
    calls = await read_calls(world.ports.records, "run-1", Purpose.TRAIN, "task_0")
    assert [call.reply["content"] for call in calls] == ["first"]


async def test_each_call_has_its_own_time(world_of: "WorldOf") -> None:
    async with world_of(call_timeout_s=0.6) as world:
        rollout = await world.begin()
        world.replica.may_answer.clear()
        early = [asyncio.create_task(world.chat(rollout, f"Early {number}.")) for number in range(2)]
        await asyncio.sleep(0.3)
        late = [asyncio.create_task(world.chat(rollout, f"Late {number}.")) for number in range(2)]
        assert [(await task).code for task in early] == ["call_timeout", "call_timeout"]
        assert not any(task.done() for task in late)
        world.replica.may_answer.set()
        assert [(await task).status for task in late] == [200, 200]
        assert not world.is_lone or world.sessions.calls.counts.num_timeouts == 2
        world.replica.may_answer.clear()
        assert (await world.chat(rollout, "Again.")).code == "call_timeout"
        world.replica.may_answer.set()


async def test_a_call_that_times_out_is_504_and_the_attempt_goes_on(world_of: "WorldOf") -> None:
    async with world_of(call_timeout_s=0.2) as world:
        rollout = await world.begin()
        world.replica.may_answer.clear()
        answer = await world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"})
        assert (answer.status, answer.code) == (504, "call_timeout")
        world.replica.may_answer.set()
        key = call_key("run-1", Purpose.TRAIN, "task_0", "task_0_0")
        while (await world.ports.records.get([key]))[0] is None:  # noqa: ASYNC110 - a record has no event
            await asyncio.sleep(0.01)
        # Recorded late: a retry gets it, anything else is a call of its own.
        assert (await world.chat(rollout, "Other.")).body["id"] == "task_0_1"
        assert (await world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"})).body["id"] == "task_0_0"
        await world.report(rollout)
        assert sorted((await world.sample()).calls) == ["task_0_0", "task_0_1"]


async def test_an_error_of_the_replica_is_the_answer_of_all_tries(world: "World") -> None:
    rollout = await world.begin()
    world.replica.reply = lambda request: {"code": "context_length_exceeded", "message": "too long"}
    for _ in range(2):
        answer = await world.chat(rollout, "Guess.", headers={"Idempotency_Key": "k"})
        assert (answer.status, answer.code, answer.body["error"]["message"]) == (
            400,
            "context_length_exceeded",
            "too long",
        )
    assert len(world.replica.requests) == 1
    world.replica.reply = lambda request: {"code": "engine_failed", "message": "out of memory"}
    assert (await world.chat(rollout, "Guess.")).status == 500
    await world.report(rollout)
    assert (await world.sample()).calls == ()


async def test_an_altered_record_is_refused_with_evidence(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    waiting = asyncio.create_task(world.chat(rollout, "Guess."))
    await world.replica.was_asked.wait()
    request = world.replica.requests[0]
    call = Call(
        **{
            **_fields(request.step_id),
            "request_digest": request.request_digest,
            "messages": request.messages,
            "sampling": request.sampling,
        }
    ).sealed()
    altered = structs.replace(call, token_ids=[8, 7])
    await world.ports.records.write([Write(key=call.key, value=encode(altered), expected=0)])
    world.replica.may_answer.set()
    answer = await waiting
    assert (answer.status, answer.code) == (500, "record_corrupt")
    assert "task_0_0" in answer.body["error"]["message"]


def _fields(call_id: str) -> dict[str, Any]:
    return {
        "run_id": "run-1",
        "purpose": Purpose.TRAIN,
        "sample_id": "task_0",
        "call_id": call_id,
        "attempt": 1,
        "parent": None,
        "parent_digest": "",
        "choice": 0,
        "reply": {"role": "assistant", "content": "x"},
        "token_ids": [7, 7],
        "loss_mask": [0, 1],
        "logprobs": [-0.1],
        "version": "0.0",
        "finish_reason": "stop",
        "created_at": time.time(),
    }


async def test_messages_that_nobody_waits_for_are_acked_and_counted(lone_world: "World") -> None:
    response = GenerateResponse(sample_id="task_9", step_id="task_9_0", run_id="run-1")
    await lone_world.ports.generate_response.send(
        [Message(body=encode(response), group="a", dedup_id="a"), Message(body=b"no json", group="b", dedup_id="b")]
    )
    rollout = await lone_world.begin()
    await lone_world.chat(rollout, "Guess.")
    counts = lone_world.sessions.calls.counts
    assert (counts.num_unexpected, counts.num_unreadable) == (1, 1)
    assert (await lone_world.ports.generate_response.counts()).dead == 0


# ---------------------------------------------------------------- restarts


async def test_a_restarted_proxy_goes_on_with_the_attempt(world: "World") -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "a")
    await world.chat(rollout, "a", message(first), "b", headers={"Idempotency_Key": "k"})
    async with world.restarted() as second:
        here = second.here(rollout)
        # The answer was lost with the first process: the same call, and no number is handed out twice.
        retry = await second.chat(here, "a", message(first), "b", headers={"Idempotency_Key": "k"})
        assert retry.body["id"] == "task_0_1"
        third = await second.chat(here, "a", message(first), "b", message(retry), "c")
        assert third.body["id"] not in {"task_0_0", "task_0_1"}
        assert world.replica.requests[-1].parent == "task_0_1"
        assert second.counts.num_forks == 0
        assert (await second.report(here)).status == 200
    sample = await world.sample()
    assert sample.calls == ("task_0_0", "task_0_1", third.body["id"])
    assert sample.state is SampleState.REPORTED


async def test_a_restarted_proxy_renews_leases_and_takes_reports(world: "World") -> None:
    rollout = await world.begin()
    await play(world, rollout, "a", "b")
    async with world.restarted() as second:
        body = {"worker": "worker-0", "lease_tokens": [rollout["lease_token"]]}
        answer = await second.post("/v1/rollouts/heartbeat", body, token="worker-token-0123456789")
        assert answer.body == {"lost": []}
        assert (await second.report(rollout)).status == 200
    assert (await world.sample()).calls == ("task_0_0", "task_0_1")


async def test_a_restarted_proxy_knows_what_was_replayed_once_it_is_gone_on_from(world: "World") -> None:
    first = await world.begin()
    await play(world, first, "a", "b")
    await world.lose_lease()
    second = await world.lease_one()
    replayed = await world.chat(second, "a")
    async with world.restarted() as other:
        again = await other.chat(other.here(second), "a", message(replayed), "b")
        assert again.body["id"] == "task_0_1"
        await other.report(second)
    assert (await world.sample()).calls == ("task_0_0", "task_0_1")


async def test_call_numbers_of_a_restarted_proxy_start_past_all_reserved_ones(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    async with lone_world.restarted() as second:
        answer = await second.chat(second.here(rollout), "Guess.")
        c = int(answer.body["id"].removeprefix("task_0_"))
        assert c >= 64
        await lone_world.lose_lease()
        again = await second.lease_one()
        assert (await second.chat(again, "Other.")).body["id"] == f"task_0_{c + 1}"


async def test_an_attempt_may_make_more_calls_than_one_reservation(world: "World") -> None:
    rollout = await world.begin()
    answers = []
    for start in (0, 50, 100):
        answers += await asyncio.gather(*(world.chat(rollout, f"Guess {start + index}.") for index in range(50)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.body["id"] for answer in answers} == {f"task_0_{c}" for c in range(150)}
    assert not world.is_lone or (await world.sample()).call_bound >= 150
    await world.report(rollout)
    assert len((await world.sample()).calls) == 150


async def test_a_stranger_s_answer_to_the_call_is_refused(world: "World") -> None:
    rollout = await world.begin()
    call = Call(
        **{
            **_fields("task_0_0"),
            "request_digest": "other",
            "messages": [],
            "sampling": world.services[0].offer.sampling,
        }
    )
    await write_calls(world.ports.records, [call.sealed()])
    answer = await world.chat(rollout, "Guess.")
    assert (answer.status, answer.code) == (500, "record_corrupt")


async def test_an_attempt_that_another_proxy_leased_is_served_where_an_earlier_one_is_known(world: "World") -> None:
    first = await world.begin()
    await world.chat(first, "hello")
    await world.lose_lease()
    async with world.restarted() as other:
        second = await other.lease_one()
        await other.chat(second, "something else")
    answer = await world.chat(world.here(second), "and more")
    assert answer.status == 200
    assert (await world.chat(first, "hello")).code == "attempt_over"
    assert (await world.report(second)).status == 200
    sample = await world.sample()
    assert sample.attempt == 2 and answer.body["id"] in sample.calls and len(sample.calls) == 2


async def test_a_report_ends_an_attempt_that_another_proxy_leased_where_an_earlier_one_is_known(world: "World") -> None:
    first = await world.begin()
    await world.chat(first, "hello")
    await world.lose_lease()
    async with world.restarted() as other:
        second = await other.lease_one()
        answer = await other.chat(second, "something else")
    assert (await world.report(second)).status == 200
    assert (await world.sample()).calls == (answer.body["id"],)
    assert (await world.report(first, 0.0)).status == 409
