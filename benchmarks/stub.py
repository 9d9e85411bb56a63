"""The least that can be called a model endpoint, and the least that can be called its client.

python -m benchmarks.stub      an aiohttp server of chat completions with one fixed answer, on a free port
play(base_url, ...)            conversations over a bare aiohttp client, in this process
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from benchmarks.common import ROOT, allow_many_files
from turnmill.wiring.event_loop import run_loop

REPLY = {"role": "assistant", "content": "crane"}
OPENING = {"role": "user", "content": "Guess the five-letter word."}
OBSERVATION = {"role": "user", "content": "c+ r? a- n- e-"}


async def _complete(request: web.Request) -> web.Response:
    body: dict[str, Any] = msgspec.json.decode(await request.read())
    answer = {
        "id": f"call-{len(body['messages'])}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [{"index": 0, "message": REPLY, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22},
    }
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def _serve() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, gone.set)
    await gone.wait()


@contextmanager
def stub_server() -> Iterator[str]:
    """A stub in a process of its own; its base URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stub"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.stdin.close()
        process.wait()


async def play(base_url: str, *, total: int, concurrent: int, turns: int) -> float:
    """Play `total` conversations of `turns` turns, `concurrent` at once; turns a second."""
    slots = asyncio.Semaphore(concurrent)
    url = f"{base_url}/chat/completions"

    async def converse(session: aiohttp.ClientSession) -> None:
        async with slots:
            messages = [OPENING]
            for _ in range(turns):
                body = msgspec.json.encode({"model": "turnmill", "messages": messages})
                async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                    answer = msgspec.json.decode(await response.read())
                messages += [answer["choices"][0]["message"], OBSERVATION]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = time.perf_counter()
        await asyncio.gather(*(converse(session) for _ in range(total)))
        return total * turns / (time.perf_counter() - begun)


if __name__ == "__main__":
    allow_many_files()
    run_loop(_serve())
