"""Reward functions of a verifiers rubric under watch: verifiers itself takes one that raises for a score of 0.0.

    rubric -> its functions, each watched -> score_rollout(state) -> reward and metrics | RewardError

What a function catches itself can't be seen from here; the check before a run finds it by its rewards.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from turnmill.environment.boundary import describe
from turnmill.environment.outcomes import RewardError, finite

# What went wrong while the rollout of this context is scored.
_failures: ContextVar[list[str] | None] = ContextVar("failures of reward functions", default=None)
# Weights of 0.1 and the like add up to a bit more than 1, which would be a reward outside its range.
_DIGITS = 12


class WatchedFunction:
    """A reward function that leaves word of its failures; for a rubric it has the name and signature of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = name_of(function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            score = self._function(*args, **kwargs)
        except Exception as error:
            self._note(f"raised {describe(error)}")
            raise
        if inspect.isawaitable(score):
            return self._awaited(score)
        self._check(score)
        return score

    async def _awaited(self, waiting: Awaitable[Any]) -> Any:
        try:
            score = await waiting
        except Exception as error:
            self._note(f"raised {describe(error)}")
            raise
        self._check(score)
        return score

    def _check(self, score: Any) -> None:
        """verifiers takes what is no number for 0.0 too."""
        try:
            finite("its value", score)
        except RewardError as error:
            self._note(f"can't be used: {error}")

    def _note(self, what: str) -> None:
        failures = _failures.get()
        if failures is not None:
            failures.append(f"reward function {self.__name__} {what}")


def name_of(function: Callable[..., Any]) -> str:
    """By which verifiers calls its metric."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


def leaves(rubric: Any) -> Iterator[Any]:
    """The rubrics that hold functions, in the order in which they score."""
    inner = getattr(rubric, "rubrics", None)
    if inner is None:
        yield rubric
    else:
        for each in inner:
            yield from leaves(each)


def weights(rubric: Any) -> dict[str, float]:
    """Of the functions that make up the reward, by name; metrics, which weigh nothing, are left out."""
    return {
        name_of(function): weight
        for leaf in leaves(rubric)
        for function, weight in zip(leaf.funcs, leaf.weights, strict=True)
        if weight
    }


async def score(rubric: Any, state: Any) -> tuple[float, dict[str, float]]:
    """Reward and metrics of the finished rollout `state`; raises `RewardError` naming each function that failed."""
    # Each time anew: an environment may add functions as it goes.
    for leaf in leaves(rubric):
        leaf.funcs[:] = [
            function if isinstance(function, WatchedFunction) else WatchedFunction(function) for function in leaf.funcs
        ]
    failures: list[str] = []
    token = _failures.set(failures)
    try:
        await rubric.score_rollout(state)
    except Exception as error:
        failures.append(f"the rubric raised {describe(error)}")
        raise RewardError("; ".join(failures)) from error
    finally:
        _failures.reset(token)
    if failures:
        raise RewardError("; ".join(failures))
    return round(finite("the reward of the rubric", state.get("reward")), _DIGITS), state.get("metrics") or {}
