"""The worker's light client with a proxy that answers later, or only what is signed."""

import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.unit.conversation.later_server import (
    SECRET,
    Fault,
    Later,
    cut,
    in_progress_form,
    instead,
    later,
    lost,
    plain,
    shaped,
    silent,
)
from turnmill.conversation.client import ChatClient, Retry
from turnmill.conversation.http import HttpClient, Sign
from turnmill.conversation.polling import Pauses
from turnmill.errors import BackendUnavailable, GenerationFailed, LeaseLost

MESSAGES = [{"role": "user", "content": "hello"}]
FAST = Retry(for_s=30.0, first_s=0.001, most_s=0.01)
POLL = Pauses(first_s=0.001, most_s=0.005)


@asynccontextmanager
async def chatting(sign: Sign | None = None, **options: Any) -> AsyncIterator[tuple[Later, ChatClient]]:
    settings: dict[str, Any] = {"timeout_s": 30.0, "deadline": math.inf, "retry": FAST, "poll": POLL}
    settings |= {name: options.pop(name) for name in list(options) if name in settings}
    async with later(**options) as server, HttpClient(sign) as session:
        yield server, ChatClient(session, server.base_url, **settings)


@pytest.mark.parametrize("form", [plain, in_progress_form])
async def test_an_answer_that_comes_later_is_asked_for(form: Any) -> None:
    async with chatting(form=form) as (server, client):
        replies = [await client.complete(MESSAGES), await client.complete(MESSAGES)]

    assert [reply.content for reply in replies] == ["answer task/ö_0_0 to 1", "answer task/ö_0_1 to 1"]
    assert [method for method, _, _ in server.requests] == ["POST", "GET", "GET", "GET"] * 2
    assert server.requests[1][1] == f"/a/{SECRET}/v1/chat/completions/task/ö_0_0"
    assert len(set(server.keys)) == 2
    assert [headers.get("prefer") for _, _, headers in server.requests[:2]] == [None, "wait=15"]


@pytest.mark.parametrize("fault", [lost, cut, instead(429), instead(502), instead(504), shaped(503, "shutting_down")])
async def test_lost_answers_are_asked_for_again_and_never_sampled_twice(fault: Fault) -> None:
    async with chatting(faults=[fault, None, fault, fault]) as (server, client):
        assert (await client.complete(MESSAGES)).content == "answer task/ö_0_0 to 1"

    assert (server.num_sampled, len(server.keys), len(set(server.keys))) == (1, 2, 1)


async def test_a_question_that_hangs_is_asked_again() -> None:
    async with chatting(faults=[None, silent], timeout_s=0.2) as (server, client):
        assert (await client.complete(MESSAGES)).content == "answer task/ö_0_0 to 1"

    assert server.num_sampled == 1


@pytest.mark.parametrize(
    ("fault", "expected", "code"),
    [
        (shaped(504, "call_timeout"), GenerationFailed, "call_timeout"),
        (shaped(500, "engine_failed"), GenerationFailed, "engine_failed"),
        (shaped(400, "context_length_exceeded"), GenerationFailed, "context_length_exceeded"),
        (shaped(409, "attempt_over"), LeaseLost, None),
    ],
)
async def test_a_late_error_is_the_answer(fault: Fault, expected: type[Exception], code: str | None) -> None:
    async with chatting(faults=[None, None, fault]) as (server, client):
        with pytest.raises(expected, match="because") as caught:
            await client.complete(MESSAGES)

    assert len(server.requests) == 3
    assert code is None or (isinstance(caught.value, GenerationFailed) and caught.value.code == code)


async def test_a_step_that_failed_is_a_failed_generation() -> None:
    def failed(completion: dict[str, Any]) -> web.Response:
        return web.json_response({"status": "failed", "error": {"code": "engine_failed", "message": "because"}})

    async with chatting(form=failed) as (_server, client):
        with pytest.raises(GenerationFailed, match="because") as caught:
            await client.complete(MESSAGES)

    assert caught.value.code == "engine_failed"


async def test_the_deadline_ends_the_wait_for_an_answer() -> None:
    async with chatting(num_pending=10**6, deadline=time.monotonic() + 1.0) as (_server, client):
        with pytest.raises(BackendUnavailable, match="in time"):
            await client.complete(MESSAGES)


async def test_a_202_that_names_no_step_is_a_failed_generation() -> None:
    async with chatting(taken=lambda step_id: web.json_response({"status": "pending"}, status=202)) as (_, client):
        with pytest.raises(GenerationFailed, match="does not say where"):
            await client.complete(MESSAGES)


async def test_every_request_is_signed_questions_and_retries_included() -> None:
    seen: list[tuple[str, str, str | None, bytes]] = []

    async def sign(method: str, url: str, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        seen.append((method, url, headers.get("Content-Type"), body))
        return {**headers, "X-Signed": str(len(seen))}

    async with chatting(sign, faults=[lost, None, instead(502)], num_pending=1) as (server, client):
        await client.complete(MESSAGES)

    assert [headers["x-signed"] for _, _, headers in server.requests] == ["1", "2", "3", "4"]
    assert [method for method, _, _, _ in seen] == [method for method, _, _ in server.requests]
    assert {kind for method, _, kind, body in seen if method == "POST" and b"hello" in body} == {"application/json"}
    assert [(kind, body) for method, _, kind, body in seen if method == "GET"] == [(None, b"")] * 2
    assert seen[2][1] == f"{server.base_url}/chat/completions/task%2F%C3%B6_0_0"
