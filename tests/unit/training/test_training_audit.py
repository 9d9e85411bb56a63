import pytest

from turnmill.errors import AuditFailed
from turnmill.records import ReplicaStatus, Version
from turnmill.training.audit import check_fingerprints

TRAINED = {"0.0": "aa", "1.1": "bb", "1.2": "cc"}


def replica(name: str = "replica-0", **fingerprints: str) -> ReplicaStatus:
    return ReplicaStatus(
        run_id="run-1",
        replica=name,
        version=Version(incarnation=1, n=2),
        fingerprints={f"{key[1]}.{key[2]}": value for key, value in fingerprints.items()},
        updated_at=1.0,
        pid=1,
    )


def test_equal_fingerprints_pass() -> None:
    check_fingerprints([replica(v00="aa", v11="bb"), replica("replica-1", v11="bb")], TRAINED, {"1.1"})


def test_a_replica_that_has_not_served_the_version_says_nothing_about_it() -> None:
    check_fingerprints([replica(v11="bb"), replica("replica-1", v00="aa")], TRAINED, {"1.1"})


def test_a_replica_with_other_weights_is_named() -> None:
    with pytest.raises(
        AuditFailed, match=r"replica replica-1 serves version 1.1 with fingerprint xx, the trainer's is bb"
    ):
        check_fingerprints([replica(v11="bb"), replica("replica-1", v11="xx")], TRAINED, {"1.1"})


@pytest.mark.parametrize("before", ["aa", "zz"])
def test_a_replica_that_still_serves_the_version_before_is_told_apart(before: str) -> None:
    with pytest.raises(AuditFailed, match=r"still the weights of 0.0"):
        check_fingerprints([replica(v00=before, v11=before)], TRAINED, {"1.1"})


def test_equal_fingerprints_of_two_versions_pass_where_the_trainers_are_equal_too() -> None:
    check_fingerprints([replica(v00="aa", v11="aa")], {"0.0": "aa", "1.1": "aa"}, {"1.1"})


@pytest.mark.parametrize("replicas", [[], [replica(v00="aa")]])
def test_a_sampled_version_that_no_replica_vouches_for_fails(replicas: list[ReplicaStatus]) -> None:
    with pytest.raises(AuditFailed, match=r"no replica recorded its fingerprint"):
        check_fingerprints(replicas, TRAINED, {"1.2"})


def test_a_version_that_was_never_published_fails() -> None:
    with pytest.raises(AuditFailed, match=r"never published"):
        check_fingerprints([replica(v19="aa")], TRAINED, {"1.9"})


def test_a_batch_without_tokens_asks_nothing() -> None:
    check_fingerprints([], TRAINED, set())


def test_a_batch_that_is_made_anew_needs_no_replica_that_remembers_but_none_that_disagrees() -> None:
    check_fingerprints([], TRAINED, {"1.1"}, is_vouched=False)
    with pytest.raises(AuditFailed, match="fingerprint xx"):
        check_fingerprints([replica(v11="xx")], TRAINED, {"1.1"}, is_vouched=False)
    with pytest.raises(AuditFailed, match="never published"):
        check_fingerprints([], TRAINED, {"7.7"}, is_vouched=False)
