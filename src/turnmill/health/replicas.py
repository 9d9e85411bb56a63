"""What a replica's status says, in plain words."""

from turnmill.records import ReplicaState, ReplicaStatus

_WORDS = {
    ReplicaState.LOADING: "takes no calls yet: it loads and proves its weights",
    ReplicaState.DRAINING: "takes no calls any more: it is ending",
    ReplicaState.STOPPED: "has ended",
}


def describe(status: ReplicaStatus, now: float) -> str:
    """What the replica does, since when, and when it was heard of last; `now` is in Unix seconds."""
    words = _WORDS.get(status.state, f"serves version {status.version}")
    if status.changed_at:
        words += f", for {max(0.0, now - status.changed_at):.0f} s"
    if status.next_version is not None and status.state is ReplicaState.SERVING:
        words += f"; draining to load version {status.next_version}"
    if status.error is not None:
        words += f"; {status.error}"
    if status.state is ReplicaState.STOPPED:
        return words
    age_s = max(0.0, now - status.updated_at)
    return f"{words}; {'heard of' if status.is_fresh(now) else 'last heard of'} {age_s:.0f} s ago"
