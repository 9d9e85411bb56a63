"""Reward functions: a rollout is worth the weighted sum of what they return.

    Rollout -> each function (per rollout, or per turn and then the mean) -> weights -> Score: reward, metrics
                                  '-> weights -> what each turn is worth
    all samples of a group -> each function per group -> weights -> what is added to each sample's reward

Each is a plain function, sync or async, and its value is a metric under its name; one of weight 0 is a metric and
nothing else. One that raises, or returns what is no number within its range, is an error with its name: never 0.0.
"""

import asyncio
import inspect
import math
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    # `function(rollout, turn)` for each turn; its value is their mean, and 0.0 where the model said nothing. One turn
    # is worth the weighted sum over all such functions.
    TURN = "turn"
    # `function(rollouts)`, once for all samples of a group, in training alone: one value for each, in their order.
    GROUP = "group"


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One function with its weight; made by `reward` and `metric`."""

    function: Callable[..., Any]
    # Of the metric, and in messages; unique in an environment.
    name: str
    # 0: a metric alone.
    weight: float
    per: Per
    # What the function may return, both ends included, before it is weighed.
    low: float
    high: float


def reward(
    function: Callable[..., Any],
    *,
    weight: float = 1.0,
    per: str = Per.ROLLOUT,
    low: float = 0.0,
    high: float = 1.0,
    name: str | None = None,
) -> RewardFunction:
    """`function` as a part of the reward; called as its own name says, unless `name` does.

    `per` is `rollout`, `turn` or `group`. Choose weights that add up to what the run's rewards may be, 1 for the usual
    range of [0, 1]; what a group adds comes on top. Raises `ValueError` for a weight, a range or a `per` that is none.
    """
    called: str = name or str(getattr(function, "__name__", ""))
    if not called.isidentifier():
        raise ValueError(f"the reward function {function!r} needs a name: reward(..., name=...)")
    if not math.isfinite(weight) or math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"{called}: weight = {weight} must be finite, and low = {low} at most high = {high}")
    return RewardFunction(function=function, name=called, weight=float(weight), per=Per(per), low=low, high=high)


def metric(function: Callable[..., Any], *, per: str = Per.ROLLOUT, name: str | None = None) -> RewardFunction:
    """`function` as a metric, per rollout or turn: any finite number, and nothing to the reward."""
    if per == Per.GROUP:
        raise ValueError("a metric is of one rollout: per must be rollout or turn")
    return reward(function, weight=0.0, per=per, low=-math.inf, high=math.inf, name=name)


async def weigh(functions: Sequence[RewardFunction], rollout: Rollout) -> Score:
    """The weighted sums of those that need no group, for the whole and for each turn; each value is a metric.

    They are asked side by side. Raises `RewardError` with the name of a function that fails, and `JudgeUnavailable` as
    it came.
    """
    asked = own(functions)
    names = [each.name for each in asked]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RewardError(f"two reward functions are called {', '.join(sorted(twice))}: give each a name of its own")
    found = await _side_by_side([_said(each, rollout) for each in asked])
    values = {name: statistics.fmean(said) if said else 0.0 for name, said in zip(names, found, strict=True)}
    return Score(
        reward=math.fsum(each.weight * values[each.name] for each in asked),
        metrics=values,
        turn_rewards=_of_turns(asked, found, num_turns=len(rollout.turns)),
    )


def _of_turns(asked: Sequence[RewardFunction], found: Sequence[Sequence[float]], *, num_turns: int) -> list[float]:
    """What each turn is worth; [] where no function with a weight is asked about turns."""
    per_turn = [
        (each.weight, said) for each, said in zip(asked, found, strict=True) if each.per is Per.TURN and each.weight
    ]
    if not per_turn:
        return []
    return [math.fsum(weight * said[index] for weight, said in per_turn) for index in range(num_turns)]


async def weigh_group(functions: Sequence[RewardFunction], rollouts: Sequence[Rollout]) -> list[float]:
    """What the functions per group add to the reward of each rollout, in their order; raises as `weigh` does."""
    asked = [each for each in functions if each.per is Per.GROUP]
    found = await _side_by_side([_values(each, rollouts) for each in asked])
    return [
        math.fsum(each.weight * values[index] for each, values in zip(asked, found, strict=True))
        for index in range(len(rollouts))
    ]


def own(functions: Sequence[RewardFunction]) -> list[RewardFunction]:
    """Those that a rollout alone is asked about."""
    return [each for each in functions if each.per is not Per.GROUP]


def explained(functions: Sequence[RewardFunction], metrics: Mapping[str, float]) -> str:
    """How a reward came about, for people: ` = 1 x solved 1 + 0.2 x brief 0.5`; empty without functions."""
    parts = [f"{each.weight:g} x {each.name} {metrics[each.name]:g}" for each in own(functions) if each.weight]
    return f" = {' + '.join(parts)}" if parts else ""


async def settled(value: T | Awaitable[T]) -> T:
    """What a function returned, or what it comes to where it is async."""
    if inspect.isawaitable(value):
        return await value
    return value


async def _side_by_side(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def _said(each: RewardFunction, rollout: Rollout) -> list[float]:
    """The function's values: one, or one a turn."""
    with _named(each):
        if each.per is Per.ROLLOUT:
            return [_in_range(each, await settled(each.function(rollout)))]
        return [_in_range(each, await settled(each.function(rollout, turn))) for turn in rollout.turns]


async def _values(each: RewardFunction, rollouts: Sequence[Rollout]) -> list[float]:
    with _named(each):
        values = await settled(each.function(rollouts))
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(rollouts):
            raise RewardError(
                f"reward function {each.name}: it must return a list with a number for each of {len(rollouts)} "
                f"rollouts, not {values!r:.80}"
            )
        return [_in_range(each, value) for value in values]


@contextmanager
def _named(each: RewardFunction) -> Iterator[None]:
    """The boundary to the environment's code: what it raises gets the function's name."""
    try:
        yield
    except (JudgeUnavailable, RewardError):
        raise
    except Exception as error:
        raise RewardFunctionFailed(
            f"reward function {each.name} raised {type(error).__name__}: {error}{place_of(error)}"
        ) from error


def _in_range(each: RewardFunction, value: Any) -> float:
    try:
        return _checked(each, value)
    except RewardError as error:
        # Raised here, but made there.
        raise RewardFunctionFailed(f"{error}{_home_of(each.function)}") from error


def _home_of(function: Callable[..., Any]) -> str:
    """` (file:line in function)` of where it begins; empty for what is no Python function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""


def _checked(each: RewardFunction, value: Any) -> float:
    number = finite(f"reward function {each.name}: its value", value)
    if not each.low <= number <= each.high:
        raise RewardError(
            f"reward function {each.name}: its value {number:g} is outside its range [{each.low:g}, {each.high:g}]"
        )
    return number
