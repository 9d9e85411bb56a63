"""One optimizer step: rows -> micro-batches -> log-probs -> audit, loss, gradients -> AdamW.

The audit comes before the update: the same tokens, scored with the weights that sampled them, must get the log-probs
that the sampler recorded. It is decided over the whole batch, in the pass that computes the gradients anyway.

Axes: G groups, S samples of a group, B rows of a micro-batch, T positions, N trained tokens, V vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from turnmill.config import Config
from turnmill.errors import AuditFailed, NoProgress
from turnmill.training.grpo import LossTerms, LossWeights, group_advantages, token_logprobs, token_loss
from turnmill.training.policy import Policy
from turnmill.training.samples import Row, TrainingSample

# A micro-batch is cut early when padding would be more than this share of it ...
_MAX_PADDING = 0.25
# ... and it holds this many positions already and leaves as many: smaller ones cost more overhead than padding.
_MIN_POSITIONS = 1024


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did; means are over its trained tokens."""

    loss: float
    clip_fraction: float
    # k3 estimate of KL(sampler, policy) before the update: 0 on policy, up to float noise.
    kl: float
    # k3 estimate of KL(policy, base model); None when kl_coeff is 0.
    kl_reference: float | None
    entropy: float
    # Global norm before clipping.
    grad_norm: float
    lr: float
    # |trainer - sampler| log-prob.
    audit_mean: float
    audit_max: float
    num_tokens: int
    num_rows: int
    # Share of the forward passes' positions that was padding.
    padding: float


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Right-padded rows and their trained tokens."""

    # Which of the step's rows, in order.
    rows: tuple[int, ...]
    ids_bt: Tensor
    # Row and position of each trained token.
    rows_n: Tensor
    positions_n: Tensor
    tokens_n: Tensor
    sampled_n: Tensor
    temperature_n: Tensor
    advantages_n: Tensor


def learning_rate(config: Config, step: int) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up to `lr`, then constant, or down to `min_lr` at the end."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps - 1) / max(1, config.max_steps - config.warmup_steps - 1))
    left = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left


def pack(lengths: Sequence[int], max_positions: int) -> list[tuple[int, ...]]:
    """Indices of rows, longest first, cut into micro-batches of at most `max_positions` padded positions.

    A row longer than that is alone. Deterministic: ties keep their order.
    """
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    num_real, num_left = 0, sum(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        width = lengths[current[0]] if current else lengths[index]
        positions = width * (len(current) + 1)
        padding = 1 - (num_real + lengths[index]) / positions
        wasteful = padding > _MAX_PADDING and min(width * len(current), num_left) >= _MIN_POSITIONS
        if current and (positions > max_positions or wasteful):
            batches.append(tuple(current))
            current, num_real = [], 0
        current.append(index)
        num_real += lengths[index]
        num_left -= lengths[index]
    return [*batches, tuple(current)] if current else batches


def collate(rows: Sequence[Row], advantages: Sequence[float], picked: tuple[int, ...]) -> MicroBatch:
    """Tensors of the rows `picked`; a row's advantage counts for each of its trained tokens."""
    width = max(len(rows[i].token_ids) for i in picked)
    ids_bt = torch.zeros(len(picked), width, dtype=torch.long)
    where: list[tuple[int, int]] = []
    tokens: list[int] = []
    values: list[tuple[float, float, float]] = []
    for b, i in enumerate(picked):
        row = rows[i]
        ids_bt[b, : len(row.token_ids)] = torch.tensor(row.token_ids)
        for t, mask in enumerate(row.loss_mask):
            if mask:
                where.append((b, t))
                tokens.append(row.token_ids[t])
                values.append((row.logprobs[t], row.temperatures[t], advantages[i]))
    rows_n, positions_n = torch.tensor(where).unbind(1)
    sampled_n, temperature_n, advantages_n = torch.tensor(values).unbind(1)
    return MicroBatch(
        rows=picked,
        ids_bt=ids_bt,
        rows_n=rows_n,
        positions_n=positions_n,
        tokens_n=torch.tensor(tokens),
        sampled_n=sampled_n,
        temperature_n=temperature_n,
        advantages_n=advantages_n,
    )


class _Audit:
    """|trainer - sampler| over a batch, with the worst token as evidence."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._sum = 0.0
        self.num_tokens = 0
        self.max = 0.0
        self.worst = ""

    @property
    def mean(self) -> float:
        return self._sum / max(1, self.num_tokens)

    def add(self, batch: MicroBatch, logprobs_n: Tensor) -> None:
        delta_n = (logprobs_n - batch.sampled_n).abs().double()
        # A log-prob that is no number is the worst there is.
        delta_n = torch.where(delta_n.isnan(), torch.inf, delta_n)
        self._sum += float(delta_n.sum())
        self.num_tokens += len(delta_n)
        largest, n = delta_n.max(dim=0)
        if not self.worst or float(largest) > self.max:
            self.max = float(largest)
            row = self._rows[batch.rows[int(batch.rows_n[n])]]
            position = int(batch.positions_n[n])
            span = row.span_at(position)
            self.worst = (
                f"{row.key}, call {span.call_id} (version {span.version}), token {int(batch.tokens_n[n])} at position "
                f"{position - span.start} of the call ({position} of the row): trainer {float(logprobs_n[n]):.6f}, "
                f"sampler {float(batch.sampled_n[n]):.6f}"
            )

    def check(self, config: Config) -> None:
        """Raise `AuditFailed` with the worst token."""
        if self.mean <= config.audit_mean_tolerance and self.max <= config.audit_max_tolerance:
            return
        raise AuditFailed(
            f"trainer and sampler disagree over {self.num_tokens} tokens: |log-prob difference| mean {self.mean:.3g} "
            f"(limit {config.audit_mean_tolerance:g}), max {self.max:.3g} (limit {config.audit_max_tolerance:g}); "
            f"worst: {self.worst}"
        )


class Trainer:
    """The model, its optimizer, and one step at a time; not safe for concurrent use."""

    def __init__(self, base_model: Path, config: Config) -> None:
        """Load `base_model`, or raise `InvalidInput`; sets torch threads and seed of this process."""
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.base_model = base_model
        self.policy = Policy.load(base_model)
        self.reference: Policy | None = None
        if config.kl_coeff > 0:
            self.reference = Policy(copy.deepcopy(self.policy.model).requires_grad_(False))
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            foreach=True,
        )
        # Optimizer steps made.
        self.num_steps = 0
        self._loss_weights = LossWeights(
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            kl_coeff=config.kl_coeff,
            ent_coeff=config.ent_coeff,
        )

    def fingerprint(self) -> str:
        """Digest of the current weights."""
        return self.policy.fingerprint()

    def save_weights(self, folder: Path) -> None:
        """Write what replicas load into an existing folder."""
        self.policy.save_weights(folder)

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint into an existing folder."""
        self.policy.save_pretrained(folder, self.base_model)

    def step(self, groups: Sequence[Sequence[TrainingSample]]) -> StepResult:
        """Make one optimizer step on complete groups (all of one size).

        Raises `AuditFailed` before anything changed if the recorded log-probs are not those of the current weights,
        `NoProgress` if there is nothing to train or loss or gradient is not finite (weights unchanged as well).
        """
        rows, advantages = _flatten(groups)
        num_tokens = sum(row.num_trained for row in rows)
        if num_tokens == 0:
            raise NoProgress(f"no token to train in a batch of {len(groups)} groups: no sample has a trainable call")
        self.optimizer.zero_grad()
        audit, parts, num_positions = _Audit(rows), [], 0
        for picked in pack([len(row.token_ids) for row in rows], self.config.micro_batch_tokens):
            batch = collate(rows, advantages, picked)
            terms, logprobs_n = self._terms(batch, num_tokens)
            terms.loss.backward()  # type: ignore[no-untyped-call]
            audit.add(batch, logprobs_n)
            parts.append(terms)
            num_positions += batch.ids_bt.numel()
        audit.check(self.config)
        loss, grad_norm = self._clipped(parts)
        lr = learning_rate(self.config, self.num_steps + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        kl_reference = [float(part.kl_reference) for part in parts if part.kl_reference is not None]
        return StepResult(
            loss=loss,
            clip_fraction=sum(float(part.clip_fraction) for part in parts),
            kl=sum(float(part.kl) for part in parts),
            kl_reference=sum(kl_reference) if kl_reference else None,
            entropy=sum(float(part.entropy) for part in parts),
            grad_norm=grad_norm,
            lr=lr,
            audit_mean=audit.mean,
            audit_max=audit.max,
            num_tokens=num_tokens,
            num_rows=len(rows),
            padding=1 - sum(len(row.token_ids) for row in rows) / num_positions,
        )

    def _terms(self, batch: MicroBatch, num_tokens: int) -> tuple[LossTerms, Tensor]:
        """Loss of one micro-batch, and the policy's log-probs [N] for the audit."""
        logits_nv = self.policy.logits(batch.ids_bt, batch.rows_n, batch.positions_n - 1)
        logprobs_n, entropy_n = token_logprobs(logits_nv, batch.tokens_n, batch.temperature_n)
        reference_n: Tensor | None = None
        if self.reference is not None:
            with torch.no_grad():
                reference_nv = self.reference.logits(batch.ids_bt, batch.rows_n, batch.positions_n - 1)
                reference_n, _ = token_logprobs(reference_nv, batch.tokens_n, batch.temperature_n)
        terms = token_loss(
            logprobs_n=logprobs_n,
            sampled_n=batch.sampled_n,
            advantages_n=batch.advantages_n,
            entropy_n=entropy_n,
            reference_n=reference_n,
            num_tokens=num_tokens,
            weights=self._loss_weights,
        )
        return terms, logprobs_n.detach()

    def _clipped(self, parts: Sequence[LossTerms]) -> tuple[float, float]:
        """Clip the gradients; the batch's loss and the norm before, both finite."""
        loss = sum(float(part.loss.detach()) for part in parts)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.grad_clip))
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return loss, grad_norm
        bad = [
            name
            for name, parameter in self.policy.model.named_parameters()
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        raise NoProgress(
            f"step {self.num_steps + 1}: loss {loss}, gradient norm {grad_norm}; the weights are unchanged; "
            f"gradients that are not finite: {bad[:5]}"
        )


def _flatten(groups: Sequence[Sequence[TrainingSample]]) -> tuple[list[Row], list[float]]:
    """All rows with trained tokens, group by group, and the advantage of each."""
    rewards_gs = torch.tensor([[sample.reward for sample in group] for group in groups], dtype=torch.float64)
    advantages = group_advantages(rewards_gs).flatten().tolist()
    rows: list[Row] = []
    row_advantages: list[float] = []
    for sample, advantage in zip(chain.from_iterable(groups), advantages, strict=True):
        kept = [row for row in sample.rows if row.num_trained]
        rows += kept
        row_advantages += [advantage] * len(kept)
    return rows, row_advantages
