"""Stands in for `turnmill role preflight`, with environments that do whatever their `do` says."""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnmill.backends.embedded import open_run
from turnmill.environment import Chat, Environment, Outcome, Score, opening_messages
from turnmill.errors import InvalidInput
from turnmill.records import EnvironmentChoice, Task
from turnmill.telemetry import configure_logging
from turnmill.wiring.running.preflight import run_preflight


def block() -> None:
    time.sleep(600)


def spin() -> None:
    while True:
        pass


class Behaving(Environment):
    """Worth 1.0 for the answer, unless it behaves otherwise."""

    def __init__(self, do: str) -> None:
        self._do = do
        self._num_played = 0

    async def play(self, task: Task, chat: Chat) -> Outcome:
        self._num_played += 1
        said = f"This is game {self._num_played}." if self._do == "count" else "Say it again."
        reply = await chat.complete([*opening_messages(task), {"role": "user", "content": said}])
        if self._do == "block":
            block()
        if self._do == "spin":
            spin()
        if self._do == "ignore cancelling":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
        if self._do == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._do == "exit":
            raise SystemExit(0)
        reward = 0.5 if self._do == "blind" else float(reply.content == task.metadata["answer"])
        return Outcome(reward=reward)

    async def score(self, task: Task, messages: Sequence[Any]) -> Score:
        return Score(reward=0.0)


def load(choice: EnvironmentChoice) -> Environment:
    env_args = choice.env_args
    if env_args["do"] == "refuse":
        raise InvalidInput("env_args: do = refuse is refused")
    if env_args["do"] == "break":
        raise ImportError("no module named gym")
    return Behaving(env_args["do"])


async def main(root: Path, run_id: str, name: str) -> None:
    ports = open_run(root, run_id, num_replicas=0)
    try:
        await run_preflight(ports.blobs, name, stop=asyncio.Event(), load=load, grace_s=0.5)
    finally:
        ports.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs=2)
    for option in ("--root", "--run", "--name"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    configure_logging(given.name, run_id=given.run, form="text")
    asyncio.run(main(Path(given.root), given.run, given.name))
