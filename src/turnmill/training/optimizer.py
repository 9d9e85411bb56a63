"""AdamW over the trained parameters, and its learning rate: warm-up, then constant, linear or cosine.

    make_optimizer -> [set_learning_rate(step) -> optimizer.step()]*

Rates follow from the number of the step alone, so there is nothing of the schedule to store or to restore.
"""

import math
from typing import Any

import torch

from turnmill.config import Config
from turnmill.training.policy import Policy

# Of a parameter group of the optimizer: its learning rate over that of the run; 1 where the group does not say.
_RATIO = "lr_ratio"


def make_optimizer(policy: Policy, config: Config) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) over the policy's trained parameters, at the run's peak learning rate.

    With `loraplus_lr_ratio`, the B matrices of an adapter learn by so much faster than the others: it is the lambda of
    LoRA+ (arXiv:2402.12354).
    """
    groups: list[dict[str, Any]] = [{"params": policy.parameters()}]
    if policy.lora is not None and config.loraplus_lr_ratio != 1:
        named = policy.named_trained()
        groups = [
            {"params": [parameter for name, parameter in named if not _is_b(name)]},
            {
                "params": [parameter for name, parameter in named if _is_b(name)],
                "lr": config.lr * config.loraplus_lr_ratio,
                _RATIO: config.loraplus_lr_ratio,
            },
        ]
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _is_b(name: str) -> bool:
    """Whether the parameter of that name is the B of an adapter, which begins as zeros."""
    return ".lora_B." in name


def learning_rate(config: Config, step: int) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up to `lr`, then constant, or down to `min_lr` at the end."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps - 1) / max(1, config.max_steps - config.warmup_steps - 1))
    left = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> float:
    """Give every group of parameters its rate of optimizer step `step`; the run's rate."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_RATIO, 1.0)
    return rate
