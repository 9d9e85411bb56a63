"""Steps of several updates, of whole samples and whole batches, against a loop that is written down plainly."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, ScriptedRollouts, first_of_four
from tests.unit.training.test_training_resume import check_same, remove_checkpoints, state, step_values
from tests.unit.training.test_training_snapshot import saved
from tests.unit.training.test_training_trainer import change_rows, make_groups
from turnmill.config import Config
from turnmill.errors import AuditFailed, InvalidInput, NoProgress
from turnmill.training import snapshot
from turnmill.training.samples import Row, Span, TrainingSample
from turnmill.training.trainer import Trainer

Trainers = Callable[[Config], Trainer]
Groups = Sequence[Sequence[TrainingSample]]
LOOSE: dict[str, Any] = {"audit_mean_tolerance": 1e9, "audit_max_tolerance": 1e9}


def as_branches(row: Row) -> tuple[Row, ...]:
    """The same trained tokens in one row a turn, each behind what came before it: as if it had branched after it."""
    starts = [t for t, mask in enumerate(row.loss_mask) if mask and not row.loss_mask[t - 1]]
    rows = []
    for start in starts:
        end = next((t for t in range(start, len(row.loss_mask)) if not row.loss_mask[t]), len(row.loss_mask))
        mask = [int(start <= t < end) for t in range(end)]
        rows.append(
            replace(
                row,
                token_ids=row.token_ids[:end],
                loss_mask=mask,
                logprobs=[x * m for x, m in zip(row.logprobs[:end], mask, strict=True)],
                temperatures=row.temperatures[:end],
                spans=(replace(row.spans[0], end=end),),
            )
        )
    return tuple(rows)


def disagreeing(groups: Groups, seed: int = 0) -> list[list[TrainingSample]]:
    """As if other kernels had sampled: some tokens far off, the others near."""
    random = np.random.default_rng(seed)

    def change(row: Row) -> Row:
        noise = random.normal(size=len(row.logprobs)) * random.choice([0.05, 0.6])
        return replace(
            row,
            logprobs=[x + float(d) if m else 0.0 for x, d, m in zip(row.logprobs, noise, row.loss_mask, strict=True)],
        )

    return change_rows(groups, change)


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.policy.parameters()]


# ---------------------------------------------------------------- the plain loop


def plain_logprobs(model: Any, sample: TrainingSample) -> tuple[Tensor, Tensor]:
    """Log-probs of all trained tokens of a sample, and entropies."""
    logprobs, entropies = [], []
    for row in sample.rows:
        log_p_tv = torch.log_softmax(model(input_ids=torch.tensor([row.token_ids])).logits[0], dim=-1)
        for t, mask in enumerate(row.loss_mask):
            if mask:
                logprobs.append(log_p_tv[t - 1, row.token_ids[t]])
                entropies.append(-(log_p_tv[t - 1].exp() * log_p_tv[t - 1]).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def plain_loss(
    config: Config, model: Any, reference: Any, minibatch: list[tuple[TrainingSample, float]], before: list[Tensor]
) -> Tensor:
    """Sample by sample, from the definitions."""
    total, num_tokens = torch.zeros(()), 0
    for (sample, advantage), old in zip(minibatch, before, strict=True):
        policy, entropy = plain_logprobs(model, sample)
        sampled = torch.tensor(
            [x for row in sample.rows for x, m in zip(row.logprobs, row.loss_mask, strict=True) if m]
        )
        drift = old - sampled
        base = sampled if config.mismatch_correction == "none" else old
        ratio = (policy - base).exp()
        if config.loss_fn == "gspo":
            ratio = (policy - base).mean().exp().expand(len(policy))
        clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
        objective = {
            "ppo": torch.minimum(ratio * advantage, clipped * advantage),
            "gspo": torch.minimum(ratio * advantage, clipped * advantage),
            "importance_sampling": ratio * advantage,
            "cispo": clipped.detach() * advantage * policy,
        }[config.loss_fn]
        cap = config.mismatch_cap
        weight = {
            "none": torch.ones(()),
            "token_truncate": drift.exp().clamp(max=cap),
            "sequence_mask": torch.tensor(float(1 / cap <= math.exp(drift.mean()) <= cap)),
        }[config.mismatch_correction]
        with torch.no_grad():
            target, _ = plain_logprobs(reference, sample)
        kl = (target - policy).exp() - (target - policy) - 1
        terms = weight * objective + config.ent_coeff * entropy - config.kl_coeff * kl
        divisor = {"token": 1, "sequence": len(policy), "constant": config.max_length}[config.loss_aggregation]
        total, num_tokens = total + terms.sum() / divisor, num_tokens + len(policy)
    return -config.loss_scale * total / (num_tokens if config.loss_aggregation == "token" else len(minibatch))


def plain_step(config: Config, trainer: Trainer, groups: Groups) -> list[Tensor]:
    """The weights after one step, by AdamW on the losses above."""
    model, reference = (
        AutoModelForCausalLM.from_pretrained(trainer.base_model, dtype=torch.float32).eval() for _ in range(2)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=0.0,
    )
    rated = []
    for group in groups:
        rewards = np.array([sample.reward for sample in group])
        rated.append([(s, float((s.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4))) for s in group])
    size = len(groups) // config.ppo_minibatches
    minibatches = [list(chain.from_iterable(rated[start : start + size])) for start in range(0, len(groups), size)]
    with torch.no_grad():
        before = [[plain_logprobs(model, sample)[0] for sample, _ in minibatch] for minibatch in minibatches]
    for _ in range(config.ppo_epochs):
        for minibatch, old in zip(minibatches, before, strict=True):
            optimizer.zero_grad()
            plain_loss(config, model, reference, minibatch, old).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("loss_fn", "aggregation", "correction"),
    [
        ("ppo", "token", "none"),
        ("ppo", "sequence", "token_truncate"),
        ("cispo", "constant", "token_truncate"),
        ("importance_sampling", "token", "sequence_mask"),
        ("gspo", "sequence", "none"),
        ("gspo", "token", "sequence_mask"),
    ],
)
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 2)])
def test_the_updates_of_a_step_are_those_of_a_plain_loop(
    trainer_of: Trainers,
    small_config: Config,
    loss_fn: str,
    aggregation: str,
    correction: str,
    epochs: int,
    minibatches: int,
) -> None:
    config = replace(
        small_config,
        **LOOSE,
        loss_fn=loss_fn,
        loss_aggregation=aggregation,
        mismatch_correction=correction,
        mismatch_cap=1.3,
        ppo_epochs=epochs,
        ppo_minibatches=minibatches,
        kl_coeff=0.1,
        ent_coeff=0.01,
        loss_scale=2.0,
        max_length=64,
        lr=3e-4,
        # AdamW's first updates have the size of lr whatever the gradient, were it float noise.
        adam_eps=1e-2,
        micro_batch_tokens=40,
    )
    trainer = trainer_of(config)
    groups = disagreeing(make_groups(trainer))
    before, expected = weights_of(trainer), plain_step(config, trainer, groups)
    result = trainer.step(groups, (1, 1), threads=2)
    moved = 0.0
    for mine, plain, old in zip(trainer.policy.parameters(), expected, before, strict=True):
        torch.testing.assert_close(mine.detach(), plain, rtol=0, atol=2e-6)
        moved = max(moved, float((plain - old).abs().max()))
    assert moved > 1e-5, "the comparison has something to compare"
    assert result.num_updates == epochs * minibatches and trainer.num_steps == 1
    assert (result.num_tokens, result.num_rows) == (40, 8)
    assert (result.mismatch_share is None) is (correction == "none")
    assert math.isfinite(result.loss) and result.ratio_max >= result.ratio_mean > 0


def test_what_a_step_says_of_itself_on_policy(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(small_config)
    result = trainer.step(make_groups(trainer))
    assert result.ratio_mean == pytest.approx(1, abs=1e-5) and result.ratio_max == pytest.approx(1, abs=1e-4)
    assert result.mismatch_share is None and result.num_updates == 1
    # Winners have 1.5, of four conversations with 5 tokens a turn on average; all tokens count alike.
    values = [
        (1.5 if s.reward else -0.5) * 0.5 / 0.5001
        for group in make_groups(trainer)
        for s in group
        for row in s.rows
        for _ in range(row.num_trained)
    ]
    assert result.advantage_mean == pytest.approx(np.mean(values), abs=1e-6)
    assert result.advantage_std == pytest.approx(np.std(values), abs=1e-6)


# ---------------------------------------------------------------- rows, passes and threads


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    ("loss_fn", "correction"),
    [("ppo", "none"), ("cispo", "token_mask"), ("gspo", "none"), ("gspo", "sequence_mask"), ("ppo", "sequence_mask")],
)
def test_a_sample_weighs_the_same_whatever_its_branches_and_passes(
    trainer_of: Trainers, small_config: Config, aggregation: str, loss_fn: str, correction: str
) -> None:
    config = replace(
        small_config,
        **LOOSE,
        loss_fn=loss_fn,
        loss_aggregation=aggregation,
        mismatch_correction=correction,
        mismatch_cap=1.3,
        adam_eps=1e-2,
    )
    found = []
    for is_branched, budget in ((False, 100000), (True, 100000), (True, 8)):
        trainer = trainer_of(replace(config, micro_batch_tokens=budget))
        groups = disagreeing(make_groups(trainer))
        if is_branched:
            groups = [[replace(s, rows=as_branches(s.rows[0])) for s in group] for group in groups]
        found.append((trainer.step(groups), weights_of(trainer)))
    assert found[1][0].num_rows > found[0][0].num_rows == 8
    for result, parameters in found[1:]:
        assert result.num_tokens == 40
        assert result.loss == pytest.approx(found[0][0].loss, abs=1e-5)
        assert result.clip_fraction == found[0][0].clip_fraction
        assert result.mismatch_share == found[0][0].mismatch_share
        for mine, first in zip(parameters, found[0][1], strict=True):
            torch.testing.assert_close(mine, first, rtol=0, atol=2e-6)


WHOLE: dict[str, dict[str, Any]] = {
    "epochs": {"ppo_epochs": 2, "ppo_minibatches": 2},
    "whole batch": {"advantage_method": "reinforce_pp_baseline"},
    "both, of samples": {"advantage_method": "reinforce_pp_baseline", "loss_fn": "gspo", "ppo_epochs": 2},
}


@pytest.mark.parametrize("change", WHOLE)
def test_where_the_whole_batch_is_needed_neither_parts_nor_threads_change_a_bit(
    trainer_of: Trainers, small_config: Config, change: str
) -> None:
    config = replace(small_config, **WHOLE[change], kl_coeff=0.1, ent_coeff=0.01, micro_batch_tokens=40)
    found = []
    for parts, threads in (((2,), 1), ((1, 1), 3)):
        trainer = trainer_of(config)
        assert not trainer.is_incremental
        groups = make_groups(trainer)
        found.append((trainer.step(groups, parts, threads=threads), trainer.fingerprint()))
    assert found[0] == found[1]


@pytest.mark.parametrize("change", [{"loss_fn": "gspo"}, {"mismatch_correction": "sequence_mask"}])
def test_whole_samples_are_no_reason_to_wait_for_the_whole_batch(
    trainer_of: Trainers, small_config: Config, change: dict[str, Any]
) -> None:
    config = replace(small_config, **change)
    early, late = trainer_of(config), trainer_of(config)
    assert early.is_incremental and early.is_scored
    groups = make_groups(early)
    early.accumulate(groups[:1], 1)
    assert any(p.grad is not None for p in early.policy.parameters())
    early.accumulate(groups[1:], 1)
    assert early.finish() == late.step(groups, (1, 1))
    assert early.fingerprint() == late.fingerprint()


def test_abandoned_groups_leave_nothing_behind_where_they_are_held(trainer_of: Trainers, small_config: Config) -> None:
    config = replace(small_config, ppo_epochs=2)
    disturbed, plain = trainer_of(config), trainer_of(config)
    groups = make_groups(plain)
    disturbed.accumulate(groups[:1], 1)
    disturbed.abandon()
    assert disturbed.step(groups) == plain.step(groups)
    assert disturbed.fingerprint() == plain.fingerprint()
    assert [p for p in disturbed.policy.parameters() if p.grad is not None] == []


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "change", [{"mismatch_correction": "token_truncate"}, {"loss_fn": "gspo"}, {"mismatch_correction": "sequence_mask"}]
)
def test_masked_tokens_and_rows_never_matter(
    trainer_of: Trainers, small_config: Config, change: dict[str, Any], aggregation: str
) -> None:
    def with_noise(row: Row) -> Row:
        return replace(row, logprobs=[x if m else -9.0 for x, m in zip(row.logprobs, row.loss_mask, strict=True)])

    def context_only(row: Row) -> Row:
        return replace(row, loss_mask=[0] * len(row.loss_mask))

    config = replace(small_config, **LOOSE, **change, loss_aggregation=aggregation, mismatch_cap=1.3)
    plain, noisy = trainer_of(config), trainer_of(config)
    groups = disagreeing(make_groups(plain))
    extended = [
        [replace(s, rows=(context_only(s.rows[0]), *s.rows)) for s in group]
        for group in change_rows(groups, with_noise)
    ]
    assert plain.step(groups) == noisy.step(extended)
    assert plain.fingerprint() == noisy.fingerprint()


@pytest.mark.parametrize("method", ["group_based", "reinforce_pp_baseline", "rloo"])
def test_the_order_of_a_groups_samples_means_nothing(trainer_of: Trainers, small_config: Config, method: str) -> None:
    config = replace(small_config, advantage_method=method, adam_eps=1e-2)
    plain, other = trainer_of(config), trainer_of(config)
    groups = make_groups(plain)
    first, second = plain.step(groups), other.step([group[::-1] for group in groups])
    assert second.loss == pytest.approx(first.loss, abs=1e-6)
    for mine, theirs in zip(weights_of(plain), weights_of(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


# ---------------------------------------------------------------- audit


@pytest.mark.parametrize("change", [{}, {"loss_fn": "gspo"}, *WHOLE.values()])
@pytest.mark.parametrize("last", [False, True])
def test_the_audit_is_over_the_whole_batch_and_before_the_first_update(
    trainer_of: Trainers, small_config: Config, change: dict[str, Any], last: bool
) -> None:
    trainer = trainer_of(replace(small_config, **change))
    groups = make_groups(trainer)
    wrong = change_rows(
        groups,
        lambda row: (
            replace(row, logprobs=[*row.logprobs[:-1], -9.0]) if row.key.endswith("s7" if last else "s0") else row
        ),
    )
    before = trainer.fingerprint()
    with pytest.raises(AuditFailed, match=r"worst: samples/run-1/train/s[07]"):
        trainer.step(wrong)
    assert trainer.fingerprint() == before and trainer.num_steps == 0 and not trainer.optimizer.state
    assert trainer.step(groups).audit_max < 1e-4


@pytest.mark.parametrize("change", [{}, {"ppo_epochs": 2}])
def test_tokens_of_older_versions_are_not_audited_with_the_weights_of_now(
    trainer_of: Trainers, small_config: Config, change: dict[str, Any]
) -> None:
    def older(row: Row) -> Row:
        """All but the last token, which is sampled by the weights of now, come from other weights."""
        end = len(row.token_ids)
        spans = (
            Span(call_id="old", start=0, end=end - 1, version="1.1"),
            Span(call_id="new", start=end - 1, end=end, version="1.2"),
        )
        off = [x - 1.0 if m else 0.0 for x, m in zip(row.logprobs[:-1], row.loss_mask[:-1], strict=True)]
        return replace(row, logprobs=[*off, row.logprobs[-1]], spans=spans)

    trainer = trainer_of(replace(small_config, **change))
    groups = change_rows(make_groups(trainer), older)
    with pytest.raises(AuditFailed):
        trainer.step(groups)
    with pytest.raises(AuditFailed):
        trainer.step(groups, version="1.1")
    assert trainer.step(groups, version="1.2").audit_max < 1e-4
    # Of a version that sampled nothing, nothing is audited.
    assert trainer_of(trainer.config).step(groups, version="1.3").audit_max == 0


# ---------------------------------------------------------------- what the environment gives


def test_turn_rewards_train_the_turns_and_without_any_the_parameter_is_named(
    trainer_of: Trainers, small_config: Config
) -> None:
    config = replace(small_config, advantage_method="group_based_per_turn")
    trainer, plain = trainer_of(config), trainer_of(small_config)
    groups = [[replace(s, call_ids=(s.rows[0].spans[0].call_id,)) for s in group] for group in make_groups(trainer)]
    before = trainer.fingerprint()
    with pytest.raises(InvalidInput, match=r"advantage_method = group_based_per_turn .* gave none in all conv"):
        trainer.step(groups)
    assert trainer.fingerprint() == before
    rewarded = [[replace(s, turn_rewards={s.call_ids[0]: float(i)}) for i, s in enumerate(group)] for group in groups]
    result = trainer.step(rewarded)
    plain.step(groups)
    assert result.num_updates == 1 and trainer.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize("epochs", [1, 2])
def test_once_turns_were_rewarded_a_batch_without_is_trained_by_its_outcomes(
    trainer_of: Trainers, small_config: Config, epochs: int
) -> None:
    config = replace(small_config, advantage_method="group_based_per_turn", overlong="drop", ppo_epochs=epochs)
    trainer = trainer_of(config)

    def groups(*, is_rewarded: bool) -> list[list[TrainingSample]]:
        found = [[replace(s, call_ids=(s.rows[0].spans[0].call_id,)) for s in g] for g in make_groups(trainer)]
        if is_rewarded:
            # Of a conversation that is not trained: the environment gives them all the same.
            last = found[0][-1]
            found[0][-1] = replace(last, turn_rewards={last.call_ids[0]: 1.0}, is_overlong=True)
        return found

    assert trainer.step(groups(is_rewarded=True)).num_rows == 7
    assert trainer.step(groups(is_rewarded=False)).num_rows == 8


class TurnByTurn(ScriptedRollouts):
    """The first call of every second sample is worth something."""

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        await super().play(sample_id, group_id, reward)
        sample = self.ready.pop()
        rewarded = replace(sample, turn_rewards={sample.calls[0]: float(sample_id[-1] in "13579")})
        rewarded = replace(rewarded, report_digest=rewarded.expected_report_digest())
        await self.put(rewarded.key, rewarded)
        self.ready.append(rewarded)


async def test_turn_rewards_go_from_the_records_to_the_advantages(
    bench: Bench, tiny_model: Path, builders: Builders, trainer_of: Trainers
) -> None:
    bench.config = replace(bench.config, advantage_method="group_based_per_turn")
    bench.trainer = trainer_of(bench.config)
    await bench.train(TurnByTurn(bench.ports, tiny_model, builders, first_of_four), max_steps=1)
    [metric] = await bench.ports.metrics.read(RUN_ID)
    # One winner of four, and the first of two calls, of two tokens each, was worth something in two of the four.
    outcome, turn = np.array([1.5, -0.5, -0.5, -0.5]), math.sqrt(3) / 2 * np.array([-1, 1, -1, 1])
    values = np.concatenate([outcome + turn, outcome])
    assert metric.values["advantage_mean"] == pytest.approx(0, abs=1e-5)
    assert metric.values["advantage_std"] == pytest.approx(values.std(), abs=1e-3)


async def test_a_group_whose_turns_alone_differ_is_trained_where_turns_are_compared(
    bench: Bench, tiny_model: Path, builders: Builders, trainer_of: Trainers
) -> None:
    bench.config = replace(bench.config, advantage_method="group_based_per_turn")
    bench.trainer = trainer_of(bench.config)
    await bench.train(TurnByTurn(bench.ports, tiny_model, builders, lambda task, g: 0.25), max_steps=1)
    [metric] = await bench.ports.metrics.read(RUN_ID)
    # Nothing but the first turns: 0.866 and -0.866 for half of the tokens.
    assert metric.values["num_trained"] == 8
    assert metric.values["advantage_std"] == pytest.approx(math.sqrt(3 / 8), abs=1e-3)


@pytest.mark.parametrize("overlong", ["mask", "drop"])
def test_a_batch_in_which_all_conversations_filled_their_length_says_so(
    trainer_of: Trainers, small_config: Config, overlong: str
) -> None:
    trainer = trainer_of(replace(small_config, overlong=overlong))
    groups = [[replace(s, is_overlong=True) for s in group] for group in make_groups(trainer)]
    with pytest.raises(NoProgress, match=rf"no token to train.*max_length are {overlong}.*\(overlong\)"):
        trainer.step(groups)


class CutOff(ScriptedRollouts):
    """Of the first task every conversation fills its length, and of each other task the last one."""

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        await super().play(sample_id, group_id, reward)
        sample = self.ready.pop()
        if sample_id.startswith("t0_") or sample_id.endswith("3"):
            sample = replace(sample, stop_reason="max_length")
            sample = replace(sample, report_digest=sample.expected_report_digest())
            await self.put(sample.key, sample)
        self.ready.append(sample)


@pytest.mark.parametrize("overlong", ["mask", "drop"])
async def test_a_group_that_filled_its_length_as_a_whole_makes_room_for_the_next_one(
    bench: Bench, tiny_model: Path, builders: Builders, trainer_of: Trainers, overlong: str
) -> None:
    bench.config = replace(bench.config, overlong=overlong, global_batch_size=4)
    bench.trainer = trainer_of(bench.config)
    await bench.train(CutOff(bench.ports, tiny_model, builders, first_of_four), max_steps=2)
    assert (await bench.status()).state == "succeeded"
    assert [[group[0] for group in batch.groups] for batch in await bench.batches()] == [["t1_0"], ["t2_0"]]
    first, second = await bench.ports.metrics.read(RUN_ID)
    # Of four conversations of four tokens each, three are trained.
    assert (first.values["num_trained_tokens"], first.values["dropped_no_signal"]) == (12, 4)
    assert (second.values["num_trained_tokens"], second.values["dropped_no_signal"]) == (12, 0)


def test_a_minibatch_without_a_token_is_passed_over(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(replace(small_config, ppo_minibatches=2, overlong="drop"))
    first, second = make_groups(trainer)
    result = trainer.step([first, [replace(s, is_overlong=True) for s in second]])
    assert (result.num_updates, result.num_rows) == (1, 4)


# ---------------------------------------------------------------- the reference, and steps made again


def test_the_reference_becomes_the_policy_after_so_many_steps(trainer_of: Trainers, small_config: Config) -> None:
    trainer = trainer_of(replace(small_config, kl_coeff=0.1, kl_refresh_steps=2))
    assert trainer.reference is not None
    base, prints = trainer.fingerprint(), []
    for _ in range(4):
        trainer.step(make_groups(trainer))
        prints.append((trainer.fingerprint(), trainer.reference.fingerprint()))
    policies = [policy for policy, _ in prints]
    assert [reference for _, reference in prints] == [base, policies[1], policies[1], policies[3]]


def test_a_checkpoint_holds_the_renewed_reference(trainer_of: Trainers, small_config: Config, tmp_path: Path) -> None:
    config = replace(small_config, kl_coeff=0.5, kl_refresh_steps=2)
    trainer = trainer_of(config)
    for _ in range(3):
        trainer.step(make_groups(trainer))
    manifest = saved(trainer, tmp_path / "step-3")
    other = trainer_of(config)
    snapshot.restore(other, tmp_path / "step-3", manifest)
    assert trainer.reference is not None and other.reference is not None
    assert other.reference.fingerprint() == trainer.reference.fingerprint() != trainer.fingerprint()
    assert snapshot.state_digest(other) == manifest.state_digest
    groups = make_groups(trainer)
    assert other.step(groups) == trainer.step(groups)
    assert other.fingerprint() == trainer.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"ppo_epochs": 2, "ppo_minibatches": 2, "kl_coeff": 0.1, "kl_refresh_steps": 2, "loss_fn": "gspo"},
        {"advantage_method": "reinforce_pp_baseline", "kl_coeff": 0.1, "kl_refresh_steps": 3},
    ],
)
async def test_replayed_steps_of_several_updates_with_a_renewed_reference_give_the_same_bits(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: Trainers, change: dict[str, Any]
) -> None:
    """From the checkpoint between two renewals, and from no checkpoint at all."""
    bench.config = replace(bench.config, **change)
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=6, save_steps=3)
    expected, batches = state(bench.trainer), await bench.batches()
    metrics = await bench.ports.metrics.read(RUN_ID)
    assert all(metric.values["early_share"] == 0 for metric in metrics)
    for after in (3, 0):
        remove_checkpoints(bench, after=after)
        (bench.folder.parent / "root" / "runs" / RUN_ID / "metrics.jsonl").unlink()
        bench.trainer = trainer_of(bench.config)
        await bench.train(rollouts, max_steps=6, save_steps=3)
        check_same(state(bench.trainer), expected)
        assert await bench.batches() == batches
        again = await bench.ports.metrics.read(RUN_ID)
        assert step_values(again) == step_values(metrics[after:])
