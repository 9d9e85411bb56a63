"""One optimizer step: rows -> micro-batches -> log-probs -> audit, loss, gradients -> AdamW.

    accumulate -> ... -> accumulate -> finish        the same as `step` with all groups and the same parts
                                    -> abandon       nothing of them is left

Gradients are summed over tokens, part by part in draw order, and divided by the number of tokens at the end: so the
first parts can be made before it is known how many tokens the batch will have. Threads share the passes of a part, each
pass is one thread's, and gradients are added in the order of the passes: so the bits do not depend on how many threads
there are, and no thread waits for another one in the middle of a product. The audit comes before the update: the
same tokens, scored with the weights that sampled them, must get the log-probs that the sampler recorded. It is decided
over the whole batch, in the passes that compute the gradients anyway.

Axes: G groups, S samples of a group, N trained tokens of a micro-batch, V vocabulary.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from turnmill.config import Config
from turnmill.errors import NoProgress
from turnmill.training.audit import TokenAudit
from turnmill.training.bundles import Bundle
from turnmill.training.grpo import LossTerms, LossWeights, group_advantages, token_logprobs, token_loss
from turnmill.training.microbatches import MicroBatch, collate, plan
from turnmill.training.optimizer import make_optimizer, set_learning_rate
from turnmill.training.policy import Policy
from turnmill.training.samples import Row, TrainingSample


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


def threads_alone(config: Config) -> int:
    """Threads for the passes of a step while nothing is being played."""
    if config.trainer_threads:
        return config.trainer_threads
    # The cores that this process may use; not every system tells.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(kw_only=True)
class _Sums:
    """What the passes of a batch have given so far, beside the gradients."""

    audit: TokenAudit = field(default_factory=TokenAudit)
    # Of each micro-batch: sums over its tokens.
    terms: list[LossTerms] = field(default_factory=list)
    num_groups: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    # Of the passes, padding included, and how many of them are padding.
    num_positions: int = 0
    num_padding: int = 0


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What one micro-batch gives."""

    batch: MicroBatch
    terms: LossTerms
    # The policy's, for the audit.
    logprobs_n: Tensor
    # One a parameter; None where the pass does not reach it.
    gradients: tuple[Tensor | None, ...]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one thread in the calling thread, and as it was before afterwards: other work may come to it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Trainer:
    """The model, its optimizer, and one step at a time; not safe for concurrent use, but for `accumulate`'s `after`."""

    def __init__(self, base_model: Path, config: Config) -> None:
        """Load `base_model`, or raise `InvalidInput`; sets torch threads and seed of this process."""
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.base_model = base_model
        self.policy = Policy.load(base_model, config)
        self.reference: Policy | None = self.policy.frozen_twin() if config.kl_coeff > 0 else None
        self.optimizer = make_optimizer(self.policy, config)
        # Optimizer steps made.
        self.num_steps = 0
        # Of the step to come.
        self._sums = _Sums()
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

    def step(
        self, groups: Sequence[Sequence[TrainingSample]], parts: Sequence[int] = (), *, threads: int = 1
    ) -> StepResult:
        """Make one optimizer step on complete groups (all of one size), cut into `parts` of groups; see `finish`."""
        self.abandon()
        begin = 0
        for num_groups in parts or (len(groups),):
            self.accumulate(groups[begin : begin + num_groups], threads)
            begin += num_groups
        return self.finish()

    def accumulate(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        threads: int,
        *,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the gradients of complete groups, the next ones in draw order, to those of the step to come.

        Groups that are given together are cut into passes together, which decides about the last bits of the sums.
        With `after`, which returns when those of the groups before are added (or raises what they ended with), this may
        be called in another thread meanwhile: the first passes are made beside theirs, and added behind them.
        """
        rows, advantages = _flatten(groups)
        passes = plan(rows, self.config.micro_batch_tokens, is_sharing=self.policy.is_sharing)
        parameters = self.policy.parameters()
        sums = self._sums
        with closing(self._passes(rows, advantages, passes, threads)) as made:
            first = list(islice(made, 1))
            after()
            for done in chain(first, made):
                for parameter, gradient in zip(parameters, done.gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                sums.audit.add(rows, done.batch, done.logprobs_n)
                sums.terms.append(done.terms)
                sums.num_positions += len(done.batch.ids_m)
                sums.num_padding += done.batch.num_padding
        sums.num_groups += len(groups)
        sums.num_rows += len(rows)
        sums.num_tokens += sum(row.num_trained for row in rows)

    def _passes(
        self, rows: Sequence[Row], advantages: Sequence[float], plan: Sequence[tuple[Bundle, ...]], threads: int
    ) -> Generator[_Pass, None, None]:
        """The passes of a plan, in order; few of them are ahead of the one asked for, as each holds all gradients."""
        make = partial(self._pass, rows, advantages)
        threads = min(threads, len(plan)) if self.policy.is_reentrant else 1
        if threads <= 1:
            with _one_thread():
                yield from map(make, plan)
            return
        pending: deque[Future[_Pass]] = deque()
        with ThreadPoolExecutor(threads, "passes", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for bundles in plan:
                pending.append(pool.submit(make, bundles))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _pass(self, rows: Sequence[Row], advantages: Sequence[float], bundles: tuple[Bundle, ...]) -> _Pass:
        """One micro-batch forward and backward; may run in several threads at once."""
        batch = collate(rows, advantages, bundles)
        terms, logprobs_n = self._terms(batch)
        gradients = torch.autograd.grad(terms.loss, self.policy.parameters(), allow_unused=True)
        return _Pass(batch=batch, terms=terms.detached(), logprobs_n=logprobs_n, gradients=gradients)

    def abandon(self) -> None:
        """Forget the gradients of the step to come."""
        self._sums = _Sums()
        self.optimizer.zero_grad()

    def finish(self) -> StepResult:
        """Make the optimizer step with the accumulated gradients.

        Raises `AuditFailed` before anything changed if the recorded log-probs are not those of the current weights,
        `NoProgress` if there is nothing to train or loss or gradient is not finite (weights unchanged as well).
        Whatever happens, the gradients are gone afterwards.
        """
        try:
            with _one_thread():
                return self._update(self._sums)
        finally:
            self.abandon()

    def _update(self, sums: _Sums) -> StepResult:
        """Audit, scale, clip, step."""
        num_tokens = sums.num_tokens
        if num_tokens == 0:
            raise NoProgress(
                f"no token to train in a batch of {sums.num_groups} groups: no sample has a trainable call. Tokens "
                "drawn greedily or from a truncated support are never trained, and of several choices (`n`) only those "
                "that the conversation went on from"
            )
        sums.audit.check(self.config)
        loss, grad_norm = self._clipped(sums)
        lr = set_learning_rate(self.optimizer, self.config, self.num_steps + 1)
        self.optimizer.step()
        self.num_steps += 1
        kl_reference = [float(part.kl_reference) for part in sums.terms if part.kl_reference is not None]
        return StepResult(
            loss=loss,
            clip_fraction=sum(float(part.clip_fraction) for part in sums.terms) / num_tokens,
            kl=sum(float(part.kl) for part in sums.terms) / num_tokens,
            kl_reference=sum(kl_reference) / num_tokens if kl_reference else None,
            entropy=sum(float(part.entropy) for part in sums.terms) / num_tokens,
            grad_norm=grad_norm,
            lr=lr,
            audit_mean=sums.audit.mean,
            audit_max=sums.audit.max,
            num_tokens=num_tokens,
            num_rows=sums.num_rows,
            padding=sums.num_padding / sums.num_positions,
        )

    def _terms(self, batch: MicroBatch) -> tuple[LossTerms, Tensor]:
        """Loss of one micro-batch, summed over its tokens, and the policy's log-probs [N] for the audit."""
        logits_nv = self.policy.logits(batch)
        logprobs_n, entropy_n = token_logprobs(logits_nv, batch.tokens_n, batch.temperature_n)
        reference_n: Tensor | None = None
        if self.reference is not None:
            with torch.no_grad():
                reference_nv = self.reference.logits(batch)
                reference_n, _ = token_logprobs(reference_nv, batch.tokens_n, batch.temperature_n)
        terms = token_loss(
            logprobs_n=logprobs_n,
            sampled_n=batch.sampled_n,
            advantages_n=batch.advantages_n,
            entropy_n=entropy_n,
            reference_n=reference_n,
            num_tokens=1,
            weights=self._loss_weights,
        )
        return terms, logprobs_n.detach()

    def _clipped(self, sums: _Sums) -> tuple[float, float]:
        """Scale the gradients to the mean over tokens and clip them; the loss and the norm before, both finite."""
        loss = sum(float(part.loss) for part in sums.terms) / sums.num_tokens
        parameters = self.policy.parameters()
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], float(sums.num_tokens))
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip))
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return loss, grad_norm
        bad = [
            name
            for name, parameter in self.policy.named_trained()
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
