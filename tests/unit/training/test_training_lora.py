"""Training an adapter: what is trained, what leaves the process, and that it is what peft makes of the same files."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from turnmill.config import Config
from turnmill.errors import AuditFailed, InvalidInput, RecordCorrupt
from turnmill.records import Version
from turnmill.training import snapshot
from turnmill.training.bundles import Bundle
from turnmill.training.checkpoint import Manifest, export
from turnmill.training.merging import merge_checkpoint
from turnmill.training.microbatches import MicroBatch, collate
from turnmill.training.optimizer import make_optimizer, set_learning_rate
from turnmill.training.policy import Policy
from turnmill.training.samples import Row, Span, TrainingSample
from turnmill.training.trainer import Trainer

Trainers = Callable[[Config], Trainer]

# What `PeftModel` asks of transformers, by the name that it had.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def config(small_config: Config) -> Config:
    return replace(small_config, training_method="RFT_MULTITURN_LORA", lora_rank=4, lora_alpha=8.0, lr=1e-2)


def row_of(model: torch.nn.Module, seed: int) -> Row:
    """A conversation of one call, with the log-probs that a plain forward pass gives."""
    random = np.random.default_rng(seed)
    ids = [int(token) for token in random.integers(7, 500, size=8 + seed % 4)]
    with torch.no_grad():
        log_p_tv = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
    return Row(
        key=f"samples/run-1/train/s{seed}",
        token_ids=ids,
        loss_mask=[int(t >= 4) for t in range(len(ids))],
        logprobs=[float(log_p_tv[t - 1, token]) if t >= 4 else 0.0 for t, token in enumerate(ids)],
        temperatures=[1.0] * len(ids),
        spans=(Span(call_id=f"s{seed}_0", start=0, end=len(ids), version="0.0"),),
    )


def groups_of(model: torch.nn.Module) -> list[list[TrainingSample]]:
    return [
        [TrainingSample(key=f"s{4 * g + s}", reward=float(s == g), rows=(row_of(model, 4 * g + s),)) for s in range(4)]
        for g in range(2)
    ]


def pass_of(rows: Sequence[Row]) -> MicroBatch:
    width = max(len(row.token_ids) for row in rows)
    bundle = Bundle(rows=tuple(range(len(rows))), num_shared=0, width=width)
    return collate(rows, [0] * len(rows), (bundle,))


def disturb(policy: Policy) -> None:
    """An adapter that does something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits_btv: torch.Tensor = model(input_ids=torch.arange(7, 40)[None]).logits
    return logits_btv


def test_a_new_adapter_changes_no_bit_of_the_logits_and_is_all_that_is_trained(
    config: Config, tiny_model: Path
) -> None:
    policy = Policy.load(tiny_model, config)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert torch.equal(plain_logits(policy.model), plain_logits(Policy.load(tiny_model).model))
    torch.testing.assert_close(plain_logits(policy.model), plain_logits(base), rtol=0, atol=1e-5)
    names = [name for name, _ in policy.named_trained()]
    # Seven linear layers in each of two decoder layers; not the output embedding.
    assert len(names) == 2 * 7 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    frozen = {name.replace(".base_layer", ""): p for name, p in policy.model.named_parameters() if not p.requires_grad}
    assert frozen.keys() == dict(base.named_parameters()).keys()
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in base.named_parameters())
    # The ways of a pass that save time are there as without an adapter.
    assert policy.is_sharing and policy.has_plain_head


def test_the_first_adapter_is_the_same_in_every_process_and_another_with_another_seed(
    config: Config, tiny_model: Path
) -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    first = Policy.load(tiny_model, config).fingerprint()
    program = (
        "import sys; from pathlib import Path; from turnmill.config import Config; "
        "from turnmill.training.policy import Policy; "
        "config = Config(training_method='RFT_MULTITURN_LORA', lora_rank=4, lora_alpha=8.0); "
        "print(Policy.load(Path(sys.argv[1]), config).fingerprint())"
    )
    other = subprocess.run([sys.executable, "-c", program, str(tiny_model)], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == first
    torch.set_rng_state(state)
    assert Policy.load(tiny_model, replace(config, seed=config.seed + 1)).fingerprint() != first
    assert Policy.load(tiny_model).fingerprint() != first


def test_a_step_passes_the_audit_and_leaves_the_base_as_it_was(config: Config, trainer_of: Trainers) -> None:
    trainer = trainer_of(config)
    before = {name: parameter.detach().clone() for name, parameter in trainer.policy.model.named_parameters()}
    digest = trainer.fingerprint()
    result = trainer.step(groups_of(trainer.policy.model))
    assert result.audit_max < 1e-4 and result.grad_norm > 0
    assert trainer.fingerprint() != digest
    for name, parameter in trainer.policy.model.named_parameters():
        # A gets its first gradient through B, which begins as zeros.
        assert torch.equal(parameter, before[name]) is (".lora_B." not in name)


def test_tokens_that_the_base_model_sampled_under_an_adapters_version_stop_the_step(
    config: Config, trainer_of: Trainers, tiny_model: Path
) -> None:
    trainer = trainer_of(config)
    trainer.step(groups_of(trainer.policy.model))
    digest = trainer.fingerprint()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with pytest.raises(AuditFailed, match="disagree over"):
        trainer.step(groups_of(base))
    assert trainer.fingerprint() == digest


def test_gradients_are_those_of_pefts_own_model(config: Config, tiny_model: Path, tmp_path: Path) -> None:
    policy = Policy.load(tiny_model, config)
    disturb(policy)
    policy.save_checkpoint(tmp_path, tiny_model)
    rows = [row_of(policy.model, seed) for seed in range(4)]
    batch = pass_of(rows)
    loss = torch.log_softmax(policy.logits(batch), dim=-1).gather(1, batch.tokens_n[:, None]).sum()
    mine = torch.autograd.grad(loss, policy.parameters())

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    total = torch.zeros(())
    for row in rows:
        log_p_tv = torch.log_softmax(theirs(input_ids=torch.tensor([row.token_ids])).logits[0], dim=-1)
        total = total + sum(log_p_tv[t - 1, row.token_ids[t]] for t in range(4, len(row.token_ids)))
    total.backward()  # type: ignore[no-untyped-call]
    expected = {name.removeprefix("base_model.model."): p.grad for name, p in theirs.named_parameters()}
    for (name, _), gradient in zip(policy.named_trained(), mine, strict=True):
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=2e-4)


def test_threads_change_no_bit_of_a_step_with_a_reference(config: Config, trainer_of: Trainers) -> None:
    found = []
    for threads in (1, 3):
        trainer = trainer_of(replace(config, micro_batch_tokens=12, kl_coeff=0.1))
        results = [trainer.step(groups_of(trainer.policy.model), threads=threads) for _ in range(2)]
        found.append((results, trainer.fingerprint()))
    assert found[0] == found[1]
    # After the first step the policy is no longer the reference.
    first, second = found[0][0]
    assert first.kl_reference == pytest.approx(0.0, abs=1e-8)
    assert second.kl_reference is not None and second.kl_reference > 1e-6


def test_a_frozen_twin_keeps_its_logits_and_shares_the_base(config: Config, tiny_model: Path) -> None:
    policy = Policy.load(tiny_model, config)
    batch = pass_of([row_of(policy.model, seed) for seed in range(3)])
    twin = policy.frozen_twin()
    before = policy.logits(batch).detach()
    disturb(policy)
    assert torch.equal(twin.logits(batch), before) and not twin.parameters()
    assert not torch.equal(policy.logits(batch), before)
    mine, its = (dict(p.model.named_parameters()) for p in (policy, twin))
    for name in mine:
        assert (mine[name].data_ptr() == its[name].data_ptr()) is (".lora_" not in name)
    # Without an adapter all weights are trained: it has its own.
    full = Policy.load(tiny_model)
    assert not {p.data_ptr() for p in full.parameters()} & {p.data_ptr() for p in full.frozen_twin().model.parameters()}


def test_what_replicas_load_holds_the_adapter_alone(config: Config, trainer_of: Trainers, tmp_path: Path) -> None:
    trainer = trainer_of(config)
    trainer.save_weights(tmp_path)
    (path,) = tmp_path.iterdir()
    tensors = load_file(path)
    assert path.name == "model.safetensors"
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in trainer.policy.parameters())
    assert "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in tensors


def test_the_published_model_gives_the_logits_of_base_and_adapter_through_peft(
    config: Config, trainer_of: Trainers, tiny_model: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(config)
    disturb(trainer.policy)
    digest = trainer.fingerprint()
    trainer.save_pretrained(tmp_path)
    published = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = plain_logits(base)
    through_peft = plain_logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    torch.testing.assert_close(plain_logits(published), through_peft, rtol=0, atol=2e-5)
    torch.testing.assert_close(plain_logits(trainer.policy.model), through_peft, rtol=0, atol=2e-5)
    assert (through_peft - before).abs().max() > 0.1
    # A model like any other: its parameters and files have the names of the base model's.
    assert dict(published.named_parameters()).keys() == dict(Policy.load(tiny_model).model.named_parameters()).keys()
    assert {path.name for path in tiny_model.iterdir()} - {"README.md"} <= {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    # Publishing changed nothing here, and the next run may begin with it.
    assert trainer.fingerprint() == digest
    assert Trainer(tmp_path, config).fingerprint() != digest


def gpt2() -> Any:
    """Its linear layers are transposed (`Conv1D`)."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=24, n_layer=2, n_head=2, n_positions=64))


def qwen3() -> Any:
    """An output embedding of its own."""
    config = Qwen3Config(
        vocab_size=500,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("make", [gpt2, qwen3])
def test_other_architectures_are_trained_and_published_too(
    make: Callable[[], Any], config: Config, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base_model, out = tmp_path / "base", tmp_path / "out"
    make().save_pretrained(base_model)
    out.mkdir()
    trainer = Trainer(base_model, config)
    trainer.step(groups_of(trainer.policy.model))
    disturb(trainer.policy)
    trainer.save_pretrained(out)
    published = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(plain_logits(published), plain_logits(trainer.policy.model), rtol=0, atol=1e-4)


def test_targets_choose_the_layers_by_the_end_of_their_names(config: Config, tiny_model: Path) -> None:
    policy = Policy.load(tiny_model, replace(config, lora_targets=("q_proj", "layers.1.mlp.down_proj")))
    layers = {name.partition(".lora_")[0] for name, _ in policy.named_trained()}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (
            ("q_proj", "q_prj"),
            "'q_prj': the model has no module of that name; choose among down_proj, gate_proj, k_proj",
        ),
        (("lm_head",), "'lm_head': lm_head is no linear layer of the decoder"),
        (("embed_tokens",), r"'embed_tokens': model\.embed_tokens is no linear layer"),
        (("mlp",), r"'mlp': model\.layers\.0\.mlp is no linear layer"),
    ],
)
def test_targets_that_can_have_no_adapter_are_an_error_of_the_user(
    targets: tuple[str, ...], text: str, config: Config, tiny_model: Path
) -> None:
    with pytest.raises(InvalidInput, match=text):
        Policy.load(tiny_model, replace(config, lora_targets=targets))


def test_with_lora_plus_the_b_matrices_learn_faster_by_its_ratio(config: Config, tiny_model: Path) -> None:
    config = replace(config, loraplus_lr_ratio=16.0, warmup_steps=4, max_steps=4, weight_decay=0.0)
    policy = Policy.load(tiny_model, config)
    optimizer = make_optimizer(policy, config)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_trained()}
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert set_learning_rate(optimizer, config, 2) == config.lr / 2
    optimizer.step()
    for name, parameter in policy.named_trained():
        # AdamW's first step is the learning rate itself.
        moved = (before[name] - parameter.detach()).mean().item()
        assert moved == pytest.approx(config.lr / 2 * (16 if ".lora_B." in name else 1), rel=1e-3)


def test_a_checkpoints_adapter_is_merged_once_and_only_as_its_manifest_says(
    config: Config, trainer_of: Trainers, tiny_model: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(config)
    disturb(trainer.policy)
    checkpoint, target = tmp_path / "step-1", tmp_path / "merged" / "step-1"
    manifest = Manifest(
        run_id="r", step=1, version=Version(incarnation=1, n=1), digest=trainer.fingerprint(), position=0
    )
    export(checkpoint, manifest, lambda folder: snapshot.save(trainer, folder))
    merge_checkpoint(checkpoint, tiny_model, config, target)
    merged = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.testing.assert_close(plain_logits(merged), plain_logits(trainer.policy.model), rtol=0, atol=2e-5)
    written = (target / "model.safetensors").stat().st_mtime_ns
    merge_checkpoint(checkpoint, tiny_model, config, target)
    assert (target / "model.safetensors").stat().st_mtime_ns == written
    export(checkpoint, replace(manifest, digest="other"), lambda folder: snapshot.save(trainer, folder))
    with pytest.raises(RecordCorrupt, match="was altered"):
        merge_checkpoint(checkpoint, tiny_model, config, target)
    with pytest.raises(RecordCorrupt, match=r"has no checkpoint\.json"):
        merge_checkpoint(tmp_path, tiny_model, config, target)
