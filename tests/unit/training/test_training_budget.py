"""A trainer stops within one batch of its run's budget of tokens, and goes on under a higher one."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, ScriptedRollouts, first_of_four
from turnmill.budget import num_tokens
from turnmill.ports import Count, Message, Write
from turnmill.records import Call, DropReason, Purpose, SampleRecord, SampleState, encode, token_count_key
from turnmill.training.trainer import Trainer

# Two calls of two tokens; eight samples are a batch.
PER_SAMPLE = 4
BATCH = 8 * PER_SAMPLE


class CountedRollouts(ScriptedRollouts):
    """Records calls as a replica does: counted."""

    async def put(self, key: str, record: object) -> None:
        if not isinstance(record, Call):
            await super().put(key, record)
            return
        write = Write(key=key, value=encode(record), expected=0)
        count = Count(key=token_count_key(RUN_ID, Purpose.TRAIN, "replica-0"), amount=record.num_sampled)
        await self.ports.answers.write([(write, Message(body=b"", group=key, dedup_id=None))], [count])


def rollouts_of(bench: Bench, tiny_model: Path, builders: Builders) -> CountedRollouts:
    return CountedRollouts(bench.ports, tiny_model, builders, first_of_four)


async def used(bench: Bench) -> int:
    return sum((await num_tokens(bench.ports.records, RUN_ID)).values())


def is_settled(sample: SampleRecord) -> bool:
    return sample.state in (SampleState.TRAINED, SampleState.DROPPED)


@pytest.mark.parametrize("budget", [1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH - 1, 2 * BATCH, 3 * BATCH])
async def test_no_more_than_one_batch_is_generated_beyond_the_budget(
    bench: Bench, tiny_model: Path, builders: Builders, budget: int
) -> None:
    await bench.train(rollouts_of(bench, tiny_model, builders), max_steps=4, budget_tokens=budget)
    status = await bench.status()
    assert status.state == "exhausted" and status.error is None
    assert budget <= await used(bench) < budget + BATCH
    assert await used(bench) == PER_SAMPLE * len(await bench.samples())
    assert all(map(is_settled, await bench.samples()))
    assert (status.checkpoint is not None) is (status.step > 0)
    # What was paid for before is trained.
    assert status.step == -(-budget // BATCH)


async def test_a_run_goes_on_under_a_higher_budget_to_its_end(
    bench: Bench, tiny_model: Path, builders: Builders, trainer_of: object
) -> None:
    rollouts, before = rollouts_of(bench, tiny_model, builders), 0
    for budget, step in ((BATCH, 1), (2 * BATCH, 2)):
        bench.trainer = Trainer(tiny_model, bench.config)
        await bench.train(rollouts, max_steps=3, budget_tokens=budget)
        status = await bench.status()
        assert (status.state, status.step) == ("exhausted", step)
        assert before < await used(bench)
        before = await used(bench)
    bench.trainer = Trainer(tiny_model, bench.config)
    await bench.train(rollouts, max_steps=3, budget_tokens=3 * BATCH)
    # The last step may use up the budget: it is the end all the same.
    assert (await bench.status()).state == "succeeded" and (await bench.status()).step == 3
    assert [batch.step for batch in await bench.batches()] == [1, 2, 3]


async def test_samples_of_a_batch_that_can_not_be_filled_are_dropped_with_the_reason(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    """Groups without signal would be replaced, which the budget does not allow any more."""
    rollouts = rollouts_of(bench, tiny_model, builders)
    rollouts.reward = lambda task, g: 0.0 if task == "t1" else first_of_four(task, g)
    await bench.train(rollouts, max_steps=2, budget_tokens=BATCH)
    status = await bench.status()
    assert (status.state, status.step, status.checkpoint) == ("exhausted", 0, None)
    reasons = {sample.drop_reason for sample in await bench.samples()}
    assert reasons == {DropReason.NO_SIGNAL, DropReason.BUDGET}
    assert BATCH <= await used(bench) < 2 * BATCH


async def test_without_a_budget_nothing_is_counted_and_nothing_stops(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    bench.config = replace(bench.config, budget_tokens=0)
    await bench.train(rollouts_of(bench, tiny_model, builders), max_steps=2)
    assert (await bench.status()).state == "succeeded"
