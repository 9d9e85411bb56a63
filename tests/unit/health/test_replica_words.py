"""What a replica's status says in words."""

from dataclasses import replace

import pytest

from turnmill.health.replicas import describe
from turnmill.records import ReplicaState, ReplicaStatus, Version

SERVING = ReplicaStatus(
    run_id="r1",
    replica="replica-0",
    version=Version(incarnation=1, n=4),
    fingerprints={},
    updated_at=99.0,
    pid=1,
    changed_at=88.0,
)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (SERVING, "serves version 1.4, for 12 s; heard of 1 s ago"),
        (
            replace(SERVING, next_version=Version(incarnation=1, n=5)),
            "serves version 1.4, for 12 s; draining to load version 1.5; heard of 1 s ago",
        ),
        (
            replace(SERVING, updated_at=58.0),
            "serves version 1.4, for 12 s; last heard of 42 s ago",
        ),
        (
            replace(SERVING, state=ReplicaState.LOADING, changed_at=99.0),
            "takes no calls yet: it loads and proves its weights, for 1 s; heard of 1 s ago",
        ),
        (
            replace(SERVING, state=ReplicaState.STOPPED, error="its memory does not hold version 1.5", updated_at=1.0),
            "has ended, for 12 s; its memory does not hold version 1.5",
        ),
    ],
)
def test_a_status_is_told_in_words(status: ReplicaStatus, words: str) -> None:
    assert describe(status, 100.0) == words
