"""Reward functions: a rollout is worth the weighted sum of what they return.

    Rollout -> each function (per rollout, or per turn and then the mean) -> weights -> Score

Each is a plain function, sync or async, and its value is a metric under its name; one of weight 0 is a metric and
nothing else. One that raises, or returns what is no number within its range, is an error with its name: never 0.0.
"""

import asyncio
import inspect
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from turnmill.environment.outcomes import RewardError, Rollout, Score, finite, place_of
from turnmill.environment.watching import JudgeUnavailable

T = TypeVar("T")


class RewardFunctionFailed(RewardError):
    """A reward function raised: the text has its name, what was raised, and where."""


class Per(StrEnum):
    """What a function is asked about."""

    # `function(rollout)`, once.
    ROLLOUT = "rollout"
    # `function(rollout, turn)` for each turn; its value is their mean, and 0.0 where the model said nothing.
    TURN = "turn"


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One function with its weight; made by `reward` and `metric`."""

    function: Callable[..., float | Awaitable[float]]
    # Of the metric, and in messages; unique in an environment.
    name: str
    # 0: a metric alone.
    weight: float
    per: Per
    # What the function may return, both ends included, before it is weighed.
    low: float
    high: float


def reward(
    function: Callable[..., float | Awaitable[float]],
    *,
    weight: float = 1.0,
    per: str = Per.ROLLOUT,
    low: float = 0.0,
    high: float = 1.0,
    name: str | None = None,
) -> RewardFunction:
    """`function` as a part of the reward; called as its own name says, unless `name` does.

    `per` is `rollout` or `turn`. Choose weights that add up to what the run's rewards may be: 1 for the usual range of
    [0, 1]. Raises `ValueError` for a weight, a range or a `per` that is none.
    """
    called: str = name or str(getattr(function, "__name__", ""))
    if not called.isidentifier():
        raise ValueError(f"the reward function {function!r} needs a name: reward(..., name=...)")
    if not math.isfinite(weight) or math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"{called}: weight = {weight} must be finite, and low = {low} at most high = {high}")
    return RewardFunction(function=function, name=called, weight=float(weight), per=Per(per), low=low, high=high)


def metric(
    function: Callable[..., float | Awaitable[float]], *, per: str = Per.ROLLOUT, name: str | None = None
) -> RewardFunction:
    """`function` as a metric: any finite number, and nothing to the reward."""
    return reward(function, weight=0.0, per=per, low=-math.inf, high=math.inf, name=name)


async def weigh(functions: Sequence[RewardFunction], rollout: Rollout) -> Score:
    """The weighted sum, and each value as a metric; the functions are asked side by side.

    Raises `RewardError` with the name of a function that fails, and `JudgeUnavailable` as it came.
    """
    names = [each.name for each in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RewardError(f"two reward functions are called {', '.join(sorted(twice))}: give each a name of its own")
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_value(each, rollout), name=f"reward {each.name}") for each in functions]
    except ExceptionGroup as errors:
        # The first one ended the others.
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    values = {each.name: task.result() for each, task in zip(functions, tasks, strict=True)}
    return Score(reward=math.fsum(each.weight * values[each.name] for each in functions), metrics=values)


def explained(functions: Sequence[RewardFunction], metrics: Mapping[str, float]) -> str:
    """How a reward came about, for people: ` = 1 x solved 1 + 0.2 x brief 0.5`; empty without functions."""
    parts = [f"{each.weight:g} x {each.name} {metrics[each.name]:g}" for each in functions if each.weight]
    return f" = {' + '.join(parts)}" if parts else ""


async def settled(value: T | Awaitable[T]) -> T:
    """What a function returned, or what it comes to where it is async."""
    if inspect.isawaitable(value):
        return await value
    return value


async def _value(each: RewardFunction, rollout: Rollout) -> float:
    try:
        if each.per is Per.ROLLOUT:
            return _in_range(each, await settled(each.function(rollout)))
        values = [_in_range(each, await settled(each.function(rollout, turn))) for turn in rollout.turns]
    except (JudgeUnavailable, RewardError):
        raise
    except Exception as error:  # the boundary to the environment's code
        raise RewardFunctionFailed(
            f"reward function {each.name} raised {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    return statistics.fmean(values) if values else 0.0


def _in_range(each: RewardFunction, value: Any) -> float:
    number = finite(f"reward function {each.name}: its value", value)
    if not each.low <= number <= each.high:
        raise RewardError(
            f"reward function {each.name}: its value {number:g} is outside its range [{each.low:g}, {each.high:g}]"
        )
    return number
