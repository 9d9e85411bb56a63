"""The optimizer and its learning rate."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from turnmill.config import Config
from turnmill.training.optimizer import learning_rate, set_learning_rate
from turnmill.training.trainer import Trainer

Trainers = Callable[[Config], Trainer]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    config = Config(lr=1.0, min_lr=0.1, warmup_steps=2, max_steps=6, lr_schedule=schedule)
    assert [learning_rate(config, step) for step in range(1, 7)] == pytest.approx(expected)


def test_the_learning_rate_of_a_single_step_is_the_peak() -> None:
    assert learning_rate(Config(lr=0.5, max_steps=1, lr_schedule="cosine"), 1) == 0.5


def test_the_optimizer_is_torchs_adamw_with_the_parameters_of_the_run(
    small_config: Config, trainer_of: Trainers
) -> None:
    config = replace(small_config, lr=0.25, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, weight_decay=0.1)
    trainer = trainer_of(config)
    plain = [parameter.detach().clone().requires_grad_() for parameter in trainer.policy.parameters()]
    torchs = torch.optim.AdamW(plain, lr=0.25, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, fused=True)
    torch.manual_seed(0)
    for step in range(1, 4):
        for parameter, other in zip(trainer.policy.parameters(), plain, strict=True):
            parameter.grad = torch.randn(parameter.shape)
            other.grad = parameter.grad.clone()
        torchs.param_groups[0]["lr"] = set_learning_rate(trainer.optimizer, config, step)
        trainer.optimizer.step()
        torchs.step()
    assert all(map(torch.equal, trainer.policy.parameters(), plain))
