"""What is made of the messages of generate_response where nobody listens to them."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.conversation.conftest import World, open_external_world
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.history import read_calls
from turnmill.conversation.responses import Outcome, record_message
from turnmill.records import Call, FinishReason, GenerateResponse, Purpose, encode

URL = "{}/chat/completions/row_0_0"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_external_world(tmp_path) as opened:
        yield opened


async def asked(world: World) -> str:
    """A call that was asked for; where to ask for its answer."""
    request = {
        "timestamp": "2026-01-01T00:00:00Z",
        "sample_id": "row_0",
        "max_length": 512,
        "rewards": {"range": [0, 1]},
        "data": {},
    }
    await open_occurrence(world.ports, world.run, world.config, request)
    rollout = await world.lease_one()
    assert (await world.chat(rollout, "Guess.", headers={"Prefer": "respond-async"})).body["step_id"] == "row_0_0"
    return URL.format(rollout["base_url"])


def token(number: int, logprob: Any = -0.5) -> dict[str, Any]:
    return {"token": f"token_id:{number}", "logprob": logprob}


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "message": {"role": "assistant", "content": "crane"},
        "finish_reason": "stop",
        "logprobs": {"content": [token(11), token(12, -1.5)]},
        **changes,
    }


def answer(*choices: Any, **changes: Any) -> dict[str, Any]:
    return {
        "version": "v0",
        "sample_id": "row_0",
        "step_id": "row_0_0",
        "data": {"choices": list(choices), "serving_model_num": 3},
        "finish_reason": "stop",
        **changes,
    }


async def tell(world: World, message: Any) -> Outcome:
    body = message if isinstance(message, bytes) else msgspec.json.encode(message)
    return await record_message(world.ports, world.run, body)


async def calls_of(world: World) -> list[Call]:
    return await read_calls(world.ports.records, "run-1", Purpose.TRAIN, "row_0")


async def test_an_answer_becomes_a_call_of_the_tokens_that_were_sampled(world: World) -> None:
    url = await asked(world)
    assert await tell(world, answer(choice())) is Outcome.RECORDED
    (call,) = await calls_of(world)
    assert (call.token_ids, call.loss_mask, call.logprobs) == ([11, 12], [1, 1], [-0.5, -1.5])
    assert (call.version, call.finish_reason, call.attempt) == ("3", FinishReason.STOP, 1)
    assert call.messages == [{"role": "user", "content": "Guess."}]
    assert call.reply == {"role": "assistant", "content": "crane"}
    assert (await world.get(url)).text == "crane"


async def test_an_answer_that_comes_again_changes_nothing(world: World) -> None:
    url = await asked(world)
    assert await tell(world, answer(choice())) is Outcome.RECORDED
    other = choice(message={"content": "other"})
    for again in (answer(choice()), answer(other), answer(error={"code": "engine_failed", "message": "late"})):
        assert await tell(world, again) is Outcome.KNOWN
    assert await tell(world, answer("malformed")) is Outcome.KNOWN
    assert len(await calls_of(world)) == 1
    assert (await world.get(url)).text == "crane"


async def test_the_reason_why_it_ended_may_stand_beside_the_choice(world: World) -> None:
    await asked(world)
    assert await tell(world, answer(choice(finish_reason=None), finish_reason="length")) is Outcome.RECORDED
    assert (await calls_of(world))[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (answer(), "data.choices"),
        (answer(choice(), choice()), "data.choices"),
        (answer("text"), "data.choices"),
        (answer(data=None), "data.choices"),
        (answer(data={"choices": {}}), "data.choices"),
        (answer(choice(message="crane")), "message.content"),
        (answer(choice(message={"content": None})), "message.content"),
        (answer(choice(logprobs=None)), "logprobs.content"),
        (answer(choice(logprobs={"content": []})), "logprobs.content"),
        (answer(choice(logprobs={"content": [token(1), "x"]})), r"content\[1\].token"),
        (answer(choice(logprobs={"content": [{"token": "crane", "logprob": -1}]})), r"content\[0\].token"),
        (answer(choice(logprobs={"content": [{"token": "token_id:-1", "logprob": -1}]})), r"content\[0\].token"),
        (answer(choice(logprobs={"content": [token(1), {"token": "token_id:2"}]})), r"content\[1\].logprob"),
        (answer(choice(logprobs={"content": [token(1, None)]})), r"content\[0\].logprob"),
        (answer(choice(logprobs={"content": [token(1, 0.5)]})), r"content\[0\].logprob"),
        (answer(choice(logprobs={"content": [token(1, "-1")]})), r"content\[0\].logprob"),
        (answer(choice(), data={"choices": [choice()]}), "serving_model_num"),
        (answer(choice(), data={"choices": [choice()], "serving_model_num": True}), "serving_model_num"),
        (answer(choice(finish_reason="abort")), "finish_reason"),
        (answer(choice(finish_reason=None), finish_reason=None), "finish_reason"),
        # As JSON never has it, and as it is written nevertheless.
        (encode(answer(choice())).replace(b"-0.5", b"NaN"), "malformed"),
        (encode(answer(choice())).replace(b"-0.5", b"-Infinity"), "malformed"),
        (answer(data=[choice()]), "malformed"),
    ],
)
async def test_an_answer_that_can_t_be_used_fails_the_call_and_says_why(world: World, message: Any, part: str) -> None:
    url = await asked(world)
    assert await tell(world, message) is Outcome.FAILED
    assert await calls_of(world) == []
    told = await world.get(url)
    assert (told.status, told.code) == (500, "malformed_answer")
    assert re.search(part, told.body["error"]["message"])
    # It stands.
    assert await tell(world, message) is Outcome.KNOWN
    assert await tell(world, answer(choice())) is Outcome.KNOWN
    assert await calls_of(world) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"sample_id": "row_0"}', b'{"step_id": NaN}', b"\xff"])
async def test_a_message_that_says_nothing_is_dropped(world: World, body: bytes) -> None:
    url = await asked(world)
    assert await tell(world, body) is Outcome.UNREADABLE
    assert (await world.get(url)).status == 202


async def test_an_answer_to_nothing_that_was_asked_is_dropped(world: World) -> None:
    url = await asked(world)
    for names in ({"sample_id": "row_1"}, {"step_id": "row_0_1"}, {"step_id": "row_0"}):
        assert await tell(world, answer(choice(), **names)) is Outcome.UNKNOWN
    assert (await world.get(url)).status == 202


async def test_an_error_of_the_generator_is_the_answer(world: World) -> None:
    url = await asked(world)
    error = {"code": "context_length_exceeded", "message": "too long"}
    assert await tell(world, answer(data=None, error=error)) is Outcome.FAILED
    assert (await world.get(url)).status == 400


async def test_what_our_own_replicas_say_needs_no_doing_but_for_errors(shared_world: World) -> None:
    rollout = await shared_world.begin()
    assert (await shared_world.chat(rollout, "Guess.")).status == 200
    response = GenerateResponse(sample_id="task_0", step_id="task_0_0", run_id="run-1")
    assert await record_message(shared_world.ports, shared_world.run, encode(response)) is Outcome.KNOWN
    failed = GenerateResponse(sample_id="task_0", step_id="task_0_0", run_id="run-1", error={"code": "engine_failed"})
    assert await record_message(shared_world.ports, shared_world.run, encode(failed)) is Outcome.KNOWN
