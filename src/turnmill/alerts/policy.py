"""How often and how long: deduplication, rate limits, repeated attempts."""

from collections import deque
from dataclasses import dataclass

from tenacity import RetryCallState
from tenacity.wait import wait_base, wait_random_exponential

from turnmill.errors import DeliveryFailed
from turnmill.ports import Notifier
from turnmill.records import Severity


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The defaults reach a receiver that is away for half an hour."""

    # The same alert within it is counted instead of sent.
    dedup_window_s: float = 3600.0
    # Of one delivery; then it is a dead letter.
    max_attempts: int = 12
    # Longest pause before the second attempt; it doubles each time, up to `most_pause_s`.
    first_pause_s: float = 1.0
    most_pause_s: float = 600.0
    # What a receiver may ask for by Retry-After.
    most_retry_after_s: float = 900.0
    # Of one attempt as a whole.
    timeout_s: float = 20.0
    # How often the process that delivers looks for what others handed over: one read of a mostly empty list.
    look_s: float = 2.0
    # How often it looks through the alerts of a day, for what somebody recorded who was killed before handing it over.
    search_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A notifier, and what goes there."""

    notifier: Notifier
    # Alerts below it do not go there.
    min_severity: Severity = Severity.INFO
    # More than `max_alerts` within `per_s` are held and summed up; a summary counts as one of them.
    max_alerts: int = 30
    per_s: float = 3600.0


class Limiter:
    """A sliding window over the times at which a channel was given an alert."""

    def __init__(self, channel: Channel) -> None:
        self._most = channel.max_alerts
        self._per_s = channel.per_s
        self._times: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more may go at `now`; it counts if so."""
        self._forget(now)
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True

    def note(self, then: float) -> None:
        """Count one that an earlier process let through; call with rising times."""
        self._times.append(then)

    def free_in_s(self, now: float) -> float:
        """Seconds until one more may go; 0 where it may at once."""
        self._forget(now)
        # A clock that was set back must not hold alerts for longer than the window.
        return min(self._per_s, self._times[0] + self._per_s - now) if len(self._times) >= self._most else 0.0

    def _forget(self, now: float) -> None:
        while self._times and not 0 <= now - self._times[0] < self._per_s:
            self._times.popleft()


class Pause(wait_base):
    """Jittered exponential pauses, or what the receiver asked for, within bounds, where that is longer.

    Full jitter (random between 0 and the doubled pause): Marc Brooker, "Exponential Backoff And Jitter", AWS
    Architecture Blog, 2015. `used` attempts were made by an earlier process.
    """

    def __init__(self, policy: Policy, used: int) -> None:
        self._policy = policy
        # Its exponent counts from this process's first attempt; the multiplier carries the earlier ones over.
        first = min(policy.first_pause_s * 2.0 ** min(used, 30), policy.most_pause_s)
        self._backoff = wait_random_exponential(multiplier=first, max=policy.most_pause_s)

    def __call__(self, retry_state: RetryCallState) -> float:
        """Seconds until the next attempt."""
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        asked = error.retry_after_s if isinstance(error, DeliveryFailed) else None
        return max(self._backoff(retry_state), min(asked or 0.0, self._policy.most_retry_after_s))


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may do better."""
    return isinstance(error, DeliveryFailed) and not error.is_final
