"""What comes of a conversation: how it ended, its turns, and what it is worth.

play -> Outcome;  Outcome and the conversation -> Rollout -> reward functions -> Score
"""

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnmill.records import Reply, StopReason, Task

Message = Mapping[str, Any]
# What single turns are worth: by the call id of each one's reply, not all of them need be there; or a number for each
# call that was answered, in the order of the answers.
TurnRewards = Mapping[str, float] | Sequence[float]


class RewardError(Exception):
    """The reward can't be computed or is no finite number. Raise it from `play` where play computes the reward."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a conversation is worth. Raises `RewardError` for a reward or metric that is no finite number."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    # For training methods that give credit a turn; the others look at the reward alone. () where there are none.
    turn_rewards: TurnRewards = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", finite("reward", self.reward))
        object.__setattr__(self, "metrics", _finite_metrics(self.metrics))
        object.__setattr__(self, "turn_rewards", _finite_turns(self.turn_rewards))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a conversation ended. Raises `RewardError` for a reward or metric that is no finite number."""

    stop_reason: StopReason = StopReason.END_OF_CONVERSATION
    # None: the reward functions, or `Environment.score`, compute it.
    reward: float | None = None
    # Joined with those of the reward functions or of `score`.
    metrics: Mapping[str, float] = field(default_factory=dict)
    # As those of a `Score`, which has none then.
    turn_rewards: TurnRewards = ()
    # What the reward functions may look at beside the messages: whatever `play` puts here.
    state: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", finite("reward", self.reward))
        object.__setattr__(self, "metrics", _finite_metrics(self.metrics))
        object.__setattr__(self, "turn_rewards", _finite_turns(self.turn_rewards))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One call of the model that was answered."""

    # The whole conversation that it was asked with.
    messages: Sequence[Message]
    reply: Reply


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A task that was played to its end, as reward functions see it."""

    task: Task
    # The conversation of the call that ended last, with its answer; without one where the context was full.
    messages: Sequence[Message]
    # Of all conversations of the rollout, in the order of the answers.
    turns: Sequence[Turn]
    stop_reason: StopReason
    # `Outcome.state`; None where the context filled up in a `play` that did not catch that, and in a group.
    state: Any = None
    # In a group: its own reward and its metrics, as they were reported. Else none yet.
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def by_call(given: TurnRewards, turns: Sequence[Turn]) -> dict[str, float]:
    """Turn rewards by call id; {} where the chat names none. Raises `RewardError` where one fits no turn."""
    ids = [turn.reply.call_id for turn in turns]
    known = set(ids) - {""}
    if not isinstance(given, Mapping):
        if given and len(given) != len(ids):
            raise RewardError(f"turn_rewards has {len(given)} numbers, and {len(ids)} calls were answered")
        given = dict(zip(ids, given, strict=False))
    elif known and (unknown := given.keys() - set(ids)):
        raise RewardError(f"turn_rewards: no call that was answered has the id {min(unknown)!r:.80}")
    return {call_id: value for call_id, value in given.items() if call_id in known}


def finite(name: str, value: Any) -> float:
    """`value` as a number; raises `RewardError` for what is none, and for NaN and infinities."""
    # float() reads texts, too.
    if value is None or isinstance(value, (str, bytes, bytearray)):
        raise RewardError(f"{name} must be a number, not {value!r:.80}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{name} must be a number, not {value!r:.80}") from error
    if not math.isfinite(number):
        raise RewardError(f"{name} must be finite, not {number}")
    return number


def place_of(error: BaseException) -> str:
    """` (file:line in function)` of the line that raised it; empty where it was not raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    for name in metrics:
        if not isinstance(name, str) or not name:
            raise RewardError(f"a metric's name must be a text, not {name!r:.80}")
    return {name: finite(f"metric {name}", value) for name, value in metrics.items()}


def _finite_turns(turn_rewards: TurnRewards) -> TurnRewards:
    if isinstance(turn_rewards, str) or not isinstance(turn_rewards, Mapping | Sequence):
        raise RewardError(f"turn_rewards must be numbers by call id, or one a turn, not {turn_rewards!r:.80}")
    if not isinstance(turn_rewards, Mapping):
        return tuple(finite(f"turn_rewards[{index}]", value) for index, value in enumerate(turn_rewards))
    for call_id in turn_rewards:
        if not isinstance(call_id, str):
            raise RewardError(f"turn_rewards: a call id must be a text, not {call_id!r:.80}")
    return {call_id: finite(f"turn_rewards of {call_id:.80}", value) for call_id, value in turn_rewards.items()}
