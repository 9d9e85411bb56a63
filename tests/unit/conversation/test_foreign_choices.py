"""Tools and several choices where a foreign trainer generates: a v0 request a choice; what v0 can't say is refused."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conversation.conftest import World, open_external_world
from tests.unit.conversation.foreign_peer import Generator, opened
from tests.unit.conversation.talking import ask, request_of, secret_of, tool_of, user
from turnmill.conversation.attempts import Answer, Pending
from turnmill.conversation.history import read_calls
from turnmill.conversation.responses import Outcome
from turnmill.conversation.shared import SharedSessions
from turnmill.errors import GenerationFailed, InvalidRequest
from turnmill.records import Call, FinishReason, Purpose

TOOLS = [tool_of("look")]
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_external_world(tmp_path) as opened:
        yield opened


async def begin(world: World) -> dict[str, Any]:
    await opened(world)
    return await world.lease_one()


async def asked(world: World, rollout: dict[str, Any], said: list[dict[str, Any]], **more: Any) -> str:
    """The step that a request is."""
    key = more.pop("key", None)
    pending = await world.services[0].chat(secret_of(rollout), request_of(said, **more), key=key, hold_s=0)
    assert isinstance(pending, Pending)
    return pending.step_id


async def answered(world: World, rollout: dict[str, Any], step_id: str) -> tuple[Answer, ...]:
    answers = await world.services[1].step(secret_of(rollout), step_id)
    assert isinstance(answers, tuple)
    return answers


async def calls_of(world: World) -> list[Call]:
    return await read_calls(world.ports.records, "run-1", Purpose.TRAIN, "row_0")


async def test_each_choice_is_a_request_of_its_own(world: World) -> None:
    rollout, generator = await begin(world), Generator(world.ports)
    step = await asked(world, rollout, [user("a")], num_choices=3)
    requests = await generator.take()
    assert [request["step_id"] for request in requests] == ["row_0_0", "row_0_1", "row_0_2"]
    assert {request["messages"][0]["content"] for request in requests} == {"a"}
    assert all((item["choice"], item["num_choices"]) == (0, 1) for item in generator.seen)
    for number in (2, 0):
        assert await generator.tell(generator.answer(requests[number], text=f"word {number}")) is Outcome.RECORDED
        assert await world.services[0].step(secret_of(rollout), step) == Pending(step_id=step)
    assert await generator.tell(generator.answer(requests[1], text="word 1")) is Outcome.RECORDED
    answers = await answered(world, rollout, step)
    assert [(answer.choice, answer.reply["content"]) for answer in answers] == [(n, f"word {n}") for n in range(3)]
    assert [(call.choice, call.num_choices) for call in await calls_of(world)] == [(0, 3), (1, 3), (2, 3)]
    # The branch that it goes on from is told as a whole.
    await asked(world, rollout, [user("a"), answers[1].reply, user("b")])
    (request,) = await generator.take()
    assert (request["step_id"], [item["content"] for item in request["messages"]]) == ("row_0_3", ["a", "word 1", "b"])


async def test_only_the_choices_that_are_missing_are_asked_for_once_more(world: World) -> None:
    rollout, generator = await begin(world), Generator(world.ports)
    step = await asked(world, rollout, [user("a")], num_choices=3)
    requests = await generator.take()
    await generator.tell(generator.answer(requests[1]))
    impatient = SharedSessions(world.ports, run=world.run, config=world.config, resend_s=0.0)
    assert await impatient.step(secret_of(rollout), step) == Pending(step_id=step)
    assert [request["step_id"] for request in await generator.take()] == ["row_0_0", "row_0_2"]
    assert [item["epoch"] for item in generator.seen[3:]] == [1, 1]


async def test_a_choice_that_the_generator_fails_fails_the_request(world: World) -> None:
    rollout, generator = await begin(world), Generator(world.ports)
    step = await asked(world, rollout, [user("a")], num_choices=2, key="k")
    first, second = await generator.take()
    assert await generator.tell(generator.answer(first)) is Outcome.RECORDED
    error = {"code": "context_length_exceeded", "message": "too long"}
    failed = {name: second[name] for name in ("version", "sample_id", "step_id")} | {"error": error}
    assert await generator.tell(failed) is Outcome.FAILED
    assert await generator.tell(failed) is Outcome.KNOWN
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="too long"):
            await answered(world, rollout, step)
        with pytest.raises(GenerationFailed, match="too long"):
            await ask(world.services[0], rollout, [user("a")], num_choices=2, key="k")
    assert (await world.report(rollout)).status == 200
    assert (await world.sample("row_0")).calls == ()


async def test_tools_are_told_and_the_calls_of_them_are_read(world: World) -> None:
    rollout, generator = await begin(world), Generator(world.ports)
    step = await asked(world, rollout, [user("a")], tools=TOOLS, tool_choice="required")
    (request,) = await generator.take()
    assert (generator.seen[0]["tools"], generator.seen[0]["tool_choice"]) == (TOOLS, "required")
    answer = generator.answer(request)
    message = {"role": "assistant", "content": None, "tool_calls": [{**CALLED, "index": 0}]}
    answer["data"]["choices"][0] |= {"message": message, "finish_reason": "tool_calls"}
    assert await generator.tell(answer) is Outcome.RECORDED
    (told,) = await answered(world, rollout, step)
    assert told.reply == {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    assert told.finish_reason is FinishReason.TOOL_CALLS
    (call,) = await calls_of(world)
    assert (call.tools, call.tool_choice) == (TOOLS, "required")
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    await asked(world, rollout, [user("a"), told.reply, result], tools=TOOLS)
    (after,) = await generator.take()
    assert after["messages"] == [user("a"), told.reply, result]
    assert generator.seen[1]["tools"] == TOOLS


@pytest.mark.parametrize(
    ("tool_calls", "part"),
    [
        ("look", "tool_calls must be a list"),
        (["look"], r"tool_calls\[0\] must have id and function"),
        ([CALLED, {**CALLED, "id": 1}], r"tool_calls\[1\].id must be a text"),
        ([{**CALLED, "function": {"name": "look", "arguments": {}}}], "function.arguments must be a text"),
        ([{**CALLED, "function": {"arguments": "{}"}}], "function.name must be a text"),
    ],
)
async def test_calls_of_tools_that_are_none_fail_the_call(world: World, tool_calls: Any, part: str) -> None:
    rollout, generator = await begin(world), Generator(world.ports)
    step = await asked(world, rollout, [user("a")], tools=TOOLS)
    answer = generator.answer((await generator.take())[0])
    answer["data"]["choices"][0]["message"] = {"content": "x", "tool_calls": tool_calls}
    assert await generator.tell(answer) is Outcome.FAILED
    with pytest.raises(GenerationFailed, match=part):
        await answered(world, rollout, step)


async def test_what_v0_has_no_words_for_is_refused(world: World) -> None:
    rollout = await begin(world)
    with pytest.raises(InvalidRequest, match="completions are not served"):
        await ask(world.services[0], rollout, "Once upon")
    with pytest.raises(InvalidRequest, match="return_token_ids is not served"):
        await ask(world.services[0], rollout, [user("a")], has_token_ids=True)
    step = await asked(world, rollout, [user("a")], has_logprobs=True)
    generator = Generator(world.ports)
    await generator.tell(generator.answer((await generator.take())[0]))
    (answer,) = await answered(world, rollout, step)
    assert (answer.sampled_ids, answer.logprobs) == ([5, 6, 7], [-0.25] * 3)
