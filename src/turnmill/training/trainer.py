"""One optimizer step: groups -> minibatches -> passes -> log-probs -> audit, loss, gradients -> update.

    accumulate -> ... -> accumulate -> finish        the same as `step` with all groups and the same parts
                                    -> abandon       nothing of them is left

A step is one update on all of its groups, or several: `ppo_epochs` times `ppo_minibatches`. Gradients are summed over
tokens, part by part in draw order, and divided at the end by what the batch has: so where there is one update and a
group's advantages do not depend on other groups (`is_incremental`), the first parts are made before it is known how
many tokens the batch will have. Everywhere else `accumulate` holds the groups and `finish` makes everything: then the
parts decide about nothing, and what is trained when is a pure function of the groups and their order.

Threads share the passes of a part, each pass is one thread's, and gradients are added in the order of the passes: so
the bits do not depend on how many threads there are, and no thread waits for another one in the middle of a product.

The audit comes before the first update: the same tokens, scored with the weights that sampled them, must get the
log-probs that the sampler recorded. It is decided over the whole batch, in the passes that come first: those that
compute the gradients, or, where log-probs of whole samples or of the weights before the step are needed (`is_scored`),
passes without gradients before them.

Axes: G groups, N trained tokens of a micro-batch, K of a minibatch, V vocabulary.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from turnmill.config import Config
from turnmill.errors import InvalidInput, NoProgress
from turnmill.training.algorithms import advantages, losses, mismatch
from turnmill.training.audit import TokenAudit
from turnmill.training.minibatches import Minibatch, cut, loss_divisor, minibatch, rate
from turnmill.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from turnmill.training.passes import Passes, Scores, one_thread
from turnmill.training.policy import Policy
from turnmill.training.samples import TrainingSample
from turnmill.training.sums import Means, Sums, Update


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did; means are over its trained tokens, in all of its updates."""

    loss: float
    # Share of tokens whose ratio the bounds held back.
    clip_fraction: float
    # Of policy / old (see `algorithms.mismatch`): the token's, or with gspo its sample's.
    ratio_mean: float
    ratio_max: float
    # Share of tokens that the mismatch correction truncated or masked; None without one.
    mismatch_share: float | None
    # k3 estimate of KL(sampler, policy): 0 on policy before the first update, up to float noise.
    kl: float
    # k3 estimate of KL(policy, reference); None when kl_coeff is 0.
    kl_reference: float | None
    entropy: float
    advantage_mean: float
    advantage_std: float
    # Global norm before clipping; mean of the updates.
    grad_norm: float
    lr: float
    # |trainer - sampler| log-prob, and the share of the batch's tokens that were compared.
    audit_mean: float
    audit_max: float
    audit_share: float
    # Of the batch, however often it was passed over.
    num_tokens: int
    num_rows: int
    num_updates: int
    # Share of the forward passes' positions that was padding.
    padding: float


@dataclass(kw_only=True)
class _Held:
    """Groups whose gradients are made when all of them are known."""

    groups: list[Sequence[TrainingSample]] = field(default_factory=list)
    threads: int = 1
    version: str | None = None


def threads_alone(config: Config) -> int:
    """Threads for the passes of a step while nothing is being played."""
    if config.trainer_threads:
        return config.trainer_threads
    # The cores that this process may use; not every system tells.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        self._sums = Sums()
        self._held = _Held()
        self._passes = Passes(self.policy, self.reference, config)

    @property
    def is_incremental(self) -> bool:
        """Whether gradients of some groups can be made before the others are known."""
        return self._num_updates == 1 and self.config.advantage_method not in advantages.WHOLE_BATCH

    @property
    def is_scored(self) -> bool:
        """Whether passes without gradients come first.

        For the log-probs before the step, where updates come after the first one; or for those of whole samples, whose
        rows may be in several passes.
        """
        config = self.config
        is_ratio_of_samples = config.loss_fn in losses.SEQUENCE_LEVEL and config.mismatch_correction == "none"
        return self._num_updates > 1 or is_ratio_of_samples or config.mismatch_correction in mismatch.SEQUENCE_LEVEL

    def is_renewed_at(self, step: int) -> bool:
        """Whether, after so many optimizer steps, the reference has other weights than the base model."""
        return self.reference is not None and 0 < self.config.kl_refresh_steps <= step

    def named_reference(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those of the reference's parameters that are trained in the policy, with their names."""
        if self.reference is None:
            return []
        trained = {name for name, _ in self.policy.named_trained()}
        return [(name, held) for name, held in self.reference.model.named_parameters() if name in trained]

    @property
    def _num_updates(self) -> int:
        return self.config.ppo_epochs * self.config.ppo_minibatches

    def fingerprint(self) -> str:
        """Digest of the current weights."""
        return self.policy.fingerprint()

    def save_weights(self, folder: Path) -> None:
        """Write what replicas load into an existing folder."""
        self.policy.save_weights(folder)

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint into an existing folder."""
        self.policy.save_pretrained(folder, self.base_model)

    # ------------------------------------------------------------ a step

    def step(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        parts: Sequence[int] = (),
        *,
        threads: int = 1,
        version: str | None = None,
    ) -> StepResult:
        """Make one optimizer step on complete groups, cut into `parts` of groups; see `accumulate` and `finish`."""
        self.abandon()
        begin = 0
        for num_groups in parts or (len(groups),):
            self.accumulate(groups[begin : begin + num_groups], threads, version=version)
            begin += num_groups
        return self.finish()

    def accumulate(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        threads: int,
        *,
        version: str | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the gradients of complete groups, the next ones in draw order, to those of the step to come.

        Groups that are given together are cut into passes together, which decides about the last bits of the sums.
        With `after`, which returns when those of the groups before are added (or raises what they ended with), this may
        be called in another thread meanwhile: the first passes are made beside theirs, and added behind them.

        With `version`, that of the current weights, only tokens that it sampled are audited; without, all are.
        """
        if not self.is_incremental:
            after()
            self._held.groups += groups
            self._held.threads, self._held.version = threads, version
            return
        batch = minibatch(rate(groups, self.config), self.config, version)
        if self.is_scored:
            batch = self._scored(batch, threads)
        self._add(batch, self._sums, threads, self._sums.audit, after)
        self._sums.add_given(groups)

    def abandon(self) -> None:
        """Forget the gradients of the step to come."""
        self._sums = Sums()
        self._held = _Held()
        self.optimizer.zero_grad()

    def finish(self) -> StepResult:
        """Make the optimizer step on the accumulated groups.

        Raises `AuditFailed` before anything changed if the recorded log-probs are not those of the current weights,
        `NoProgress` if there is nothing to train or loss or gradient is not finite, `InvalidInput` if the advantage
        method needs what the environment does not give. Whatever happens, the gradients are gone afterwards.
        """
        try:
            with one_thread():
                return self._finish_accumulated() if self.is_incremental else self._finish_held()
        finally:
            self.abandon()

    def _finish_accumulated(self) -> StepResult:
        """The one update whose gradients are there."""
        self._check(self._sums)
        self._sums.audit.check(self.config)
        return self._finished(self._sums, [self._update(self._sums)])

    def _finish_held(self) -> StepResult:
        """All updates of a step whose groups were held."""
        config, threads = self.config, self._held.threads
        rated = rate(self._held.groups, config)
        cuts = [minibatch(part, config, self._held.version) for part in cut(rated, config.ppo_minibatches)]
        whole = Sums()
        whole.add_given(self._held.groups)
        for batch in cuts:
            whole.add_all(batch)
        self._check(whole)
        batches = [batch for batch in cuts if batch.num_tokens]
        if self.is_scored:
            batches = [self._scored(batch, threads, whole.audit) for batch in batches]
            whole.audit.check(config)
        updates: list[Update] = []
        for number, batch in enumerate(batches * config.ppo_epochs):
            if number and config.loss_fn in losses.SEQUENCE_LEVEL:
                # The first update's ratios are those of the scores.
                batch = self._with_ratio(batch, self._logprobs(batch, threads))
            sums = Sums()
            self._add(batch, sums, threads, None if self.is_scored else whole.audit)
            if not self.is_scored:
                whole.audit.check(config)
            updates.append(self._update(sums))
            self.optimizer.zero_grad()
        return self._finished(whole, updates)

    def _check(self, sums: Sums) -> None:
        """Raise unless there is something to train with what the advantage method needs."""
        if sums.num_tokens == 0:
            overlong = {"mask": "masked", "drop": "dropped"}.get(self.config.overlong)
            hint = f"; conversations that filled max_length are {overlong} (overlong)" if overlong else ""
            raise NoProgress(
                f"no token to train in a batch of {sums.num_groups} groups: no sample has a trainable call. Tokens "
                "drawn greedily or from a truncated support are never trained, and of several choices (`n`) only those "
                f"that the conversation went on from{hint}"
            )
        # Of a later batch it says nothing of the environment: where turns seldom earn something, there may be none.
        is_first = self.num_steps == 0
        if is_first and self.config.advantage_method == advantages.PER_TURN and not sums.has_turn_rewards:
            raise InvalidInput(
                f"advantage_method = {advantages.PER_TURN} compares the rewards of single turns, and the environment "
                "gave none in all conversations of the first batch: have it report turn_rewards (0 where a turn earned "
                "nothing), or set advantage_method = group_based"
            )

    # ------------------------------------------------------------ passes

    def _scored(self, batch: Minibatch, threads: int, audit: TokenAudit | None = None) -> Minibatch:
        """With what the log-probs of the current weights, those before the step, say of its tokens and samples."""
        policy_k, sampled_k = self._logprobs(batch, threads, audit), batch.sampled_k()
        old_k = sampled_k if self.config.mismatch_correction == "none" else policy_k
        batch = replace(batch, old_k=old_k)
        if self.config.mismatch_correction in mismatch.SEQUENCE_LEVEL:
            batch = replace(batch, mismatch_k=batch.sample_means(old_k - sampled_k))
        return self._with_ratio(batch, policy_k) if self.config.loss_fn in losses.SEQUENCE_LEVEL else batch

    def _with_ratio(self, batch: Minibatch, policy_k: Tensor) -> Minibatch:
        """With the samples' ratios of the current weights, whose log-probs are `policy_k`."""
        assert batch.old_k is not None
        return replace(batch, log_ratio_k=batch.sample_means(policy_k - batch.old_k))

    def _logprobs(self, batch: Minibatch, threads: int, audit: TokenAudit | None = None) -> Tensor:
        """[K] log-probs of all tokens, in passes without gradients; counted in `audit`."""
        logprobs_k = torch.zeros(batch.num_tokens)
        with closing(self._passes.scores(batch, threads)) as made:
            for done in made:
                logprobs_k[done.batch.flat_n] = done.logprobs_n
                if audit is not None:
                    _audit(audit, batch, done)
        return logprobs_k

    def _add(
        self,
        batch: Minibatch,
        sums: Sums,
        threads: int,
        audit: TokenAudit | None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the gradients of a minibatch, and what else its passes give; `after` as in `accumulate`."""
        parameters = self.policy.parameters()
        with closing(self._passes.gradients(batch, threads)) as made:
            first = list(islice(made, 1))
            after()
            for done in chain(first, made):
                for parameter, gradient in zip(parameters, done.gradients, strict=True):
                    if gradient is None:
                        continue
                    known = parameter.grad
                    parameter.grad = _laid_out(gradient, parameter) if known is None else known.add_(gradient)
                if audit is not None:
                    _audit(audit, batch, done)
                sums.add_pass(done.batch, done.terms)
        sums.add_all(batch)

    # ------------------------------------------------------------ the update

    def _update(self, sums: Sums) -> Update:
        """Scale the gradients, clip them, let the optimizer apply them; nothing changes unless they are finite."""
        divisor = loss_divisor(self.config, sums.num_tokens, sums.num_samples)
        loss = sums.loss / divisor
        parameters = self.policy.parameters()
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], divisor)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            bad = [
                name
                for name, parameter in self.policy.named_trained()
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
            ]
            raise NoProgress(
                f"step {self.num_steps + 1}: loss {loss}, gradient norm {grad_norm}; this update was not made; "
                f"gradients that are not finite: {bad[:5]}"
            )
        set_learning_rate(self.optimizer, self.config, self.num_steps + 1)
        self.optimizer.step()
        return Update(sums=sums, loss=loss, grad_norm=grad_norm)

    @torch.no_grad()
    def _renew_reference(self) -> None:
        """Make the reference a copy of the policy."""
        for (_, held), parameter in zip(self.named_reference(), self.policy.parameters(), strict=True):
            held.copy_(parameter)

    def _finished(self, whole: Sums, updates: Sequence[Update]) -> StepResult:
        """The updates of a step are made."""
        self.num_steps += 1
        if self.is_renewed_at(self.num_steps) and self.num_steps % self.config.kl_refresh_steps == 0:
            self._renew_reference()
        means = Means(updates)
        num_positions = sum(update.sums.num_positions for update in updates)
        return StepResult(
            loss=means.loss,
            clip_fraction=means.of(lambda terms: terms.num_clipped),
            ratio_mean=means.of(lambda terms: terms.ratio),
            ratio_max=means.ratio_max,
            mismatch_share=means.of_optional(lambda terms: terms.num_corrected),
            kl=means.of(lambda terms: terms.kl),
            kl_reference=means.of_optional(lambda terms: terms.kl_reference),
            entropy=means.of(lambda terms: terms.entropy),
            advantage_mean=means.advantage,
            advantage_std=means.advantage_std,
            grad_norm=means.grad_norm,
            lr=learning_rate(self.config, self.num_steps),
            audit_mean=whole.audit.mean,
            audit_max=whole.audit.max,
            audit_share=whole.audit.num_tokens / whole.num_tokens,
            num_tokens=whole.num_tokens,
            num_rows=whole.num_rows,
            num_updates=len(updates),
            padding=sum(update.sums.num_padding for update in updates) / num_positions,
        )


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the strides of its parameter: the fused optimizer takes both as they lie in memory.

    `Tensor.backward` sees to that, `autograd.grad` does not: where a model uses a weight transposed, they differ.
    """
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _audit(audit: TokenAudit, minibatch: Minibatch, done: Scores) -> None:
    """Count those tokens of a pass that the current weights sampled."""
    is_current_n = done.batch.picked(minibatch.is_current_k)
    if is_current_n is None:
        audit.add(minibatch.rows, done.batch, done.logprobs_n)
    elif is_current_n.any():
        audit.add(minibatch.rows, done.batch.only(is_current_n), done.logprobs_n[is_current_n])
