"""Streams: events of an answer that is recorded, signs of life before it, errors before and after the first one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mangum import Mangum
from yarl import URL

from tests.unit.conversation.conftest import CONFIG, RUN, RUN_ID
from tests.unit.conversation.speech import WEATHER, calling, spoken
from turnmill.backends.embedded import open_run
from turnmill.conversation.proxy import create_app
from turnmill.conversation.shared import SharedSessions
from turnmill.conversation.streaming import Pace, events_of
from turnmill.records import encode

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

HASTY = Pace(first_s=0.02, every_s=0.02)
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
]


def completion(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "task_0_0",
        "object": "chat.completion",
        "created": 1,
        "model": "turnmill",
        "choices": list(choices),
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        **more,
    }


def choice(index: int = 0, *, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": None, **message}
    return {"index": index, "message": said, "finish_reason": finish_reason, "logprobs": None}


def chunks_of(events: bytes) -> list[Any]:
    """The chunks of a stream that came to its end."""
    lines = events.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if not line.startswith(":")]


# ---------------------------------------------------------------- chunks


def test_a_text_comes_as_role_text_and_end() -> None:
    chunks = chunks_of(events_of(completion(choice(content="hello")), has_usage=False))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {(chunk["object"], chunk["id"], chunk["model"]) for chunk in chunks} == {
        ("chat.completion.chunk", "task_0_0", "turnmill")
    }
    assert not any("usage" in chunk for chunk in chunks)


def test_each_tool_call_is_a_delta_of_its_own() -> None:
    said = completion(choice(tool_calls=CALLS, finish_reason="tool_calls"))
    chunks = chunks_of(events_of(said, has_usage=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, **CALLS[0]}]},
        {"tool_calls": [{"index": 1, **CALLS[1]}]},
        {},
    ]
    assert (chunks[-2]["choices"][0]["finish_reason"], chunks[-2]["usage"]) == ("tool_calls", None)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], said["usage"])


def test_tokens_come_with_what_is_said_and_those_of_the_prompt_first() -> None:
    measured = {"logprobs": {"content": [{"token": "token_id:7", "logprob": -0.5}]}, "token_ids": [7]}
    for message in ({"content": "a"}, {"tool_calls": CALLS}, {"content": ""}):
        said = completion({**choice(**message), **measured}, prompt_token_ids=[1, 2])
        chunks = chunks_of(events_of(said, has_usage=False))
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2], *([None] * (len(chunks) - 1))]
        told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0].get("token_ids")]
        assert [(part["token_ids"], part["logprobs"]) for part in told] == [([7], measured["logprobs"])]


def test_choices_follow_one_another() -> None:
    said = completion(*(choice(index, content=f"answer {index}") for index in range(3)))
    chunks = chunks_of(events_of(said, has_usage=False))
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_text_goes_on_as_text() -> None:
    said = {"index": 0, "text": " upon", "finish_reason": "length", "logprobs": None}
    chunks = chunks_of(events_of(completion(said, object="text_completion"), has_usage=False))
    assert [(chunk["object"], chunk["choices"][0]["text"]) for chunk in chunks] == [
        ("text_completion", " upon"),
        ("text_completion", ""),
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


# ---------------------------------------------------------------- over HTTP


@dataclass
class Received:
    """A stream as it comes."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    has_sign: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def streamed(world: "World", rollout: dict[str, Any], **changes: Any) -> AsyncIterator[Received]:
    """The answer to a request for a stream, read to its end on leaving."""
    headers = changes.pop("headers", {})
    body = {"model": "turnmill", "messages": [{"role": "user", "content": "Guess."}], "stream": True, **changes}
    url = f"{world.here(rollout)['base_url']}/chat/completions"
    async with world.http.post(url, data=encode(body), headers=headers) as response:
        received = Received(status=response.status, headers={k.lower(): v for k, v in response.headers.items()})

        async def read() -> None:
            async for part in response.content.iter_any():
                received.body += part
                if b": waiting" in received.body:
                    received.has_sign.set()

        reading = asyncio.create_task(read())
        yield received
        await reading


async def test_an_answer_that_is_there_soon_is_one_burst(world: "World") -> None:
    rollout = await world.begin()
    async with streamed(world, rollout, stream_options={"include_usage": True}) as received:
        pass
    assert received.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(received.body)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "answer task_0_0"
    assert chunks[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert b": waiting" not in received.body
    # What was streamed is what is recorded, and gone on from.
    answer = await world.chat(rollout, "Guess.", {"role": "assistant", "content": "answer task_0_0"}, "Again.")
    assert answer.body["usage"]["prompt_tokens"] == 12
    assert world.counts.num_forks == 0


async def test_tool_calls_are_streamed_as_the_model_made_them(world: "World") -> None:
    world.replica.make = spoken
    world.replica.reply = lambda request: calling(("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}))
    rollout = await world.begin()
    async with streamed(world, rollout, tools=[WEATHER]) as received:
        pass
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(received.body)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Rome", "Oslo"]
    assert world.replica.requests[0].tools == [WEATHER]


async def test_who_waits_sees_signs_of_life(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with world.beside(pace=HASTY) as hasty, streamed(hasty, rollout) as received:
        await received.has_sign.wait()
        assert b"data:" not in received.body
        world.replica.may_answer.set()
    assert received.status == 200
    assert received.body.startswith(b": waiting\n\n")
    assert len(chunks_of(received.body)) == 3


async def test_an_error_that_comes_soon_has_its_status(world: "World") -> None:
    world.replica.reply = lambda request: {"code": "context_length_exceeded", "message": "too long"}
    rollout = await world.begin()
    async with streamed(world, rollout) as received:
        pass
    assert (received.status, received.headers["content-type"]) == (400, "application/json")
    error = json.loads(received.body)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_an_error_behind_a_sign_of_life_is_the_last_event(world: "World") -> None:
    world.replica.reply = lambda request: {"code": "engine_failed", "message": "out of luck"}
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with world.beside(pace=HASTY) as hasty, streamed(hasty, rollout) as received:
        await received.has_sign.wait()
        world.replica.may_answer.set()
    assert received.status == 200
    last = received.body.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"] == {
        "message": "out of luck",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    assert b"[DONE]" not in received.body


async def test_who_waits_when_the_proxy_closes_is_told(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with world.restarted(pace=HASTY) as second, streamed(second, rollout) as received:
        await received.has_sign.wait()
        second.services[0].stop()
    assert b"shutting_down" in received.body.split(b"\n\n")[-2]


@pytest.mark.parametrize("has_sign", [False, True])
async def test_a_client_that_hangs_up_undoes_nothing(world: "World", has_sign: bool) -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    key = {"Idempotency-Key": "mine"}
    async with world.beside(pace=HASTY if has_sign else Pace()) as other:
        url = URL(other.here(rollout)["base_url"])
        body = encode({"messages": [{"role": "user", "content": "Guess."}], "stream": True}).decode()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nIdempotency-Key: mine\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await world.replica.was_asked.wait()
        if has_sign:
            await reader.readuntil(b": waiting")
        writer.transport.abort()
        again = asyncio.create_task(world.chat(rollout, "Guess.", headers=key))
        await asyncio.sleep(0.05)
        world.replica.may_answer.set()
        answer = await again
    assert (answer.status, answer.body["id"]) == (200, "task_0_0")
    assert len(world.replica.requests) == 1
    assert (await world.report(rollout)).status == 200
    assert (await world.sample()).calls == ("task_0_0",)


async def test_who_says_how_long_to_wait_for_a_stream_is_sent_away_after_that(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with streamed(world, rollout, headers={"Prefer": "respond-async"}) as received:
        pass
    assert (received.status, json.loads(received.body)["status"]) == (202, "pending")
    world.replica.may_answer.set()
    headers = {"Prefer": "wait=20", "x-stainless-retry-count": "1"}
    async with streamed(world, rollout, headers=headers) as received:
        pass
    assert received.status == 200
    assert len(chunks_of(received.body)) == 3
    assert len(world.replica.requests) == 1


async def test_a_proxy_that_holds_nobody_holds_streams(world: "World") -> None:
    rollout = await world.begin()
    world.replica.may_answer.clear()
    async with world.beside(hold_s=0.0, pace=HASTY) as other:
        asking = asyncio.create_task(_whole(other, rollout))
        await world.replica.was_asked.wait()
        world.replica.may_answer.set()
        received = await asking
    # In one burst: whoever can't send a part before the rest gains nothing by signs of life.
    assert received.body.startswith(b"data: ")
    assert len(chunks_of(received.body)) == 3


async def _whole(world: "World", rollout: dict[str, Any]) -> Received:
    async with streamed(world, rollout) as received:
        pass
    return received


# ---------------------------------------------------------------- as a function


def called(root: Path, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """What a function answers that is called through its URL, with a loop and stores of its own."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    ports = open_run(root, RUN_ID, num_replicas=1)
    try:
        app = create_app(SharedSessions(ports, run=RUN, config=CONFIG), hold_s=0.0, pace=HASTY)
        http = {"method": "POST", "path": path, "sourceIp": "127.0.0.1", "protocol": "HTTP/1.1"}
        event: Any = {
            "version": "2.0",
            "rawPath": path,
            "rawQueryString": "",
            "headers": {"host": "function", "content-type": "application/json", **headers},
            "requestContext": {"http": http, "domainName": "function", "stage": "$default"},
            "body": encode(body).decode(),
            "isBase64Encoded": False,
        }
        context: Any = None
        return Mangum(app, lifespan="off")(event, context)
    finally:
        ports.close()
        loop.close()
        asyncio.set_event_loop(None)


async def test_a_function_answers_a_stream_in_one_burst(shared_world: "World") -> None:
    rollout = await shared_world.begin()
    path = rollout["base_url"][rollout["base_url"].index("/a/") :] + "/chat/completions"
    body = {"messages": [{"role": "user", "content": "Guess."}], "stream": True}
    answer = await asyncio.to_thread(called, shared_world.root, path, body, {})
    assert answer["statusCode"] == 200
    assert answer["headers"]["content-type"].startswith("text/event-stream")
    assert (len(chunks_of(answer["body"].encode())), answer["isBase64Encoded"]) == (3, False)
    # Whoever says that it may be sent away is.
    shared_world.replica.may_answer.clear()
    later = await asyncio.to_thread(called, shared_world.root, path, body, {"prefer": "wait=20"})
    assert later["statusCode"] == 202
