"""What must hold of every run that has ended well, however often its processes died on the way."""

import asyncio
from pathlib import Path
from typing import Any

from tests.e2e.house import accounted
from tests.e2e.processes import read_records
from turnmill import assets
from turnmill.config import from_dict
from turnmill.pipeline.engine import load_run
from turnmill.records import Batch, BatchState, SampleRecord, SampleState
from turnmill.training.played import load_calls
from turnmill.training.samples import TrainingSample, rows_of
from turnmill.training.trainer import Trainer
from turnmill.wiring.backend import backend_of
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import read_metrics


def check_accounting(root: Path, figures: dict[str, Any]) -> None:
    """Every requested sample ended in exactly one way; each step trained its batch once."""
    samples, batches = read_records(root, figures["run_id"])
    counts = accounted(samples)
    assert [batch.step for batch in batches] == list(range(1, figures["steps"] + 1))
    assert [batch.state for batch in batches] == [BatchState.APPLIED] * figures["steps"]
    trained = [sample_id for batch in batches for sample_id in batch.sample_ids]
    assert len(trained) == len(set(trained)) == counts["trained"]
    assert {sample.sample_id for sample in samples if sample.state is SampleState.TRAINED} == set(trained)
    assert sum(counts.values()) == len(samples)
    unfinished = (SampleState.REQUESTED, SampleState.LEASED, SampleState.REPORTED, SampleState.BATCHED)
    assert not [sample.key for sample in samples if sample.state in unfinished]


def check_steps(root: Path, figures: dict[str, Any]) -> None:
    """The weights are those of an undisturbed run with the same batches; each step has one metric and one version."""
    run_id = figures["run_id"]
    samples, batches = read_records(root, run_id)
    assert run_loop(_digests(root, run_id, samples, batches)) == [batch.digest for batch in batches]
    versions = [batch.version for batch in batches]
    assert len(set(versions)) == len(versions)
    assert [version.n for version in versions if version] == list(range(1, len(batches) + 1))
    metrics = run_loop(read_metrics(root, run_id))
    assert [(metric.step, metric.incarnation) for metric in metrics] == [(b.step, b.incarnation) for b in batches]


async def _digests(root: Path, run_id: str, samples: list[SampleRecord], batches: list[Batch]) -> list[str]:
    """Fingerprint after each batch, made from the base model in one go."""
    ports = backend_of(root).open_run(run_id, num_replicas=1)
    try:
        config = from_dict((await load_run(ports.runs, run_id)).config)
        trainer = Trainer(assets.model_folder(config.base_model), config)
        by_id = {sample.sample_id: sample for sample in samples}
        digests = []
        version = "0.0"
        for batch in batches:
            groups = []
            for group in batch.groups:
                members = [by_id[sample_id] for sample_id in group]
                calls = await load_calls(ports.records, members)
                groups.append(
                    [
                        TrainingSample(key=s.key, reward=s.reward or 0.0, rows=tuple(rows_of(s, of_sample)))
                        for s, of_sample in zip(members, calls, strict=True)
                    ]
                )
            # Off policy, those tokens alone that these weights sampled are audited here.
            audited = version if config.is_async else None
            await asyncio.to_thread(trainer.step, groups, batch.parts, version=audited)
            version = str(batch.version)
            digests.append(trainer.fingerprint())
        return digests
    finally:
        ports.close()
