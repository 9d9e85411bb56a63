"""The loop over real embedded ports; one small class stands for scheduler, worker and replica."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, CountingTrainer, ScriptedRollouts, first_of_four
from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.errors import AuditFailed, Conflict, NoProgress, NotFound, RecordCorrupt
from turnmill.records import (
    BatchState,
    Call,
    DropReason,
    ReplicaStatus,
    SampleRecord,
    SampleState,
    Version,
    decode,
    replica_key,
    training_key,
)
from turnmill.training.policy import Policy
from turnmill.training.task_statistics import TaskTable
from turnmill.training.trainer import Trainer


async def test_a_run_trains_its_steps_and_accounts_for_every_sample(bench: Bench, rollouts: ScriptedRollouts) -> None:
    rollouts.reward = lambda task, g: 0.0 if task == "t1" else None if (task, g) == ("t2", 0) else float(g % 3 == 1)
    await bench.train(rollouts)
    status = await bench.status()
    assert (status.state, status.step, status.incarnation) == ("succeeded", 3, 1)
    assert status.version == Version(incarnation=1, n=3)
    batches = await bench.batches()
    assert [(b.step, b.state, str(b.version)) for b in batches] == [
        (step, BatchState.APPLIED, f"1.{step}") for step in (1, 2, 3)
    ]
    assert batches[0].groups == (("t0_0", "t0_1", "t0_2", "t0_3"), ("t2_1", "t2_2", "t2_3", "t2_4"))
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    for batch in batches:
        for sample_id in batch.sample_ids:
            sample = samples.pop(sample_id)
            assert (sample.state, sample.step) == (SampleState.TRAINED, batch.step)
    assert samples.pop("t2_0").state is SampleState.INVALID
    assert {samples.pop(f"t1_{g}").drop_reason for g in range(4)} == {DropReason.NO_SIGNAL}
    assert {sample.drop_reason for sample in samples.values()} <= {DropReason.SURPLUS}
    assert len({b.digest for b in batches}) == 3


class RememberingTrainer(Trainer):
    """Remembers the folders that it saved weights into."""

    def __init__(self, base_model: Path, config: Config) -> None:
        super().__init__(base_model, config)
        self.folders: list[Path] = []

    def save_weights(self, folder: Path) -> None:
        self.folders.append(folder)
        super().save_weights(folder)


async def test_weights_lie_in_the_runs_own_folder_until_they_are_published_and_are_gone_then(
    bench: Bench, rollouts: ScriptedRollouts, tiny_model: Path
) -> None:
    """A trainer that is killed just then leaves nothing in the folder for temporary files of the machine."""
    bench.trainer = trainer = RememberingTrainer(tiny_model, bench.config)
    await bench.train(rollouts, max_steps=1)
    assert [folder.parent for folder in trainer.folders] == [bench.folder] * 2
    assert [path.name for path in bench.folder.iterdir() if path.name != "step-1"] == ["final"]


async def test_versions_are_published_pointed_to_and_pruned(bench: Bench, rollouts: ScriptedRollouts) -> None:
    await bench.train(rollouts)
    current = await bench.ports.weights.current()
    assert current is not None and str(current.version) == "1.3"
    assert current.digest == bench.trainer.fingerprint() == (await bench.batches())[-1].digest
    for text in ("0.0", "1.2"):
        await bench.ports.weights.get(Version.parse(text))
    with pytest.raises(NotFound):
        await bench.ports.weights.get(Version(incarnation=1, n=1))
    assert list(rollouts.fingerprints) == ["0.0", "1.1", "1.2"]


async def test_the_final_checkpoint_holds_the_last_version(bench: Bench, rollouts: ScriptedRollouts) -> None:
    await bench.train(rollouts)
    status = await bench.status()
    assert status.checkpoint == str(bench.folder / "final")
    model = AutoModelForCausalLM.from_pretrained(status.checkpoint)
    assert Policy(model).fingerprint() == bench.trainer.fingerprint()


async def test_each_step_has_its_metric_over_everything_that_was_played(
    bench: Bench, rollouts: ScriptedRollouts
) -> None:
    rollouts.reward = lambda task, g: 0.0 if task == "t1" else None if (task, g) == ("t2", 0) else float(g % 3 == 1)
    await bench.train(rollouts)
    metrics = await bench.ports.metrics.read(RUN_ID)
    assert [metric.step for metric in metrics] == [1, 2, 3]
    first = metrics[0].values
    assert first["num_trained"] == 8 and first["num_invalid"] == 1
    assert first["dropped_no_signal"] == 4
    assert first["num_generated"] == 12 + first["dropped_surplus"]
    assert first["reward_min"] == 0.0 and first["reward_max"] == 1.0
    assert first["response_length_mean"] == 4 and first["conversation_length_mean"] == 12
    assert first["turns_mean"] == 2 and first["staleness"] == 0 and first["num_rows"] == 8
    assert first["audit_max"] < 1e-4 and first["audit_share"] == 1
    expected = {"reward_mean", "solved", "invalid_share", "dropped_share", "loss", "clip_fraction", "kl", "entropy"}
    expected |= {"grad_norm", "lr", "generate_s", "wait_s", "train_s", "publish_s", "tokens_per_s", "audit_mean"}
    assert expected <= first.keys()


async def test_equal_rewards_give_equal_weights(
    bench: Bench, rollouts: ScriptedRollouts, tmp_path: Path, tiny_model: Path, builders: Builders
) -> None:
    await bench.train(rollouts)
    ports = open_run(tmp_path / "again", RUN_ID, num_replicas=1)
    try:
        trainer = Trainer(tiny_model, bench.config)
        again = Bench(ports, bench.config, bench.tasks, trainer, tmp_path / "again" / "checkpoints")
        await again.train(ScriptedRollouts(ports, tiny_model, builders, first_of_four))
        assert await again.batches() == await bench.batches()
    finally:
        ports.close()


class Corrupting(ScriptedRollouts):
    """Alters one stored record of a sample after it was reported."""

    alter: Callable[[SampleRecord, Call], SampleRecord | Call]

    async def ended(self) -> list[SampleRecord]:
        ended = await super().ended()
        for sample in ended:
            if sample.sample_id == "t0_2":
                (stored,) = await self.ports.records.get([f"calls/{RUN_ID}/train/t0_2/t0_2_0"])
                assert stored is not None
                altered = self.alter(sample, decode(stored.value, Call))
                await self.put(sample.key if isinstance(altered, SampleRecord) else stored.key, altered)
        return ended


@pytest.mark.parametrize(
    ("field", "alter"),
    [
        ("digest", lambda _, call: structs.replace(call, loss_mask=[0, 0, 0, 1, 1, 1])),
        ("digest", lambda _, call: structs.replace(call, token_ids=[*call.token_ids[:-1], 77])),
        ("parent_digest", lambda _, call: structs.replace(call, token_ids=[*call.token_ids[:-1], 77]).sealed()),
        ("report_digest", lambda sample, _: replace(sample, reward=1.0)),
        ("key", lambda sample, _: replace(sample, sample_id="t0_3")),
        ("calls", lambda sample, _: replace(sample, calls=sample.calls[:1], report_digest=None)),
    ],
)
async def test_an_altered_record_stops_the_run_with_evidence(
    bench: Bench,
    tiny_model: Path,
    builders: Builders,
    field: str,
    alter: Callable[[SampleRecord, Call], SampleRecord | Call],
) -> None:
    rollouts = Corrupting(bench.ports, tiny_model, builders, first_of_four)
    rollouts.alter = alter
    before = bench.trainer.fingerprint()
    with pytest.raises(RecordCorrupt, match=r"t0_2.*expected"):
        await bench.train(rollouts)
    status = await bench.status()
    assert status.state == "failed" and status.error is not None
    assert "RecordCorrupt" in status.error and "t0_2" in status.error
    # Calls are read before the batch is recorded, the samples' records once more after it.
    is_sample = field in ("report_digest", "key", "calls")
    assert [batch.state for batch in await bench.batches()] == [BatchState.RECORDED] * is_sample
    assert bench.trainer.fingerprint() == before


class Lying(ScriptedRollouts):
    """Says that its memory holds other weights than the trainer's."""

    async def put(self, key: str, record: object) -> None:
        if isinstance(record, ReplicaStatus):
            record = replace(record, fingerprints=dict.fromkeys(record.fingerprints, "0" * 32))
        await super().put(key, record)


async def test_a_wrong_fingerprint_stops_the_run(bench: Bench, tiny_model: Path, builders: Builders) -> None:
    with pytest.raises(AuditFailed, match=r"replica-0 serves version 0\.0 with fingerprint 0000"):
        await bench.train(Lying(bench.ports, tiny_model, builders, first_of_four))
    assert (await bench.status()).state == "failed"


class Frozen(ScriptedRollouts):
    """Never loads a new version, but says that it does."""

    async def swap(self) -> None:
        current = await self.ports.weights.current()
        assert current is not None
        base = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        await super().swap()
        if current.version.n:
            self.model.load_state_dict(base)
            self.fingerprints[self.version] = Policy(self.model).fingerprint()
            status = ReplicaStatus(
                run_id=RUN_ID,
                replica="replica-0",
                version=current.version,
                fingerprints=self.fingerprints,
                updated_at=1.0,
                pid=1,
            )
            await self.put(replica_key(RUN_ID, "replica-0"), status)


async def test_a_replica_that_keeps_old_weights_stops_the_run(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    with pytest.raises(AuditFailed, match=r"still the weights of 0\.0"):
        await bench.train(Frozen(bench.ports, tiny_model, builders, first_of_four))
    assert (await bench.status()).step == 1


class Damaged(ScriptedRollouts):
    """Its memory changes after it said what it holds."""

    async def swap(self) -> None:
        await super().swap()
        with torch.no_grad():
            self.model.model.layers[0].mlp.down_proj.weight[0, 0] += 1.0


async def test_weights_damaged_in_the_replicas_memory_stop_the_run(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    with pytest.raises(AuditFailed, match=r"disagree over 32 tokens.*worst: samples/run-1/train/t"):
        await bench.train(Damaged(bench.ports, tiny_model, builders, first_of_four))
    assert [batch.state for batch in await bench.batches()] == [BatchState.RECORDED]
    current = await bench.ports.weights.current()
    assert current is not None and str(current.version) == "0.0"


class Late(ScriptedRollouts):
    """The first sample of the second step was sampled by the weights before it."""

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        version = self.version
        if sample_id == "t2_0":
            self.version = "0.0"
        await super().play(sample_id, group_id, reward)
        self.version = version


async def test_a_stale_sample_is_dropped_and_sampled_anew(bench: Bench, tiny_model: Path, builders: Builders) -> None:
    await bench.train(Late(bench.ports, tiny_model, builders, lambda _, g: float(g % 2)), max_steps=2)
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    assert samples["t2_0"].drop_reason is DropReason.STALE
    assert (await bench.batches())[1].groups[0] == ("t2_1", "t2_2", "t2_3", "t2_4")
    assert (await bench.ports.metrics.read(RUN_ID))[1].values["staleness"] == 1


async def test_ten_steps_without_signal_stop_the_run_with_a_diagnosis(bench: Bench, rollouts: ScriptedRollouts) -> None:
    rollouts.reward = lambda task, g: 0.25
    with pytest.raises(NoProgress, match=r"10 steps in a row .* 240 valid rollouts .* mean 0\.25"):
        await bench.train(rollouts)
    assert {sample.drop_reason for sample in await bench.samples()} == {DropReason.NO_SIGNAL}
    assert await bench.batches() == []


async def test_steps_without_signal_are_counted_in_the_metric_of_the_next_one(
    bench: Bench, rollouts: ScriptedRollouts
) -> None:
    rollouts.reward = lambda task, g: float(g % 4 == 0) if int(task[1:]) >= 12 else 0.0
    await bench.train(rollouts, max_steps=1)
    (metric,) = await bench.ports.metrics.read(RUN_ID)
    assert metric.values["num_empty_rounds"] == 2
    assert metric.values["num_generated"] == 12 * 4 + 8


async def test_three_steps_of_mostly_invalid_samples_stop_the_run(bench: Bench, rollouts: ScriptedRollouts) -> None:
    rollouts.reward = lambda task, g: [None, None, 1.0, None, 0.0, None][g % 6]
    with pytest.raises(NoProgress, match=r"invalid in 3 steps running.*env_error: it broke"):
        await bench.train(rollouts, number_generation=2, global_batch_size=4, max_steps=10)
    assert (await bench.status()).state == "failed"


class OneByOne(ScriptedRollouts):
    """Samples end one after the other."""

    async def ended(self) -> list[SampleRecord]:
        if not self.ready:
            await asyncio.Event().wait()
        # The trainer may compute meanwhile.
        await asyncio.sleep(0.01)
        return [self.ready.pop(0)]


async def test_groups_that_are_certain_are_made_before_the_batch_is_closed(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    bench.config = replace(bench.config, global_batch_size=16, max_refill_rounds=0, trainer_threads=2)
    rollouts = OneByOne(bench.ports, tiny_model, builders, first_of_four)
    await bench.train(rollouts, max_steps=2)
    for batch in await bench.batches():
        assert sum(batch.parts) == len(batch.groups) == 4 and len(batch.parts) > 1
    shares = [metric.values["early_share"] for metric in await bench.ports.metrics.read(RUN_ID)]
    assert all(0 < share < 1 for share in shares)


async def test_the_rest_takes_all_cores_unless_others_are_still_being_played(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    threads = []
    for max_refill_rounds in (0, 2):
        bench.trainer = trainer = CountingTrainer(tiny_model, bench.config)
        # Where a group may have no signal, others are drawn ahead.
        rollouts = OneByOne(bench.ports, tiny_model, builders, first_of_four)
        rollouts.num_requested = Counter({f"t{i}": 100 * max_refill_rounds for i in range(20)})
        await bench.train(
            rollouts, max_steps=1 + max_refill_rounds // 2, max_refill_rounds=max_refill_rounds, trainer_threads=2
        )
        threads.append(trainer.threads)
    assert threads[0][:-1] == [1] * (len(threads[0]) - 1) and threads[0][-1] == 2
    (_, metric) = await bench.ports.metrics.read(RUN_ID)
    assert metric.values["dropped_surplus"] > 0 and threads[1][-1] == 1


async def test_stopping_leaves_nothing_of_the_gradients_made_so_far(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    class Halting(OneByOne):
        async def ended(self) -> list[SampleRecord]:
            if self.version == "1.1" and len(self.ready) == 2:
                # One group of two is certain; the other one will never be.
                bench.stop.set()
                await asyncio.Event().wait()
            return await super().ended()

    await bench.train(Halting(bench.ports, tiny_model, builders, first_of_four), max_refill_rounds=0)
    status = await bench.status()
    assert (status.state, str(status.version)) == ("cancelled", "1.1")
    assert [p for p in bench.trainer.policy.parameters() if p.grad is not None] == []
    model = AutoModelForCausalLM.from_pretrained(str(status.checkpoint))
    assert Policy(model).fingerprint() == (await bench.batches())[0].digest


class Hanging(ScriptedRollouts):
    """From the second step on, samples never end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hangs = asyncio.Event()
        self.after = "1.1"

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        await super().play(sample_id, group_id, reward)
        if self.version == self.after:
            self.ready.clear()
            self.hangs.set()


@pytest.mark.parametrize(("after", "step"), [("0.0", 0), ("1.1", 1)])
async def test_stopping_drops_what_is_open_and_keeps_what_was_learned(
    bench: Bench, tiny_model: Path, builders: Builders, after: str, step: int
) -> None:
    rollouts = Hanging(bench.ports, tiny_model, builders, first_of_four)
    rollouts.after = after
    training = asyncio.create_task(bench.train(rollouts))
    await rollouts.hangs.wait()
    bench.stop.set()
    await training
    status = await bench.status()
    assert (status.state, status.step) == ("cancelled", step)
    assert (status.checkpoint is not None) == (step > 0) == (bench.folder / "final").exists()
    states = [sample.state for sample in await bench.samples()]
    assert set(states) <= {SampleState.TRAINED, SampleState.DROPPED}
    reasons = [sample.drop_reason for sample in await bench.samples()]
    assert reasons.count(DropReason.CANCELLED) == 8


async def test_a_run_that_was_stopped_before_it_began_asks_for_nothing(
    bench: Bench, rollouts: ScriptedRollouts
) -> None:
    bench.stop.set()
    await bench.train(rollouts)
    assert (await bench.status()).state == "cancelled"
    assert await bench.samples() == []


async def test_each_trainer_process_is_the_next_incarnation(bench: Bench, rollouts: ScriptedRollouts) -> None:
    bench.stop.set()
    await bench.train(rollouts)
    bench.stop.clear()
    await bench.train(rollouts, max_steps=1)
    status = await bench.status()
    assert (status.incarnation, str(status.version)) == (2, "2.1")


async def test_a_second_trainer_of_the_run_fences_the_first(bench: Bench, tiny_model: Path, builders: Builders) -> None:
    rollouts = Hanging(bench.ports, tiny_model, builders, first_of_four)
    rollouts.after = "0.0"
    training = asyncio.create_task(bench.train(rollouts))
    await rollouts.hangs.wait()
    await rollouts.put(training_key(RUN_ID), replace(await bench.status(), incarnation=2))
    bench.stop.set()
    with pytest.raises(Conflict, match="another process wrote it"):
        await training
    assert (await bench.status()).incarnation == 2


async def test_groups_without_signal_in_a_row_stop_the_run_and_say_which_tasks_they_were(
    bench: Bench, rollouts: ScriptedRollouts
) -> None:
    rollouts.reward = lambda task, g: float(task == "t1" or (task == "t0" and g % 2 == 0))
    with pytest.raises(NoProgress) as stopped:
        await bench.train(rollouts, max_useless_groups=5)
    assert "5 groups in a row without signal (max_useless_groups = 5)" in str(stopped.value)
    assert "In 4 groups no rollout passed" in str(stopped.value) and "tasks t2, t3, t4, t5." in str(stopped.value)
    assert "In 1 group every rollout passed: task t1." in str(stopped.value)
    assert (await bench.status()).state == "failed"


async def test_a_curriculum_goes_on_from_the_records_of_a_run_and_its_checkpoints_hold_the_statistics(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: Callable[[Config], Trainer]
) -> None:
    """Half of the tasks always fail: each is played once, and again four epochs later."""
    bench.config = replace(bench.config, curriculum="pass_rate", save_steps=2)
    bench.tasks = bench.tasks[:6]
    rollouts.reward = lambda task, g: float(g % 4 == 0 and int(task[1:]) % 2 == 0)
    await bench.train(rollouts, max_steps=4)
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=7)
    batches = await bench.batches()
    drawn = [[sample_ids[0].partition("_")[0] for sample_ids in batch.groups] for batch in batches]
    assert drawn == [["t0", "t2"], ["t4", "t0"], ["t2", "t4"], ["t0", "t2"], ["t4", "t0"], ["t2", "t4"], ["t0", "t2"]]
    decided = [(outcome.task_id, outcome.position) for batch in batches for outcome in batch.progress.outcomes]
    hard = [(task_id, position // 6) for task_id, position in decided if task_id in ("t1", "t3", "t5")]
    assert hard == [("t1", 0), ("t3", 0), ("t5", 0), ("t1", 4), ("t3", 4)]
    for step in (2, 4, 6):
        rows = json.loads((bench.folder / f"step-{step}" / "tasks.json").read_text())
        expected = TaskTable.of(batches[:step]).statistics
        assert rows == [expected[task_id].as_object() for task_id in sorted(expected)]
