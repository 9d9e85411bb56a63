"""Everything at once: an adapter, off policy, several updates a step, a renewed reference, and crashes in between."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, first_of_four
from tests.unit.training.test_training_async import Slow, ages_of
from turnmill.config import Config
from turnmill.ports import RunPorts
from turnmill.records import BatchState, ReplicaStatus, SampleState, replica_key
from turnmill.training.history import live_batches, supersede
from turnmill.training.policy import Policy
from turnmill.training.trainer import StepResult, Trainer

ALL: dict[str, dict[str, Any]] = {
    "turns, whole batch of updates": {
        "advantage_method": "group_based_per_turn",
        "ppo_epochs": 2,
        "ppo_minibatches": 2,
        "kl_coeff": 0.1,
        "kl_refresh_steps": 2,
        "loss_fn": "gspo",
        "loss_aggregation": "sequence",
    },
    "whole batch, masks of samples": {
        "advantage_method": "reinforce_pp_baseline",
        "mismatch_correction": "sequence_mask",
        "kl_coeff": 0.1,
        "kl_refresh_steps": 3,
        "loss_fn": "cispo",
        "loss_aggregation": "constant",
    },
}


@pytest.fixture(params=ALL)
def small_config(small_config: Config, request: pytest.FixtureRequest) -> Config:
    return replace(
        small_config,
        training_method="RFT_MULTITURN_LORA",
        lora_rank=4,
        loraplus_lr_ratio=4.0,
        rollout_strategy="off_policy_async",
        age_tolerance=2,
        max_steps=5,
        overlong="drop",
        weight_decay=0.1,
        **ALL[request.param],
    )


class Adapted(Slow):
    """Samples with base and adapter. The first call of every second sample earned something; some are cut off."""

    def __init__(self, ports: RunPorts, model_folder: Path, builders: Builders, config: Config) -> None:
        super().__init__(ports, model_folder, builders, first_of_four)
        self.policy = Policy.load(model_folder, config)
        self.model = self.policy.model

    async def swap(self) -> None:
        self.num_swaps += 1
        current = await self.ports.weights.current()
        assert current is not None
        if self.num_swaps % 3 != 1 or str(current.version) == self.version:
            return
        self.version = str(current.version)
        self.policy.load_weights(Path(current.location))
        self.fingerprints[self.version] = self.policy.fingerprint()
        status = ReplicaStatus(
            run_id=RUN_ID,
            replica="replica-0",
            version=current.version,
            fingerprints=self.fingerprints,
            updated_at=1.0,
            pid=1,
        )
        await self.put(replica_key(RUN_ID, "replica-0"), status)

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        await super().play(sample_id, group_id, reward)
        sample = self.ready.pop()
        sample = replace(
            sample,
            turn_rewards={sample.calls[0]: float(sample_id[-1] in "13579")},
            stop_reason="max_length" if sample_id[-1] in "27" else sample.stop_reason,
        )
        sample = replace(sample, report_digest=sample.expected_report_digest())
        await self.put(sample.key, sample)
        self.ready.append(sample)


@pytest.mark.slow
async def test_an_adapter_trained_off_policy_goes_on_with_the_same_bits_wherever_it_was_interrupted(
    bench: Bench, tiny_model: Path, builders: Builders, trainer_of: Callable[[Config], Trainer]
) -> None:
    class Dying(Trainer):
        """Its process ends in the middle of step 4."""

        def finish(self) -> StepResult:
            if self.num_steps == 3:
                raise OSError("the machine is gone")
            return super().finish()

    bench.trainer = Dying(tiny_model, bench.config)
    rollouts = Adapted(bench.ports, tiny_model, builders, bench.config)
    with pytest.raises(OSError, match="the machine is gone"):
        await bench.train(rollouts, save_steps=2)
    assert (await bench.batches())[-1].state is BatchState.RECORDED
    rollouts.num_swaps = 0
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, save_steps=2)
    digest = bench.trainer.fingerprint()
    assert 0 < max(ages_of(bench, await bench.samples())) <= 2
    metrics = await bench.ports.metrics.read(RUN_ID)
    assert max(metric.values["audit_max"] for metric in metrics) < 1e-4
    # 8 conversations of 4 tokens, but for those that were cut off.
    assert 0 < min(metric.values["num_trained_tokens"] for metric in metrics) < 32
    # Each replayed step must give its recorded weights: from the last checkpoint, the one before, and from none.
    for steps in ((), (5,), (5, 4, 2)):
        for step in steps:
            shutil.rmtree(bench.folder / f"step-{step}", ignore_errors=True)
        bench.trainer = trainer_of(bench.config)
        await bench.train(rollouts, save_steps=2)
        assert bench.trainer.fingerprint() == digest

    await supersede(bench.ports.records, RUN_ID, 2)
    rollouts.num_swaps = 0
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, save_steps=2)
    live = [item.batch for item in await live_batches(bench.ports.records, RUN_ID)]
    assert [batch.version.n for batch in live if batch.version is not None] == [1, 2, 3, 4, 5]
    trained = [sample for sample in await bench.samples() if sample.state is SampleState.TRAINED]
    assert len(trained) == 5 * 8 and max(ages_of(bench, trained)) <= 2
    # What is published is base and adapter in one.
    ids = torch.tensor([[2, 300, 6, 4, 310]])
    final = AutoModelForCausalLM.from_pretrained(bench.folder / "final", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(final(ids).logits, bench.trainer.policy.model(ids).logits, rtol=0, atol=2e-4)
