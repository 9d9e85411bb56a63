"""`turnmill serve`, over real HTTP: OpenAI's API of the model that was trained."""

import asyncio
import io
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unit.cli.terminal import turnmill_command
from turnmill import assets
from turnmill.backends.embedded import open_root_records
from turnmill.config import Config, to_dict
from turnmill.errors import InvalidInput, NotFound
from turnmill.generation.engine import EngineCall
from turnmill.generation.renderer import Renderer
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.ports import Write
from turnmill.records import Run, RunStatus, Sampling, encode
from turnmill.serving.conversations import Conversations
from turnmill.serving.loop import EngineLoop
from turnmill.wiring.serving import Address, find_model, serve_model

MODEL = "wordle-tiny"
FOLDER = assets.model_folder(MODEL)
QUESTION = [{"role": "user", "content": "Guess the five-letter word."}]
FEEDBACK = {"role": "user", "content": "a- b- c- d- e-"}


class Client:
    """Requests to one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def chat(self, **changes: Any) -> dict[str, Any]:
        status, answer = await self.post("/chat/completions", {"model": MODEL, "messages": QUESTION, **changes})
        assert status == 200, answer
        return answer

    async def stream(self, path: str = "/chat/completions", **changes: Any) -> list[dict[str, Any]]:
        """The chunks, without the `[DONE]` that ends them."""
        body = {"model": MODEL, "stream": True, **({} if "prompt" in changes else {"messages": QUESTION}), **changes}
        async with self.session.post(self.url + path, json=body) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            events = (await answer.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@asynccontextmanager
async def serving(token: str | None = None, *, num_slots: int = 8) -> AsyncIterator[Client]:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    server = asyncio.create_task(
        serve_model(
            find_model(Path("nowhere"), MODEL),
            Address(host="127.0.0.1", port=0, token=token),
            num_slots=num_slots,
            stop=stop,
            hurry=asyncio.Event(),
            ready=url.set_result,
        )
    )
    try:
        either: set[asyncio.Future[Any]] = {server, url}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        async with aiohttp.ClientSession() as session:
            yield Client(await url, session)
    finally:
        stop.set()
        await server


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)


async def test_answers_streams_and_errors_have_openais_shape() -> None:
    async with serving() as client:
        answer = await client.chat(seed=1, logprobs=True)
        assert answer["object"] == "chat.completion" and answer["model"] == MODEL
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "stop"
        said, usage = choice["message"]["content"], answer["usage"]
        assert said and len(choice["logprobs"]["content"]) == usage["completion_tokens"]
        assert "".join(token["token"] for token in choice["logprobs"]["content"]).startswith(said)
        assert all(token["logprob"] <= 0 for token in choice["logprobs"]["content"])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

        chunks = await client.stream(seed=1, stream_options={"include_usage": True})
        assert text_of(chunks) == said, "the same seed, streamed"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage

        listed = await (await client.session.get(client.url + "/models")).json()
        assert [model["id"] for model in listed["data"]] == [MODEL]
        assert (await client.session.get(f"{client.url}/models/{MODEL}")).status == 200
        assert (await client.session.get(f"{client.url}/models/other")).status == 404
        assert (await client.session.get(f"{client.url}/nothing")).status == 404
        assert (await client.session.get(f"{client.url}/completions")).status == 405


async def test_choices_differ_and_a_seed_repeats_them() -> None:
    async with serving() as client:
        one, two = [await client.chat(n=6, seed=7, temperature=1.5) for _ in range(2)]
        texts = [choice["message"]["content"] for choice in one["choices"]]
        assert texts == [choice["message"]["content"] for choice in two["choices"]]
        assert [choice["index"] for choice in one["choices"]] == list(range(6)) and len(set(texts)) > 1
        chunks = await client.stream(n=6, seed=7, temperature=1.5)
        assert [text_of(chunks, index) for index in range(6)] == texts
        greedy = {(await client.chat(temperature=0))["choices"][0]["message"]["content"] for _ in range(3)}
        assert len(greedy) == 1


async def test_completions_continue_a_text() -> None:
    async with serving() as client:
        body = {"model": MODEL, "prompt": "crane", "max_tokens": 3, "seed": 1}
        status, answer = await client.post("/completions", body)
        assert status == 200 and answer["object"] == "text_completion"
        assert answer["usage"]["completion_tokens"] <= 3
        chunks = await client.stream("/completions", prompt="crane", max_tokens=3, seed=1)
        assert text_of(chunks) == answer["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


async def test_a_stop_string_ends_the_text_in_front_of_it() -> None:
    async with serving() as client:
        said = (await client.chat(temperature=0))["choices"][0]["message"]["content"]
        for stopped in (await client.chat(temperature=0, stop=said[2]), None):
            if stopped is None:
                chunks = await client.stream(temperature=0, stop=[said[2]])
                text, reason = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
            else:
                choice = stopped["choices"][0]
                text, reason = choice["message"]["content"], choice["finish_reason"]
            assert (text, reason) == (said.partition(said[2])[0], "stop")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        ({"model": "other", "messages": QUESTION}, 404, "model_not_found"),
        ({"model": MODEL, "messages": QUESTION * 40}, 400, "context_length_exceeded"),
        ({"model": MODEL, "messages": QUESTION, "max_tokens": 10_000}, 400, "context_length_exceeded"),
        ({"model": MODEL, "messages": QUESTION * 40, "stream": True}, 400, "context_length_exceeded"),
        ({"model": MODEL, "messages": QUESTION, "top_logprobs": 2}, 400, "unsupported_value"),
    ],
)
async def test_what_can_not_be_answered_is_an_error_of_openais_form(body: Any, status: int, code: str) -> None:
    async with serving() as client:
        found, answer = await client.post("/chat/completions", body)
        assert (found, answer["error"]["code"]) == (status, code)
        assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_a_token_is_needed_where_one_was_set() -> None:
    async with serving("secret-token") as client:
        body = {"model": MODEL, "messages": QUESTION}
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret-token"}):
            status, answer = await client.post("/chat/completions", body, **headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert "secret-token" not in json.dumps(answer)
        status, _ = await client.post("/chat/completions", body, Authorization="Bearer secret-token")
        assert status == 200


async def test_many_clients_are_answered_together_with_fewer_slots_than_clients() -> None:
    async with serving(num_slots=4) as client:
        answers = await asyncio.gather(*[client.chat(seed=seed) for seed in range(40)])
        alone = [await client.chat(seed=seed) for seed in range(3)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[:3] == [answer["choices"][0]["message"]["content"] for answer in alone]


async def test_a_client_that_goes_away_frees_its_slot() -> None:
    async with serving(num_slots=1) as client:
        async with asyncio.timeout(30.0):
            for _ in range(5):
                host, port = client.url.removeprefix("http://").removesuffix("/v1").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                body = json.dumps({"model": MODEL, "messages": QUESTION, "n": 32}).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
                writer.transport.abort()
            assert (await client.chat())["choices"][0]["message"]["content"]


def test_a_conversation_goes_on_after_the_tokens_that_were_sampled_as_in_training() -> None:
    """Nothing that the model sampled is tokenized again, and a conversation that is not known is rendered anew."""
    renderer = Renderer(FOLDER)
    conversations = Conversations(renderer, max_remembered=60)
    opening = conversations.prompt(QUESTION)
    assert opening.new_ids == renderer.opening(QUESTION) and opening.context_ids == []
    # One word in two tokens: the tokenizer would make one of it.
    sampled = [*renderer.plain("c"), *renderer.plain("rane"), max(renderer.end_ids)]
    assert renderer.plain("crane") != sampled[:-1]
    reply = renderer.decode(sampled)
    conversations.remember(opening, "call-1", sampled, {"role": "assistant", "content": reply})
    said = [*QUESTION, {"role": "assistant", "content": f" {reply}\n"}, FEEDBACK]
    prompt = conversations.prompt(said)
    assert prompt.prefix_key == "call-1" and prompt.context_ids == [*opening.new_ids, *sampled]
    assert prompt.new_ids == renderer.continuation([FEEDBACK], ended=True)
    other = conversations.prompt([*QUESTION, {"role": "assistant", "content": "other"}, FEEDBACK])
    assert other.prefix_key is None
    for number in range(20):
        conversations.remember(opening, f"call-{number}", sampled, {"role": "assistant", "content": f"{number}"})
    assert conversations.prompt(said).prefix_key is None, "forgotten, and rendered anew"


async def test_a_call_that_is_given_up_leaves_the_others_as_they_were() -> None:
    engine = TransformersEngine(FOLDER, num_slots=3, max_length=160)
    new_ids = Renderer(FOLDER).opening(QUESTION)

    def call(name: str) -> EngineCall:
        return EngineCall(
            call_id=name,
            seed_parts=(name.partition(" ")[0],),
            prefix_key=None,
            new_ids=new_ids,
            sampling=Sampling(),
            max_new_tokens=100,
            end_ids=frozenset(),
        )

    async with EngineLoop(engine) as loop:

        async def play(name: str, most: int = 1000) -> list[int]:
            ids: list[int] = []
            stream = loop.generate(call(name))
            async for progress in stream:
                ids += progress.token_ids
                if len(ids) >= most:
                    break
            await stream.aclose()
            return ids

        alone = await play("one")
        given_up = [play("two", 1), play("three", 5), play("four", 40), play("five", 1)]
        together, *_ = await asyncio.gather(play("one again"), *given_up)
        assert together == alone and len(alone) == 100
        assert await play("one once more") == alone
    assert engine.num_running == 0 and engine.num_free == 3


# ---------------------------------------------------------------- the command


@contextmanager
def serve_command(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    process = subprocess.Popen(
        turnmill_command("serve", *arguments, "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("serving "))
        yield process, int(line.partition("127.0.0.1:")[2].partition("/")[0])
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_answers_what_was_asked_before_and_ends(tmp_path: Path) -> None:
    with serve_command(MODEL, "--root", str(tmp_path)) as (process, port):
        body = json.dumps({"model": MODEL, "messages": QUESTION, "n": 32, "max_tokens": 100}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            client.sendall(body[:-1])
            with socket.create_connection(("127.0.0.1", port)) as other:
                other.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
            client.sendall(body[-1:])
            answer = client.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    assert list(tmp_path.iterdir()) == [], "looking for the model leaves no trace"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-run"], "no run in"),
        ([MODEL, "--step", "3"], "--step is for a run"),
        ([MODEL, "--host", "0.0.0.0"], "TURNMILL_SERVE_TOKEN"),
        ([MODEL, "--token-file", "/nowhere/token"], "can't be read"),
        ([MODEL, "--host", "203.0.113.1", "--token-file", "TOKEN"], "can't listen there"),
    ],
)
def test_what_can_not_be_served_is_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "token").write_text("secret\n")
    arguments = [str(tmp_path / "token") if part == "TOKEN" else part for part in arguments]
    done = subprocess.run(
        turnmill_command("serve", *arguments, "--root", str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


async def test_a_run_is_served_as_it_was_trained(tmp_path: Path) -> None:
    config = to_dict(Config(base_model=MODEL, max_length=96, max_new_tokens=5, temperature=0.9))
    run = Run(
        run_id="r1", cause="c", status=RunStatus.SUCCEEDED, created_at=1.0, config=config, sources={}, data_path=None
    )
    runs = open_root_records(tmp_path)
    await runs.write([Write(key=run.key, value=encode(run), expected=0)])
    runs.close()
    with pytest.raises(NotFound, match="no checkpoint final: it has none"):
        find_model(tmp_path, "r1")
    for name in ("final", "step-3"):
        shutil.copytree(FOLDER, tmp_path / "runs" / "r1" / "checkpoints" / name)
    found = find_model(tmp_path, "r1")
    assert (found.name, found.folder.name) == ("r1", "final")
    assert (found.config.max_length, found.config.max_new_tokens, found.config.temperature) == (96, 5, 0.9)
    found = find_model(tmp_path, "r1", 3)
    assert (found.name, found.folder.name) == ("r1/step-3", "step-3")
    with pytest.raises(NotFound, match=r"there are final, step-3 \(--step N\)"):
        find_model(tmp_path, "r1", 4)


def test_models_are_found_by_their_names(tmp_path: Path) -> None:
    assert find_model(tmp_path, MODEL).folder == FOLDER
    assert find_model(tmp_path, str(FOLDER)).name == MODEL
    with pytest.raises(InvalidInput, match=r"config\.json is missing"):
        find_model(tmp_path, str(tmp_path))
    with pytest.raises(NotFound):
        find_model(tmp_path, "nothing")
    for version in ("1.9", "1.10", "0.11"):
        folder = tmp_path / "bucket" / "models" / "20300101-000000-abcd" / version
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    # What was published outlives its run.
    assert find_model(tmp_path, "20300101-000000-abcd").folder.name == "1.10"


async def test_a_prompt_that_takes_long_to_render_holds_up_nobody() -> None:
    async with serving() as client:
        many = [{"role": "user", "content": "guess"}] * 100_000
        body = io.BytesIO(json.dumps({"model": MODEL, "messages": many}).encode())
        long = asyncio.create_task(client.session.post(f"{client.url}/chat/completions", data=body))
        num_answered = 0
        while not long.done():
            async with client.session.get(client.url.removesuffix("/v1") + "/healthz") as answer:
                assert answer.status == 200
            num_answered += 1
        async with await long as refused:
            assert refused.status == 400 and "context_length_exceeded" in await refused.text()
        assert num_answered > 20
