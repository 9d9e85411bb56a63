"""What the passes of an update have given so far, beside the gradients, and what that says of the whole step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from turnmill.training.algorithms.objective import LossTerms
from turnmill.training.audit import TokenAudit
from turnmill.training.microbatches import MicroBatch
from turnmill.training.minibatches import Groups, Minibatch


@dataclass(kw_only=True)
class Sums:
    """Of one update."""

    audit: TokenAudit = field(default_factory=TokenAudit)
    # Of each micro-batch: sums over its tokens.
    terms: list[LossTerms] = field(default_factory=list)
    num_groups: int = 0
    num_samples: int = 0
    # Whether any conversation that was given, trained or not, came with rewards of single turns.
    has_turn_rewards: bool = False
    num_rows: int = 0
    num_tokens: int = 0
    # Of the passes, padding included, and how many of them are padding.
    num_positions: int = 0
    num_padding: int = 0

    def add_pass(self, batch: MicroBatch, terms: LossTerms) -> None:
        """One micro-batch."""
        self.terms.append(terms)
        self.num_positions += len(batch.ids_m)
        self.num_padding += batch.num_padding

    def add_given(self, groups: Groups) -> None:
        """What is told of all samples of the groups, those that are not trained included."""
        self.has_turn_rewards |= any(sample.turn_rewards for group in groups for sample in group)

    def add_all(self, minibatch: Minibatch) -> None:
        """What is known without passes."""
        self.num_groups += minibatch.num_groups
        self.num_samples += minibatch.num_samples
        self.num_rows += len(minibatch.rows)
        self.num_tokens += minibatch.num_tokens

    @property
    def loss(self) -> float:
        """Summed over the tokens."""
        return sum(float(part.loss) for part in self.terms)


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer update of a step."""

    sums: Sums
    # As it was minimised.
    loss: float
    # Global norm before clipping.
    grad_norm: float


class Means:
    """Means over the trained tokens of all updates of a step; a batch that is passed over twice counts twice."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self.num_tokens = sum(update.sums.num_tokens for update in updates)
        self._updates = updates
        self._terms = list(chain.from_iterable(update.sums.terms for update in updates))

    def of(self, term: Callable[[LossTerms], Tensor]) -> float:
        """Of a term that every update has."""
        return sum(float(term(part)) for part in self._terms) / self.num_tokens

    def of_optional(self, term: Callable[[LossTerms], Tensor | None]) -> float | None:
        """Of a term that all updates have, or none."""
        found = [value for part in self._terms if (value := term(part)) is not None]
        return sum(map(float, found)) / self.num_tokens if found else None

    @property
    def ratio_max(self) -> float:
        return max(float(part.ratio_max) for part in self._terms)

    @property
    def advantage(self) -> float:
        return self.of(lambda terms: terms.advantage)

    @property
    def advantage_std(self) -> float:
        """Over the tokens, around their mean."""
        return math.sqrt(max(0.0, self.of(lambda terms: terms.advantage_square) - self.advantage**2))

    @property
    def loss(self) -> float:
        """Mean of the updates' losses."""
        return sum(update.loss for update in self._updates) / len(self._updates)

    @property
    def grad_norm(self) -> float:
        """Mean of the updates' norms."""
        return sum(update.grad_norm for update in self._updates) / len(self._updates)
