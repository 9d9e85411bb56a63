"""The forward passes of a minibatch, shared by threads, in order: with gradients, or without, for log-probs alone.

    plan -> collate -> logits -> log-probs [-> loss -> gradients]

Each pass is one thread's, with torch on one thread in it. What a pass gives is pure: nothing is added up here.

Axes: N trained tokens of a micro-batch, K of its minibatch.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from turnmill.config import Config
from turnmill.training.algorithms.logprobs import token_logprobs
from turnmill.training.algorithms.objective import LossTerms, Objective, TokenBatch, loss_terms
from turnmill.training.bundles import Bundle
from turnmill.training.microbatches import MicroBatch, collate, plan
from turnmill.training.minibatches import Minibatch
from turnmill.training.policy import Policy
from turnmill.training.samples import Row

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one micro-batch gives forward."""

    batch: MicroBatch
    # The policy's.
    logprobs_n: Tensor


@dataclass(frozen=True, kw_only=True)
class Gradients(Scores):
    """What one micro-batch gives forward and backward."""

    terms: LossTerms
    # One a parameter; None where the pass does not reach it.
    gradients: tuple[Tensor | None, ...]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread in the calling thread, and as it was before afterwards: other work may come to it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Passes:
    """Passes of one policy, and of the reference that it is held to."""

    def __init__(self, policy: Policy, reference: Policy | None, config: Config) -> None:
        self._policy = policy
        self._reference = reference
        self._max_positions = config.micro_batch_tokens
        self._objective = Objective.of(config)

    def scores(self, minibatch: Minibatch, threads: int) -> Generator[Scores, None, None]:
        """Log-probs of all trained tokens with the weights as they are."""
        return self._run(partial(self._score, minibatch), minibatch.rows, threads)

    def gradients(self, minibatch: Minibatch, threads: int) -> Generator[Gradients, None, None]:
        """The gradients of the summed loss, pass by pass."""
        return self._run(partial(self._differentiate, minibatch), minibatch.rows, threads)

    def _run(
        self, make: Callable[[tuple[Bundle, ...]], Made], rows: Sequence[Row], threads: int
    ) -> Generator[Made, None, None]:
        """What `make` gives, in order; few of them are ahead of the one asked for, as each may hold all gradients."""
        passes = plan(rows, self._max_positions, is_sharing=self._policy.is_sharing)
        threads = min(threads, len(passes)) if self._policy.is_reentrant else 1
        if threads <= 1:
            with one_thread():
                yield from map(make, passes)
            return
        pending: deque[Future[Made]] = deque()
        with ThreadPoolExecutor(threads, "passes", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for bundles in passes:
                pending.append(pool.submit(make, bundles))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    @torch.no_grad()
    def _score(self, minibatch: Minibatch, bundles: tuple[Bundle, ...]) -> Scores:
        """One micro-batch forward; may run in several threads at once."""
        batch = collate(minibatch.rows, minibatch.starts, bundles)
        logprobs_n, _ = token_logprobs(self._policy.logits(batch), batch.tokens_n, batch.temperature_n)
        return Scores(batch=batch, logprobs_n=logprobs_n)

    def _differentiate(self, minibatch: Minibatch, bundles: tuple[Bundle, ...]) -> Gradients:
        """One micro-batch forward and backward; may run in several threads at once."""
        batch = collate(minibatch.rows, minibatch.starts, bundles)
        logits_nv = self._policy.logits(batch)
        logprobs_n, entropy_n = token_logprobs(logits_nv, batch.tokens_n, batch.temperature_n)
        tokens = TokenBatch(
            sampled_n=batch.sampled_n,
            old_n=batch.picked(minibatch.old_k),
            advantages_n=minibatch.advantages_k[batch.flat_n],
            reference_n=self._reference_logprobs(batch),
            weights_n=batch.picked(minibatch.weights_k),
            sample_log_ratio_n=batch.picked(minibatch.log_ratio_k),
            sample_mismatch_n=batch.picked(minibatch.mismatch_k),
        )
        terms = loss_terms(logprobs_n, entropy_n, tokens, self._objective)
        gradients = torch.autograd.grad(terms.loss, self._policy.parameters(), allow_unused=True)
        return Gradients(batch=batch, terms=terms.detached(), logprobs_n=logprobs_n.detach(), gradients=gradients)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        reference_n, _ = token_logprobs(self._reference.logits(batch), batch.tokens_n, batch.temperature_n)
        return reference_n
