"""`AsyncTurnmillClient` against the embedded proxy, and against one that answers later."""

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletion

from tests.unit.conversation.later_server import (
    SECRET,
    Fault,
    Later,
    cut,
    in_progress_form,
    instead,
    later,
    lost,
    shaped,
    silent,
)
from tests.unit.conversation.speech import WEATHER, calling, spoken
from turnmill import AsyncTurnmillClient, PollingHttpClient
from turnmill.environment.wordle import feedback, parse_guess
from turnmill.errors import InvalidInput
from turnmill.records import InvalidReason, SampleState

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def client_of(server: Later, **options: Any) -> AsyncTurnmillClient:
    return AsyncTurnmillClient(**{"base_url": server.base_url, "poll_interval_s": 0.01, **options})


async def say(client: openai.AsyncOpenAI, **options: Any) -> ChatCompletion:
    completion: ChatCompletion = await client.chat.completions.create(model="turnmill", messages=MESSAGES, **options)
    return completion


# ---------------------------------------------------------------- the embedded proxy


async def play_wordle(client: openai.AsyncOpenAI, opening: list[Any], answer: str) -> tuple[float, int]:
    """An agent as anybody writes it for OpenAI: it knows nothing of Turnmill."""
    messages = list(opening)
    for turn in range(6):
        completion = await client.chat.completions.create(model="turnmill", messages=messages)
        message = completion.choices[0].message
        messages.append({"role": "assistant", "content": message.content})
        guess = parse_guess(message.content or "")
        if guess == answer:
            return 1.0, turn + 1
        marks = feedback(guess, answer) if guess else "Not a five-letter word."
        messages.append({"role": "user", "content": marks})
    return 0.0, 6


async def test_unmodified_agent_code_plays_wordle_on_the_embedded_proxy_and_reports(world: "World") -> None:
    guesses = ["slate", "no guess", "crown", "crane"]
    world.replica.reply = lambda request: guesses[int(request.step_id.rpartition("_")[2])]
    rollout = await world.begin()
    async with AsyncTurnmillClient(base_url=rollout["base_url"], report_secret=rollout["report_secret"]) as client:
        reward, num_turns = await play_wordle(client, rollout["request"]["data"]["prompt"], "crane")
        await client.report_rollout("task_0", reward, {"turns": num_turns}, stop_reason="end_of_conversation")
        # Whoever does not know whether the answer came says it again.
        await client.report_rollout("task_0", reward, {"turns": num_turns}, stop_reason="end_of_conversation")

    sample = await world.sample()
    assert (sample.state, sample.reward, sample.metrics) == (SampleState.REPORTED, 1.0, {"turns": 4.0})
    assert sample.calls == tuple(f"task_0_{turn}" for turn in range(4))
    # Each call goes on from the one before.
    assert [request.parent for request in world.replica.requests] == [None, "task_0_0", "task_0_1", "task_0_2"]


async def test_equal_calls_are_sampled_anew_and_retries_of_one_are_not(world: "World") -> None:
    rollout = await world.begin()
    async with AsyncTurnmillClient(base_url=rollout["base_url"]) as client:
        first, second = [(await say(client)).id for _ in range(2)]
        mine = {"extra_headers": {"Idempotency-Key": "my-own"}}
        third, fourth = [(await say(client, **mine)).id for _ in range(2)]

    assert len({first, second, third}) == 3
    assert third == fourth
    assert len(world.replica.requests) == 3


async def test_a_rollout_without_a_reward_is_reported_with_its_reason(world: "World") -> None:
    rollout = await world.begin()
    async with AsyncTurnmillClient(base_url=rollout["base_url"]) as client:
        metrics = [{"name": "turns", "value": 1, "type": "Metric"}]
        await client.report_rollout(
            "task_0", None, metrics, reason="env_error", detail="KeyError", report_secret=rollout["report_secret"]
        )

    sample = await world.sample()
    assert (sample.state, sample.reason, sample.detail) == (SampleState.INVALID, InvalidReason.ENV_ERROR, "KeyError")


async def test_refusals_are_openais_errors_and_are_not_repeated(world: "World") -> None:
    rollout = await world.begin()
    async with AsyncTurnmillClient(base_url=rollout["base_url"], report_secret=rollout["report_secret"]) as client:
        with pytest.raises(openai.NotFoundError, match="'gpt-judge' is not served here"):
            await client.chat.completions.create(model="gpt-judge", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await say(client, temperature=0.1)
        with pytest.raises(openai.BadRequestError, match="outside the range"):
            await client.report_rollout("task_0", 2.0)
        await client.report_rollout("task_0", 0.5)
        with pytest.raises(openai.ConflictError, match="reported otherwise"):
            await client.report_rollout("task_0", 0.25)
        with pytest.raises(openai.ConflictError, match="the attempt is over"):
            await say(client)
        with pytest.raises(openai.AuthenticationError):
            await client.report_rollout("task_0", 0.5, report_secret="of-nobody")

    assert world.replica.requests == []


async def test_a_failed_generation_is_not_asked_for_again(world: "World") -> None:
    world.replica.reply = lambda request: {"code": "engine_failed", "message": "out of luck"}
    rollout = await world.begin()
    sent: list[str] = []

    async def note(request: httpx2.Request) -> None:
        sent.append(request.method)

    http = PollingHttpClient(event_hooks={"request": [note]})
    async with AsyncTurnmillClient(base_url=rollout["base_url"], http_client=http) as client:
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            await say(client)

    assert (sent, len(world.replica.requests)) == (["POST"], 1)


# ---------------------------------------------------------------- answers that come later


@pytest.mark.parametrize("form", [None, in_progress_form])
async def test_an_answer_that_comes_later_is_asked_for(form: Any) -> None:
    async with later(**({"form": form} if form else {})) as server, client_of(server) as client:
        completion = await say(client)

    assert completion.choices[0].message.content == "answer task/ö_0_0 to 1"
    assert (completion.object, completion.id) == ("chat.completion", "task/ö_0_0")
    assert completion.created > 0
    assert [method for method, _, _ in server.requests] == ["POST", "GET", "GET", "GET"]
    assert server.requests[1][1] == f"/a/{SECRET}/v1/chat/completions/task/ö_0_0"
    assert not {"idempotency-key", "content-type", "content-length"} & server.requests[1][2].keys()


async def test_progress_may_be_told_with_200_at_first_and_while_it_is_pending() -> None:
    def progress(step_id: str) -> web.Response:
        return web.json_response({"status": "processing", "step_id": step_id})

    def taken(step_id: str) -> web.Response:
        return web.json_response({"step_id": step_id})

    async with later(pending=progress, taken=taken) as server, client_of(server) as client:
        assert (await say(client)).id == "task/ö_0_0"

    assert server.num_sampled == 1


async def test_everything_of_the_openai_client_works_on_answers_that_come_later() -> None:
    async with later() as server, client_of(server) as client:
        raw = await client.chat.completions.with_raw_response.create(model="turnmill", messages=MESSAGES)
        assert raw.status_code == 200
        assert raw.http_request.method == "POST"
        assert raw.elapsed.total_seconds() >= 0
        assert raw.parse().id == "task/ö_0_0"
        streaming = client.chat.completions.with_streaming_response
        async with streaming.create(model="turnmill", messages=MESSAGES) as response:
            assert json.loads(await response.read())["id"] == "task/ö_0_1"
        text = await client.completions.create(model="turnmill", prompt="hello")
        assert text.choices[0].text == "answer task/ö_0_2 to 5"
        tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        await say(client, tools=tools, tool_choice="auto", extra_body={"sample_id": "task_0"})

    assert server.bodies[3]["tools"] == tools
    assert server.bodies[3]["sample_id"] == "task_0"


async def test_copies_wait_for_answers_too_and_share_connections_and_secret() -> None:
    async with later() as server, client_of(server, report_secret="r") as client:
        copied = client.with_options(timeout=5.0, max_retries=1).copy(default_headers={"Prefer": "respond-async"})
        assert (await say(copied)).id == "task/ö_0_0"
        assert copied._client is client._client
        assert copied._report_secret == "r"
        assert (copied.timeout, copied.max_retries) == (5.0, 1)
        assert client.copy(report_secret="s")._report_secret == "s"

    assert server.requests[0][2]["prefer"] == "respond-async"
    # May be held for a while: half of what the client waits for an exchange.
    assert server.requests[1][2]["prefer"] == "wait=2"
    assert server.keys[0]


async def test_plain_openai_clients_wait_for_answers_with_the_http_client_of_this_one() -> None:
    async with later() as server, PollingHttpClient(poll_interval_s=0.01) as http:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", http_client=http)
        headers = {"Idempotency-Key": "k"}
        assert (await say(client, extra_headers=headers)).id == "task/ö_0_0"


LOAD_BALANCER = [instead(502), instead(503), instead(504), instead(500), instead(429, Retry_After="0.01")]


@pytest.mark.parametrize("fault", [lost, cut, *LOAD_BALANCER, shaped(503, "shutting_down")])
async def test_a_lost_answer_to_a_call_never_samples_twice(fault: Fault) -> None:
    async with later(faults=[fault], num_pending=0) as server, client_of(server) as client:
        assert (await say(client)).id == "task/ö_0_0"

    assert server.num_sampled == 1
    assert len(server.keys) == 2
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("fault", [lost, cut, *LOAD_BALANCER, shaped(503, "shutting_down")])
async def test_a_lost_answer_to_a_question_is_asked_for_again(fault: Fault) -> None:
    async with later(faults=[None, fault, fault], num_pending=3) as server, client_of(server) as client:
        assert (await say(client)).id == "task/ö_0_0"

    assert (server.num_sampled, len(server.keys)) == (1, 1)


async def test_an_exchange_that_takes_too_long_is_repeated_as_the_same_call() -> None:
    options = {"timeout": 0.2, "max_wait_s": 30.0}
    async with later(faults=[silent, None, silent]) as server, client_of(server, **options) as client:
        assert (await say(client)).id == "task/ö_0_0"

    assert server.num_sampled == 1
    assert len(server.keys) >= 2
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"code": "context_length_exceeded", "message": "too long"}, openai.BadRequestError),
        ({"code": "engine_failed", "message": "too long"}, openai.InternalServerError),
        ("too long", openai.InternalServerError),
    ],
)
async def test_a_step_that_failed_is_openais_error_and_is_not_repeated(error: Any, expected: type[Exception]) -> None:
    def failed(completion: dict[str, Any]) -> web.Response:
        return web.json_response({"status": "failed", "error": error})

    async with later(form=failed) as server, client_of(server) as client:
        with pytest.raises(expected, match="too long"):
            await say(client)

    assert (server.num_sampled, len(server.keys)) == (1, 1)


@pytest.mark.parametrize(("status", "code"), [(500, "engine_failed"), (504, "call_timeout"), (409, "attempt_over")])
async def test_an_error_of_the_proxy_is_the_answer_and_is_not_repeated(status: int, code: str) -> None:
    async with later(faults=[None, shaped(status, code), shaped(status, code)]) as server, client_of(server) as client:
        for _ in range(2):
            with pytest.raises(openai.APIStatusError, match="because") as caught:
                await say(client)
            assert caught.value.code == code
            server.faults = [shaped(status, code)] * 10

    assert [method for method, _, _ in server.requests] == ["POST", "GET", "POST"]


async def test_a_wait_that_is_too_long_ends_and_does_not_begin_anew() -> None:
    async with later(num_pending=10**6) as server, client_of(server, max_wait_s=0.2) as client:
        with pytest.raises(openai.APITimeoutError):
            await say(client)

    assert len(server.keys) == 1


async def test_the_read_time_out_bounds_the_wait_where_nothing_else_does() -> None:
    async with later(num_pending=10**6) as server, client_of(server) as client:
        with pytest.raises(openai.APITimeoutError):
            await say(client, timeout=1.0)

    assert len(server.keys) == 1


async def test_a_cancelled_call_asks_no_more() -> None:
    async with later(num_pending=10**6) as server, client_of(server) as client:
        call = asyncio.create_task(say(client))
        await server.was_asked_later.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        num_requests = len(server.requests)
        await asyncio.sleep(0.05)
        assert len(server.requests) <= num_requests + 1


async def test_a_202_that_names_no_step_is_an_error() -> None:
    async with later(taken=lambda step_id: web.json_response({}, status=202)) as server, client_of(server) as client:
        with pytest.raises(openai.APIResponseValidationError, match="nothing says where"):
            await say(client)


@pytest.mark.parametrize("form", [None, in_progress_form])
async def test_a_stream_that_comes_later_is_made_of_the_answer(form: Any) -> None:
    async with later(**({"form": form} if form else {})) as server, client_of(server) as client:
        stream = await client.chat.completions.create(model="turnmill", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="turnmill", prompt="hello", stream=True)
        pieces = [chunk.choices[0].text async for chunk in text]

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "answer task/ö_0_0 to 1"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(pieces) == "answer task/ö_0_1 to 5"
    assert [method for method, _, _ in server.requests] == ["POST", "GET", "GET", "GET"] * 2
    # It says that it may be sent away.
    assert server.requests[0][2]["prefer"] == "wait=20"


async def test_a_stream_that_failed_later_is_openais_error() -> None:
    def failed(completion: dict[str, Any]) -> web.Response:
        return web.json_response({"status": "failed", "error": {"code": "engine_failed", "message": "out of luck"}})

    async with later(form=failed) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            await client.chat.completions.create(model="turnmill", messages=MESSAGES, stream=True)

    assert server.num_sampled == 1


@pytest.mark.parametrize("hold_s", [None, 0.0])
async def test_streams_with_tools_come_from_a_proxy_that_holds_and_from_one_that_does_not(
    world: "World", hold_s: float | None
) -> None:
    world.replica.make = spoken
    script = [calling(("weather", {"city": "Rome"})), "Warm."]
    world.replica.reply = lambda request: script[int(request.step_id.rpartition("_")[2])]
    rollout = await world.begin()
    messages = list(MESSAGES)
    async with (
        world.beside(hold_s=hold_s) as other,
        AsyncTurnmillClient(base_url=other.here(rollout)["base_url"]) as client,
    ):
        for _ in script:
            async with client.chat.completions.stream(
                model="turnmill", messages=messages, tools=[WEATHER], stream_options={"include_usage": True}
            ) as stream:
                completion = await stream.get_final_completion()
            message = completion.choices[0].message
            calls = [{**call.to_dict(), "function": call.function.to_dict()} for call in message.tool_calls or []]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls or None})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "30"} for call in calls]
            assert completion.usage is not None and completion.usage.completion_tokens == 2
    assert message.content == "Warm."
    assert [request.parent for request in world.replica.requests] == [None, "task_0_0"]
    assert world.counts.num_forks == 0


class Stamp(httpx2.Auth):
    """A signer whose signatures can be told apart."""

    def __init__(self) -> None:
        self.count = 0

    def auth_flow(self, request: httpx2.Request) -> Any:
        self.count += 1
        request.headers["X-Signed"] = str(self.count)
        yield request


async def test_every_request_is_signed_questions_and_retries_included() -> None:
    async with later(faults=[lost]) as server, client_of(server, auth=Stamp()) as client:
        await say(client.with_options(timeout=5.0))

    assert [headers["x-signed"] for _, _, headers in server.requests] == ["1", "2", "3", "4", "5"]


def test_what_can_not_work_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(InvalidInput, match="base_url is missing"):
        AsyncTurnmillClient()
    with pytest.raises(InvalidInput, match=r"turnmill\.PollingHttpClient"):
        AsyncTurnmillClient(base_url="http://proxy/v1", http_client=httpx2.AsyncClient())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="make it PollingHttpClient"):
        AsyncTurnmillClient(base_url="http://proxy/v1", auth=Stamp(), http_client=PollingHttpClient())
    with pytest.raises(InvalidInput, match="greater than 0"):
        AsyncTurnmillClient(base_url="http://proxy/v1", poll_interval_s=0.0)


def test_the_users_own_key_is_not_shown_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert AsyncTurnmillClient(base_url="http://proxy/a/secret/v1").api_key == "none"
    assert AsyncTurnmillClient(base_url="http://proxy/v1", api_key="chat-secret").api_key == "chat-secret"


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://proxy/a/secret/v1", "http://proxy/v1/rollouts/report"),
        ("http://proxy:81/under/a/secret/v1/", "http://proxy:81/under/v1/rollouts/report"),
        ("http://proxy/v1", "http://proxy/v1/rollouts/report"),
        ("http://proxy/a/b/c/v1", "http://proxy/a/b/c/v1/rollouts/report"),
    ],
)
def test_reports_go_to_the_proxy_of_the_rollout(base_url: str, expected: str) -> None:
    assert AsyncTurnmillClient(base_url=base_url)._report_url() == expected


def test_the_client_is_loaded_when_it_is_asked_for() -> None:
    code = (
        "import sys, turnmill; assert 'openai' not in sys.modules; turnmill.AsyncTurnmillClient;"
        "print('openai' in sys.modules, 'boto3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "True False"
