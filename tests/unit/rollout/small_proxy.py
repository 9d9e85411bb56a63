"""A proxy with the rollout routes and chat completions, in memory, over real HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

TOKEN = "workertoken0123456789"
LEASE_S = 1


class SmallProxy:
    """Rollouts in memory, one attempt each."""

    def __init__(self) -> None:
        self.url = ""
        self.queue: asyncio.Queue[str] = asyncio.Queue()
        # Lease bodies, with the number of rollouts given.
        self.leases: list[tuple[dict[str, Any], int]] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        # Attempts so far and last heartbeat of rollouts in flight, by sample id; further fields of their tasks.
        self.attempts: dict[str, int] = {}
        self.heard_at: dict[str, float] = {}
        self.data: dict[str, dict[str, Any]] = {}
        self.limits_s: dict[str, float] = {}
        self.lost: set[str] = set()
        # Status to answer a report with, by sample id.
        self.refused: dict[str, int] = {}
        self.reply = "crane"
        self.leaves_tokens_out = False
        self.may_chat = asyncio.Event()
        self.may_chat.set()
        self.may_report = asyncio.Event()
        self.may_report.set()
        self.num_reporting = 0
        self.num_chatting = 0
        self.most_chatting = 0
        self.changed = asyncio.Condition()

    async def until(self, condition: Any) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def lease(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "wrong token", "code": "invalid_api_key"}}, status=401)
        given: list[str] = []
        with suppress(TimeoutError):
            given.append(await asyncio.wait_for(self.queue.get(), body["wait_s"]))
        while len(given) < body["max_rollouts"] and not self.queue.empty():
            given.append(self.queue.get_nowait())
        self.leases.append((body, len(given)))
        await self._notify()
        return web.json_response({"rollouts": [self._rollout(sample_id) for sample_id in given]})

    def add(self, sample_id: str, *, limit_s: float = 60.0, **data: Any) -> None:
        """A rollout whose task has this data."""
        self.data[sample_id] = data
        self.limits_s[sample_id] = limit_s
        self.queue.put_nowait(sample_id)

    async def lease_again(self) -> None:
        """Until cancelled: rollouts without a heartbeat for longer than their lease are in the queue again."""
        while True:
            await asyncio.sleep(0.1)
            for sample_id, heard_at in list(self.heard_at.items()):
                if time.monotonic() - heard_at > LEASE_S:
                    del self.heard_at[sample_id]
                    self.queue.put_nowait(sample_id)

    def _rollout(self, sample_id: str) -> dict[str, Any]:
        self.attempts[sample_id] = self.attempts.get(sample_id, 0) + 1
        self.heard_at[sample_id] = time.monotonic()
        return {
            "request": {
                "sample_id": sample_id,
                "timestamp": "2026-01-01T00:00:00Z",
                "max_length": 100,
                "rewards": {"range": [0.0, 1.0]},
                "data": {"prompt": "Guess.", "answer": "crane", **self.data.get(sample_id, {})},
            },
            "attempt": self.attempts[sample_id],
            "base_url": f"{self.url}/a/chat-{sample_id}/v1",
            "report_secret": f"report-{sample_id}",
            "deadline": time.time() + self.limits_s.get(sample_id, 60.0),
            "lease_token": f"lease-{sample_id}",
            "lease_s": LEASE_S,
        }

    async def heartbeat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.heartbeats.append(body)
        for token in body["lease_tokens"]:
            self.heard_at[token.removeprefix("lease-")] = time.monotonic()
        await self._notify()
        return web.json_response({"lost": [token for token in body["lease_tokens"] if token in self.lost]})

    async def chat(self, request: web.Request) -> web.Response:
        self.num_chatting += 1
        self.most_chatting = max(self.most_chatting, self.num_chatting)
        await self._notify()
        try:
            await self.may_chat.wait()
        finally:
            self.num_chatting -= 1
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": self.reply}, "finish_reason": "stop"}
        if not (await request.json()).get("return_token_ids") or self.leaves_tokens_out:
            return web.json_response({"choices": [choice]})
        logprob = {"token": "token_id:4", "logprob": -0.5, "bytes": None, "top_logprobs": []}
        choice |= {"token_ids": [4], "logprobs": {"content": [logprob]}}
        return web.json_response({"choices": [choice], "prompt_token_ids": [1, 2]})

    async def report(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert request.headers["Authorization"] == f"Bearer report-{body['id']}"
        self.num_reporting += 1
        await self._notify()
        await self.may_report.wait()
        if status := self.refused.pop(body["id"], None):
            return web.json_response({"error": {"message": "refused"}}, status=status)
        self.reports.append(body)
        self.heard_at.pop(body["id"], None)
        await self._notify()
        return web.json_response({"status": "recorded"})


@asynccontextmanager
async def small_proxy() -> AsyncIterator[SmallProxy]:
    proxy = SmallProxy()
    app = web.Application()
    for name in ("lease", "heartbeat", "report"):
        app.router.add_post(f"/v1/rollouts/{name}", getattr(proxy, name))
    app.router.add_post("/a/{secret}/v1/chat/completions", proxy.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield proxy
    finally:
        await runner.cleanup()
