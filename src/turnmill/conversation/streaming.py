"""Streams: a finished answer as server-sent events in OpenAI's form, and signs of life until it is there.

    answer recorded -> completion -> chunks (role, what is said, each tool call, the end, usage) -> data: ... -> [DONE]

Nothing is streamed before it is recorded: what a client has read is what is trained on, whatever becomes of the line.
So the text comes at once, after comments that keep proxies and clients from giving up. Until the first of them an error
has a status of its own; after it, an error is an event, as OpenAI's clients read it, and the last.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnmill.conversation.asgi import HttpError, send_whole
from turnmill.conversation.exchange import Send
from turnmill.errors import TurnmillError
from turnmill.records import encode

CONTENT_TYPE = "text/event-stream; charset=utf-8"
_HEADERS = (
    (b"content-type", CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    # Or nginx would collect them.
    (b"x-accel-buffering", b"no"),
)
_SIGN_OF_LIFE = b": waiting\n\n"
# Fields of a completion that all its chunks have.
_COMMON = ("id", "created", "model")
_CHUNK_KINDS = {"chat.completion": "chat.completion.chunk", "text_completion": "text_completion"}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When a stream shows that its answer is still to come."""

    # Seconds to the first sign of life, in which errors have a status; None: there are no signs.
    first_s: float | None = 5.0
    # Seconds from one sign to the next.
    every_s: float = 5.0


async def send_stream(
    send: Send,
    asking: Coroutine[Any, Any, dict[str, Any]],
    *,
    has_usage: bool,
    explain: Callable[[TurnmillError], HttpError],
    pace: Pace,
) -> None:
    """Send the completion that `asking` comes to; raises what it raises as long as nothing was sent.

    A client that goes away does not end it: the call goes on, and is told to whoever asks again.
    """
    task = asyncio.create_task(asking, name="stream-answer")
    try:
        await asyncio.wait({task}, timeout=pace.first_s)
        if task.done():
            await send_events(send, task.result(), has_usage=has_usage)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while not task.done():
            await send({"type": "http.response.body", "body": _SIGN_OF_LIFE, "more_body": True})
            await asyncio.wait({task}, timeout=pace.every_s)
        try:
            last = events_of(task.result(), has_usage=has_usage)
        except HttpError as error:
            last = _event(error.body())
        except TurnmillError as error:
            last = _event(explain(error).body())
        await send({"type": "http.response.body", "body": last})
    finally:
        # Only where this one is cancelled, with its server.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def send_events(send: Send, completion: Mapping[str, Any], *, has_usage: bool) -> None:
    """A completion that is there, as a whole stream."""
    await send_whole(send, 200, events_of(completion, has_usage=has_usage), _HEADERS)


def events_of(completion: Mapping[str, Any], *, has_usage: bool) -> bytes:
    """The stream of a completion; `has_usage`: with a chunk of its own that tells the tokens."""
    events = [_event(encode(chunk)) for chunk in _chunks(completion, has_usage=has_usage)]
    return b"".join([*events, _event(b"[DONE]")])


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _chunks(completion: Mapping[str, Any], *, has_usage: bool) -> Iterator[dict[str, Any]]:
    common = {name: completion.get(name) for name in _COMMON}
    common["object"] = _CHUNK_KINDS[completion["object"]]
    if has_usage:
        common["usage"] = None
    opening = {name: completion[name] for name in ("prompt_token_ids",) if name in completion}
    for choice in completion["choices"]:
        parts = _chat_parts(choice) if "message" in choice else _text_parts(choice)
        for part in parts:
            yield {**common, **opening, "choices": [part]}
            opening = {}
    if has_usage:
        yield {**common, "choices": [], "usage": completion.get("usage")}


def _chat_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The deltas of one choice: role, text, each tool call, the end; log-probs and tokens come with what is said."""
    message: Mapping[str, Any] = choice["message"]
    content, calls = message.get("content"), message.get("tool_calls") or ()
    rest = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    deltas: list[dict[str, Any]] = [{**rest, "content": None if calls and not content else ""}]
    if content:
        deltas.append({"content": content})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    deltas.append({})
    for place, delta in enumerate(deltas):
        is_last = place == len(deltas) - 1
        part = {"index": choice["index"], "delta": delta, "logprobs": None}
        part["finish_reason"] = choice["finish_reason"] if is_last else None
        yield {**part, **_measured(choice)} if place == 1 else part


def _text_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    said = {"index": choice["index"], "text": choice["text"], "logprobs": None, "finish_reason": None}
    yield {**said, **_measured(choice)}
    yield {**said, "text": "", "finish_reason": choice["finish_reason"]}


def _measured(choice: Mapping[str, Any]) -> dict[str, Any]:
    names = ("logprobs", "token_ids", "prompt_token_ids")
    return {name: choice[name] for name in names if choice.get(name) is not None}
