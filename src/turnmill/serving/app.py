"""OpenAI's API over one model: a plain ASGI application.

    POST /v1/chat/completions     GET /v1/models        GET /healthz
    POST /v1/completions          GET /v1/models/<id>

Streams are server-sent events, a chunk each, and `[DONE]` at their end.
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from turnmill.conversation.asgi import HttpError, bearer_of, read_body, to_http, unless_gone
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.errors import ShuttingDown, TurnmillError, Unauthorized
from turnmill.records import encode
from turnmill.serving.answers import Answerer, Choice, Piece
from turnmill.serving.conversations import Prompt
from turnmill.serving.requests import Wish, parse_wish

logger = logging.getLogger(__name__)
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_MODELS = "/v1/models"
_POSTS = {"/v1/chat/completions": True, "/v1/completions": False}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is served."""

    name: str
    created_at: float
    max_length: int
    # Of calls that give none.
    temperature: float


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts of one answer begin with."""

    id: str
    created: int
    model: str
    is_chat: bool

    def fields(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class App:
    """The routes; `token` is what clients must show, None: nothing."""

    def __init__(self, model: Model, answerer: Answerer, token_of: Callable[[int], str], *, token: str | None) -> None:
        """`token_of`: the text of one token."""
        self._model = model
        self._answerer = answerer
        self._token_of = token_of
        self._token = token
        self._is_closing = False

    def stop(self) -> None:
        """Take no more requests; those under way are answered."""
        self._is_closing = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._dispatch(scope, receive, send)
        except HttpError as error:
            await _answer(send, error.status, error.body())
        except TurnmillError as error:
            answer = to_http(error)
            if answer.status == 500:
                logger.error("%s", error)
            await _answer(send, answer.status, answer.body())
        else:
            if body is not None:
                await _answer(send, 200, body)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """The body of the answer; None where it was streamed, or where nobody waits for it any more."""
        path, method = scope["path"], scope["method"]
        if path == "/healthz" and method == "GET":
            return b'{"status":"ok"}'
        self._check_token(scope)
        if path in _POSTS and method == "POST":
            return await self._complete(_POSTS[path], receive, send)
        if path == _MODELS and method == "GET":
            return encode({"object": "list", "data": [self._model_object()]})
        if path.startswith(f"{_MODELS}/") and method == "GET":
            self._check_model(path.removeprefix(f"{_MODELS}/"))
            return encode(self._model_object())
        if path in (*_POSTS, "/healthz") or path.startswith(_MODELS):
            raise _http(405, "method_not_allowed", f"{method} is not served here")
        raise _http(404, "not_found", f"there is nothing at {path}; served are {', '.join(_POSTS)} and {_MODELS}")

    def _check_token(self, scope: Scope) -> None:
        if self._token is not None and not hmac.compare_digest(bearer_of(scope).encode(), self._token.encode()):
            raise Unauthorized("the bearer token is not the one that this server was started with")

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            raise HttpError(
                status=404,
                type="invalid_request_error",
                code="model_not_found",
                message=f"the model {name!r} is not served here; it is {self._model.name!r}",
                param="model",
            )

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": int(self._model.created_at),
            "owned_by": "turnmill",
            "max_model_len": self._model.max_length,
        }

    # ------------------------------------------------------------ completions

    async def _complete(self, is_chat: bool, receive: Receive, send: Send) -> bytes | None:
        if self._is_closing:
            raise ShuttingDown("the server is closing")
        wish = parse_wish(await read_body(receive), is_chat=is_chat, temperature=self._model.temperature)
        self._check_model(wish.model)
        prompt = await self._answerer.prompt(wish)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        head = _Head(id=name, created=int(time.time()), model=self._model.name, is_chat=is_chat)
        answering = asyncio.create_task(self._answer_wish(wish, prompt, head, send), name=name)
        # Where nobody waits for it any more, what it samples would cost others their turn.
        return await unless_gone(answering, receive)

    async def _answer_wish(self, wish: Wish, prompt: Prompt, head: _Head, send: Send) -> bytes | None:
        async with aclosing(self._answerer.pieces(wish, prompt)) as pieces:
            if wish.is_streamed:
                await self._stream(wish, prompt, head, pieces, send)
                return None
            found = [piece.choice async for piece in pieces if piece.choice is not None]
        choices = sorted(found, key=lambda choice: choice.index)
        shown = [self._choice(choice, wish, head) for choice in choices]
        return encode({**head.fields(is_chunk=False), "choices": shown, "usage": _usage(prompt, choices)})

    def _choice(self, choice: Choice, wish: Wish, head: _Head) -> dict[str, Any]:
        end = {"index": choice.index, "finish_reason": choice.finish_reason}
        if not head.is_chat:
            return {**end, "text": choice.text, "logprobs": None}
        content = choice.text or (None if choice.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        return {**end, "message": message, "logprobs": self._logprobs(choice) if wish.has_logprobs else None}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=False):
            text = self._token_of(token_id)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    async def _stream(self, wish: Wish, prompt: Prompt, head: _Head, pieces: AsyncIterator[Piece], send: Send) -> None:
        """The head goes out with the first piece: what can't be answered at all is an error of its own."""
        choices: list[Choice] = []
        has_begun = False
        fields = {**head.fields(is_chunk=True), **({"usage": None} if wish.has_usage_chunk else {})}
        try:
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                    if head.is_chat:
                        for index in range(wish.num_choices):
                            await _event(
                                send, {**fields, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
                            )
                if piece.text:
                    await _event(send, {**fields, "choices": [_text_chunk(piece, head)]})
                if piece.choice is not None:
                    choices.append(piece.choice)
                    for place, call in enumerate(piece.choice.tool_calls):
                        delta = {"tool_calls": [{"index": place, **call}]}
                        await _event(send, {**fields, "choices": [_delta(piece.index, delta)]})
                    await _event(send, {**fields, "choices": [_last_chunk(piece.choice, head)]})
        except TurnmillError as error:
            if not has_begun:
                raise
            logger.warning("a stream was cut: %s", error)
            await _send(send, b"data: " + to_http(error).body() + b"\n\n", is_last=True)
            return
        if wish.has_usage_chunk:
            await _event(send, {**fields, "choices": [], "usage": _usage(prompt, choices)})
        await _send(send, b"data: [DONE]\n\n", is_last=True)


# ---------------------------------------------------------------- parts of answers


def _http(status: int, code: str, message: str) -> HttpError:
    return HttpError(status=status, type="invalid_request_error", code=code, message=message)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _event(send: Send, chunk: dict[str, Any]) -> None:
    await _send(send, b"data: " + encode(chunk) + b"\n\n", is_last=False)


async def _send(send: Send, body: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _text_chunk(piece: Piece, head: _Head) -> dict[str, Any]:
    if head.is_chat:
        return _delta(piece.index, {"content": piece.text})
    return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": None}


def _last_chunk(choice: Choice, head: _Head) -> dict[str, Any]:
    if head.is_chat:
        return _delta(choice.index, {}, choice.finish_reason)
    return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}


def _usage(prompt: Prompt, choices: list[Choice]) -> dict[str, Any]:
    num_sampled = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt.num_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": prompt.num_tokens + num_sampled,
    }
