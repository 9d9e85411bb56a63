"""What stops a run: a stored record that was altered, a reward under another name, a replica with other weights.

The whole loop runs; the corruption happens between the end of the samples and the trainer, or in the replica's memory.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.e2e.house import CONFIG, House, accounted, open_house
from turnmill.errors import AuditFailed, RecordCorrupt, WeightsUnproved
from turnmill.ports import Stored, Write
from turnmill.records import (
    Call,
    ReplicaState,
    ReplicaStatus,
    SampleRecord,
    SampleState,
    call_prefix,
    decode,
    encode,
    replica_key,
)


async def altered_call(house: House, sample: SampleRecord, change: str) -> str:
    """Alter one stored call of `sample` without touching its digest; returns the record's key."""
    stored = (await house.ports.records.scan(call_prefix(sample.run_id, sample.purpose, sample.sample_id)))[0]
    call = decode(stored.value, Call)
    values = msgspec.to_builtins(call)
    if change == "mask bit":
        values["loss_mask"][-1] = 0
    elif change == "token id":
        values["token_ids"][-1] += 1
    else:
        values["logprobs"][-1] -= 0.5
    altered = msgspec.convert(values, Call)
    assert altered != call and altered.digest == call.digest
    assert await house.ports.records.write([Write(key=stored.key, value=encode(altered), expected=None)]) == [True]
    return stored.key


@pytest.mark.parametrize("change", ["mask bit", "token id", "log-prob"])
async def test_one_altered_value_in_a_stored_call_stops_the_run_with_evidence(tmp_path: Path, change: str) -> None:
    keys: list[str] = []

    async def hook(house: House, samples: list[SampleRecord]) -> list[SampleRecord]:
        for sample in samples:
            keys.append(await altered_call(house, sample, change))
        return samples

    async with open_house(tmp_path) as house:
        with pytest.raises(RecordCorrupt) as raised:
            await house.train(hook)
        assert any(key in str(raised.value) for key in keys)
        status = await house.status()
        assert status.state == "failed" and str(raised.value) in str(status.error)
        assert not any(sample.state is SampleState.TRAINED for sample in await house.samples())


async def test_a_reward_under_another_samples_id_stops_the_run_with_evidence(tmp_path: Path) -> None:
    async def hook(house: House, samples: list[SampleRecord]) -> list[SampleRecord]:
        swapped = []
        for sample in samples:
            other = replace(sample, sample_id=f"{sample.task_id}_999")
            (stored,) = await house.ports.records.get([sample.key])
            assert stored is not None
            await house.ports.records.write([Write(key=sample.key, value=encode(other), expected=None)])
            swapped.append(sample)
        return swapped

    async with open_house(tmp_path) as house:
        with pytest.raises(RecordCorrupt, match="_999"):
            await house.train(hook)
        assert (await house.status()).state == "failed"


async def test_a_changed_reward_stops_the_run_with_evidence(tmp_path: Path) -> None:
    async def hook(house: House, samples: list[SampleRecord]) -> list[SampleRecord]:
        changed = [replace(sample, reward=1.0 - (sample.reward or 0.0)) for sample in samples]
        for sample in changed:
            await house.ports.records.write([Write(key=sample.key, value=encode(sample), expected=None)])
        return changed

    async with open_house(tmp_path) as house:
        with pytest.raises(RecordCorrupt, match=r"altered after its report|report_digest"):
            await house.train(hook)


def disturb(house: House, size: float) -> None:
    """Change one weight matrix in the replica's memory, as a bad memory cell or a half-loaded file would."""
    parameter = dict(house.engine._model.model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    with torch.no_grad():
        parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


async def test_a_replica_whose_memory_is_not_the_trainers_is_refused_before_it_answers_a_call(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnproved, match=r"does not hold version 0\.0"):
        async with open_house(tmp_path) as house:
            disturb(house, 0.05)
            training = asyncio.create_task(house.train())
            assert house.replica is not None
            await asyncio.wait([house.replica])
            (stored,) = await house.ports.records.get([replica_key("house", "replica-0")])
            assert stored is not None
            status = decode(stored.value, ReplicaStatus)
            assert status.state is ReplicaState.STOPPED and "does not hold version 0.0" in str(status.error)
            house.stop.set()
            await training
            assert not any([await calls_of(house, sample) for sample in await house.samples()])


async def calls_of(house: House, sample: SampleRecord) -> list[Stored]:
    return await house.ports.records.scan(call_prefix(sample.run_id, sample.purpose, sample.sample_id))


async def test_weights_that_change_in_the_replicas_memory_stop_the_run_with_evidence(tmp_path: Path) -> None:
    async def hook(house: House, samples: list[SampleRecord]) -> list[SampleRecord]:
        disturb(house, 0.05)
        return samples

    async with open_house(tmp_path, replace(CONFIG, max_steps=20)) as house:
        with pytest.raises(AuditFailed, match=r"trainer -?\d.*sampler"):
            await house.train(hook)
        status = await house.status()
        assert status.state == "failed" and status.error is not None and "sampler" in status.error


async def test_the_untouched_loop_trains_and_accounts_for_every_sample(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.train()
        status = await house.status()
        assert (status.state, status.step) == ("succeeded", 2)
        samples = await house.samples()
        counts = accounted(samples)
        batches = await house.batches()
        assert counts["trained"] == sum(len(batch.sample_ids) for batch in batches)
        assert sum(counts.values()) == len(samples) and not any(sample.state.is_open for sample in samples)
        assert not any(sample.state in (SampleState.REPORTED, SampleState.BATCHED) for sample in samples)
        for metric in await house.metrics():
            assert metric.values["audit_mean"] < 1e-4 and metric.values["audit_max"] < 1e-3
