"""The game style: an environment that is asked for its first messages, and then for what each reply leads to.

    reset(task) -> Opening -> reply -> step(state, reply) -> observation | Step -> reply -> ... -> End

`play` follows from the two, a full context and the limit of turns included.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from turnmill.environment.base import Chat, Environment, is_context_full
from turnmill.environment.outcomes import Message, Outcome
from turnmill.environment.rewards import settled
from turnmill.records import Reply, StopReason, Task

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Opening(Generic[S]):
    """How a game begins."""

    # One object a game, which `step` may change: games are played side by side, and `self` belongs to all of them.
    state: S
    messages: Sequence[Message]
    # Schemas of tools that the model may call, in OpenAI's form; their calls are in the replies.
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class End:
    """The game is over; there is no further message."""

    # None: `rewards`, or `score`, compute it; they see the game's state.
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    # What the last reply was worth as a turn; None: that is not said.
    turn_reward: float | None = None


# A text is a message of the user; several messages answer several calls of tools.
Observation = str | Message | Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a reply leads to, and what it was worth as a turn: for training methods that give credit a turn."""

    told: Observation
    turn_reward: float


class Game(Environment, Generic[S]):
    """An environment with a state. `reset` and `step` may be async."""

    # Replies of the model; with the last one the game is over without an `End`.
    max_turns: int = 20

    @abstractmethod
    def reset(self, task: Task) -> Opening[S] | Awaitable[Opening[S]]:
        """Begin a game of `task`."""

    @abstractmethod
    def step(self, state: S, reply: Reply) -> Observation | Step | End | Awaitable[Observation | Step | End]:
        """What the model is told after `reply`, or the end; a `Step` and an `End` may say what the reply was worth.

        Also asked after the last reply that `max_turns` allows.
        """

    async def play(self, task: Task, chat: Chat) -> Outcome:
        opening = await settled(self.reset(task))
        messages, params = list(opening.messages), {"tools": list(opening.tools)} if opening.tools else {}
        worth: dict[str, float] = {}
        for _ in range(self.max_turns):
            try:
                reply = await chat.complete(messages, **params)
            except Exception as error:
                if not is_context_full(error):
                    raise
                return Outcome(stop_reason=StopReason.MAX_LENGTH, state=opening.state, turn_rewards=worth)
            messages.append(reply.message)
            told: Observation | Step | End = await settled(self.step(opening.state, reply))
            if isinstance(told, Step | End) and told.turn_reward is not None:
                worth[reply.call_id] = told.turn_reward
            if isinstance(told, End):
                return Outcome(reward=told.reward, metrics=told.metrics, state=opening.state, turn_rewards=worth)
            messages += _messages(told.told if isinstance(told, Step) else told)
        return Outcome(stop_reason=StopReason.MAX_TURNS, state=opening.state, turn_rewards=worth)


def _messages(told: Observation) -> list[Message]:
    """Raises `TypeError` for what is no observation."""
    if isinstance(told, str):
        return [{"role": "user", "content": told}]
    messages = [told] if isinstance(told, Mapping) else told
    is_fit = isinstance(messages, Sequence) and messages and all(isinstance(each, Mapping) for each in messages)
    if not is_fit:
        raise TypeError(f"step must return a text, messages, a Step or an End, not {told!r:.80}")
    return list(messages)
