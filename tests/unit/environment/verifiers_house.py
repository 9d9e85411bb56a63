"""What the tests of the verifiers adapter share: packages, a chat with exact tokens, and verifiers left to itself."""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from turnmill.environment.base import Environment, Message
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.verifiers_adapter import adapt
from turnmill.records import FinishReason, Reply, ReplyTokens, RolloutResult, Task

PACKAGES = Path(__file__).parents[2] / "fixtures" / "custom-environments"
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs the extra: pip install '.[verifiers]'"
)
KEY_VARIABLE = "KEY_OF_NO_ENDPOINT"


def load_package(name: str, **arguments: Any) -> Any:
    """What the `load_environment` of a package gives, as verifiers has it."""
    module_name = name.replace("-", "_")
    spec = importlib.util.spec_from_file_location(module_name, PACKAGES / name / f"{module_name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    with signals_kept():
        return module.load_environment(**arguments)


@contextmanager
def signals_kept() -> Iterator[None]:
    """An environment of verifiers takes both signals for itself when it is made."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def task(prompt: Any = "Say it.", **metadata: Any) -> Task:
    return Task(id="t_0", metadata={"prompt": prompt, **metadata})


def tool_call(name: str, arguments: Mapping[str, Any], call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def reply(
    content: str | None = "hello",
    *,
    tool_calls: Sequence[dict[str, Any]] = (),
    finish_reason: FinishReason = FinishReason.STOP,
    has_tokens: bool = True,
) -> Reply:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
        finish_reason = FinishReason.TOOL_CALLS
    tokens = ReplyTokens(prompt_ids=[1, 2, 3], sampled_ids=[4, 5], logprobs=[-0.5, -0.25]) if has_tokens else None
    return Reply(message=message, finish_reason=finish_reason, tokens=tokens)


class TokenChat:
    """Gives replies in turn; an exception among them is raised in its place. `calls` keeps messages and parameters."""

    def __init__(self, *turns: Reply | Exception) -> None:
        self._turns = iter(turns)
        self.calls: list[tuple[list[Message], dict[str, Any]]] = []

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        self.calls.append((list(messages), params))
        turn = next(self._turns)
        if isinstance(turn, Exception):
            raise turn
        return turn


async def played(env: Any, asked: Task, chat: TokenChat) -> RolloutResult:
    """Through the adapter, as a worker plays it."""
    environment: Environment = adapt(env)
    return await play_scored(environment, asked, WatchedChat(chat), reward_range=(0.0, 1.0))


# ---------------------------------------------------------------- verifiers left to itself


@asynccontextmanager
async def model_endpoint(*answers: tuple[int, str]) -> AsyncIterator[str]:
    """Base URL of an endpoint that gives these answers in turn, each as (status, text), and no token ids."""
    left = iter(answers)

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        status, text = next(left)
        if status != 200:
            return web.json_response({"error": {"message": text, "type": "server_error"}}, status=status)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response(completion)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def plain_output(env: Any, row: Mapping[str, Any], *answers: tuple[int, str]) -> dict[str, Any]:
    """What verifiers says of one rollout with its own client and no adapter."""
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.types import ClientConfig

    os.environ.setdefault(KEY_VARIABLE, "none")
    async with model_endpoint(*answers) as url:
        client = OpenAIChatCompletionsClient(ClientConfig(api_key_var=KEY_VARIABLE, api_base_url=url, max_retries=0))
        try:
            output = await env.run_rollout(dict(row), client, "m", {}, state_columns=["trajectory"])
        finally:
            await client.close()
    return dict(output)
