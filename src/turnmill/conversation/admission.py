"""How many calls may be under way: of one attempt, and in all. Whoever wants more is asked to come back.

    enter -> 429, or counted -> leave, or keep (its client was sent away) -> settle (it was told the answer) | end

Without a bound one agent's loop fills the generation queue for all others, and memory of this process.
"""

import time
from dataclasses import dataclass

from turnmill.conversation.asgi import HttpError
from turnmill.conversation.registry import name_in

# Seconds after which a place may be free.
_RETRY_AFTER_S = 1
# Refused requests that are remembered.
_MAX_REFUSED = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most calls under way at a time, each choice counted."""

    per_attempt: int = 64
    in_all: int = 16384


class Admission:
    """The calls under way that this process knows of."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # By chat secret.
        self._num_calls: dict[str, int] = {}
        self._num_all = 0
        # (until when it counts, choices) of calls whose clients may come back, by secret and step; the earliest first.
        self._kept: dict[tuple[str, str], tuple[float, int]] = {}
        # How often a request was refused and has not come again, by secret and identity; the earliest first.
        self._refused: dict[tuple[str, str], int] = {}

    def enter(self, secret: str, identity: str, num_choices: int) -> None:
        """Count a request; raises `HttpError` 429 where there are too many."""
        if self._kept:
            self._forget_late()
        num_calls = self._num_calls.get(secret, 0) + num_choices
        if num_calls > self._limits.per_attempt:
            self._note_refused(secret, identity)
            raise _busy(f"at most {self._limits.per_attempt} calls of a rollout may be under way at a time")
        if self._num_all + num_choices > self._limits.in_all:
            self._note_refused(secret, identity)
            raise _busy(f"at most {self._limits.in_all} calls may be under way here at a time")
        self._num_calls[secret] = num_calls
        self._num_all += num_choices

    def leave(self, secret: str, num_choices: int) -> None:
        """A request was answered."""
        num_calls = self._num_calls[secret] - num_choices
        if num_calls:
            self._num_calls[secret] = num_calls
        else:
            del self._num_calls[secret]
        self._num_all -= num_choices

    def keep(self, secret: str, step_id: str, num_choices: int, *, for_s: float) -> None:
        """A client was sent away: its call counts until `settle`, and for `for_s` at most."""
        if (secret, step_id) not in self._kept:
            self._kept[secret, step_id] = (time.monotonic() + for_s, num_choices)
            self._num_calls[secret] = self._num_calls.get(secret, 0) + num_choices
            self._num_all += num_choices

    def settle(self, secret: str, step_id: str) -> None:
        """Whoever asked for a step was told how it ended; idempotent."""
        kept = self._kept.pop((secret, step_id), None) if self._kept else None
        if kept is not None:
            self.leave(secret, kept[1])

    def end(self, name: str) -> None:
        """The attempt is over in whose name its secrets begin: nobody comes back for its calls."""
        for secret, step_id in [place for place in self._kept if name_in(place[0]) == name]:
            self.settle(secret, step_id)

    def was_refused(self, secret: str, identity: str) -> bool:
        """A request that says that it is a retry repeats one that was refused: it is no repetition of a call.

        Equal requests may have been taken before it. Each refusal stands for one retry.
        """
        num_refused = self._refused.pop((secret, identity), 0)
        if num_refused > 1:
            self._refused[secret, identity] = num_refused - 1
        return num_refused > 0

    def _note_refused(self, secret: str, identity: str) -> None:
        self._refused[secret, identity] = self._refused.pop((secret, identity), 0) + 1
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _forget_late(self) -> None:
        now = time.monotonic()
        while self._kept:
            (secret, step_id), (until, _) = next(iter(self._kept.items()))
            if until > now:
                return
            self.settle(secret, step_id)


def _busy(why: str) -> HttpError:
    headers = ((b"retry-after", str(_RETRY_AFTER_S).encode()),)
    return HttpError(
        status=429, type="rate_limit_error", code="rate_limit_exceeded", message=f"{why}; try again", headers=headers
    )
