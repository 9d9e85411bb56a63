"""A trainer that goes on where another one ended: from checkpoints, recorded batches and nothing else."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, CountingTrainer, ScriptedRollouts, first_of_four
from turnmill.config import Config
from turnmill.errors import AuditFailed, Conflict, RecordCorrupt
from turnmill.ports import Write
from turnmill.records import (
    Batch,
    BatchState,
    DropReason,
    Metric,
    SampleRecord,
    SampleState,
    Task,
    Version,
    batch_prefix,
    encode,
    training_key,
)
from turnmill.training.history import live_batches, supersede, supersede_strays
from turnmill.training.trainer import Trainer

MakeTrainer = Callable[[Config], Trainer]


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that the next step depends on."""
    tensors = {f"weight {name}": value.detach().clone() for name, value in trainer.policy.model.named_parameters()}
    for index, values in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"{key} {index}": value.clone() for key, value in values.items()}
    for index, group in enumerate(trainer.optimizer.param_groups):
        tensors |= {f"{key} {index}": torch.tensor(group[key]) for key in ("lr", "betas", "weight_decay")}
    return tensors | {"random": torch.get_rng_state(), "steps": torch.tensor(trainer.num_steps)}


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def remove_checkpoints(bench: Bench, *, after: int) -> None:
    for path in bench.folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) > after:
            shutil.rmtree(path)


def step_values(metrics: list[Metric]) -> list[list[float]]:
    """What the optimizer steps gave, without what was generated and how long it took."""
    names = ("loss", "clip_fraction", "kl", "entropy", "grad_norm", "lr", "audit_max", "num_trained_tokens", "padding")
    return [[metric.values[name] for name in names] for metric in metrics]


async def rewrite(bench: Bench, batch: Batch, sample_state: SampleState) -> None:
    """Put a batch and its samples back into the records as they were at an earlier moment."""
    records = bench.ports.records
    await records.write([Write(key=batch.key, value=encode(batch), expected=None)])
    for sample in await bench.samples():
        if sample.sample_id in batch.sample_ids:
            earlier = replace(sample, state=sample_state)
            await records.write([Write(key=sample.key, value=encode(earlier), expected=None)])


async def check_accounts(bench: Bench) -> None:
    """Live batches and trained samples are the same thing, and nothing is unfinished."""
    live = [item.batch for item in await live_batches(bench.ports.records, RUN_ID)]
    trained = [sample_id for batch in live for sample_id in batch.sample_ids]
    samples = await bench.samples()
    assert sorted(trained) == sorted(s.sample_id for s in samples if s.state is SampleState.TRAINED)
    assert {s.state for s in samples} <= {SampleState.TRAINED, SampleState.DROPPED, SampleState.INVALID}


async def test_the_recorded_batches_from_a_checkpoint_give_the_same_bits_as_the_unbroken_run(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer
) -> None:
    await bench.train(rollouts, max_steps=6, save_steps=2)
    expected, batches = state(bench.trainer), await bench.batches()
    metrics = await bench.ports.metrics.read(RUN_ID)
    remove_checkpoints(bench, after=2)
    (bench.folder.parent / "root" / "runs" / RUN_ID / "metrics.jsonl").unlink()
    num_samples = len(await bench.samples())

    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=6, save_steps=2)
    check_same(state(bench.trainer), expected)
    again = await bench.ports.metrics.read(RUN_ID)
    assert [metric.step for metric in again] == [3, 4, 5, 6]
    assert step_values(again) == step_values(metrics[2:])
    assert await bench.batches() == batches and len(await bench.samples()) == num_samples
    status = await bench.status()
    assert (status.state, status.step, status.incarnation) == ("succeeded", 6, 2)
    assert status.version == Version(incarnation=1, n=6)
    assert sorted(path.name for path in bench.folder.iterdir()) == ["final", "step-2", "step-4", "step-6"]


class OneByOne(ScriptedRollouts):
    """Samples end one after the other, so that gradients are made ahead."""

    async def ended(self) -> list[SampleRecord]:
        if not self.ready:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        return [self.ready.pop(0)]


async def test_a_step_made_in_parts_is_made_again_to_the_same_bits_whatever_the_threads_are_now(
    bench: Bench, tiny_model: Path, builders: Builders, trainer_of: MakeTrainer
) -> None:
    bench.config = replace(bench.config, trainer_threads=2, global_batch_size=16, max_refill_rounds=0)
    rollouts = OneByOne(bench.ports, tiny_model, builders, first_of_four)
    await bench.train(rollouts, max_steps=3, save_steps=10)
    expected, batches = state(bench.trainer), await bench.batches()
    assert all(len(batch.parts) > 1 for batch in batches)
    metrics = await bench.ports.metrics.read(RUN_ID)
    remove_checkpoints(bench, after=0)
    (bench.folder.parent / "root" / "runs" / RUN_ID / "metrics.jsonl").unlink()

    bench.config = replace(bench.config, trainer_threads=1, torch_threads=3)
    bench.trainer = trainer_of(bench.config)
    torch.set_num_threads(3)
    try:
        await bench.train(rollouts, max_steps=3, save_steps=10)
    finally:
        torch.set_num_threads(1)
    check_same(state(bench.trainer), expected)
    assert step_values(await bench.ports.metrics.read(RUN_ID)) == step_values(metrics)
    assert await bench.batches() == batches


async def test_steps_that_are_made_again_take_all_cores(
    bench: Bench, rollouts: ScriptedRollouts, tiny_model: Path
) -> None:
    """One from its applied batch, one from a batch that was only recorded: nothing is being played meanwhile."""
    await bench.train(rollouts, max_steps=2, save_steps=10)
    batches = await bench.batches()
    remove_checkpoints(bench, after=0)
    await rewrite(
        bench, replace(batches[-1], state=BatchState.RECORDED, version=None, digest=None), SampleState.BATCHED
    )
    bench.trainer = trainer = CountingTrainer(tiny_model, bench.config)
    await bench.train(rollouts, max_steps=2, save_steps=10, trainer_threads=3)
    assert trainer.threads == [3] * sum(len(batch.parts) for batch in batches)


async def test_training_goes_on_as_if_it_had_not_been_interrupted(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer
) -> None:
    await bench.train(rollouts, max_steps=3, save_steps=2)
    before = (await bench.batches())[-1]
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=5, save_steps=2)
    batches = await bench.batches()
    assert [str(batch.version) for batch in batches] == ["1.1", "1.2", "1.3", "2.4", "2.5"]
    assert [batch.incarnation for batch in batches] == [1, 1, 1, 2, 2]
    # The next task in data order, and a g that no sample had before.
    assert batches[3].groups[0][0] == f"t{before.progress.position}_0"
    sample_ids = [sample.sample_id for sample in await bench.samples()]
    assert len(sample_ids) == len(set(sample_ids))
    assert [metric.step for metric in await bench.ports.metrics.read(RUN_ID)] == [1, 2, 3, 4, 5]
    await check_accounts(bench)


@pytest.mark.parametrize("sample_state", [SampleState.REPORTED, SampleState.BATCHED])
async def test_a_batch_that_was_recorded_and_not_applied_is_applied_once(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer, sample_state: SampleState
) -> None:
    await bench.train(rollouts, max_steps=3, save_steps=2)
    expected, batches = state(bench.trainer), await bench.batches()
    remove_checkpoints(bench, after=2)
    recorded = replace(batches[-1], state=BatchState.RECORDED, version=None, digest=None, values={"reward_mean": 0.5})
    await rewrite(bench, recorded, sample_state)

    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=3, save_steps=2)
    check_same(state(bench.trainer), expected)
    assert await bench.batches() == [
        *batches[:2],
        replace(batches[2], version=Version(incarnation=2, n=3), digest=batches[2].digest),
    ]
    current = await bench.ports.weights.current()
    assert current is not None and (str(current.version), current.digest) == ("2.3", batches[2].digest)
    await check_accounts(bench)


async def test_samples_that_nobody_waits_for_any_more_are_dropped_as_superseded(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer
) -> None:
    await bench.train(rollouts, max_steps=1)
    (trained, *_) = [sample for sample in await bench.samples() if sample.state is SampleState.TRAINED]
    for g, sample_state in ((91, SampleState.REQUESTED), (92, SampleState.LEASED), (93, SampleState.REPORTED)):
        sample = replace(trained, sample_id=f"t9_{g}", task_id="t9", state=sample_state, step=None, report_digest=None)
        await rollouts.put(sample.key, sample)
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=2)
    left = {sample.sample_id: sample for sample in await bench.samples() if sample.task_id == "t9"}
    assert {left[f"t9_{g}"].drop_reason for g in (91, 92, 93)} == {DropReason.SUPERSEDED}
    await check_accounts(bench)


async def test_a_replayed_step_that_gives_other_weights_stops_with_evidence(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer
) -> None:
    await bench.train(rollouts, max_steps=3)
    batches = await bench.batches()
    remove_checkpoints(bench, after=0)
    bench.trainer = trainer_of(replace(bench.config, lr=2e-3))
    with pytest.raises(AuditFailed, match=rf"step 1 made again.*recorded was {batches[0].digest} \(version 1\.1\)"):
        await bench.train(rollouts, max_steps=5)
    status = await bench.status()
    assert status.state == "failed" and "recorded was" in str(status.error)
    assert await bench.batches() == batches


async def test_going_on_from_an_earlier_step_gives_up_the_later_batches_and_their_samples(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer
) -> None:
    await bench.train(rollouts, max_steps=5, save_steps=2)
    before = await bench.batches()
    given_up = await supersede(bench.ports.records, RUN_ID, 3)
    assert [batch.step for batch in given_up] == [4, 5]
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=5, save_steps=2)
    batches = await bench.batches()
    assert [(b.step, b.incarnation, b.state) for b in batches] == [
        *((step, 1, BatchState.APPLIED) for step in (1, 2, 3)),
        (4, 1, BatchState.SUPERSEDED),
        (4, 2, BatchState.APPLIED),
        (5, 1, BatchState.SUPERSEDED),
        (5, 2, BatchState.APPLIED),
    ]
    assert [str(b.version) for b in batches if b.incarnation == 2] == ["2.4", "2.5"]
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    for batch in before[3:]:
        assert {samples[i].drop_reason for i in batch.sample_ids} == {DropReason.SUPERSEDED}
    await check_accounts(bench)
    # Metrics and checkpoints are those of the steps that count.
    metrics = await bench.ports.metrics.read(RUN_ID)
    assert [(metric.step, metric.incarnation) for metric in metrics] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert bench.trainer.fingerprint() == batches[-1].digest


async def test_going_on_from_the_beginning_serves_the_base_model_again(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer
) -> None:
    await bench.train(rollouts, max_steps=2, save_steps=1)
    await supersede(bench.ports.records, RUN_ID, 0)
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=1, save_steps=1)
    live = [item.batch for item in await live_batches(bench.ports.records, RUN_ID)]
    assert [str(batch.version) for batch in live] == ["2.1"]
    (metric,) = [m for m in await bench.ports.metrics.read(RUN_ID) if m.incarnation == 2]
    assert metric.values["staleness"] == 0 and metric.values["audit_max"] < 1e-4
    await check_accounts(bench)


@pytest.mark.parametrize("damage", ["weights", "optimizer", "manifest", "half"])
async def test_a_damaged_checkpoint_is_not_used(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: MakeTrainer, damage: str
) -> None:
    await bench.train(rollouts, max_steps=4, save_steps=2)
    expected = state(bench.trainer)
    folder = bench.folder / "step-4"
    name = {"weights": "model.safetensors", "optimizer": "trainer.safetensors"}.get(damage, "checkpoint.json")
    content = bytearray((folder / name).read_bytes())
    content[-100] ^= 1
    if damage == "half":
        del content[-100:]
    (folder / name).write_bytes(content)
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=4, save_steps=2)
    check_same(state(bench.trainer), expected)
    assert sorted(path.name for path in bench.folder.iterdir()) == ["final", "step-2", "step-4"]


async def test_a_step_without_a_batch_or_a_batch_under_another_name_stops_the_trainer(bench: Bench) -> None:
    batch = Batch(run_id=RUN_ID, step=2, groups=())
    await bench.ports.records.write([Write(key=batch.key, value=encode(batch), expected=0)])
    with pytest.raises(RecordCorrupt, match="step 1 is missing, but step 2 has one"):
        await live_batches(bench.ports.records, RUN_ID)
    other = f"{batch_prefix(RUN_ID)}00000001.1"
    await bench.ports.records.write([Write(key=other, value=encode(batch), expected=0)])
    with pytest.raises(RecordCorrupt, match=r"00000001\.1 holds the batch .*00000002\.1"):
        await live_batches(bench.ports.records, RUN_ID)


class Overtaken(ScriptedRollouts):
    """Another trainer takes the run over while this one collects its second batch."""

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        ids = await super().request(wanted)
        if self.version == "1.1":
            (stored,) = await self.ports.records.get([training_key(RUN_ID)])
            assert stored is not None
            await self.ports.records.write([Write(key=stored.key, value=stored.value, expected=stored.version)])
        return ids


async def test_a_trainer_that_lost_its_run_makes_no_step_and_its_batch_gives_way(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    with pytest.raises(Conflict, match="another process"):
        await bench.train(Overtaken(bench.ports, tiny_model, builders, first_of_four))
    stray = (await bench.batches())[-1]
    assert (stray.step, stray.state) == (2, BatchState.RECORDED)
    # The trainer that took over looked before that batch was recorded, and has one of its own by now.
    records = bench.ports.records
    own = replace(stray, incarnation=2, groups=(("t7_0",),))
    await records.write([Write(key=own.key, value=encode(own), expected=0)])
    live = await live_batches(records, RUN_ID)
    assert [item.batch.incarnation for item in live] == [1, 2]
    await supersede_strays(records, RUN_ID, live)
    assert [batch.state for batch in await bench.batches()] == [
        BatchState.APPLIED,
        BatchState.SUPERSEDED,
        BatchState.RECORDED,
    ]
