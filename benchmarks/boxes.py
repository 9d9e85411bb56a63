"""What does it cost that an environment plays in a box?

    python -m benchmarks.boxes [--quick]

The same rollouts of the same environment (six turns of Wordle), played by the worker's two runners against a stub that
answers at once: in the worker's process, and in a box of the kind that this machine makes. Beside them: how long a
box takes to be there.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from benchmarks import stub
from benchmarks.common import Claim, allow_many_files, arguments, emit_ratio, interleave
from turnmill.conversation.client import LeasedRollout
from turnmill.conversation.http import HttpClient
from turnmill.environment.registry import find, load_built_in
from turnmill.records import EnvironmentChoice, RolloutRequest
from turnmill.rollout.box.isolation import Settings, choose
from turnmill.rollout.boxed import BoxedRunner
from turnmill.rollout.runner import InProcessRunner, Runner
from turnmill.wiring.event_loop import run_loop

NAME = "boxes"
TURNS = 6
WARM_UP = 64
BOXED, PLAIN = "in a box", "in the worker's process"
CHOICE = EnvironmentChoice(env_id="wordle", env_args={"max_turns": TURNS})


@asynccontextmanager
async def runner_of(kind: str, session: HttpClient, concurrent: int, folder: Path) -> AsyncIterator[Runner]:
    """The runner that a worker would have."""
    if kind == PLAIN:
        yield InProcessRunner(load_built_in(CHOICE), session, call_timeout_s=60.0, training_timeout_s=600.0)
        return
    settings = Settings(
        found=find(CHOICE),
        isolation=choose(is_unsafe_allowed=True),
        log=folder / "environment.log",
        call_timeout_s=60.0,
    )
    async with BoxedRunner(settings, session, num_slots=concurrent, max_attempts=3, training_timeout_s=600.0) as runner:
        yield runner


def measure(kind: str, url: str, concurrent: int, total: int) -> float:
    """Turns a second."""

    async def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with HttpClient() as session, runner_of(kind, session, concurrent, Path(folder)) as runner:
                await play(runner, url, WARM_UP, concurrent)
                began = time.perf_counter()
                await play(runner, url, total, concurrent)
                return total * TURNS / (time.perf_counter() - began)

    return run_loop(run())


async def play(runner: Runner, url: str, total: int, concurrent: int) -> None:
    """So many rollouts, at most so many at once; raises for one that has no reward."""
    numbers = itertools.count()

    async def slot() -> None:
        while (number := next(numbers)) < total:
            result = await runner.run(leased(url, number))
            if result.reward is None:
                raise RuntimeError(f"rollout {number}: {result.detail}")

    await asyncio.gather(*[slot() for _ in range(concurrent)])


def leased(url: str, number: int) -> LeasedRollout:
    """A rollout that nobody asked for; the answer of the stub is never the word."""
    request = RolloutRequest(
        sample_id=f"t-{number}_0",
        timestamp="2026-01-01T00:00:00Z",
        max_length=1000,
        rewards={"range": [0.0, 1.0]},
        data={"prompt": "Guess.", "answer": "zebra"},
    )
    return LeasedRollout(
        request=request,
        attempt=1,
        base_url=url,
        report_secret="none",
        deadline=time.time() + 600,
        lease_token="none",
        lease_s=600,
    )


def measure_start() -> float:
    """Seconds from nothing to a box that can play, and to nothing again."""

    async def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            async with HttpClient() as session, runner_of(BOXED, session, 1, Path(folder)):
                return time.perf_counter() - began

    return run_loop(run())


def main() -> None:
    args = arguments("What does a box cost?").parse_args()
    allow_many_files()
    rounds, total = (2, 256) if args.quick else (5, 2048)
    with stub.stub_server() as url:
        for concurrent in (1, 64):
            num = total if concurrent > 1 else total // 16
            subjects: dict[str, Callable[[], float]] = {
                kind: partial(measure, kind, url, concurrent, num) for kind in (BOXED, PLAIN)
            }
            case = f"{concurrent} rollouts at once x {TURNS} turns"
            figures, met = interleave(NAME, case, "turns/s", subjects, rounds=rounds)
            bound = 0.2 if concurrent > 1 else None
            claim = Claim(benchmark=NAME, text=case, unit="turns/s", ours=BOXED, peer=PLAIN, at_least=bound)
            emit_ratio(claim, figures[BOXED], figures[PLAIN], met)
        interleave(NAME, "a box is there", "s", {BOXED: measure_start}, rounds=rounds)


if __name__ == "__main__":
    main()
