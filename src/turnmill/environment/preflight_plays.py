"""One conversation of the check before a run: a script in the place of the model, and what is kept of it.

turns of a script -> Script (a chat; hears and times the environment) -> Play -> checks
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED, Message, ScriptedChat, ScriptedTurn
from turnmill.environment.boundary import WatchedChat
from turnmill.environment.outcomes import Rollout
from turnmill.environment.preflight_fields import Fields
from turnmill.errors import GenerationFailed
from turnmill.records import Reply, RolloutResult, Task, decode, encode

GARBAGE = "~ garbage ~ 0 ~"
_SHOWN = 80
# Of a conversation, so that one that has no end before its time is over takes no memory.
_MOST_NOTED = 1000


class ScriptName(StrEnum):
    """What is said in the place of the model."""

    GOLD = "gold"
    GARBAGE = "garbage"
    FULL_CONTEXT = "full context"
    # What was said once before, on the same task.
    AGAIN = "again"


@dataclass(frozen=True, kw_only=True)
class Play:
    """One conversation."""

    task_id: str
    script: ScriptName
    result: RolloutResult
    num_turns: int
    # What was said; each call as JSON, with its messages and its other fields. Of a very long one, its beginning.
    said: Sequence[ScriptedTurn | Exception]
    calls: Sequence[bytes]
    # Seconds that the environment took from each reply to the next call, or to the end with its reward.
    turn_s: Sequence[float]
    fields: Fields
    # None where it has no reward.
    rollout: Rollout | None

    @property
    def name(self) -> str:
        return f"task {self.task_id}, {self.script}"


class Script(ScriptedChat):
    """Lets the event loop breathe at each turn, so that an environment that asks without end meets its time limit."""

    def __init__(self, turns: Iterable[ScriptedTurn | Exception]) -> None:
        self.said: list[ScriptedTurn | Exception] = []
        super().__init__(self._noted(turns))
        self.num_calls = 0
        self.heard: list[bytes] = []
        self.turn_s: list[float] = []
        # Of the last reply; None before the first.
        self._replied_at: float | None = None

    def _noted(self, turns: Iterable[ScriptedTurn | Exception]) -> Iterator[ScriptedTurn | Exception]:
        for turn in turns:
            if len(self.said) < _MOST_NOTED:
                self.said.append(turn)
            yield turn

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        self.end_turn()
        self.num_calls += 1
        if self.num_calls <= _MOST_NOTED:
            self.heard.append(encode({**params, "messages": messages}))
        await asyncio.sleep(0)
        try:
            return await super().complete(messages, **params)
        finally:
            self._replied_at = time.monotonic()

    def end_turn(self) -> None:
        """The environment asks again, or has come to its end."""
        if self._replied_at is not None:
            self.turn_s.append(time.monotonic() - self._replied_at)
        self._replied_at = None


def limited(turns: Iterable[ScriptedTurn], most: int, *, then_full: bool) -> Iterator[ScriptedTurn | Exception]:
    """At most so many turns; where there are more, or `then_full`, calls after that find the context full."""
    left = iter(turns)
    yield from itertools.islice(left, most)
    if then_full or next(left, None) is not None:
        while True:
            yield GenerationFailed(CONTEXT_LENGTH_EXCEEDED, "the conversation is full (preflight)")


def rollout_of(task: Task, chat: WatchedChat, result: RolloutResult) -> Rollout | None:
    """As a reward function per group sees it."""
    if result.reward is None or result.stop_reason is None:
        return None
    return Rollout(
        task=task,
        messages=chat.messages,
        turns=chat.turns,
        stop_reason=result.stop_reason,
        reward=result.reward,
        metrics=result.metrics,
    )


def difference(first: Play, again: Play) -> str | None:
    """How the second of two plays with the same words is another one than the first; None: it is the same."""
    for number, (asked, later) in enumerate(zip(first.calls, again.calls, strict=False), 1):
        if asked != later:
            return f"call {number} {_other_request(decode(asked, dict), decode(later, dict))}"
    if first.num_turns != again.num_turns:
        return f"{count(first.num_turns, 'call')}, then {again.num_turns}"
    one, other = first.result, again.result
    if (one.reason, one.stop_reason) != (other.reason, other.stop_reason):
        return f"it ends by {one.reason or one.stop_reason}, then by {other.reason or other.stop_reason}"
    if one.reward != other.reward:
        return f"reward {one.reward}, then {other.reward}"
    names = sorted(one.metrics.keys() | other.metrics.keys())
    changed = [name for name in names if one.metrics.get(name) != other.metrics.get(name)]
    if changed:
        return f"metric {changed[0]} is {one.metrics.get(changed[0])}, then {other.metrics.get(changed[0])}"
    return None


def count(number: int, noun: str) -> str:
    """`1 turn`, `2 turns`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _other_request(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for first, second in itertools.zip_longest(one["messages"], other["messages"]):
        if first != second:
            return f"has {_shown(first)}, then {_shown(second)}"
    (name, *_) = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return f"has {name} {one.get(name)!r:.{_SHOWN}}, then {other.get(name)!r:.{_SHOWN}}"


def _shown(message: Mapping[str, Any] | None) -> str:
    return "no message" if message is None else f"{message.get('content')!r:.{_SHOWN}} of {message.get('role')}"
