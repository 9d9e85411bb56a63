"""Several updates a step and a renewed reference, where an adapter is what is trained."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.training.test_training_trainer import make_groups
from turnmill.config import Config
from turnmill.training import snapshot
from turnmill.training.trainer import Trainer


@pytest.fixture
def lora(small_config: Config) -> Config:
    return replace(
        small_config,
        training_method="RFT_MULTITURN_LORA",
        lora_rank=4,
        ppo_epochs=2,
        ppo_minibatches=2,
        loss_fn="gspo",
        kl_coeff=0.1,
        kl_refresh_steps=2,
    )


def test_the_renewed_reference_of_an_adapter_is_an_adapter(
    trainer_of: Callable[[Config], Trainer], lora: Config
) -> None:
    trainer, again = trainer_of(lora), trainer_of(lora)
    assert trainer.reference is not None
    base = trainer.reference.fingerprint()
    prints = []
    for _ in range(3):
        groups = make_groups(trainer)
        assert trainer.step(groups, (1, 1)) == again.step(groups, threads=2)
        prints.append((trainer.fingerprint(), trainer.reference.fingerprint()))
    (first, kept), (second, renewed), (third, held) = prints
    assert len({first, second, third}) == 3 and kept == base
    assert renewed == held == second
    names = {name for name in snapshot.state_of(trainer) if name.startswith("reference/")}
    assert names and all("lora_" in name for name in names)
    assert again.fingerprint() == third
