"""Runs that train an adapter: the whole loop, adapters that never reach what samples, kills, and what is published."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.house import CONFIG, MODEL, accounted, open_house
from tests.e2e.processes import start_run
from tests.e2e.test_kills_in_conversations import calls_of
from turnmill.errors import AuditFailed, WeightsUnproved
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import Version
from turnmill.weights import Lora
from turnmill.wiring.serving import find_model

# Rates at which one step of an adapter is seen in log-probs.
LORA_CONFIG = replace(
    CONFIG,
    training_method="RFT_MULTITURN_LORA",
    lora_rank=8,
    lora_alpha=32.0,
    lr=5e-3,
    lr_schedule="constant",
    max_steps=3,
    save_steps=2,
)


async def test_an_adapter_is_trained_on_what_it_samples(tmp_path: Path) -> None:
    async with open_house(tmp_path, LORA_CONFIG) as house:
        await house.train()
        status, metrics = await house.status(), await house.metrics()
        assert (status.state, status.step) == ("succeeded", 3)
        assert accounted(await house.samples())["trained"] == 3 * 8
        # Trainer and sampler agree as closely as without an adapter.
        assert max(metric.values["audit_max"] for metric in metrics) < 1e-4
        assert len({batch.digest for batch in await house.batches()}) == 3
        current = await house.ports.weights.current()
        assert current is not None and current.version == Version(incarnation=1, n=3)
        assert all(".lora_" in name for name in load_file(Path(current.location) / "model.safetensors"))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-2", "step-3", "final"}


class Deaf(TransformersEngine):
    """Takes every version for loaded, and goes on with what it has."""

    def load(self, folder: Path, version: Version) -> None:
        self._version = version


async def test_a_replica_that_never_loaded_the_adapter_is_refused_before_it_answers_a_call(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnproved, match=r"does not hold version 1\.1"):
        async with open_house(tmp_path, LORA_CONFIG, engine_type=Deaf) as house:
            training = asyncio.create_task(house.train())
            assert house.replica is not None
            await asyncio.wait([house.replica])
            house.stop.set()
            await training
            assert (await house.status()).step == 1
            versions = {call.version for sample in await house.samples() for call in await calls_of(house, sample)}
            assert versions == {"0.0"}


class Boasting(Deaf):
    """Loads every version into one model, shows the fingerprint of that, and samples from another."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        super().__init__(folder, **arguments)
        self._shown = TransformersEngine(folder, num_slots=1, max_length=16, lora=arguments["lora"])

    def load(self, folder: Path, version: Version) -> None:
        super().load(folder, version)
        self._shown.load(folder, version)

    def fingerprint(self) -> str:
        return self._shown.fingerprint()


async def test_a_replica_that_shows_the_adapter_and_samples_without_it_stops_the_run_by_its_tokens(
    tmp_path: Path,
) -> None:
    async with open_house(tmp_path, LORA_CONFIG, engine_type=Boasting) as house:
        with pytest.raises(AuditFailed, match=r"disagree over .*version 1\.1"):
            await house.train()
        assert (await house.status()).step == 1


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits_btv: torch.Tensor = model(input_ids=torch.arange(7, 60)[None]).logits
    return logits_btv


@pytest.mark.slow
@pytest.mark.timeout(600)
# What `PeftModel` asks of transformers, by the name that it had.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_killed_run_of_an_adapter_goes_on_to_the_same_bits_and_publishes_a_model_like_any_other(
    tmp_path: Path,
) -> None:
    with start_run(
        tmp_path,
        evaluate=True,
        max_steps="4",
        save_steps="2",
        promotion="always",
        training_method="RFT_MULTITURN_LORA",
        lora_rank="8",
        loraplus_lr_ratio="4",
        lr="1e-2",
    ) as running:
        for num_steps in (1, 3):
            running.wait_for_steps(num_steps)
            running.wait_for_death("trainer", running.kill("trainer"))
        figures = running.finish()
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    assert (figures["status"], figures["steps"]) == ("succeeded", 4)

    published = Path(figures["published"])
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before = logits_of(base)
    through_peft = logits_of(PeftModel.from_pretrained(base, published / "adapter").eval())
    merged = logits_of(AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32))
    torch.testing.assert_close(merged, through_peft, rtol=0, atol=1e-4)
    assert (merged - before).abs().max() > 1e-2
    card = (published / "README.md").read_text()
    assert "LoRA adapter of rank 8" in card and "`adapter/`" in card

    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "t", "metadata": {"prompt": "Guess.", "answer": "crane"}}) + "\n"
    )
    # The adapter of a step is merged when it is asked for; the published model is one like any other.
    for target in ([figures["run_id"], "--step", "2"], [str(published)]):
        command = [sys.executable, "-m", "turnmill", "eval", *target, "--json", "--root", str(tmp_path)]
        command += ["--eval-rollouts", "4", "--data", str(tmp_path / "tasks.jsonl")]
        evaluated = subprocess.run(command, capture_output=True, text=True, check=False)
        assert evaluated.returncode == 0, evaluated.stderr
    folder = find_model(tmp_path, figures["run_id"], 2).folder
    assert folder == tmp_path / "runs" / figures["run_id"] / "merged" / "step-2"
    step = tmp_path / "runs" / figures["run_id"] / "checkpoints" / "step-2"
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    through_peft = logits_of(PeftModel.from_pretrained(base, step).eval())
    merged = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    torch.testing.assert_close(merged, through_peft, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_targets_that_the_model_does_not_have_end_a_run_with_their_names(tmp_path: Path) -> None:
    with start_run(tmp_path, training_method="RFT_MULTITURN_LORA", lora_targets="q_prj") as running:
        out, err = running.process.communicate(timeout=300)
    assert running.process.returncode in (1, 2) and "Traceback" not in err
    assert "'q_prj': the model has no module of that name" in out + err


def test_a_lora_of_a_run_is_none_where_all_weights_are_trained() -> None:
    assert Lora.of(CONFIG) is None
    assert Lora.of(LORA_CONFIG) == Lora(rank=8, alpha=32.0, targets=(), seed=0, base_model="wordle-tiny")
