"""A proxy that answers later, as small as its contract: it samples a call once for each Idempotency-Key.

POST /a/<secret>/v1/chat/completions -> 202 {step_id} -> GET .../<step_id> -> 202 ... -> the completion
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SECRET = "chatsecret0123456789"
# What happens to a request after it was served: the answer goes on, or another comes in its place.
Fault = Callable[[web.Request, web.Response], Awaitable[web.StreamResponse]]


def completion_of(body: dict[str, Any], step_id: str, kind: str = "chat.completion") -> dict[str, Any]:
    said = body.get("messages") or body.get("prompt")
    text = f"answer {step_id} to {len(said or ())}"
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
    return {"id": step_id, "object": kind, "created": 1, "model": "turnmill", "choices": [choice]}


def plain(completion: dict[str, Any]) -> web.Response:
    return web.json_response(completion)


def in_progress_form(completion: dict[str, Any]) -> web.Response:
    bare = {"choices": completion["choices"], "model": "turnmill"}
    return web.json_response({"status": "completed", "result": bare})


async def lost(request: web.Request, answer: web.Response) -> web.StreamResponse:
    """Served, but the answer never comes."""
    assert request.transport is not None
    request.transport.abort()
    return answer


async def cut(request: web.Request, answer: web.Response) -> web.StreamResponse:
    """Half the answer comes."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id":')
    assert request.transport is not None
    request.transport.abort()
    return response


async def silent(request: web.Request, answer: web.Response) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def instead(status: int, body: Any = "<html>no</html>", **headers: str) -> Fault:
    """Another answer: that of something between client and proxy, unless it has OpenAI's shape."""

    async def fault(request: web.Request, answer: web.Response) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(
            status=status, text=text, headers={name.replace("_", "-"): headers[name] for name in headers}
        )

    return fault


def shaped(status: int, code: str) -> Fault:
    return instead(status, {"error": {"message": "because", "type": "server_error", "param": None, "code": code}})


@dataclass
class Later:
    """The proxy; `faults` befall the requests one after the other, None none."""

    url: str = ""
    # How often a step is pending before it is done.
    num_pending: int = 2
    # The form of a finished step, and the answer while it is pending.
    form: Callable[[dict[str, Any]], web.Response] = plain
    pending: Callable[[str], web.Response] = lambda step_id: web.json_response(
        {"step_id": step_id, "status": "pending"}, status=202
    )
    taken: Callable[[str], web.Response] = lambda step_id: web.json_response(
        {"step_id": step_id, "status": "pending"}, status=202
    )
    faults: list[Fault | None] = field(default_factory=list)
    # (method, path, headers by lower-case name) of each request.
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    # Each is one sampled call.
    bodies: list[dict[str, Any]] = field(default_factory=list)
    # Set by the first question for a step.
    was_asked_later: asyncio.Event = field(default_factory=asyncio.Event)
    _steps: dict[str, str] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"{self.url}/a/{SECRET}/v1"

    @property
    def num_sampled(self) -> int:
        return len(self.bodies)

    @property
    def keys(self) -> list[str | None]:
        """Idempotency keys of the POSTs."""
        return [headers.get("idempotency-key") for method, _, headers in self.requests if method == "POST"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(
            (request.method, request.path, {name.lower(): value for name, value in request.headers.items()})
        )
        number = len(self.requests) - 1
        answer = self._take(await request.json(), request) if request.method == "POST" else self._tell(request)
        fault = self.faults[number] if number < len(self.faults) else None
        return answer if fault is None else await fault(request, answer)

    def _take(self, body: dict[str, Any], request: web.Request) -> web.Response:
        key = request.headers["Idempotency-Key"]
        if key not in self._steps:
            # An id that is no path segment as it stands.
            self._steps[key] = f"task/ö_0_{self.num_sampled}"
            self.bodies.append(body)
        return self.taken(self._steps[key])

    def _tell(self, request: web.Request) -> web.Response:
        step_id = request.match_info["step"]
        body = self.bodies[int(step_id.rpartition("_")[2])]
        self.was_asked_later.set()
        self._asked[step_id] = self._asked.get(step_id, 0) + 1
        if self._asked[step_id] <= self.num_pending:
            return self.pending(step_id)
        kind = "chat.completion" if "/chat/" in request.path else "text_completion"
        return self.form(completion_of(body, step_id, kind))


@asynccontextmanager
async def later(**options: Any) -> AsyncIterator[Later]:
    server = Later(**options)
    app = web.Application()
    for route in ("chat/completions", "completions"):
        app.router.add_post(f"/a/{SECRET}/v1/{route}", server.handle)
        app.router.add_get(f"/a/{SECRET}/v1/{route}/{{step}}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
