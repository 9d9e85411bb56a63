"""What an environment is: it plays one task through a chat, and says what the conversation is worth.

    Task -> play(task, chat) -> Outcome -> score(task, messages) -> reward and metrics

An environment raises plain Python errors; `turnmill.environment.boundary` turns them into reasons. One instance plays
many tasks at once, so what belongs to a conversation lives in local variables of `play`.
"""

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnmill.errors import DataError
from turnmill.records import FinishReason, Reply, StopReason, Task

Message = Mapping[str, Any]

# `GenerationFailed.code` of a call whose conversation fills the context: an end that the policy caused.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RewardError(Exception):
    """The reward can't be computed or is no finite number. Raise it from `play` where play computes the reward."""


class Chat(Protocol):
    """The model, as OpenAI chat completions. Calls may run side by side."""

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        """The model's next message after `messages`; `params` are further fields of the request.

        Raises `GenerationFailed`; with code `context_length_exceeded` the conversation is full. An environment may
        let that pass (what was said so far is scored) or catch it and return an outcome of its own. Raises
        `InvalidInput` for a request that is not allowed. Other errors are not the environment's business: whatever it
        does with them, the rollout ends without a reward.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a conversation is worth. Raises `RewardError` for a reward or metric that is no finite number."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _finite("reward", self.reward))
        object.__setattr__(self, "metrics", _finite_metrics(self.metrics))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a conversation ended. Raises `RewardError` for a reward or metric that is no finite number."""

    stop_reason: StopReason = StopReason.END_OF_CONVERSATION
    # None: `Environment.score` computes it.
    reward: float | None = None
    # Joined with those of `score`.
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", _finite("reward", self.reward))
        object.__setattr__(self, "metrics", _finite_metrics(self.metrics))


class Environment(ABC):
    """The world that the agent acts in."""

    @abstractmethod
    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Play `task` to its end. In a rollout `task.id` is the sample's id.

        An exception makes the rollout invalid (`env_error`): it has no reward and is played again.
        """

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """The worth of a conversation as it stands: `messages` of the last call and its answer.

        Called when `play` returned no reward, and when the context filled up, with the message that got no answer
        last. An exception or a NaN makes the rollout invalid (`reward_error`).
        """
        raise RewardError(
            f"{type(self).__name__}.play gave no reward and the class has no `score`: return a reward, also where "
            f"the context fills up (GenerationFailed, code {CONTEXT_LENGTH_EXCEEDED}), or define `score`"
        )

    def validate(self, task: Task) -> None:
        """Check a task before any rollout; raises `DataError` naming the field that this environment can't use."""
        opening_messages(task)

    def gold(self, task: Task) -> Iterable[str] | None:
        """The assistant turns of a conversation that earns a good reward, for the check before a run; or None.

        Here: `metadata.answer`, as often as it is asked for. Override it where more than the answer is asked for.
        """
        answer = task.metadata.get("answer")
        return None if answer is None else itertools.repeat(answer if isinstance(answer, str) else json.dumps(answer))


def opening_messages(task: Task) -> list[dict[str, Any]]:
    """`metadata.prompt` as messages: a string is one user message, a list of messages stays as it is.

    Raises `DataError` where it is neither.
    """
    prompt = task.metadata.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return [dict(message) for message in prompt]
    raise DataError(f"task {task.id}: metadata.prompt must be a text or a list of messages, not {prompt!r:.80}")


class ScriptEnded(Exception):
    """An environment asked for more assistant turns than its script has."""


class ScriptedChat:
    """A chat that plays given assistant turns, without a model: gold and garbage before a run, games in tests.

    An exception among the turns is raised in its place. `calls` keeps the messages of each call.
    """

    def __init__(self, turns: Iterable[str | Exception]) -> None:
        self._turns = iter(turns)
        self.calls: list[list[Message]] = []

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        self.calls.append(list(messages))
        for turn in self._turns:
            if isinstance(turn, Exception):
                raise turn
            return Reply(message={"role": "assistant", "content": turn}, finish_reason=FinishReason.STOP)
        raise ScriptEnded(f"the script ended before call {len(self.calls)}")


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{name} must be a number, not {value!r:.80}") from error
    if not math.isfinite(number):
        raise RewardError(f"{name} must be finite, not {number}")
    return number


def _finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    for name in metrics:
        if not isinstance(name, str) or not name:
            raise RewardError(f"a metric's name must be a text, not {name!r:.80}")
    return {name: _finite(f"metric {name}", value) for name, value in metrics.items()}
