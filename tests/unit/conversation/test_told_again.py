"""What clients make of the answers that they send back, and what they ask once more: in both forms of the proxy."""

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.unit.conversation.conftest import call_for
from tests.unit.conversation.speech import WEATHER
from tests.unit.conversation.talking import Tokens, check_sample, tool_of, user
from turnmill.conversation.admission import Limits
from turnmill.records import Call, FinishReason, GenerateRequest

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

CALL_ID = "abcdefghi"
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "rain"}
# Numbers beyond those of a machine, escapes, and objects in one another.
RICH = '{"n": 123456789012345678901234567890, "x": 1.5, "city": "\\u00c5s \\ud83d\\ude00", "near": {"b": 1, "a": [2]}}'


def calling(arguments: str) -> Callable[[GenerateRequest, str, Call | None], Call]:
    """Makes answers that call one tool, each by the same id."""

    def make(request: GenerateRequest, text: str, parent: Call | None) -> Call:
        function = {"name": "weather", "arguments": arguments}
        reply = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
        }
        call = call_for(request, text, parent)
        return msgspec.structs.replace(call, reply=reply, finish_reason=FinishReason.TOOL_CALLS, digest="").sealed()

    return make


def sent_back(message: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    (call,) = message["tool_calls"]
    function = {**call["function"], "arguments": change(call["function"]["arguments"])}
    return {**message, "tool_calls": [{**call, "function": function}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: json.dumps(json.loads(text)),
        lambda text: json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False, indent=2),
        lambda text: json.loads(text),
    ],
    ids=["as it came", "written anew", "sorted", "an object"],
)
async def test_a_call_is_gone_on_from_however_its_client_writes_it(
    world: "World", change: Callable[[str], Any]
) -> None:
    world.replica.make = calling(RICH)
    rollout = await world.begin()
    said: list[dict[str, Any]] = [user("Go.")]
    for _ in range(3):
        # Each turn calls by the same id.
        answer = await world.chat(rollout, *said, tools=[WEATHER])
        assert answer.status == 200, answer
        said += [sent_back(answer.body["choices"][0]["message"], change), RESULT]
    parents = [request.parent for request in world.replica.requests]
    assert parents == [None, "task_0_0", "task_0_1"]
    assert world.counts.num_forks == 0


@pytest.mark.parametrize(
    "arguments",
    ["", "NaN", '{"a": NaN}', '{"a": 1, "a": 2}', "[1]", '{"a": 1e999}', '"\\ud800"', "[" * 3000, "9" * 5000],
)
async def test_arguments_that_are_no_object_are_gone_on_from_too(world: "World", arguments: str) -> None:
    world.replica.make = calling(arguments)
    rollout = await world.begin()
    first = await world.chat(rollout, "Go.", tools=[WEATHER])
    message = first.body["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert (await world.chat(rollout, user("Go."), message, RESULT, tools=[WEATHER])).status == 200
    assert world.replica.requests[1].parent == first.body["id"]


async def test_tools_in_another_order_or_no_more_make_another_conversation(world: "World", tokens: Tokens) -> None:
    rollout = await world.begin()
    tools = [WEATHER, tool_of("look")]
    first = await world.chat(rollout, "Go.", tools=tools)
    said = [user("Go."), first.body["choices"][0]["message"], user("On.")]
    for others in (tools[::-1], [], tools):
        assert (await world.chat(rollout, *said, tools=others)).status == 200
    # The model was told of them in that order.
    assert [request.parent for request in world.replica.requests] == [None, None, None, first.body["id"]]
    assert world.counts.num_forks == 2
    assert (await world.report(rollout)).status == 200
    assert len(await check_sample(world, tokens)) == 3


@pytest.mark.parametrize(("seed", "is_replayed"), [(5, True), (6, False), (None, False)])
async def test_another_seed_goes_live(world: "World", seed: int | None, is_replayed: bool) -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "Go.", seed=5)
    await world.lose_lease()
    again = await world.chat(await world.lease_one(), "Go.", seed=seed)
    assert (again.body["id"] == first.body["id"]) == is_replayed
    assert len(world.replica.requests) == 2 - is_replayed


async def test_a_replay_goes_on_behind_what_was_refused_in_its_midst(world: "World", tokens: Tokens) -> None:
    rollout = await world.begin()
    first = await world.chat(rollout, "a")
    said = [user("a"), first.body["choices"][0]["message"], user("b")]
    second = await world.chat(rollout, *said)
    await world.lose_lease()
    rollout = await world.lease_one()
    async with world.beside(limits=Limits(per_attempt=1)) as limited:
        here, retry = limited.here(rollout), {"x-stainless-retry-count": "1"}
        world.replica.may_answer.clear()
        world.replica.was_asked.clear()
        live = asyncio.create_task(limited.chat(here, "another"))
        await world.replica.was_asked.wait()
        assert (await limited.chat(here, "a")).status == 429
        world.replica.may_answer.set()
        assert (await live).status == 200
        assert (await limited.chat(here, "a", headers=retry)).body["id"] == first.body["id"]
        assert (await limited.chat(here, *said)).body["id"] == second.body["id"]
    assert (await world.report(rollout)).status == 200
    assert len(await check_sample(world, tokens)) == 2


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole first", "streamed first"])
async def test_a_retry_is_the_same_call_streamed_or_not(world: "World", tokens: Tokens, is_streamed: bool) -> None:
    rollout = await world.begin()
    told: list[set[str]] = []
    for streams in (is_streamed, not is_streamed):
        body = {"messages": [user("a")], "n": 2, "stream": streams, "return_token_ids": streams}
        path = f"{world.here(rollout)['base_url']}/chat/completions"
        async with world.http.post(path, json=body, headers={"Idempotency-Key": "mine"}) as response:
            assert response.status == 200
            text = await response.text()
        told.append({f"answer task_0_{number}" for number in range(4) if f"answer task_0_{number}" in text})
        assert ("prompt_token_ids" in text) == streams
    assert told == [{"answer task_0_0", "answer task_0_1"}] * 2
    assert len(world.replica.requests) == 2
