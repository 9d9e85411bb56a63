"""What an agent is served beside a plain chat: choices, tools, tokens, texts, the model's names; and how much of it."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.conversation.speech import WEATHER, calling, spoken
from turnmill.conversation.admission import Admission, Limits
from turnmill.conversation.asgi import HttpError
from turnmill.conversation.client import ChatClient
from turnmill.conversation.http import HttpClient
from turnmill.errors import BackendUnavailable, InvalidInput
from turnmill.records import FinishReason, ReplyTokens

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import HttpAnswer, World


async def text(world: "World", rollout: dict[str, Any], prompt: str, **more: Any) -> "HttpAnswer":
    headers = more.pop("headers", {})
    return await world.post(f"{rollout['base_url']}/completions", {"prompt": prompt, **more}, **headers)


async def models(world: "World", rollout: dict[str, Any], name: str = "") -> "HttpAnswer":
    return await world.get(f"{rollout['base_url']}/models{name}")


# ---------------------------------------------------------------- choices, tools, tokens


async def test_each_choice_is_a_call_of_its_own(world: "World") -> None:
    rollout = await world.begin()
    answer = await world.chat(rollout, "Guess.", n=3, seed=5)
    choices = answer.body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in choices] == [f"answer task_0_{c}" for c in range(3)]
    assert answer.body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    asked = [(request.choice, request.num_choices, request.sampling.seed) for request in world.replica.requests]
    assert sorted(asked) == [(0, 3, 5), (1, 3, 5), (2, 3, 5)]
    again = await world.chat(rollout, "Guess.", choices[1]["message"], "Again.")
    assert again.status == 200
    assert world.replica.requests[-1].parent == "task_0_1"


async def test_tools_are_offered_called_and_answered(world: "World") -> None:
    world.replica.make = spoken
    script = [calling(("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})), "Rome is warmer."]
    world.replica.reply = lambda request: script[int(request.step_id.rpartition("_")[2])]
    rollout = await world.begin()
    first = await world.chat(rollout, "Where is it warmer?", tools=[WEATHER], tool_choice="required")
    (choice,) = first.body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    calls = choice["message"]["tool_calls"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "18"} for call in calls]
    second = await world.chat(rollout, "Where is it warmer?", choice["message"], *results, tools=[WEATHER])
    assert second.text == "Rome is warmer."
    opening, continuation = world.replica.requests
    assert (opening.tools, opening.tool_choice) == ([WEATHER], "required")
    assert (continuation.parent, continuation.messages, continuation.tools) == ("task_0_0", results, [WEATHER])
    assert world.counts.num_forks == 0


async def test_tokens_are_told_to_who_asks_for_them(world: "World") -> None:
    rollout = await world.begin()
    plain = await world.chat(rollout, "Guess.")
    assert plain.body["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in plain.body and "token_ids" not in plain.body["choices"][0]
    asked = await world.chat(
        rollout, "Guess.", plain.body["choices"][0]["message"], "Again.", logprobs=True, return_token_ids=True
    )
    assert asked.body["prompt_token_ids"] == [7] * 12
    assert asked.body["choices"][0]["token_ids"] == [7, 7]
    content = asked.body["choices"][0]["logprobs"]["content"]
    assert content == [{"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * 2
    only = await world.chat(rollout, "Guess.", logprobs=True)
    assert only.body["choices"][0]["logprobs"]["content"] == content
    assert "prompt_token_ids" not in only.body and "token_ids" not in only.body["choices"][0]


async def test_tokens_are_told_with_answers_that_come_later(world: "World") -> None:
    rollout = await world.begin()
    wish = {"logprobs": True, "return_token_ids": True, "headers": {"Prefer": "respond-async"}}
    world.replica.may_answer.clear()
    step = (await world.chat(rollout, "Guess.", **wish)).body["step_id"]
    world.replica.may_answer.set()
    answer = await world.get(f"{rollout['base_url']}/chat/completions/{step}", Prefer="wait=20")
    assert answer.body["prompt_token_ids"] == [7] * 5
    assert len(answer.body["choices"][0]["logprobs"]["content"]) == 2


# ---------------------------------------------------------------- texts


async def test_a_text_is_gone_on_with(world: "World") -> None:
    rollout = await world.begin()
    answer = await text(world, rollout, "Once", n=2, return_token_ids=True)
    assert (answer.status, answer.body["object"]) == (200, "text_completion")
    first, second = answer.body["choices"]
    assert first == {
        "index": 0,
        "call_id": "task_0_0",
        "text": "answer task_0_0",
        "finish_reason": "stop",
        "logprobs": None,
        "token_ids": [7, 7],
        "prompt_token_ids": [7] * 5,
    }
    assert second["text"] == "answer task_0_1"
    assert world.replica.requests[0].messages == [{"role": "text", "content": "Once"}]
    assert world.replica.requests[0].sampling.max_new_tokens == 16


async def test_a_text_may_come_later_and_be_retried(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    later = {"Prefer": "respond-async", "Idempotency-Key": "k"}
    step = (await text(world, rollout, "Once", headers=later)).body["step_id"]
    assert (await text(world, rollout, "Once", headers=later)).body["step_id"] == step
    world.replica.may_answer.set()
    answer = await world.get(f"{rollout['base_url']}/completions/{step}", Prefer="wait=20")
    assert (answer.body["object"], answer.body["choices"][0]["text"]) == ("text_completion", f"answer {step}")
    assert len(world.replica.requests) == 1


# ---------------------------------------------------------------- the model


async def test_the_names_of_the_model_are_told(world: "World") -> None:
    rollout = await world.begin()
    answer = await models(world, rollout)
    assert [model["id"] for model in answer.body["data"]] == ["turnmill", "wordle-tiny"]
    assert (await models(world, rollout, "/wordle-tiny")).body["object"] == "model"
    assert (await world.chat(rollout, "Guess.", model="wordle-tiny")).body["model"] == "wordle-tiny"
    missing = await models(world, rollout, "/judge")
    assert (missing.status, missing.code) == (404, "model_not_found")
    assert (await world.get("/v1/models", token="x" * 43)).code == "invalid_api_key"
    assert (await world.get("/v1/models")).status == 401
    secret = rollout["base_url"].split("/")[-2]
    assert (await world.get("/v1/models", token=secret)).status == 200
    assert (await world.post(f"{rollout['base_url']}/models", {})).status == 405


async def test_a_judges_call_that_comes_here_by_mistake_is_not_answered(world: "World") -> None:
    rollout = await world.begin()
    for answer in (
        await world.chat(rollout, "Is it right?", model="gpt-judge"),
        await text(world, rollout, "Is it right?", model="gpt-judge"),
    ):
        assert (answer.status, answer.code, answer.body["error"]["param"]) == (404, "model_not_found", "model")
        assert "'gpt-judge' is not served here; the run's model is turnmill, wordle-tiny" in str(answer.body)
    assert world.replica.requests == []


# ---------------------------------------------------------------- limits


def test_calls_are_counted_by_attempt_and_in_all() -> None:
    admission = Admission(Limits(per_attempt=3, in_all=4))
    admission.enter("a", "same", 2)
    admission.enter("a", "same", 1)
    with pytest.raises(HttpError, match="of a rollout") as caught:
        admission.enter("a", "same", 1)
    assert (caught.value.status, dict(caught.value.headers)[b"retry-after"]) == (429, b"1")
    admission.enter("b", "same", 1)
    with pytest.raises(HttpError, match="under way here"):
        admission.enter("c", "same", 1)
    admission.leave("a", 2)
    admission.enter("a", "same", 2)
    for secret, num in (("a", 2), ("a", 1), ("b", 1)):
        admission.leave(secret, num)
    for _ in range(3):
        admission.enter("d", "same", 1)
    assert admission._num_calls == {"d": 3}


def test_a_retry_of_what_was_refused_repeats_no_call() -> None:
    admission = Admission(Limits(per_attempt=1))
    admission.enter("a", "same", 1)
    for _ in range(2):
        with pytest.raises(HttpError):
            admission.enter("a", "same", 1)
    assert not admission.was_refused("a", "other") and not admission.was_refused("b", "same")
    assert [admission.was_refused("a", "same") for _ in range(3)] == [True, True, False]
    for number in range(5000):
        with pytest.raises(HttpError):
            admission.enter("a", f"request {number}", 1)
    assert len(admission._refused) == 4096


def test_a_call_whose_client_was_sent_away_counts_until_it_is_told() -> None:
    admission = Admission(Limits(per_attempt=1))
    admission.keep("a", "step", 1, for_s=60.0)
    admission.keep("a", "step", 1, for_s=60.0)
    with pytest.raises(HttpError):
        admission.enter("a", "same", 1)
    admission.settle("a", "other")
    admission.settle("a", "step")
    admission.settle("a", "step")
    admission.enter("a", "same", 1)
    admission.leave("a", 1)
    # Or until nobody would come any more.
    admission.keep("a", "late", 1, for_s=-1.0)
    admission.enter("a", "same", 1)
    assert admission._num_calls == {"a": 1}


async def test_too_many_calls_of_a_rollout_are_429_and_others_are_served(world: "World") -> None:
    first, second = await world.begin("task_0"), await world.begin("task_1")
    async with world.restarted(limits=Limits(per_attempt=2)) as limited:
        world.replica.may_answer.clear()
        waiting = [asyncio.create_task(limited.chat(limited.here(first), f"Guess {i}.")) for i in range(2)]
        while limited.counts.num_chats < 2:  # noqa: ASYNC110 - inside the server that has no event
            await asyncio.sleep(0.01)
        refused = await limited.chat(limited.here(first), "Guess 3.")
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert refused.body["error"]["type"] == "rate_limit_error"
        assert (await limited.chat(limited.here(first), "Guess.", n=3)).status == 429
        other = asyncio.create_task(limited.chat(limited.here(second), "Guess."))
        world.replica.may_answer.set()
        assert [answer.status for answer in await asyncio.gather(*waiting, other)] == [200] * 3
        assert (await limited.chat(limited.here(first), "Guess 3.")).status == 200


async def test_who_is_sent_away_and_never_comes_back_fills_nothing_but_his_own_places(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    later = {"Prefer": "respond-async"}
    async with lone_world.restarted(limits=Limits(per_attempt=2)) as limited:
        lone_world.replica.may_answer.clear()
        here = limited.here(rollout)
        steps = [(await limited.chat(here, f"Guess {i}.", headers=later)).body["step_id"] for i in range(2)]
        assert (await limited.chat(here, "Guess 3.", headers=later)).status == 429
        assert (await limited.get(f"{here['base_url']}/chat/completions/{steps[0]}")).status == 202
        lone_world.replica.may_answer.set()
        for step in steps:
            answer = await limited.get(f"{here['base_url']}/chat/completions/{step}", Prefer="wait=20")
            assert answer.status == 200
        assert (await limited.chat(here, "Guess 3.")).status == 200


# ---------------------------------------------------------------- the light client


def client(http: HttpClient, rollout: dict[str, Any], seconds: float = 20.0) -> ChatClient:
    return ChatClient(http, rollout["base_url"], timeout_s=10.0, deadline=time.monotonic() + seconds)


async def test_what_a_reported_rollout_never_asked_for_again_keeps_nobody_out(lone_world: "World") -> None:
    first = await lone_world.begin("task_0")
    second = await lone_world.begin("task_1")
    async with lone_world.beside(limits=Limits(in_all=2)) as limited:
        lone_world.replica.may_answer.clear()
        for number in range(2):
            away = await limited.chat(limited.here(first), f"Guess {number}.", headers={"Prefer": "respond-async"})
            assert away.status == 202
        assert (await limited.chat(limited.here(second), "Guess.")).status == 429
        lone_world.replica.may_answer.set()
        assert (await limited.report(first)).status == 200
        assert (await limited.chat(limited.here(second), "Guess.")).status == 200


async def test_the_light_client_plays_with_tools_and_gets_the_tokens(world: "World") -> None:
    world.replica.make = spoken
    script = [calling(("weather", {"city": "Rome"})), "Warm."]
    world.replica.reply = lambda request: script[int(request.step_id.rpartition("_")[2])]
    rollout = await world.begin()
    messages: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
    async with HttpClient() as http:
        chat = client(http, rollout)
        reply = await chat.complete(messages, tools=[WEATHER], return_token_ids=True)
        assert (reply.content, reply.finish_reason) == ("", FinishReason.TOOL_CALLS)
        (call,) = reply.tool_calls
        assert call["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
        assert reply.tokens == ReplyTokens(prompt_ids=[7] * 5, sampled_ids=[0, 1], logprobs=[-0.5, -0.5])
        messages += [reply.message, {"role": "tool", "tool_call_id": call["id"], "content": "30"}]
        last = await chat.complete(messages, tools=[WEATHER])
        assert (last.content, last.tool_calls, last.tokens) == ("Warm.", [], None)
        for impossible in ({"n": 2}, {"stream": True}):
            with pytest.raises(InvalidInput, match="one reply as a whole"):
                await chat.complete(messages, **impossible)
    assert world.counts.num_forks == 0


async def test_the_light_client_waits_while_the_proxy_is_busy(world: "World") -> None:
    rollout = await world.begin()
    async with world.restarted(limits=Limits(per_attempt=1)) as limited, HttpClient() as http:
        world.replica.may_answer.clear()
        chat = client(http, limited.here(rollout))
        messages = [{"role": "user", "content": "Guess."}]
        calls = [asyncio.create_task(chat.complete(messages)) for _ in range(3)]
        await world.replica.was_asked.wait()
        world.replica.may_answer.set()
        replies = await asyncio.gather(*calls)
    assert len({reply.content for reply in replies}) == 3


async def test_a_proxy_that_stays_busy_is_the_infrastructures_fault(world: "World") -> None:
    rollout = await world.begin()
    async with world.restarted(limits=Limits(per_attempt=0)) as limited, HttpClient() as http:
        with pytest.raises(BackendUnavailable, match="429"):
            await client(http, limited.here(rollout), seconds=0.5).complete([{"role": "user", "content": "Guess."}])
