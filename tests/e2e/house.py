"""The whole loop in one process: real ports, proxy over HTTP, worker, replica and trainer as tasks of one event loop.

`House` gives a test hands on every part while it runs, which separate processes do not.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.config import Config, to_dict
from turnmill.conversation.hosting import serve
from turnmill.conversation.proxy import create_app
from turnmill.conversation.sessions import Sessions
from turnmill.environment.base import Chat, Environment, Outcome, opening_messages
from turnmill.generation.renderer import Renderer
from turnmill.generation.replica import run_replica
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.intake.dataset import read_tasks
from turnmill.ports import RunPorts
from turnmill.records import (
    Batch,
    DropReason,
    Metric,
    Purpose,
    Run,
    RunStatus,
    SampleRecord,
    Task,
    TrainingStatus,
    batch_prefix,
    decode,
    sample_prefix,
    training_key,
)
from turnmill.rollout.scheduler import Scheduler
from turnmill.rollout.worker import run_worker
from turnmill.training.loop import train
from turnmill.training.trainer import Trainer
from turnmill.weights import Lora

TOKEN = "worker-token-of-the-house"
MODEL = assets.model_folder("wordle-tiny")

CONFIG = Config(
    max_steps=2,
    global_batch_size=8,
    number_generation=4,
    max_length=160,
    max_new_tokens=8,
    max_concurrent_rollouts=32,
    generation_slots=32,
    lr=1e-3,
    ent_coeff=0.0,
    call_timeout_s=60.0,
    training_timeout=90.0,
    audit_mean_tolerance=1e-4,
)


class Letters(Environment):
    """Two short turns, won with about even odds by a model that knows words: every group has signal soon."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        messages = opening_messages(task)
        for _ in range(2):
            reply = await chat.complete(messages)
            messages += [dict(reply.message), {"role": "user", "content": "a- b- c- d- e-"}]
        return Outcome(reward=float("e" in reply.content), metrics={"turns": 2.0})


Hook = Callable[["House", list[SampleRecord]], Awaitable[list[SampleRecord]]]


class HookedSource:
    """The scheduler, with a hook between the end of samples and the trainer that learns of it."""

    def __init__(self, house: "House", scheduler: Scheduler, hook: Hook | None) -> None:
        self._house, self._scheduler, self._hook = house, scheduler, hook

    @property
    def num_open(self) -> int:
        return self._scheduler.num_open

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        return await self._scheduler.request(wanted)

    async def ended(self) -> list[SampleRecord]:
        samples = await self._scheduler.ended()
        return await self._hook(self._house, samples) if self._hook else samples

    async def drop(self, sample_ids: Sequence[str], reason: DropReason) -> None:
        await self._scheduler.drop(sample_ids, reason)


@dataclass
class House:
    """A running loop; `train` drives it."""

    folder: Path
    config: Config
    ports: RunPorts
    run: Run
    sessions: Sessions
    engine: TransformersEngine
    tasks: list[Task]
    # None where the replicas are others'.
    replica: "asyncio.Task[None] | None" = None
    model: Path = MODEL
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def train(self, hook: Hook | None = None) -> None:
        scheduler = Scheduler(
            self.ports.records,
            self.ports.rollout_request,
            self.ports.rollout_response,
            self.run.run_id,
            Purpose.TRAIN,
            self.config,
        )
        await scheduler.start()
        try:
            await train(
                self.ports,
                run=self.run,
                config=self.config,
                tasks=self.tasks,
                rollouts=HookedSource(self, scheduler, hook),
                trainer=Trainer(self.model, self.config),
                folder=self.folder / "checkpoints",
                stop=self.stop,
            )
        finally:
            await scheduler.close()

    async def samples(self, purpose: Purpose = Purpose.TRAIN) -> list[SampleRecord]:
        """All sample records."""
        prefix = sample_prefix(self.run.run_id, purpose)
        found: list[SampleRecord] = []
        page = await self.ports.records.scan(prefix)
        while page:
            found += [decode(item.value, SampleRecord) for item in page]
            page = await self.ports.records.scan(prefix, after=page[-1].key)
        return found

    async def batches(self) -> list[Batch]:
        page = await self.ports.records.scan(batch_prefix(self.run.run_id))
        return [decode(item.value, Batch) for item in page]

    async def status(self) -> TrainingStatus:
        (stored,) = await self.ports.records.get([training_key(self.run.run_id)])
        assert stored is not None
        return decode(stored.value, TrainingStatus)

    async def metrics(self) -> list[Metric]:
        return await self.ports.metrics.read(self.run.run_id)


@asynccontextmanager
async def open_house(
    folder: Path,
    config: Config = CONFIG,
    *,
    environment: Environment | None = None,
    has_worker: bool = True,
    has_replica: bool = True,
    model: Path = MODEL,
    engine_type: type[TransformersEngine] = TransformersEngine,
) -> AsyncIterator[House]:
    """Start everything but the trainer, with `Letters` unless told otherwise; end it in reverse order.

    Without a worker, rollouts wait for whoever leases them; without a replica, calls for whoever answers them.
    """
    ports = open_run(folder, "house", num_replicas=config.generation_replicas)
    run = Run(
        run_id="house",
        cause="test",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config=to_dict(config),
        sources={},
        data_path=str(assets.wordle_data("train")),
        worker_token_hash=hashlib.sha256(TOKEN.encode()).hexdigest(),
    )
    sessions = Sessions(ports, run=run, config=config)
    engine = engine_type(model, num_slots=config.generation_slots, max_length=config.max_length, lora=Lora.of(config))
    stop = asyncio.Event()
    try:
        async with sessions, serve(create_app(sessions)) as port:
            sessions.base_url = f"http://127.0.0.1:{port}"
            roles: list[asyncio.Task[None]] = []
            if has_replica:
                generating = run_replica(
                    ports,
                    run_id="house",
                    name="replica-0",
                    index=0,
                    config=config,
                    engine=engine,
                    renderer=Renderer(model),
                    stop=stop,
                )
                roles.append(asyncio.create_task(generating))
            if has_worker:
                working = run_worker(
                    proxy_url=sessions.base_url,
                    worker_token=TOKEN,
                    name="worker-0",
                    config=config,
                    environment=environment or Letters(),
                    stop=stop,
                )
                roles.append(asyncio.create_task(working))
            try:
                tasks = read_tasks(assets.wordle_data("train"))
                yield House(
                    folder=folder,
                    config=config,
                    ports=ports,
                    run=run,
                    sessions=sessions,
                    engine=engine,
                    tasks=tasks,
                    replica=roles[0] if has_replica else None,
                    model=model,
                )
            finally:
                stop.set()
                await asyncio.gather(*roles)
    finally:
        ports.close()


def accounted(samples: Sequence[SampleRecord]) -> dict[str, int]:
    """How many samples ended how: trained, dropped by reason, invalid by reason, or still open."""
    counts: dict[str, int] = {}
    for sample in samples:
        detail = sample.drop_reason or sample.reason
        name = sample.state.value if detail is None else f"{sample.state.value}:{detail.value}"
        counts[name] = counts.get(name, 0) + 1
    return counts
