"""From the id of an environment and its arguments to the environment: the one place that knows the built-in ones."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from turnmill.environment import wordle
from turnmill.environment.base import Environment
from turnmill.errors import InvalidInput

_BUILT_IN: dict[str, Callable[..., Environment]] = {"wordle": wordle.load_environment}


def environment_ids() -> list[str]:
    """Ids that `load` accepts."""
    return sorted(_BUILT_IN)


def load(env: str, env_args: Mapping[str, Any]) -> Environment:
    """Environment `env` made with `env_args`.

    Raises `InvalidInput` for an unknown id, an argument that the environment does not have, one that it needs, and
    one whose value it refuses.
    """
    load_environment = _BUILT_IN.get(env)
    if load_environment is None:
        raise InvalidInput(f"env: there is no environment {env!r}{_suggest(env, _BUILT_IN)}; known: {_all(_BUILT_IN)}")
    allowed = inspect.signature(load_environment).parameters
    for name in env_args:
        if name not in allowed:
            raise InvalidInput(
                f"env_args: {env} has no argument {name!r}{_suggest(name, allowed)}; it takes: {_all(allowed)}"
            )
    try:
        return load_environment(**env_args)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"env_args: {env} refuses its arguments: {error}") from error


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
