"""A run on real embedded ports with a training loop in it; one small class stands for scheduler, worker and replica."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnmill.config import Config
from turnmill.ports import RunPorts, Write
from turnmill.records import (
    Batch,
    Call,
    DropReason,
    InvalidReason,
    Purpose,
    ReplicaStatus,
    Run,
    RunStatus,
    SampleRecord,
    SampleState,
    Task,
    TrainingStatus,
    batch_prefix,
    decode,
    encode,
    replica_key,
    sample_key,
    sample_prefix,
    training_key,
)
from turnmill.training.loop import train
from turnmill.training.policy import Policy
from turnmill.training.samples import TrainingSample
from turnmill.training.trainer import Trainer
from turnmill.training.validation import Evaluator

RUN_ID = "run-1"
Reward = Callable[[str, int], float | None]
Builders = tuple[Callable[..., Call], Callable[..., SampleRecord]]


def first_of_four(task: str, g: int) -> float:
    return float(g % 4 == 0)


class ScriptedRollouts:
    """Plays each requested sample at once, two calls long, with a model of its own; the reward follows a rule."""

    def __init__(self, ports: RunPorts, model_folder: Path, builders: Builders, reward: Reward) -> None:
        self.ports = ports
        self.reward = reward
        self.call_of, self.sample_of = builders
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        self.version = "none"
        self.fingerprints: dict[str, str] = {}
        self.ready: list[SampleRecord] = []
        self.num_requested: dict[str, int] = {}

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        await self.swap()
        ids = []
        for task, group_id in wanted:
            g = self.num_requested.get(task.id, 0)
            self.num_requested[task.id] = g + 1
            ids.append(f"{task.id}_{g}")
            await self.play(ids[-1], group_id, self.reward(task.id, g))
        return ids

    async def ended(self) -> list[SampleRecord]:
        ended, self.ready = self.ready, []
        if not ended:
            await asyncio.Event().wait()
        return ended

    async def drop(self, sample_ids: Sequence[str], reason: DropReason) -> None:
        keys = [sample_key(RUN_ID, Purpose.TRAIN, sample_id) for sample_id in sample_ids]
        for stored in await self.ports.records.get(keys):
            assert stored is not None
            sample = decode(stored.value, SampleRecord)
            if sample.state is SampleState.INVALID:
                continue
            assert sample.state in (SampleState.REQUESTED, SampleState.REPORTED)
            dropped = replace(sample, state=SampleState.DROPPED, drop_reason=reason)
            await self.ports.records.write([Write(key=sample.key, value=encode(dropped), expected=stored.version)])
        self.ready = [sample for sample in self.ready if sample.sample_id not in sample_ids]

    async def swap(self) -> None:
        """Load the current version and say what is in memory."""
        current = await self.ports.weights.current()
        assert current is not None
        if str(current.version) == self.version:
            return
        self.version = str(current.version)
        self.model.load_state_dict(load_file(Path(current.location) / "model.safetensors"), strict=False)
        self.fingerprints[self.version] = Policy(self.model).fingerprint()
        status = ReplicaStatus(
            run_id=RUN_ID,
            replica="replica-0",
            version=current.version,
            fingerprints=self.fingerprints,
            updated_at=time.time(),
            pid=1,
        )
        await self.put(replica_key(RUN_ID, "replica-0"), status)

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        calls: list[Call] = []
        ids: list[int] = []
        for index in range(2):
            prompt = [2, 300, 6, 4] if index == 0 else [3, 20, 6, 4]
            ids += prompt
            seed = int.from_bytes(hashlib.blake2b(f"{sample_id}_{index}".encode(), digest_size=6).digest())
            sampled, logprobs = self.sample(ids, torch.Generator().manual_seed(seed))
            ids += sampled
            parent = calls[-1] if calls else None
            call = self.call_of(
                sample_id, index, parent, prompt=prompt, sampled=sampled, logprobs=logprobs, version=self.version
            )
            calls.append(call)
        for call in calls:
            await self.put(call.key, call)
        sample = self.sample_of(sample_id, calls, reward, group_id)
        if reward is None:
            sample = replace(sample, state=SampleState.INVALID, reason=InvalidReason.ENV_ERROR, detail="it broke")
        await self.put(sample.key, sample)
        self.ready.append(sample)

    @torch.no_grad()
    def sample(self, ids: list[int], generator: torch.Generator) -> tuple[list[int], list[float]]:
        sampled: list[int] = []
        logprobs: list[float] = []
        for _ in range(2):
            logits_v = self.model(input_ids=torch.tensor([ids + sampled])).logits[0, -1]
            log_p_v = torch.log_softmax(logits_v, dim=-1)
            sampled.append(int(torch.multinomial(log_p_v.exp(), 1, generator=generator)))
            logprobs.append(float(log_p_v[sampled[-1]]))
        return sampled, logprobs

    async def put(self, key: str, record: object) -> None:
        await self.ports.records.write([Write(key=key, value=encode(record), expected=None)])


class Bench:
    """A run with its ports, and one call that trains it."""

    def __init__(self, ports: RunPorts, config: Config, tasks: list[Task], trainer: Trainer, folder: Path) -> None:
        self.ports = ports
        self.config = config
        self.tasks = tasks
        self.trainer = trainer
        self.folder = folder
        self.evaluator: Evaluator | None = None
        self.stop = asyncio.Event()

    async def train(self, rollouts: ScriptedRollouts, **changes: Any) -> None:
        run = Run(
            run_id=RUN_ID,
            cause="test",
            status=RunStatus.ACTIVE,
            created_at=1.0,
            config={},
            sources={},
            data_path="tasks.jsonl",
        )
        await train(
            self.ports,
            run=run,
            config=replace(self.config, **changes),
            tasks=self.tasks,
            rollouts=rollouts,
            trainer=self.trainer,
            folder=self.folder,
            stop=self.stop,
            evaluator=self.evaluator,
        )

    async def status(self) -> TrainingStatus:
        (stored,) = await self.ports.records.get([training_key(RUN_ID)])
        assert stored is not None
        return decode(stored.value, TrainingStatus)

    async def batches(self) -> list[Batch]:
        """Without the seconds that they took."""
        found = [decode(s.value, Batch) for s in await self.ports.records.scan(batch_prefix(RUN_ID))]
        return [replace(batch, values={}) for batch in found]

    async def samples(self) -> list[SampleRecord]:
        found = await self.ports.records.scan(sample_prefix(RUN_ID, Purpose.TRAIN))
        return [decode(stored.value, SampleRecord) for stored in found]


class CountingTrainer(Trainer):
    """Remembers on how many threads gradients were made."""

    def __init__(self, base_model: Path, config: Config) -> None:
        super().__init__(base_model, config)
        self.threads: list[int] = []

    def accumulate(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        threads: int,
        *,
        version: str | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.threads.append(threads)
        super().accumulate(groups, threads, version=version, after=after)
