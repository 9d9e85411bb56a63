"""From what a player says about a rollout to a result that may be reported: nothing of it is believed unseen.

Ended + what the relay saw of the calls -> RolloutResult | LeaseLost
"""

import math

from turnmill.conversation.reports import MAX_TURN_REWARDS
from turnmill.errors import LeaseLost, printable
from turnmill.records import InvalidReason, RolloutResult
from turnmill.rollout.box.relay import Watch
from turnmill.rollout.box.wire import Ended
from turnmill.telemetry import redact

_DETAIL_LENGTH, _NAME_LENGTH, _MOST_METRICS = 2000, 200, 1000


def result_of(
    ended: Ended, watch: Watch, reward_range: tuple[float, float], *, has_network: bool = False
) -> RolloutResult:
    """Raises `LeaseLost` when the proxy said so, whatever the player says.

    `has_network`: it may have asked somebody that nobody here knows about, a judge, and waited in vain.
    """
    if watch.failure is not None:
        return failed(watch.failure)
    if ended.reason is not None:
        # Whether the model failed, or did not answer yet, is known here: a player that says so may be wrong.
        is_wrong = ended.reason is InvalidReason.INFRA and not has_network and not watch.num_pending
        reason = InvalidReason.ENV_ERROR if is_wrong else ended.reason
        return refused(reason, ended.detail or "no detail")
    low, high = reward_range
    wrong = (
        _wrong_reward(ended.reward, low, high)
        or _wrong_metrics(ended.metrics)
        or _wrong_turn_rewards(ended.turn_rewards)
    )
    if wrong is not None:
        return refused(InvalidReason.REWARD_ERROR, wrong)
    return RolloutResult(
        reward=ended.reward,
        metrics=ended.metrics,
        turn_rewards=ended.turn_rewards,
        stop_reason=ended.stop_reason,
    )


def failed(failure: Exception) -> RolloutResult:
    """The result where a call failed. Raises `LeaseLost`, where that is how it failed."""
    if isinstance(failure, LeaseLost):
        raise failure
    return refused(InvalidReason.INFRA, f"{type(failure).__name__}: {failure}")


def refused(reason: InvalidReason, detail: str) -> RolloutResult:
    """A result without a reward; the detail is cut, and shows no secret and no control character."""
    return RolloutResult(reason=reason, detail=printable(redact(detail), limit=_DETAIL_LENGTH))


def _wrong_reward(reward: float | None, low: float, high: float) -> str | None:
    if reward is None:
        return "the environment ended a rollout with neither a reward nor a reason"
    if not math.isfinite(reward):
        return f"the reward must be finite, not {reward}"
    if not low <= reward <= high:
        return f"reward {reward} is outside the range [{low}, {high}] of the request"
    return None


def _wrong_metrics(metrics: dict[str, float]) -> str | None:
    if len(metrics) > _MOST_METRICS:
        return f"{len(metrics)} metrics; at most {_MOST_METRICS} are reported"
    for name, value in metrics.items():
        if not name or len(name) > _NAME_LENGTH or not name.isprintable():
            return f"a metric's name must be a printable text of at most {_NAME_LENGTH} characters, not {name!r:.80}"
        if not math.isfinite(value):
            return f"metric {name} must be finite, not {value}"
    return None


def _wrong_turn_rewards(turn_rewards: dict[str, float]) -> str | None:
    """Which calls there were, the proxy knows."""
    if len(turn_rewards) > MAX_TURN_REWARDS:
        return f"{len(turn_rewards)} turn rewards; at most {MAX_TURN_REWARDS} are reported"
    for call_id, value in turn_rewards.items():
        if not math.isfinite(value):
            return f"the turn reward of {call_id!r:.80} must be finite, not {value}"
    return None
