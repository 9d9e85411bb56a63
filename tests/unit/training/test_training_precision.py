"""Passes in bfloat16, and passes whose activations are computed again in the backward pass."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from tests.unit.training.test_training_lora import groups_of, pass_of, row_of
from turnmill.config import Config
from turnmill.errors import AuditFailed, InvalidInput
from turnmill.training.bundles import Bundle
from turnmill.training.microbatches import MicroBatch, collate
from turnmill.training.policy import Policy
from turnmill.training.trainer import Trainer

Trainers = Callable[[Config], Trainer]


@pytest.fixture(params=["RFT_MULTITURN_FULL", "RFT_MULTITURN_LORA"])
def config(small_config: Config, request: pytest.FixtureRequest) -> Config:
    return replace(small_config, training_method=request.param, lora_rank=4)


@pytest.fixture
def deep_model(tmp_path: Path) -> Path:
    """Six layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "deep")
    return tmp_path / "deep"


def loss_of(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    return torch.log_softmax(policy.logits(batch), dim=-1).gather(1, batch.tokens_n[:, None]).sum()


def shared_pass(policy: Policy) -> MicroBatch:
    """A bundle of three rows with the same prompt, and one row by itself."""
    rows = [row_of(policy.model, seed) for seed in range(4)]
    rows = [replace(row, token_ids=[*rows[0].token_ids[:4], *row.token_ids[4:]]) for row in rows[:3]] + rows[3:]
    width = max(len(row.token_ids) for row in rows[:3]) - 3
    order = tuple(sorted(range(3), key=lambda i: -len(rows[i].token_ids)))
    bundles = (
        Bundle(rows=order, num_shared=3, width=width),
        Bundle(rows=(3,), num_shared=0, width=len(rows[3].token_ids)),
    )
    return collate(rows, [0] * 4, bundles)


def test_bf16_passes_give_fp32_gradients_and_logits_near_those_of_fp32(config: Config, tiny_model: Path) -> None:
    exact, rounded = (Policy.load(tiny_model, replace(config, precision=name)) for name in ("fp32", "bf16"))
    assert exact.fingerprint() == rounded.fingerprint()
    batch = shared_pass(exact)
    with torch.no_grad():
        logits_nv, exact_nv = rounded.logits(batch), exact.logits(batch)
    difference_nv = (torch.log_softmax(logits_nv, -1) - torch.log_softmax(exact_nv, -1)).abs()
    assert logits_nv.dtype is torch.float32 and 1e-5 < float(difference_nv.mean()) < 0.1
    mine, plain = (torch.autograd.grad(loss_of(policy, batch), policy.parameters()) for policy in (rounded, exact))
    assert all(gradient.dtype is torch.float32 for gradient in mine)
    flat, expected = (torch.cat([gradient.flatten() for gradient in found]) for found in (mine, plain))
    assert float((flat - expected).norm() / expected.norm()) < 0.05


def test_a_bf16_step_keeps_fp32_weights_and_needs_wider_tolerances(config: Config, trainer_of: Trainers) -> None:
    config = replace(config, precision="bf16", kl_coeff=0.1, micro_batch_tokens=12)
    # The sampler's log-probs, as the fp32 engine gives them.
    groups = groups_of(trainer_of(replace(config, precision="fp32")).policy.model)
    with pytest.raises(AuditFailed):
        trainer_of(config).step(groups)
    found = []
    for threads in (1, 3):
        trainer = trainer_of(replace(config, audit_mean_tolerance=0.05, audit_max_tolerance=1.0))
        result = trainer.step(groups, threads=threads)
        assert result.grad_norm > 0 and 1e-6 < result.audit_mean < 0.05
        tensors = [*trainer.policy.parameters(), *(v for s in trainer.optimizer.state.values() for v in s.values())]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        found.append((result, trainer.fingerprint()))
    assert found[0] == found[1]


def kept_bytes(policy: Policy, batch: MicroBatch) -> int:
    """What the forward pass keeps for the backward pass, beside the weights."""
    weights = {parameter.data_ptr() for parameter in policy.model.parameters()}
    total = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        if tensor.data_ptr() not in weights:
            total += tensor.nbytes
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(policy, batch)
    return total


def test_activations_computed_again_give_the_same_gradients_and_are_not_kept(config: Config, deep_model: Path) -> None:
    keeping, again = (Policy.load(deep_model, replace(config, gradient_checkpointing=value)) for value in (False, True))
    batch = shared_pass(keeping)
    assert torch.equal(again.logits(batch), keeping.logits(batch))
    for policy in (keeping, again):
        for _, parameter in policy.named_trained():
            # An adapter that does something.
            parameter.data.add_(0.01)
    mine, plain = (torch.autograd.grad(loss_of(policy, batch), policy.parameters()) for policy in (again, keeping))
    for gradient, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert again.is_sharing
    assert kept_bytes(again, batch) < 0.4 * kept_bytes(keeping, batch)


def test_activations_are_computed_again_in_several_threads(config: Config, trainer_of: Trainers) -> None:
    found = []
    for is_again in (False, True):
        changed = replace(config, gradient_checkpointing=is_again, kl_coeff=0.1, micro_batch_tokens=12)
        trainer = trainer_of(changed)
        result = trainer.step(groups_of(trainer.policy.model), threads=3)
        found.append((result.loss, result.grad_norm, trainer.fingerprint()))
    assert found[0] == found[1]


def test_both_together_train_too(config: Config, trainer_of: Trainers) -> None:
    config = replace(config, precision="bf16", gradient_checkpointing=True, audit_mean_tolerance=1.0)
    trainer = trainer_of(replace(config, audit_max_tolerance=1.0))
    before = trainer.fingerprint()
    assert trainer.step(groups_of(trainer.policy.model)).grad_norm > 0
    assert trainer.fingerprint() != before


def test_a_layer_that_drops_out_when_it_is_trained_is_an_error_of_the_user(
    small_config: Config, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    Policy.load(tmp_path, small_config)
    with pytest.raises(InvalidInput, match="gradient_checkpointing: not with OPTForCausalLM"):
        Policy.load(tmp_path, replace(small_config, gradient_checkpointing=True))


def test_a_pass_of_rows_without_a_shared_prompt_is_the_same_as_one_by_one(config: Config, tiny_model: Path) -> None:
    policy = Policy.load(tiny_model, replace(config, gradient_checkpointing=True))
    rows = [row_of(policy.model, seed) for seed in range(3)]
    together = policy.logits(pass_of(rows))
    alone = torch.cat([policy.logits(pass_of([row])) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
