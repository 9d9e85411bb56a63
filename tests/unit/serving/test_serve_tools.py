"""Tools over `turnmill serve`: calls told and streamed, and the tokens of a conversation as training stored them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unit.generation.bench import CountingEngine, ask, request_for
from tests.unit.generation.bench import serving as training
from tests.unit.generation.families import TOOLS
from tests.unit.generation.scripted import save_scripted
from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.generation.renderer import Renderer
from turnmill.records import Sampling
from turnmill.serving.conversations import Conversations
from turnmill.wiring.serving import Address, ServedModel, serve_model

QUESTION = [{"role": "user", "content": "What is the weather?"}]
NAMES = {"chatml": ["get_weather", "add"], "qwen3": ["get_weather"], "llama3": ["get_weather"], "mistral": []}


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            save_scripted(folders[family], family)
        return folders[family]

    return make


class Client:
    """Requests to one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def post(self, **body: Any) -> tuple[int, dict[str, Any]]:
        whole = {"model": "m", "messages": QUESTION, "tools": TOOLS, **body}
        async with self._session.post(f"{self._url}/chat/completions", json=whole) as answer:
            return answer.status, await answer.json()

    async def chat(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post(**body)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        whole = {"model": "m", "messages": QUESTION, "tools": TOOLS, "stream": True, **body}
        async with self._session.post(f"{self._url}/chat/completions", json=whole) as answer:
            events = (await answer.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Client]:
    stop = asyncio.Event()
    url: list[str] = []
    is_ready = asyncio.Event()

    def ready(base_url: str) -> None:
        url.append(base_url)
        is_ready.set()

    task = asyncio.create_task(
        serve_model(
            ServedModel(name="m", folder=folder, config=Config(max_length=1024)),
            Address(host="127.0.0.1", port=0, token=None),
            num_slots=4,
            stop=stop,
            hurry=asyncio.Event(),
            ready=ready,
        )
    )
    try:
        async with asyncio.timeout(60):
            await is_ready.wait()
        async with aiohttp.ClientSession() as session:
            yield Client(url[0], session)
    finally:
        stop.set()
        await task


def results_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"} for call in message["tool_calls"]]


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
async def test_an_agent_calls_tools_over_several_turns(family: str, scripted: Callable[[str], Path]) -> None:
    messages: list[dict[str, Any]] = list(QUESTION)
    async with serving(scripted(family)) as client:
        for _ in range(3):
            choice = await client.chat(messages=messages, temperature=0)
            message = choice["message"]
            assert choice["finish_reason"] == "tool_calls"
            assert [call["function"]["name"] for call in message["tool_calls"]] == NAMES[family]
            assert all(call["type"] == "function" and len(call["id"]) == 9 for call in message["tool_calls"])
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
            assert message["content"] == ("<think>\nTools, then.\n</think>\n\n" if family == "qwen3" else None)
            messages += [message, *results_of(message)]


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
async def test_a_stream_tells_the_text_and_then_each_call_whole(family: str, scripted: Callable[[str], Path]) -> None:
    async with serving(scripted(family)) as client:
        parts = await client.stream(temperature=0)
        whole = await client.chat(temperature=0)
    text = "".join(part["delta"].get("content") or "" for part in parts)
    assert text == (whole["message"]["content"] or "")
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == list(range(len(NAMES[family])))
    told = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [call["function"] for call in calls] == told
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]
    assert parts[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_choices_of_tools_are_kept(is_streamed: bool, scripted: Callable[[str], Path]) -> None:
    async def ask_for(client: Client, **body: Any) -> tuple[str, list[str], str]:
        """(text, names of calls, finish reason)"""
        if is_streamed:
            parts = await client.stream(temperature=0, **body)
            calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
            text = "".join(part["delta"].get("content") or "" for part in parts)
            reason = parts[-1]["finish_reason"]
        else:
            choice = await client.chat(temperature=0, **body)
            calls, text = choice["message"].get("tool_calls", []), choice["message"]["content"] or ""
            reason = choice["finish_reason"]
        return text, [call["function"]["name"] for call in calls], reason

    async with serving(scripted("mistral")) as client:
        forced = await ask_for(client, tool_choice="required")
        assert forced == ("", ["get_weather"], "tool_calls")
        one = {"type": "function", "function": {"name": "add"}}
        # Begun by its name, it goes on as the model likes: here it ends at once, and there is no call.
        text, names, reason = await ask_for(client, tool_choice=one, max_tokens=4)
        assert names == [] and text == '[TOOL_CALLS] [{"name": "add", "arguments":' and reason == "stop"
        text, names, reason = await ask_for(client, tool_choice="none")
        assert names == [] and text.startswith('[{"name": "get_weather"') and reason == "stop"
    async with serving(scripted("chatml")) as client:
        text, names, reason = await ask_for(client, tools=[], tool_choice="none")
        assert names == [] and text.startswith("<tool_call>") and reason == "stop"
        text, names, reason = await ask_for(client, stop='"add"')
        assert (names, reason) == (["get_weather"], "tool_calls") and text.endswith('{"name": ')


async def test_what_a_model_can_not_do_with_tools_is_an_error(scripted: Callable[[str], Path]) -> None:
    async with serving(scripted("llama3")) as client:
        status, answer = await client.post(tool_choice="required", tools=[])
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
    async with serving(assets.model_folder("wordle-tiny")) as client:
        status, answer = await client.post()
        assert status == 400 and "does not tell the model of tools" in answer["error"]["message"]


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
async def test_a_served_conversation_has_the_tokens_that_training_stored(
    family: str, scripted: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the calls that it sampled itself, and as another process gets it, which renders it anew turn by turn."""
    folder = scripted(family)
    renderer = Renderer(folder)
    ports = open_run(tmp_path / "root", "run", num_replicas=1)
    same, other = Conversations(renderer), Conversations(renderer)
    messages: list[dict[str, Any]] = list(QUESTION)
    new: list[dict[str, Any]] = list(QUESTION)
    parent: str | None = None
    path: list[int] = []
    async with training(ports, CountingEngine(folder), folder):
        for turn in range(4):
            sampling = Sampling(max_new_tokens=40)
            response = await ask(ports, request_for(f"a_{turn}", new, parent=parent, tools=TOOLS, sampling=sampling))
            call = response.call
            assert call is not None
            sampled = call.token_ids[-call.num_sampled :]
            stored = [*path, *call.token_ids[: -call.num_sampled]]
            prompt = same.prompt(messages, TOOLS)
            assert [*prompt.context_ids, *prompt.new_ids] == stored
            assert (prompt.prefix_key is not None) is (turn > 0)
            assert other.prompt(messages, TOOLS).new_ids == stored
            if family == "qwen3" and turn > 2:
                later = [*messages, {"role": "user", "content": "And in Oslo?"}]
                # Where the template would have stripped what was thought.
                assert renderer.decode(renderer.one_go(later, TOOLS)).count("Tools, then.") == 0
                assert renderer.decode(other.prompt(later, TOOLS).new_ids).count("Tools, then.") == turn
            same.remember(prompt, call.call_id, sampled, call.reply)
            # With other tools it is another conversation.
            assert same.prompt([*messages, call.reply, *QUESTION], TOOLS[:1]).prefix_key is None
            path += call.token_ids
            new, parent = results_of(call.reply), call.call_id
            messages += [call.reply, *new]
    ports.close()
