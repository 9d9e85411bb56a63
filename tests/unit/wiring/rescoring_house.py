"""A run whose conversations were played by a package: proxy and worker are real, the model is scripted."""

import asyncio
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.unit.conversation.conftest import CONFIG, RUN, WORKER_TOKEN, World, open_world
from tests.unit.rollout.boxes import make_package
from turnmill.backends.embedded import open_root_records
from turnmill.config import Config, to_dict
from turnmill.environment.registry import PACKAGES
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import Write
from turnmill.records import GenerateRequest, Run, RunStatus, SampleRecord, encode
from turnmill.rollout.worker import run_worker

ENV_ID = "guessing"
# What it is worth that the model says a letter, what it is told after its first word, and what its reward does.
SOURCE = """
import os

from turnmill.environment import Environment, Outcome, opening_messages, reward


def says(letter):
    def said(rollout):
        return float(letter in rollout.turns[-1].reply.content)
    return said


def brief(rollout, turn):
    return 1.0 if len(turn.reply.content) < 8 else 0.0


def raising(rollout):
    return {}["nothing"]


def first(rollouts):
    return [float(index == 0) for index in range(len(rollouts))]


class Guessing(Environment):
    def __init__(self, letter, told, weight, is_broken, num_turns, group_weight, ends):
        self.told, self.num_turns, self.ends = told, num_turns, ends
        self.rewards = [
            reward(says(letter), name="said", weight=1 - weight),
            reward(brief, weight=weight, per="turn"),
        ]
        if is_broken:
            self.rewards.append(reward(raising, weight=0))
        if group_weight:
            self.rewards.append(reward(first, weight=group_weight, per="group"))

    async def play(self, task, chat):
        messages = opening_messages(task)
        for turn in range(self.num_turns):
            reply = await chat.complete(messages)
            messages += [reply.message, {"role": "user", "content": self.told}]
        if task.id == self.ends:
            os._exit(1)
        return Outcome(metrics={"turns": self.num_turns})


def load_environment(
    letter="a", told="Again.", weight=0.25, is_broken=False, num_turns=2, group_weight=0.0, ends=None
):
    return Guessing(letter, told, weight, is_broken, num_turns, group_weight, ends)
"""
# By sample: what the model says in its turns.
SAID = {
    "t1_0": ("once", "alpha"),
    "t1_1": ("once", "one or the other"),
    "t2_0": ("a longer word", "echo"),
    "t2_1": ("once", "echo"),
}


@dataclass
class Played:
    """A run whose conversations were played."""

    root: Path
    run: Run
    config: Config
    world: World

    async def samples(self) -> list[SampleRecord]:
        return [await self.world.sample(sample_id) for sample_id in SAID]


@asynccontextmanager
async def played_run(root: Path, **changes: object) -> AsyncIterator[Played]:
    """Two groups of two, played and reported; `changes` are parameters of the run. Its proxy stays until the end."""
    make_package(root, ENV_ID, source=SOURCE)
    config = replace(CONFIG, env=ENV_ID, number_generation=2, max_concurrent_rollouts=4, **changes)  # type: ignore[arg-type]
    run = replace(RUN, status=RunStatus.SUCCEEDED, config=to_dict(config), created_at=1.0)
    async with open_world(root, config) as world:
        store = open_root_records(root)
        await RunRecord.create(store, run)
        store.close()
        world.replica.reply = said_by_script
        for sample_id in SAID:
            await add_sample(world, sample_id)
        await worked(world, config, root)
        yield Played(root, run, config, world)


def said_by_script(request: GenerateRequest) -> str:
    return SAID[request.sample_id][0 if request.parent is None else 1]


async def add_sample(world: World, sample_id: str) -> None:
    task_id = sample_id.partition("_")[0]
    sample = replace(await world.add_sample(sample_id), task_id=task_id, group_id=f"group-{task_id}")
    await world.ports.records.write([Write(key=sample.key, value=encode(sample), expected=None)])


async def worked(world: World, config: Config, root: Path) -> None:
    """A worker plays what there is, until all of it is reported."""
    module = runpy.run_path(str(root / PACKAGES / ENV_ID / f"{ENV_ID}.py"))
    stop = asyncio.Event()
    working = asyncio.create_task(
        run_worker(
            proxy_url=world.url,
            worker_token=WORKER_TOKEN,
            name="worker-0",
            config=config,
            environment=module["load_environment"](),
            stop=stop,
        )
    )
    num_ended = 0
    while num_ended < len(SAID):
        news = await world.ports.rollout_response.lease(max_messages=len(SAID), lease_s=30, wait_s=30)
        num_ended += len(news)
        await world.ports.rollout_response.ack([message.receipt for message in news])
    stop.set()
    await working
