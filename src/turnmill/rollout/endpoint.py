"""The model of a rollout as an OpenAI endpoint, for agents that bring a client of their own.

    agent -> its client -> POST <base_url>/chat/completions -> Chat.complete -> Reply -> completion | stream

It stands before the rollout's chat, in the environment's process: so reward functions see each call, whoever makes it,
what fails is known, and a script (a check before the run, a test) answers in the model's place.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from turnmill.conversation.answers import completion_of, models_of
from turnmill.conversation.asgi import HttpError, read_body, refusal, send_json, to_http, unless_gone
from turnmill.conversation.attempts import Answer
from turnmill.conversation.bodies import decoded, parts_of
from turnmill.conversation.exchange import Application, Receive, Scope, Send
from turnmill.conversation.requests import DEFAULT_MODEL
from turnmill.conversation.server import Connection
from turnmill.conversation.streaming import send_events
from turnmill.environment.base import Chat
from turnmill.errors import InvalidRequest, TurnmillError
from turnmill.records import Reply, encode

# Errors are final: what may be tried again was tried below this.
_FINAL = ((b"x-should-retry", b"false"),)
_IDLE_S = 75.0
# For bodies that are still read when the rollout ends.
_GRACE_S = 1.0
# Said by the endpoint itself, in the form that the client asked for.
_OWN = ("messages", "stream", "stream_options", "n", "logprobs", "return_token_ids")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where an agent's client finds the model of its rollout."""

    # Holds a secret of the rollout, so a key is not needed.
    base_url: str = field(repr=False)
    # For clients that must have one.
    api_key: str = "none"
    model: str = DEFAULT_MODEL


@asynccontextmanager
async def openai_endpoint(chat: Chat) -> AsyncIterator[Endpoint]:
    """Serve `chat` as OpenAI chat completions (tools and streams too) until this is left; then calls are given up.

    Clients may be many at once, sync ones in threads: one on the event loop would wait for itself.
    """
    app = _App(chat)
    server = _Server(app)
    port = await server.start()
    try:
        yield Endpoint(base_url=f"http://127.0.0.1:{port}{app.path}")
    finally:
        app.stop()
        await server.close()


class _Server:
    """A port of this machine for one rollout. There are many of them, so they cost little and log nothing."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen at a port that the system chooses."""
        loop = asyncio.get_running_loop()

        def connect() -> Connection:
            return Connection(self._app, connections=self._connections, tasks=self._tasks, idle_s=_IDLE_S, loop=loop)

        self._server = await loop.create_server(connect, "127.0.0.1", 0, backlog=128)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Nothing is answered any more; the answers that are on their way are sent first."""
        self._server.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_GRACE_S)
            for task in late:
                task.cancel()
        for connection in list(self._connections):
            connection.shutdown()
        await self._server.wait_closed()


class _App:
    """An ASGI application for one rollout."""

    def __init__(self, chat: Chat) -> None:
        self.path = f"/a/{secrets.token_urlsafe(16)}/v1"
        self._chat = chat
        self._num_calls = itertools.count()
        self._asking: set[asyncio.Task[Reply]] = set()
        self._is_over = False

    def stop(self) -> None:
        """The rollout is over."""
        self._is_over = True
        for asking in self._asking:
            asking.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except HttpError as error:
            await send_json(send, error.status, error.body(), _FINAL)
        except TurnmillError as error:
            known = to_http(error)
            await send_json(send, known.status, known.body(), _FINAL)
        except Exception as error:  # whatever a chat raises, a script that has ended say: the agent is told
            text = f"{type(error).__name__}: {error}"
            unknown = HttpError(status=500, type="server_error", code="call_failed", message=text)
            await send_json(send, 500, unknown.body(), _FINAL)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if self._is_over or not path.startswith(self.path):
            raise _over()
        route = (scope["method"], path.removeprefix(self.path))
        if route == ("GET", "/models"):
            await send_json(send, 200, encode(models_of([DEFAULT_MODEL], time.time())))
        elif route == ("POST", "/chat/completions"):
            await self._complete(await read_body(receive), receive, send)
        else:
            raise refusal(404, "not_found", "an agent may ask for POST /chat/completions and GET /models")

    async def _complete(self, content: bytes, receive: Receive, send: Send) -> None:
        body = {name: decoded(part) for name, part in parts_of(content).items()}
        messages = _messages(body)
        if body.get("n") not in (None, 1):
            raise InvalidRequest("a rollout gives one choice a call: ask n times", param="n", code="unsupported_value")
        has_tokens = bool(body.get("logprobs") or body.get("return_token_ids"))
        params = {name: value for name, value in body.items() if name not in _OWN and value is not None}
        if has_tokens:
            params["return_token_ids"] = True
        asking = asyncio.create_task(self._ask(messages, params), name="endpoint-call")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        reply = await unless_gone(asking, receive)
        if reply is None:
            return
        # By the call's own id, the agent can say what the turn was worth.
        completion_id = reply.call_id or f"chatcmpl-{next(self._num_calls)}"
        completion = _completion(reply, completion_id, str(body.get("model") or DEFAULT_MODEL))
        if body.get("stream"):
            await send_events(send, completion, has_usage=_has_usage_chunk(body))
        else:
            await send_json(send, 200, encode(completion))

    async def _ask(self, messages: list[Any], params: Mapping[str, Any]) -> Reply:
        try:
            return await self._chat.complete(messages, **params)
        except asyncio.CancelledError:
            if self._is_over:
                raise _over() from None
            raise


def _over() -> HttpError:
    return refusal(401, "invalid_api_key", "there is no rollout at this path, or it is over")


def _messages(body: Mapping[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list that is not empty", param="messages")
    return messages


def _has_usage_chunk(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _completion(reply: Reply, completion_id: str, model: str) -> dict[str, Any]:
    tokens = reply.tokens
    answer = Answer(
        call_id=completion_id,
        reply=reply.message,
        finish_reason=reply.finish_reason,
        num_prompt_tokens=reply.usage.get("prompt_tokens", 0),
        num_sampled_tokens=reply.usage.get("completion_tokens", 0),
        created_at=time.time(),
        sampled_ids=tokens.sampled_ids if tokens else (),
        logprobs=tokens.logprobs if tokens else (),
        prompt_ids=list(tokens.prompt_ids) if tokens else None,
    )
    return completion_of([answer], model, is_text=False)
