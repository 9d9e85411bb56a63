"""Do the replicas serve the weights that they say: their fingerprints against the trainer's."""

from collections.abc import Collection, Mapping, Sequence

from turnmill.errors import AuditFailed
from turnmill.records import ReplicaStatus


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
