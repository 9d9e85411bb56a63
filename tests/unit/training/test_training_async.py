"""Off policy over real embedded ports: rollouts and steps at the same time, and what is checked of older tokens."""

import asyncio
import gc
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, ScriptedRollouts, first_of_four
from turnmill.config import Config
from turnmill.errors import AuditFailed, NoProgress, NotFound
from turnmill.ports import Write
from turnmill.records import (
    BatchState,
    Call,
    DropReason,
    Purpose,
    SampleRecord,
    SampleState,
    Task,
    Version,
    token_count_key,
)
from turnmill.training.history import live_batches, supersede
from turnmill.training.policy import Policy
from turnmill.training.stale_audit import StaleAudit, StaleTokens
from turnmill.training.trainer import StepResult, Trainer


@pytest.fixture
def small_config(small_config: Config) -> Config:
    return replace(small_config, rollout_strategy="off_policy_async", age_tolerance=2, max_steps=5)


class OneByOne(ScriptedRollouts):
    """Samples end one after the other, and take a moment; with nothing to play, it looks for new weights."""

    async def ended(self) -> list[SampleRecord]:
        await asyncio.sleep(0.002)
        while not self.ready:
            await self.swap()
            await asyncio.sleep(0.01)
        return [self.ready.pop(0)]


class Slow(OneByOne):
    """Loads new weights only every third time it could."""

    num_swaps = 0

    async def swap(self) -> None:
        self.num_swaps += 1
        if self.num_swaps % 3 == 1:
            await super().swap()


def ages_of(bench: Bench, samples: Sequence[SampleRecord]) -> list[int]:
    """In steps, of all that were trained."""
    return [
        sample.step - 1 - Version.parse(sample.versions[0]).n
        for sample in samples
        if sample.step is not None and sample.versions is not None
    ]


async def test_a_run_trains_older_tokens_within_the_bound_and_accounts_for_every_sample(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    rollouts = Slow(bench.ports, tiny_model, builders, first_of_four)
    rollouts.reward = lambda task, g: 0.0 if task == "t1" else None if (task, g) == ("t2", 0) else float(g % 3 == 1)
    await bench.train(rollouts)
    status = await bench.status()
    assert (status.state, status.step, str(status.version)) == ("succeeded", 5, "1.5")
    samples = await bench.samples()
    ages = ages_of(bench, samples)
    assert len(ages) == 5 * 8 and 0 < max(ages) <= 2
    assert {s.state for s in samples} <= {SampleState.TRAINED, SampleState.INVALID, SampleState.DROPPED}
    reasons = {s.drop_reason for s in samples if s.state is SampleState.DROPPED}
    assert reasons <= {DropReason.NO_SIGNAL, DropReason.SURPLUS}
    metrics = await bench.ports.metrics.read(RUN_ID)
    assert [metric.step for metric in metrics] == [1, 2, 3, 4, 5]
    assert max(metric.values["staleness_max"] for metric in metrics) == max(ages)
    for metric in metrics:
        assert sum(metric.values[f"staleness_share_{age}"] for age in range(3)) == pytest.approx(1)
        assert metric.values["audit_max"] < 1e-4 and metric.values["num_trained_tokens"] == 32
        assert metric.values["overlap_s"] > 0
        assert 0.2 < metric.values["audit_share"] <= 1
    # Of the first batch all tokens are current ones.
    assert metrics[0].values["audit_share"] == 1 > min(metric.values["audit_share"] for metric in metrics)
    assert sum(metric.values["num_generated"] for metric in metrics) >= len(ages)


async def test_the_next_batches_are_asked_for_and_decided_while_a_step_is_made(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    going_on = threading.Event()

    class Waiting(Trainer):
        def finish(self) -> StepResult:
            assert going_on.wait(20), "nothing ends while the step is made"
            return super().finish()

    class Counting(OneByOne):
        num_ended = 0

        async def ended(self) -> list[SampleRecord]:
            ended = await super().ended()
            self.num_ended += 1
            if self.num_ended == 20:
                going_on.set()
            return ended

    bench.trainer = Waiting(tiny_model, bench.config)
    rollouts = Counting(bench.ports, tiny_model, builders, first_of_four)
    await bench.train(rollouts, max_steps=3)
    assert sorted(ages_of(bench, await bench.samples()))[-1] == 2
    assert sum(rollouts.num_requested.values()) == 3 * 8


async def test_older_tokens_are_audited_from_the_end_of_their_batch_whatever_steps_are_being_made(
    bench: Bench, tiny_model: Path, builders: Builders, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = threading.Event()

    class Waiting(Trainer):
        def finish(self) -> StepResult:
            assert audited.wait(20), "the next batch is not audited while the step is made"
            return super().finish()

    check = StaleAudit.check

    async def seen(self: StaleAudit, *args: Any, **kwargs: Any) -> StaleTokens:
        found = await check(self, *args, **kwargs)
        # Those of the first batch are all of the current version.
        if found.num_tokens:
            audited.set()
        return found

    monkeypatch.setattr(StaleAudit, "check", seen)
    bench.trainer = Waiting(tiny_model, bench.config)
    await bench.train(OneByOne(bench.ports, tiny_model, builders, first_of_four), max_steps=3)
    assert (await bench.status()).state == "succeeded"


async def test_an_audit_of_a_batch_that_is_given_up_fails_nothing(
    bench: Bench,
    tiny_model: Path,
    builders: Builders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    audited = threading.Event()

    class Stopping(Trainer):
        def finish(self) -> StepResult:
            assert audited.wait(20)
            loop.call_soon_threadsafe(bench.stop.set)
            return super().finish()

    async def failing(self: StaleAudit, groups: Any, current: Version, *args: Any, **kwargs: Any) -> StaleTokens:
        if current.n == 0:
            return StaleTokens()
        audited.set()
        raise AuditFailed("of a batch whose turn does not come")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(StaleAudit, "check", failing)
    bench.trainer = Stopping(tiny_model, bench.config)
    await bench.train(OneByOne(bench.ports, tiny_model, builders, first_of_four))
    gc.collect()
    status = await bench.status()
    assert (status.state, status.step, status.error) == ("cancelled", 1, None)
    assert "never retrieved" not in caplog.text


async def test_no_more_is_asked_for_than_slots_and_than_the_run_needs(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    class Held(OneByOne):
        """The first samples that end are those of the last request."""

        async def ended(self) -> list[SampleRecord]:
            self.ready = self.ready[-1:] + self.ready[:-1]
            return await super().ended()

    rollouts = Held(bench.ports, tiny_model, builders, first_of_four)
    most: list[int] = []
    request = rollouts.request

    async def counted(wanted: Sequence[tuple[Task, str]]) -> list[str]:
        ids = await request(wanted)
        most.append(len(rollouts.ready))
        return ids

    rollouts.request = counted  # type: ignore[method-assign]
    await bench.train(rollouts, max_steps=4, max_refill_rounds=0)
    assert max(most) == 24
    assert len(await bench.samples()) == 32


class Pretender(OneByOne):
    """From version 1.1 on it keeps the weights that it has, under the new version's name, and says all is well.

    It does so at once, so that what it samples then is for a step that is still far off.
    """

    async def ended(self) -> list[SampleRecord]:
        await self.swap()
        return await super().ended()

    async def swap(self) -> None:
        base = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        await super().swap()
        if self.version != "0.0":
            self.model.load_state_dict(base)


async def test_old_weights_under_a_new_versions_name_are_caught_in_tokens_that_are_old_when_they_are_trained(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    with pytest.raises(AuditFailed, match=r"disagree over .* tokens.*version 1\.") as caught:
        await bench.train(Pretender(bench.ports, tiny_model, builders, first_of_four), max_steps=8)
    named = re.search(r"version 1\.(\d)", str(caught.value))
    assert named is not None and int(named[1]) < (await bench.status()).step
    assert (await bench.status()).state == "failed"


async def test_weights_are_kept_for_as_long_as_their_tokens_may_be_trained(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    await bench.train(OneByOne(bench.ports, tiny_model, builders, first_of_four))
    for text in ("0.0", "1.3", "1.4", "1.5"):
        await bench.ports.weights.get(Version.parse(text))
    with pytest.raises(NotFound):
        await bench.ports.weights.get(Version.parse("1.2"))


async def test_steps_that_are_made_again_give_the_same_weights_and_the_bound_holds_afterwards(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    await bench.train(Slow(bench.ports, tiny_model, builders, first_of_four))
    shutil.rmtree(bench.folder)
    rollouts = Slow(bench.ports, tiny_model, builders, first_of_four)
    for sample in await bench.samples():
        rollouts.num_requested[sample.task_id] = rollouts.num_requested.get(sample.task_id, 0) + 1
    bench.trainer = Trainer(tiny_model, bench.config)
    await bench.train(rollouts, max_steps=8)
    batches = await bench.batches()
    assert [str(batch.version) for batch in batches] == [f"1.{n}" for n in range(1, 6)] + ["2.6", "2.7", "2.8"]
    assert batches[-1].digest == bench.trainer.fingerprint()
    assert max(ages_of(bench, await bench.samples())) <= 2


async def test_stopping_finishes_the_step_that_is_being_made_and_drops_the_rest(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    class Stopping(Trainer):
        def finish(self) -> StepResult:
            result = super().finish()
            if self.num_steps == 2:
                loop.call_soon_threadsafe(bench.stop.set)
            return result

    loop = asyncio.get_running_loop()
    bench.trainer = Stopping(tiny_model, bench.config)
    await bench.train(OneByOne(bench.ports, tiny_model, builders, first_of_four))
    status = await bench.status()
    assert (status.state, status.step) == ("cancelled", 2)
    states = {sample.state for sample in await bench.samples()}
    assert states == {SampleState.TRAINED, SampleState.DROPPED}
    assert [p for p in bench.trainer.policy.parameters() if p.grad is not None] == []
    assert Policy.load(bench.folder / "final").fingerprint() == (await bench.batches())[-1].digest


async def test_what_ends_the_pump_ends_the_run(bench: Bench, tiny_model: Path, builders: Builders) -> None:
    class Broken(OneByOne):
        num_ended = 0

        async def ended(self) -> list[SampleRecord]:
            self.num_ended += 1
            if self.num_ended == 13:
                raise OSError("the queue is gone")
            return await super().ended()

    with pytest.raises(OSError, match="the queue is gone"):
        await bench.train(Broken(bench.ports, tiny_model, builders, first_of_four))
    assert (await bench.status()).error == "OSError: the queue is gone"
    states = {sample.state for sample in await bench.samples()}
    assert states <= {SampleState.TRAINED, SampleState.DROPPED, SampleState.BATCHED}


async def test_without_any_signal_the_run_stops_with_a_diagnosis(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    rollouts = OneByOne(bench.ports, tiny_model, builders, lambda task, g: 0.25)
    with pytest.raises(NoProgress, match=r"10 steps in a row .* mean 0\.25"):
        await bench.train(rollouts)
    assert {sample.drop_reason for sample in await bench.samples()} <= {DropReason.NO_SIGNAL, DropReason.CANCELLED}
    assert await bench.batches() == []


async def test_mostly_invalid_samples_stop_the_run_although_several_batches_close_at_once(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    class LastFirst(OneByOne):
        """What was asked for last ends first, so that the first group of all that are drawn is decided last."""

        async def ended(self) -> list[SampleRecord]:
            self.ready = self.ready[-1:] + self.ready[:-1]
            return await super().ended()

    rollouts = LastFirst(bench.ports, tiny_model, builders, lambda task, g: float(g % 2) if int(task[1:]) % 2 else None)
    with pytest.raises(NoProgress, match=r"invalid in 3 steps running.*env_error: it broke"):
        await bench.train(rollouts, number_generation=2, global_batch_size=4, max_steps=8)


class Zombie(OneByOne):
    """Long after the weights went on, two samples come from a replica that was taken for dead."""

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        version = self.version
        if sample_id in ("t8_0", "t8_1"):
            self.version = "0.0"
        await super().play(sample_id, group_id, reward)
        self.version = version


async def test_what_is_too_old_all_the_same_is_dropped_and_sampled_anew(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    await bench.train(Zombie(bench.ports, tiny_model, builders, first_of_four))
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    assert samples["t8_0"].drop_reason is samples["t8_1"].drop_reason is DropReason.STALE
    assert max(ages_of(bench, list(samples.values()))) <= 2
    assert any("t8_4" in group for batch in await bench.batches() for group in batch.groups)


async def test_what_is_under_way_when_the_budget_is_used_up_is_trained_as_far_as_it_makes_batches(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    class Counted(OneByOne):
        async def put(self, key: str, record: object) -> None:
            await super().put(key, record)
            if isinstance(record, Call):
                self.num_tokens += record.num_sampled
                key = token_count_key(RUN_ID, Purpose.TRAIN, "replica-0")
                await self.ports.records.write([Write(key=key, value=str(self.num_tokens).encode(), expected=None)])

        num_tokens = 0

    rollouts = Counted(bench.ports, tiny_model, builders, first_of_four)
    # Two calls of two tokens; three batches of eight samples have slots at once.
    await bench.train(rollouts, budget_tokens=33)
    status = await bench.status()
    assert (status.state, status.step) == ("exhausted", 3)
    assert rollouts.num_tokens == 3 * 8 * 4
    assert {sample.state for sample in await bench.samples()} == {SampleState.TRAINED}


async def test_going_on_from_an_earlier_step_counts_from_there(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    rollouts = Slow(bench.ports, tiny_model, builders, first_of_four)
    await bench.train(rollouts, save_steps=1)
    await supersede(bench.ports.records, RUN_ID, 2)
    bench.trainer = Trainer(tiny_model, bench.config)
    # A replica never answers a call that was asked for after the pointer moved with what was given up.
    rollouts.num_swaps = 0
    await bench.train(rollouts, save_steps=1, max_steps=6)
    live = [item.batch for item in await live_batches(bench.ports.records, RUN_ID)]
    assert [str(batch.version) for batch in live] == ["1.1", "1.2", "2.3", "2.4", "2.5", "2.6"]
    samples = await bench.samples()
    ages = ages_of(bench, [s for s in samples if s.state is SampleState.TRAINED])
    assert len(ages) == 6 * 8 and min(ages) >= 0 and max(ages) <= 2


async def test_a_batch_that_was_recorded_and_not_applied_is_applied_with_its_older_tokens(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    class Dying(Trainer):
        """Its process ends in the middle of step 3."""

        def finish(self) -> StepResult:
            if self.num_steps == 2:
                raise OSError("the machine is gone")
            return super().finish()

    bench.trainer = Dying(tiny_model, bench.config)
    rollouts = Slow(bench.ports, tiny_model, builders, first_of_four)
    with pytest.raises(OSError, match="the machine is gone"):
        await bench.train(rollouts, save_steps=1)
    recorded = (await bench.batches())[-1]
    assert (recorded.step, recorded.state) == (3, BatchState.RECORDED)
    bench.trainer = Trainer(tiny_model, bench.config)
    await bench.train(rollouts, save_steps=1)
    applied = (await bench.batches())[2]
    assert (applied.groups, str(applied.version)) == (recorded.groups, "2.3")
    members = [sample for sample in await bench.samples() if sample.step == 3]
    assert set(ages_of(bench, members)) == {2}
    assert (await bench.ports.metrics.read(RUN_ID))[2].values["audit_max"] < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo_epochs": 2, "ppo_minibatches": 2},
        {"advantage_method": "reinforce_pp_baseline"},
        {"loss_fn": "gspo", "mismatch_correction": "token_truncate"},
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
async def test_older_tokens_are_audited_where_gradients_wait_for_the_whole_batch(
    bench: Bench, tiny_model: Path, builders: Builders, changes: dict[str, Any]
) -> None:
    bench.config = replace(bench.config, **changes)
    bench.trainer = Trainer(tiny_model, bench.config)
    await bench.train(Slow(bench.ports, tiny_model, builders, first_of_four))
    assert 0 < max(ages_of(bench, await bench.samples())) <= 2
    for metric in await bench.ports.metrics.read(RUN_ID):
        assert metric.values["audit_max"] < 1e-4
