"""What does a client spend on a call?

    python -m benchmarks.clients [--quick]

Processor time of this process for one call after the other of a conversation's third turn, against an aiohttp stub in
another process: `AsyncTurnmillClient`, the `AsyncOpenAI` that it stands in for, and the light client of the workers.
"""

import argparse
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from openai import AsyncOpenAI

from benchmarks.common import Claim, arguments, emit_ratio, interleave
from benchmarks.stub import OBSERVATION, OPENING, REPLY, stub_server
from turnmill import AsyncTurnmillClient
from turnmill.conversation.client import ChatClient
from turnmill.conversation.http import HttpClient
from turnmill.wiring.event_loop import run_loop

NAME = "clients"
OURS, OPENAI, LIGHT = "AsyncTurnmillClient", "AsyncOpenAI", "the workers' client"
MESSAGES: list[Any] = [OPENING, REPLY, OBSERVATION, REPLY, OBSERVATION]


async def _cost_ms(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Milliseconds of processor time for one of `count` calls."""
    for _ in range(max(10, count // 10)):
        await call()
    before = time.process_time()
    for _ in range(count):
        await call()
    return (time.process_time() - before) / count * 1000


def measure_openai(make: Callable[[], AsyncOpenAI], count: int) -> float:
    async def measure() -> float:
        async with make() as client:
            return await _cost_ms(partial(client.chat.completions.create, model="turnmill", messages=MESSAGES), count)

    return run_loop(measure())


def measure_light(url: str, count: int) -> float:
    async def measure() -> float:
        async with HttpClient() as session:
            client = ChatClient(session, url, timeout_s=60.0, deadline=math.inf)
            return await _cost_ms(partial(client.complete, MESSAGES), count)

    return run_loop(measure())


def compare(args: argparse.Namespace, url: str) -> None:
    count = 200 if args.quick else 2000
    subjects: dict[str, Callable[[], float]] = {
        OURS: partial(measure_openai, partial(AsyncTurnmillClient, base_url=url), count),
        OPENAI: partial(measure_openai, partial(AsyncOpenAI, base_url=url, api_key="none"), count),
        LIGHT: partial(measure_light, url, 10 * count),
    }
    case = "processor time of a call"
    figures, met = interleave(NAME, case, "ms", subjects, rounds=2 if args.quick else 7)
    bounds = {OPENAI: 1.1, LIGHT: None}
    for peer, bound in bounds.items():
        claim = Claim(benchmark=NAME, text=case, unit="ms", ours=OURS, peer=peer, at_most=bound)
        emit_ratio(claim, figures[OURS], figures[peer], met)


def main() -> None:
    args = arguments("What does a client spend on a call?").parse_args()
    with stub_server() as url:
        compare(args, url)


if __name__ == "__main__":
    main()
