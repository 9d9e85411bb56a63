"""Do the replicas serve the weights that they say: fingerprints and log-probs against the trainer's.

Axes: N trained tokens of a micro-batch.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from turnmill.config import Config
from turnmill.errors import AuditFailed
from turnmill.records import ReplicaStatus
from turnmill.training.microbatches import MicroBatch
from turnmill.training.samples import Row


def check_fingerprints(
    replicas: Sequence[ReplicaStatus],
    trained: Mapping[str, str],
    sampled_versions: Collection[str],
    *,
    is_vouched: bool = True,
) -> None:
    """Raise `AuditFailed` unless every replica's memory held the trainer's weights of the versions that sampled.

    `trained` is the trainer's fingerprint by version text, oldest first. A replica writes its fingerprint of a version
    before it answers with it, so a sampled version that no replica vouches for is a failure too; one that a replica has
    not served, or has forgotten since, is not. Without `is_vouched` the replicas that sampled may be gone: then it is
    enough that none of those that are there disagrees.
    """
    order = list(trained)
    for version in sorted(sampled_versions):
        if version not in trained:
            raise AuditFailed(f"tokens were sampled by version {version}, which this trainer never published")
        vouching = [replica for replica in replicas if version in replica.fingerprints]
        if is_vouched and not vouching:
            names = ", ".join(replica.replica for replica in replicas) or "none"
            raise AuditFailed(f"version {version} sampled tokens, but no replica recorded its fingerprint ({names})")
        index = order.index(version)
        before = order[index - 1] if index else None
        for replica in vouching:
            found = replica.fingerprints[version]
            if found == trained[version]:
                continue
            text = f"replica {replica.replica} serves version {version} with fingerprint {found}, "
            if before is not None and found in (trained[before], replica.fingerprints.get(before)):
                raise AuditFailed(f"{text}which are still the weights of {before}; the trainer's is {trained[version]}")
            raise AuditFailed(f"{text}the trainer's is {trained[version]}")


class TokenAudit:
    """|trainer - sampler| log-prob over the tokens of a batch, with the worst token as evidence.

    A temperature below 1 multiplies logits, and the float noise that tells nothing about weights: such a difference
    counts as it is before that.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self.num_tokens = 0
        self.max = 0.0
        self.worst = ""

    @property
    def mean(self) -> float:
        return self._sum / max(1, self.num_tokens)

    def add(self, rows: Sequence[Row], batch: MicroBatch, logprobs_n: Tensor) -> None:
        """Count the tokens of a micro-batch of `rows`; `logprobs_n` are the trainer's."""
        delta_n = (logprobs_n - batch.sampled_n).abs().double() * batch.temperature_n.clamp(max=1.0)
        # A log-prob that is no number is the worst there is.
        delta_n = torch.where(delta_n.isnan(), torch.inf, delta_n)
        self._sum += float(delta_n.sum())
        self.num_tokens += len(delta_n)
        largest, n = delta_n.max(dim=0)
        if not self.worst or float(largest) > self.max:
            self.max = float(largest)
            row = rows[int(batch.rows_n[n])]
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
