"""What an environment is: it plays one task through a chat, and says what the conversation is worth.

    Task -> play(task, chat) -> Outcome -> rewards, or score(task, messages) -> reward and metrics

An environment raises plain Python errors; `turnmill.environment.boundary` turns them into reasons. One instance plays
many tasks at once, so what belongs to a conversation lives in local variables of `play`.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from turnmill.environment.outcomes import Message, Outcome, RewardError, Score
from turnmill.environment.rewards import RewardFunction, own
from turnmill.errors import DataError
from turnmill.records import FinishReason, Reply, ReplyTokens, Task, encode

__all__ = [
    "CONTEXT_LENGTH_EXCEEDED",
    "Chat",
    "Environment",
    "Message",
    "Outcome",
    "RewardError",
    "Score",
    "ScriptEnded",
    "ScriptedChat",
    "ScriptedTurn",
    "is_context_full",
    "opening_messages",
]

# `GenerationFailed.code` of a call whose conversation fills the context: an end that the policy caused.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# What a script says in a turn: a text, or a whole message, which may call tools.
ScriptedTurn = str | Message


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


class Environment(ABC):
    """The world that the agent acts in: agent style, where `play` talks with the model; `games.Game` is its other form.

    The reward comes from one of three: `play` returns it, `rewards` compute it, or `score` does.
    """

    # Weighed and added up for the reward of a rollout; () where `play` or `score` gives it.
    rewards: Sequence[RewardFunction] = ()

    @abstractmethod
    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Play `task` to its end. In a rollout `task.id` is the sample's id.

        An exception makes the rollout invalid (`env_error`): it has no reward and is played again.
        """

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """The worth of a conversation as it stands: `messages` of the last call and its answer.

        Called where there are no `rewards`, when `play` returned no reward, and when the context filled up, with the
        message that got no answer last. An exception or a NaN makes the rollout invalid (`reward_error`).
        """
        raise RewardError(
            f"{type(self).__name__}.play gave no reward and the class has neither `rewards` nor `score`: return a "
            f"reward, also where the context fills up (GenerationFailed, code {CONTEXT_LENGTH_EXCEEDED}), or define "
            "`score` or `rewards`"
        )

    def validate(self, task: Task) -> None:
        """Check a task before any rollout; raises `DataError` naming the field that this environment can't use."""
        opening_messages(task)

    def gold(self, task: Task) -> Iterable[ScriptedTurn] | None:
        """The assistant turns of a conversation that earns a good reward, for the check before a run; or None.

        A text each, or a whole message: `tools.call_of` makes one that calls tools.

        Here: `metadata.answer`, as often as it is asked for. Override it where more than the answer is asked for.
        """
        answer = task.metadata.get("answer")
        return None if answer is None else itertools.repeat(answer if isinstance(answer, str) else json.dumps(answer))

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Of the metrics that make up the reward, by name, for the check before a run; {} where none do."""
        return {each.name: each.weight for each in own(self.rewards) if each.weight}


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


def is_context_full(error: BaseException) -> bool:
    """Whether a call failed because its conversation is full; also of calls side by side, whose errors are a group.

    Another client (OpenAI's) has an error of its own with that code, and a framework one that was raised from it.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_context_full(inner) for inner in error.exceptions)
    if getattr(error, "code", None) == CONTEXT_LENGTH_EXCEEDED:
        return True
    return error.__cause__ is not None and is_context_full(error.__cause__)


class ScriptEnded(Exception):
    """An environment asked for more assistant turns than its script has."""


class ScriptedChat:
    """A chat that plays given assistant turns, without a model: gold and garbage before a run, games in tests.

    An exception among the turns is raised in its place. `calls` keeps the messages of each call. Where token ids are
    asked for, each byte counts as a token.
    """

    def __init__(self, turns: Iterable[ScriptedTurn | Exception]) -> None:
        self._turns = iter(turns)
        self.calls: list[list[Message]] = []

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        self.calls.append(list(messages))
        for turn in self._turns:
            if isinstance(turn, Exception):
                raise turn
            tokens = _bytes_as_tokens(messages, turn) if params.get("return_token_ids") else None
            return _said(turn, tokens, f"call-{len(self.calls)}")
        raise ScriptEnded(f"the script ended before call {len(self.calls)}")


def _said(turn: ScriptedTurn, tokens: ReplyTokens | None, call_id: str) -> Reply:
    message = {"role": "assistant", **({"content": turn} if isinstance(turn, str) else turn)}
    reason = FinishReason.TOOL_CALLS if message.get("tool_calls") else FinishReason.STOP
    return Reply(message=message, finish_reason=reason, tokens=tokens, call_id=call_id)


def _bytes_as_tokens(messages: Sequence[Message], turn: ScriptedTurn) -> ReplyTokens:
    sampled = list(turn.encode() if isinstance(turn, str) else encode(turn))
    return ReplyTokens(prompt_ids=list(encode(messages)), sampled_ids=sampled, logprobs=[0.0] * len(sampled))
