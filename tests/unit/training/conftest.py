"""Builders for training tests: real records, digests and all, and the shipped tiny model."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, ScriptedRollouts, first_of_four
from turnmill import assets
from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.records import (
    Call,
    FinishReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    Sampling,
    Task,
)
from turnmill.training.trainer import Trainer

RUN = "run-1"


def make_call(
    sample_id: str,
    index: int,
    parent: Call | None = None,
    *,
    prompt: Sequence[int] = (2, 300, 6, 4),
    sampled: Sequence[int] = (310, 6),
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    version: str = "0.0",
) -> Call:
    """Call `index` of a sample: `prompt` is what is new before the sampled tokens."""
    return Call(
        run_id=RUN,
        purpose=Purpose.TRAIN,
        sample_id=sample_id,
        call_id=f"{sample_id}_{index}",
        attempt=1,
        parent=parent.call_id if parent else None,
        parent_digest=parent.digest if parent else "",
        choice=0,
        request_digest="",
        sampling=Sampling(temperature=temperature),
        messages=[{"role": "user", "content": "go on"}],
        reply={"role": "assistant", "content": "crane"},
        token_ids=[*prompt, *sampled],
        loss_mask=[0] * len(prompt) + [1] * len(sampled),
        logprobs=list(logprobs) if logprobs is not None else [-0.5 - 0.1 * i for i in range(len(sampled))],
        version=version,
        finish_reason=FinishReason.STOP,
        created_at=1.0,
    ).sealed()


def make_sample(
    sample_id: str, calls: Sequence[Call] = (), reward: float | None = 1.0, group_id: str = "g"
) -> SampleRecord:
    """A sample that was reported with `reward` and consumed `calls`."""
    sample = SampleRecord(
        run_id=RUN,
        purpose=Purpose.TRAIN,
        sample_id=sample_id,
        task_id=sample_id.rpartition("_")[0],
        group_id=group_id,
        state=SampleState.REPORTED,
        created_at=1.0,
        request=RolloutRequest(
            sample_id=sample_id,
            timestamp="2026-01-01T00:00:00+00:00",
            max_length=160,
            rewards={"range": [0.0, 1.0]},
            data={"prompt": "go"},
            run_id=RUN,
        ),
        deadline=100.0,
        attempt=1,
        reward=reward,
        metrics={"turns": float(len(calls))},
        stop_reason="end_of_conversation",
        calls=tuple(call.call_id for call in calls),
    )
    return replace(sample, report_digest=sample.expected_report_digest())


@pytest.fixture
def call_of() -> Callable[..., Call]:
    return make_call


@pytest.fixture
def sample_of() -> Callable[..., SampleRecord]:
    return make_sample


@pytest.fixture
def tasks() -> list[Task]:
    return [Task(id=f"t{i}", metadata={"prompt": "go", "answer": str(i)}) for i in range(20)]


@pytest.fixture
def tiny_model() -> Path:
    """The shipped model."""
    return assets.model_folder("wordle-tiny")


@pytest.fixture
def small_config() -> Config:
    """Two groups of four conversations."""
    return Config(
        global_batch_size=8,
        number_generation=4,
        max_refill_rounds=2,
        max_steps=3,
        lr=1e-3,
        lr_schedule="constant",
        ent_coeff=0.0,
        trainer_threads=1,
    )


@pytest.fixture
def trainer_of(tiny_model: Path) -> Callable[[Config], Trainer]:
    """Makes trainers of the shipped model on one thread."""

    def make(config: Config) -> Trainer:
        torch.set_num_threads(1)
        return Trainer(tiny_model, config)

    return make


@pytest.fixture
def builders(call_of: Callable[..., Call], sample_of: Callable[..., SampleRecord]) -> Builders:
    return call_of, sample_of


@pytest.fixture
async def bench(
    tmp_path: Path, small_config: Config, tasks: list[Task], trainer_of: Callable[[Config], Trainer]
) -> AsyncIterator[Bench]:
    ports = open_run(tmp_path / "root", RUN_ID, num_replicas=1)
    yield Bench(ports, small_config, tasks, trainer_of(small_config), tmp_path / "checkpoints")
    ports.close()


@pytest.fixture
def rollouts(bench: Bench, tiny_model: Path, builders: Builders) -> ScriptedRollouts:
    return ScriptedRollouts(bench.ports, tiny_model, builders, first_of_four)
