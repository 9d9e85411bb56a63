"""What an environment could hide of its rollout: calls that wait, and a model or a judge that failed.

A failure that is not the policy's decides the rollout, whatever the environment makes of it: it would else become part
of a reward. Whoever asks somebody else for the rollout (its chat, a judge) says so here.
"""

from contextvars import ContextVar

from turnmill.errors import BackendUnavailable


class JudgeUnavailable(BackendUnavailable):
    """A judge can't be reached, is overloaded, or fails by itself, after all tries. The policy has no part in it."""


class Watch:
    """Kept by the rollout, written to by what it asks."""

    def __init__(self) -> None:
        # Calls that wait for an answer now.
        self.num_pending = 0
        # The failure that decides the rollout: of the infrastructure, or a lost lease.
        self.failure: Exception | None = None


# That of the rollout in whose context the code runs; tasks and threads that it starts have it, too.
WATCH: ContextVar[Watch] = ContextVar("watch")
