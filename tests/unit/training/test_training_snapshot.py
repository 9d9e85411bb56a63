"""What training goes on with, saved and restored."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turnmill.config import Config
from turnmill.errors import RecordCorrupt
from turnmill.records import Version
from turnmill.training import snapshot
from turnmill.training.checkpoint import Manifest
from turnmill.training.optimizer import learning_rate, set_learning_rate
from turnmill.training.trainer import Trainer

MakeTrainer = Callable[[Config], Trainer]


def make_steps(trainer: Trainer, num_steps: int) -> None:
    """Optimizer steps on gradients that are drawn at random."""
    for _ in range(num_steps):
        for parameter in trainer.policy.parameters():
            parameter.grad = torch.randn(parameter.shape)
        trainer.num_steps += 1
        set_learning_rate(trainer.optimizer, trainer.config, trainer.num_steps)
        trainer.optimizer.step()


def saved(trainer: Trainer, folder: Path) -> Manifest:
    folder.mkdir()
    snapshot.save(trainer, folder)
    return Manifest(
        run_id="run-1",
        step=trainer.num_steps,
        version=Version(incarnation=1, n=trainer.num_steps),
        digest=trainer.fingerprint(),
        position=0,
        state_digest=snapshot.state_digest(trainer),
    )


@pytest.fixture(params=["RFT_MULTITURN_FULL", "RFT_MULTITURN_LORA"])
def config(small_config: Config, request: pytest.FixtureRequest) -> Config:
    config = replace(small_config, lr_schedule="cosine", max_steps=6, weight_decay=0.1, kl_coeff=0.1)
    return replace(config, training_method=request.param, lora_rank=4, loraplus_lr_ratio=4.0)


def test_a_restored_trainer_makes_the_same_steps_from_the_same_random_numbers(
    config: Config, trainer_of: MakeTrainer, tmp_path: Path
) -> None:
    trainer = trainer_of(config)
    make_steps(trainer, 3)
    manifest = saved(trainer, tmp_path / "step-3")
    make_steps(trainer, 3)

    other = trainer_of(config)
    base = other.fingerprint()
    snapshot.restore(other, tmp_path / "step-3", manifest)
    assert other.num_steps == 3
    assert other.optimizer.param_groups[0]["lr"] == learning_rate(config, 3) != config.lr
    assert (other.fingerprint(), snapshot.state_digest(other)) == (manifest.digest, manifest.state_digest)
    make_steps(other, 3)
    assert other.fingerprint() == trainer.fingerprint() != manifest.digest
    assert snapshot.state_digest(other) == snapshot.state_digest(trainer) != manifest.state_digest
    # The reference of the KL term stays the base model.
    assert other.reference is not None and other.reference.fingerprint() == base


def test_nothing_in_a_snapshot_is_a_pickle(config: Config, trainer_of: MakeTrainer, tmp_path: Path) -> None:
    trainer = trainer_of(config)
    make_steps(trainer, 1)
    saved(trainer, tmp_path / "step-1")
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    if config.is_lora:
        assert names == {"adapter_model.safetensors", "adapter_config.json", "trainer.safetensors"}
    else:
        assert {"model.safetensors", "trainer.safetensors", "config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]


@pytest.mark.parametrize("field", ["digest", "state_digest"])
@pytest.mark.parametrize("missing", [False, True])
def test_what_does_not_fit_its_manifest_changes_nothing(
    config: Config, trainer_of: MakeTrainer, tmp_path: Path, field: str, missing: bool
) -> None:
    trainer = trainer_of(config)
    make_steps(trainer, 1)
    manifest = saved(trainer, tmp_path / "step-1")
    if missing:
        weights = "adapter_model.safetensors" if config.is_lora else "model.safetensors"
        (tmp_path / "step-1" / (weights if field == "digest" else "trainer.safetensors")).unlink()
    else:
        manifest = replace(manifest, digest="other") if field == "digest" else replace(manifest, state_digest="other")
    other = trainer_of(config)
    before = (other.fingerprint(), snapshot.state_digest(other))
    with pytest.raises(RecordCorrupt, match="can't be read" if missing else "was altered"):
        snapshot.restore(other, tmp_path / "step-1", manifest)
    assert (other.fingerprint(), snapshot.state_digest(other), other.num_steps) == (*before, 0)
