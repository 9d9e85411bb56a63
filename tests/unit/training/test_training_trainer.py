import copy
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnmill.config import Config
from turnmill.errors import AuditFailed, InvalidInput, NoProgress
from turnmill.training.bundles import ATTENTION, Bundle
from turnmill.training.microbatches import MicroBatch, collate
from turnmill.training.policy import Policy
from turnmill.training.samples import Row, Span, TrainingSample
from turnmill.training.trainer import Trainer

Trainers = Callable[[Config], Trainer]


def make_row(trainer: Trainer, seed: int, *, num_turns: int = 3, temperature: float = 1.0) -> Row:
    """A random conversation with the log-probs that a plain forward pass of the model gives."""
    random = np.random.default_rng(seed)
    token_ids, mask = [int(x) for x in random.integers(7, 500, size=5)], [0] * 5
    for turn in range(num_turns):
        size = 0 if turn == num_turns - 1 else 4
        token_ids += [int(x) for x in random.integers(7, 500, size=2 + size)]
        mask += [1, 1] + [0] * size
    with torch.no_grad():
        logits_tv = trainer.policy.model(input_ids=torch.tensor([token_ids])).logits[0].double()
    log_p_tv = torch.log_softmax(logits_tv / temperature, dim=-1)
    return Row(
        key=f"samples/run-1/train/s{seed}",
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=[float(log_p_tv[t - 1, token]) if mask[t] else 0.0 for t, token in enumerate(token_ids)],
        temperatures=[temperature if m else 1.0 for m in mask],
        spans=(Span(call_id=f"s{seed}_0", start=0, end=len(token_ids), version="0.0"),),
    )


def pass_of(ids_bt: torch.Tensor, rows_n: torch.Tensor, positions_n: torch.Tensor) -> MicroBatch:
    """A pass of right-padded rows whose logits at (row, position) are wanted; only what logits are made of is real."""
    num_rows, width = ids_bt.shape
    nothing_n = torch.zeros(len(rows_n))
    return MicroBatch(
        bundles=(Bundle(rows=tuple(range(num_rows)), num_shared=0, width=width),),
        ids_m=ids_bt.flatten(),
        index_n=rows_n * width + positions_n,
        rows_n=rows_n,
        positions_n=positions_n + 1,
        tokens_n=nothing_n.long(),
        sampled_n=nothing_n,
        temperature_n=nothing_n + 1,
        flat_n=torch.arange(len(rows_n)),
        num_padding=0,
    )


def make_groups(trainer: Trainer, *, temperature: float = 1.0) -> list[list[TrainingSample]]:
    """Two groups of four; the first of each wins."""
    return [
        [
            TrainingSample(
                key=f"s{4 * g + s}",
                reward=float(s == 0),
                rows=(make_row(trainer, 4 * g + s, num_turns=1 + (g + s) % 4, temperature=temperature),),
            )
            for s in range(4)
        ]
        for g in range(2)
    ]


def change_rows(groups: Sequence[Sequence[TrainingSample]], change: Callable[[Row], Row]) -> list[list[TrainingSample]]:
    return [[replace(s, rows=tuple(change(row) for row in s.rows)) for s in group] for group in groups]


def gradients(trainer: Trainer, groups: Sequence[Sequence[TrainingSample]]) -> list[torch.Tensor]:
    """What the step would have applied, seen through plain gradient descent."""
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
    lr = trainer.step(groups).lr
    return [(old - new.detach()) / lr for old, new in zip(before, trainer.policy.parameters(), strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.01])
def test_a_step_on_what_the_weights_sampled_passes_the_audit(
    trainer_of: Trainers, small_config: Config, temperature: float
) -> None:
    trainer = trainer_of(small_config)
    before = trainer.fingerprint()
    result = trainer.step(make_groups(trainer, temperature=temperature))
    assert result.audit_mean < 1e-5 and result.audit_max < 1e-4
    assert result.kl < 1e-7 and result.clip_fraction == 0
    assert result.num_rows == 8 and result.num_tokens == 40
    assert result.entropy > 0 and math.isfinite(result.grad_norm)
    assert trainer.fingerprint() != before
    assert trainer.num_steps == 1


def test_the_step_is_the_gradient_of_the_loss_written_down_plainly(trainer_of: Trainers, small_config: Config) -> None:
    config = replace(small_config, grad_clip=1e9)
    trainer = trainer_of(config)
    groups = make_groups(trainer)
    model = AutoModelForCausalLM.from_pretrained(trainer.base_model, dtype=torch.float32)
    # On policy the ratio is 1, so the gradient is that of -sum(A log p) / tokens; one winner of four: A = 1.5, -0.5.
    total = torch.zeros(())
    for sample in (s for group in groups for s in group):
        advantage = (sample.reward - 0.25) / 0.5001
        (row,) = sample.rows
        log_p = torch.log_softmax(model(input_ids=torch.tensor([row.token_ids])).logits[0], dim=-1)
        for t in range(1, len(row.token_ids)):
            if row.loss_mask[t]:
                total = total - advantage * log_p[t - 1, row.token_ids[t]] / 40
    total.backward()  # type: ignore[no-untyped-call]
    expected = [p.grad for p in model.parameters()]
    for mine, plain in zip(gradients(trainer, groups), expected, strict=True):
        assert plain is not None
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=2e-4)


def test_micro_batches_do_not_change_the_step(trainer_of: Trainers, small_config: Config) -> None:
    results = []
    for budget in (8, 60, 100000):
        trainer = trainer_of(replace(small_config, micro_batch_tokens=budget, ent_coeff=0.01, kl_coeff=0.1))
        groups = make_groups(trainer)
        results.append((trainer.step(groups), [p.detach().clone() for p in trainer.policy.parameters()]))
    for result, parameters in results[1:]:
        assert result.loss == pytest.approx(results[0][0].loss, abs=1e-6)
        assert result.entropy == pytest.approx(results[0][0].entropy, rel=1e-5)
        assert result.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-4)
        for mine, first in zip(parameters, results[0][1], strict=True):
            assert (mine - first).abs().mean() < 1e-5


def test_equal_seeds_and_batches_give_equal_weights(trainer_of: Trainers, small_config: Config) -> None:
    prints = []
    for _ in range(2):
        trainer = trainer_of(small_config)
        trainer.step(make_groups(trainer))
        prints.append(trainer.fingerprint())
    assert prints[0] == prints[1]


@pytest.mark.parametrize("cut", [(1, 1), (2,)])
def test_parts_made_one_by_one_give_the_bits_of_the_same_parts_made_at_once(
    trainer_of: Trainers, small_config: Config, cut: tuple[int, ...]
) -> None:
    config = replace(small_config, ent_coeff=0.01, kl_coeff=0.1)
    early, late = trainer_of(config), trainer_of(config)
    groups = make_groups(early)
    begin = 0
    for num_groups in cut:
        early.accumulate(groups[begin : begin + num_groups], 1)
        begin += num_groups
    assert early.finish() == late.step(groups, cut)
    assert early.fingerprint() == late.fingerprint()


def test_neither_threads_of_the_trainer_nor_of_torch_change_a_bit(trainer_of: Trainers, small_config: Config) -> None:
    found = []
    for threads, ambient in ((1, 1), (3, 1), (1, 3), (2, 2)):
        # As many passes as there are rows.
        trainer = trainer_of(replace(small_config, micro_batch_tokens=8, ent_coeff=0.01, kl_coeff=0.1))
        groups = make_groups(trainer)
        torch.set_num_threads(ambient)
        try:
            result = trainer.step(groups, threads=threads)
            assert torch.get_num_threads() == ambient
        finally:
            torch.set_num_threads(1)
        found.append((result, trainer.fingerprint()))
    assert found == [found[0]] * 4


def test_gradients_that_lie_otherwise_in_memory_make_the_same_step(trainer_of: Trainers, small_config: Config) -> None:
    trainer, plain = trainer_of(small_config), trainer_of(small_config)
    for parameter in trainer.policy.parameters():
        if parameter.ndim == 2:
            # As the gradient of a weight comes that the model uses transposed.
            parameter.register_hook(lambda gradient: gradient.t().contiguous().t())  # type: ignore[no-untyped-call]
    groups = make_groups(plain)
    assert trainer.step(groups) == plain.step(groups)
    assert trainer.fingerprint() == plain.fingerprint()


def test_an_error_in_one_of_several_threads_is_told(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(replace(small_config, micro_batch_tokens=8))
    groups = change_rows(make_groups(trainer), lambda row: replace(row, token_ids=[10**6] * len(row.token_ids)))
    with pytest.raises(IndexError):
        trainer.step(groups, threads=2)
    trainer.abandon()
    assert [p for p in trainer.policy.parameters() if p.grad is not None] == []


def test_abandoned_gradients_leave_nothing_behind(trainer_of: Trainers, small_config: Config) -> None:
    disturbed, plain = trainer_of(small_config), trainer_of(small_config)
    groups = make_groups(plain)
    disturbed.accumulate(groups[:1], 1)
    disturbed.abandon()
    assert disturbed.step(groups) == plain.step(groups)
    assert disturbed.fingerprint() == plain.fingerprint()


def test_a_failed_audit_leaves_no_gradient_behind(trainer_of: Trainers, small_config: Config) -> None:
    trainer, plain = trainer_of(small_config), trainer_of(small_config)
    groups = make_groups(plain)
    wrong = change_rows(groups, lambda row: replace(row, logprobs=[x - 1.0 for x in row.logprobs]))
    with pytest.raises(AuditFailed):
        trainer.step(wrong)
    trainer.accumulate(groups, 1)
    assert trainer.finish() == plain.step(groups)
    assert trainer.fingerprint() == plain.fingerprint()


def test_masked_tokens_and_rows_contribute_nothing(trainer_of: Trainers, small_config: Config) -> None:
    def with_noise(row: Row) -> Row:
        """Another row of context only, and other values where the mask is 0."""
        return replace(row, logprobs=[lp if m else -9.0 for lp, m in zip(row.logprobs, row.loss_mask, strict=True)])

    def context_only(row: Row) -> Row:
        return replace(row, loss_mask=[0] * len(row.loss_mask))

    plain, noisy = trainer_of(small_config), trainer_of(small_config)
    groups = make_groups(plain)
    extended = [
        [replace(s, rows=(*s.rows, context_only(s.rows[0]))) for s in group]
        for group in change_rows(groups, with_noise)
    ]
    plain.step(groups)
    noisy.step(extended)
    assert plain.fingerprint() == noisy.fingerprint()


def test_one_perturbed_weight_fails_the_audit_and_changes_nothing(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)
    groups = make_groups(trainer)
    with torch.no_grad():
        trainer.policy.model.model.layers[0].mlp.down_proj.weight[3, 5] += 1.0
    before = trainer.fingerprint()
    with pytest.raises(
        AuditFailed, match=r"worst: samples/run-1/train/s\d, call s\d_0 .* position .* trainer .* sampler"
    ):
        trainer.step(groups)
    assert trainer.fingerprint() == before
    assert trainer.num_steps == 0 and not trainer.optimizer.state


@pytest.mark.parametrize("offset", [0.01, math.nan])
def test_one_wrong_logprob_fails_the_audit_and_is_named(
    trainer_of: Trainers, small_config: Config, offset: float
) -> None:
    trainer = trainer_of(small_config)

    def change(row: Row) -> Row:
        if not row.key.endswith("s6"):
            return row
        return replace(row, logprobs=[*row.logprobs[:-1], row.logprobs[-1] + offset])

    with pytest.raises(AuditFailed, match="worst: samples/run-1/train/s6"):
        trainer.step(change_rows(make_groups(trainer), change))


def test_one_token_id_other_than_the_sampled_fails_the_audit(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)

    def change(row: Row) -> Row:
        return replace(row, token_ids=[*row.token_ids[:-1], 501]) if row.key.endswith("s2") else row

    with pytest.raises(AuditFailed, match="train/s2"):
        trainer.step(change_rows(make_groups(trainer), change))


def test_weights_that_are_no_numbers_stop_the_training(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)
    groups = make_groups(trainer)
    with torch.no_grad():
        trainer.policy.model.model.norm.weight[0] = math.nan
    with pytest.raises(AuditFailed):
        trainer.step(groups)


def test_a_gradient_that_is_not_finite_stops_the_training(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)
    groups = [[replace(s, reward=s.reward * 1e300) for s in group] for group in make_groups(trainer)]
    groups[0][0] = replace(groups[0][0], reward=math.inf)
    before = trainer.fingerprint()
    with pytest.raises(NoProgress, match="not finite"):
        trainer.step(groups)
    assert trainer.fingerprint() == before


def test_a_batch_without_a_trained_token_is_an_error(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)
    empty = [[TrainingSample(key=f"s{s}", reward=float(s == 0), rows=()) for s in range(4)]]
    with pytest.raises(NoProgress, match="no token to train"):
        trainer.step(empty)


def test_the_kl_term_pulls_back_to_the_base_model(trainer_of: Trainers, small_config: Config) -> None:
    config = replace(small_config, kl_coeff=5.0, lr=1e-3, audit_max_tolerance=1e9, audit_mean_tolerance=1e9)
    trainer = trainer_of(config)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    kl: list[float] = []
    for _ in range(8):
        groups = [[replace(s, reward=0.0) for s in group] for group in make_groups(trainer)]
        kl_reference = trainer.step(groups).kl_reference
        assert kl_reference is not None
        kl.append(kl_reference)
    assert kl[0] > 1e-3 and kl[-1] < 0.7 * kl[0]


def test_the_entropy_bonus_raises_entropy(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(replace(small_config, ent_coeff=1.0))
    entropies = []
    for _ in range(5):
        groups = [[replace(s, reward=0.0) for s in group] for group in make_groups(trainer)]
        entropies.append(trainer.step(groups).entropy)
    assert entropies[-1] > entropies[0]


def test_logits_at_selected_positions_are_the_models_logits(tiny_model: Path) -> None:
    policy = Policy.load(tiny_model)
    assert policy.has_plain_head
    ids_bt = torch.randint(7, 500, (3, 9), generator=torch.Generator().manual_seed(0))
    rows_n, positions_n = torch.tensor([0, 0, 2]), torch.tensor([1, 8, 4])
    with torch.no_grad():
        selected_nv = policy.logits(pass_of(ids_bt, rows_n, positions_n))
        full_btv = policy.model(input_ids=ids_bt).logits
    torch.testing.assert_close(selected_nv, full_btv[rows_n, positions_n])


def test_the_last_layers_feed_forward_block_at_selected_positions_only_gives_the_same_gradient(
    tiny_model: Path,
) -> None:
    narrowed, full = Policy.load(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    seen: list[torch.Size] = []
    narrowed.model.model.layers[-1].mlp.act_fn.register_forward_hook(lambda _, __, out: seen.append(out.shape))
    ids_bt = torch.randint(7, 500, (3, 9), generator=torch.Generator().manual_seed(0))
    rows_n, positions_n = torch.tensor([0, 0, 2]), torch.tensor([1, 8, 4])
    mine_nv = narrowed.logits(pass_of(ids_bt, rows_n, positions_n))
    plain_nv = full(input_ids=ids_bt).logits[rows_n, positions_n]
    for logits_nv in (mine_nv, plain_nv):
        torch.log_softmax(logits_nv, dim=-1)[:, 11].sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mine_nv, plain_nv, rtol=1e-5, atol=1e-5)
    for mine, plain in zip(narrowed.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert seen == [(1, 3, narrowed.model.config.intermediate_size)]


def shared_and_whole(rows: Sequence[Row]) -> tuple[MicroBatch, list[MicroBatch]]:
    """Rows of which all but the last have a prompt in common: in one pass that shares it, and each by itself."""
    *alike, last = range(len(rows))
    alike.sort(key=lambda i: -len(rows[i].token_ids))
    num_shared = rows[0].loss_mask.index(1) - 1
    width = len(rows[alike[0]].token_ids) - num_shared
    bundles = (
        Bundle(rows=tuple(alike), num_shared=num_shared, width=width),
        Bundle(rows=(last,), num_shared=0, width=len(rows[last].token_ids)),
    )
    starts = [0, *accumulate(row.num_trained for row in rows)]
    each = [
        collate(rows, starts, (Bundle(rows=(i,), num_shared=0, width=len(rows[i].token_ids)),)) for i in (*alike, last)
    ]
    return collate(rows, starts, bundles), each


def rows_with_a_common_prompt(vocab_size: int) -> list[Row]:
    """Three conversations with a prompt of seven tokens, and one with another."""
    random = np.random.default_rng(0)
    prompt = [int(x) for x in random.integers(1, vocab_size, size=7)]
    rows = []
    for number, length in enumerate((14, 11, 17, 9)):
        first = prompt if number < 3 else prompt[::-1][:4]
        token_ids = [*first, *(int(x) for x in random.integers(1, vocab_size, size=length - len(first)))]
        mask = [int(t >= len(first) and (t - len(first)) % 5 < 2) for t in range(length)]
        rows.append(
            Row(
                key=f"row-{number}",
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=[-1.0 * m for m in mask],
                temperatures=[1.0] * length,
                spans=(Span(call_id="c", start=0, end=length, version="0.0"),),
            )
        )
    return rows


def small_models() -> dict[str, Any]:
    """Of each kind: heads of their own, shared ones, absolute positions, biases and norms on heads, scaled logits."""
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)),
        "grouped heads": LlamaForCausalLM(LlamaConfig(**shape, **heads)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, **heads, head_dim=8)),
        "granite": GraniteForCausalLM(GraniteConfig(**shape, **heads, logits_scaling=8.0)),
    }


@pytest.mark.parametrize("kind", ["llama", "grouped heads", "gpt2", "qwen3", "granite"])
def test_a_shared_prompt_gives_the_logits_and_the_gradients_of_whole_rows(kind: str) -> None:
    model = small_models()[kind].eval()
    plain = copy.deepcopy(model)
    policy = Policy(model)
    assert policy.is_sharing
    rows = rows_with_a_common_prompt(64)
    shared, each = shared_and_whole(rows)

    def loss_of(logits_nv: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        log_p_nv = torch.log_softmax(logits_nv, dim=-1)
        return (log_p_nv.gather(1, batch.tokens_n[:, None])[:, 0] * (batch.rows_n + 1)).sum()

    mine_nv = policy.logits(shared)
    whole = [plain(input_ids=batch.ids_m[None]).logits[0, batch.index_n] for batch in each]
    torch.testing.assert_close(mine_nv, torch.cat(whole), rtol=1e-5, atol=1e-5)
    torch.autograd.backward(loss_of(mine_nv, shared))
    torch.autograd.backward(
        torch.stack([loss_of(logits_nv, batch) for logits_nv, batch in zip(whole, each, strict=True)]).sum()
    )
    for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_no_row_sees_another_one_of_its_bundle() -> None:
    policy = Policy(small_models()["llama"])
    rows = rows_with_a_common_prompt(64)
    before = policy.logits(shared_and_whole(rows)[0])
    changed = replace(rows[0], token_ids=[*rows[0].token_ids[:7], *([9] * (len(rows[0].token_ids) - 7))])
    batch = shared_and_whole([changed, *rows[1:]])[0]
    after = policy.logits(batch)
    is_other_n = batch.rows_n != 0
    assert torch.equal(before[is_other_n], after[is_other_n])
    assert not torch.equal(before[~is_other_n], after[~is_other_n])


def test_a_model_with_an_attention_of_its_own_gets_whole_rows() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    eager = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    policy = Policy(eager)
    assert not policy.is_sharing
    rows = rows_with_a_common_prompt(64)
    batch = collate(rows, [0] * 4, (Bundle(rows=(2, 0, 1, 3), num_shared=0, width=17),))
    plain = [eager(input_ids=torch.tensor([rows[i].token_ids])).logits[0] for i in range(4)]
    expected_nv = torch.stack([plain[i][t - 1] for i, t in zip(batch.rows_n, batch.positions_n, strict=True)])
    torch.testing.assert_close(policy.logits(batch), expected_nv, rtol=1e-5, atol=1e-5)


def test_float_noise_of_sharp_logits_is_no_reason_to_compute_prompts_anew() -> None:
    """Trained models have such logits: some are near 0, with the noise of the large ones."""
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    assert Policy(model).is_sharing


def test_a_window_shorter_than_the_check_is_seen() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = MistralForCausalLM(MistralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, sliding_window=8))
    assert not Policy(model).is_sharing
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_fails_with_another_attention_function_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Sparse attention counts on a mask that transformers makes for its own functions only."""
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    sizes = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    index = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
    config = DeepseekV32Config(**shape, **experts, **heads, **sizes, **index, topk_group=1, first_k_dense_replace=1)
    with caplog.at_level(logging.WARNING):
        policy = Policy(DeepseekV32ForCausalLM(config))
    assert not policy.is_sharing
    assert policy.model.config._attn_implementation == "sdpa"
    assert "prompts are computed once a row" in caplog.text


def test_how_attention_is_computed_stays_out_of_the_exported_model(tiny_model: Path, tmp_path: Path) -> None:
    policy = Policy.load(tiny_model)
    assert policy.is_sharing
    policy.save_pretrained(tmp_path, tiny_model)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


def test_gradients_made_beside_those_before_are_added_behind_them(trainer_of: Trainers, small_config: Config) -> None:
    """Whichever is ready first: the same bits as one after the other."""
    one, other = trainer_of(small_config), trainer_of(small_config)
    first, second = make_groups(one)
    one.accumulate([first], 1)
    one.accumulate([second], 1)
    is_begun, may_add = threading.Event(), threading.Event()

    def wait_for_first() -> None:
        is_begun.set()
        assert may_add.wait(10)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(other.accumulate, [second], 2, after=wait_for_first)
        assert is_begun.wait(10)
        other.accumulate([first], 1)
        may_add.set()
        made.result()
    assert one.finish() == other.finish()
    assert one.fingerprint() == other.fingerprint()


def test_what_the_groups_before_ended_with_ends_those_behind_them(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)
    groups = make_groups(trainer)
    before: Future[None] = Future()
    before.set_exception(NoProgress("broken"))
    nothing = [[replace(s, rows=()) for s in group] for group in groups]
    for given in (groups, nothing):
        with pytest.raises(NoProgress, match="broken"):
            trainer.accumulate(given, 2, after=before.result)
    with pytest.raises(NoProgress, match="no token to train in a batch of 0 groups"):
        trainer.finish()


def test_a_model_that_scales_its_logits_is_asked_for_all_of_them() -> None:
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    policy = Policy(GraniteForCausalLM(config))
    assert not policy.has_plain_head
    ids_bt = torch.arange(10)[None, :]
    with torch.no_grad():
        selected_nv = policy.logits(pass_of(ids_bt, torch.tensor([0]), torch.tensor([7])))
        torch.testing.assert_close(selected_nv, policy.model(input_ids=ids_bt).logits[0, 7:8])


@pytest.mark.parametrize(("kind", "expected"), [("default", True), ("linear", True), ("dynamic", False)])
def test_a_model_whose_passes_change_it_is_run_by_one_thread(kind: str, expected: bool) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    assert Policy(LlamaForCausalLM(config)).is_reentrant is expected


def test_right_padding_does_not_change_the_logits_of_real_tokens(tiny_model: Path) -> None:
    policy = Policy.load(tiny_model)
    long = torch.randint(7, 500, (1, 30), generator=torch.Generator().manual_seed(0))
    ids_bt = torch.cat([long, torch.cat([long[:, 5:12], torch.zeros(1, 23, dtype=torch.long)], dim=1)])
    with torch.no_grad():
        padded = policy.logits(pass_of(ids_bt, torch.full((7,), 1), torch.arange(7)))
        alone = policy.model(input_ids=long[:, 5:12]).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)


def test_saved_weights_hold_each_parameter_once_and_the_fingerprint_tells_one_bit(
    trainer_of: Trainers, small_config: Config, tmp_path: Path
) -> None:
    trainer = trainer_of(small_config)
    trainer.save_weights(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved, "tied to the embedding"
    model = AutoModelForCausalLM.from_pretrained(trainer.base_model, dtype=torch.float32)
    model.load_state_dict(saved, strict=False)
    assert Policy(model).fingerprint() == trainer.fingerprint()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nextafter(model.model.norm.weight[0], torch.tensor(9.0))
    assert Policy(model).fingerprint() != trainer.fingerprint()


def test_the_fingerprint_of_half_precision_weights_is_of_their_bytes(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    assert len(Policy(model).fingerprint()) == 32


def test_the_checkpoint_loads_as_a_hugging_face_model(
    trainer_of: Trainers, small_config: Config, tmp_path: Path
) -> None:
    trainer = trainer_of(small_config)
    trainer.step(make_groups(trainer))
    trainer.save_pretrained(tmp_path)
    assert Policy(AutoModelForCausalLM.from_pretrained(tmp_path)).fingerprint() == trainer.fingerprint()
    ours, base = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, trainer.base_model))
    talk = [{"role": "user", "content": "Guess the five-letter word."}]
    assert ours.apply_chat_template(talk, tokenize=False) == base.apply_chat_template(talk, tokenize=False)
    assert ours.encode("hello") == base.encode("hello")
    assert (tmp_path / "recipe.toml").read_bytes() == (trainer.base_model / "recipe.toml").read_bytes()
    assert Trainer(tmp_path, small_config).fingerprint() == trainer.fingerprint()


def test_a_folder_that_is_no_model_is_an_error_of_the_user(small_config: Config, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be loaded"):
        Trainer(tmp_path, small_config)
