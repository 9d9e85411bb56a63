"""Whether an environment can be trained on: some tasks are played without a model, well and senselessly.

    tasks -> gold turns, garbage turns, a full context -> play_scored -> rewards and reasons -> checks -> report

Where rewards do not tell a right answer from nonsense there is nothing to learn, and an error that looks like a reward
would be learned. Nothing here knows processes: an environment that never lets go of its process is its caller's affair.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnmill.environment.base import (
    CONTEXT_LENGTH_EXCEEDED,
    Environment,
    Message,
    ScriptedChat,
    ScriptedTurn,
    opening_messages,
)
from turnmill.environment.boundary import WatchedChat, describe, play_scored
from turnmill.environment.outcomes import Rollout
from turnmill.environment.rewards import Per, weigh_group
from turnmill.errors import DataError, GenerationFailed
from turnmill.records import (
    Check,
    CheckState,
    InvalidReason,
    PreflightReport,
    PreflightRequest,
    Reply,
    RolloutResult,
    Task,
    encode,
)

GARBAGE = "~ garbage ~ 0 ~"
# Tasks that are played: the first ones, and some of the others.
NUM_FIRST, NUM_SAMPLED = 4, 8
# A token is hardly ever longer than this, whatever the tokenizer: bytes.
LONGEST_TOKEN = 16
# Turns after which a script ends as a context does that is full; a turn takes at least a token.
_MOST_TURNS = 200
# Tasks that a line of the report names.
_MOST_NAMED = 3


def choose(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The first few tasks and a seeded sample of the others, in the order of the file."""
    others = range(NUM_FIRST, len(tasks))
    sampled = random.Random(f"preflight/{seed}").sample(others, min(NUM_SAMPLED, len(others)))
    return [*tasks[:NUM_FIRST], *(tasks[index] for index in sorted(sampled))]


async def preflight(
    environment: Environment, tasks: Sequence[Task], request: PreflightRequest, *, playing: Callable[[str], None]
) -> PreflightReport:
    """Play `tasks` within the limits of `request`; `playing` is told what is about to be played, for a watchdog.

    Raises nothing for what an environment does wrong: it is in the report.
    """
    return await _Preflight(environment, request, playing).run(tasks)


@dataclass(frozen=True, kw_only=True)
class _Played:
    """One conversation."""

    task_id: str
    # gold | garbage | full context
    script: str
    result: RolloutResult
    num_turns: int
    # None where it has no reward.
    rollout: Rollout | None


class _Script(ScriptedChat):
    """Lets the event loop breathe at each turn, so that an environment that asks without end meets its time limit."""

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        await asyncio.sleep(0)
        return await super().complete(messages, **params)


class _Preflight:
    """The plays of one report."""

    def __init__(self, environment: Environment, request: PreflightRequest, playing: Callable[[str], None]) -> None:
        self._environment = environment
        self._request = request
        self._playing = playing
        self._played: list[_Played] = []
        self._took_s = 0.0
        # What a task or its gold is refused for, one text a task.
        self._refused: list[str] = []
        self._without_gold: list[str] = []
        # Of the metrics that make up the reward.
        self._weights: Mapping[str, float] = {}
        # Why nothing more was played.
        self._hangs: str | None = None

    async def run(self, tasks: Sequence[Task]) -> PreflightReport:
        end = time.monotonic() + self._request.total_s
        self._playing("its reward_weights")
        try:
            self._weights = dict(self._environment.reward_weights)
        except Exception as error:  # the boundary to the environment's code, as everywhere here
            self._refused.append(f"reward_weights fails: {describe(error)}")
        chosen: list[str] = []
        for task in tasks:
            if self._hangs is not None or (chosen and time.monotonic() > end):
                break
            chosen.append(task.id)
            if self._fits(task):
                await self._play_all(task)
        num_turns = sum(played.num_turns for played in self._played)
        of_group = await self._group_checks()
        return PreflightReport(
            checks=(*self._checks(chosen), *of_group),
            tasks=tuple(chosen),
            num_turns=num_turns,
            seconds_per_turn=self._took_s / num_turns if num_turns else None,
            mean_rewards={
                script: statistics.fmean(rewards.values())
                for script in ("gold", "garbage")
                if (rewards := self._rewards(script))
            },
        )

    # ------------------------------------------------------------ plays

    def _fits(self, task: Task) -> bool:
        """Whether the task can be played at all; why not is kept."""
        self._playing(f"task {task.id}, checking it")
        try:
            self._environment.validate(task)
            size = len(encode(opening_messages(task)))
        except DataError as error:
            self._refused.append(str(error))
            return False
        except Exception as error:
            self._refused.append(f"task {task.id}: validate fails: {describe(error)}")
            return False
        if size > LONGEST_TOKEN * self._request.max_length:
            self._refused.append(
                f"task {task.id}: its prompt of {size} bytes leaves no room in max_length = {self._request.max_length} "
                "tokens"
            )
            return False
        return True

    async def _play_all(self, task: Task) -> None:
        await self._play(task, "garbage", itertools.repeat(GARBAGE))
        if (gold := self._gold(task)) is not None:
            await self._play(task, "gold", gold)
        if not any(played.script == "full context" for played in self._played):
            await self._play(task, "full context", ())
            await self._play(task, "full context", (GARBAGE,))

    def _gold(self, task: Task) -> Iterable[ScriptedTurn] | None:
        self._playing(f"task {task.id}, its gold answer")
        try:
            gold = self._environment.gold(task)
        except Exception as error:
            self._refused.append(f"task {task.id}: gold fails: {describe(error)}")
            return None
        if gold is None:
            self._without_gold.append(task.id)
        return gold

    async def _play(self, task: Task, script: str, turns: Iterable[ScriptedTurn]) -> None:
        if self._hangs is not None:
            return
        what = f"task {task.id}, {script}"
        self._playing(what)
        most = min(_MOST_TURNS, self._request.max_length)
        chat = _Script(_limited(turns, most, then_full=script != "gold"))
        watched = WatchedChat(chat)
        began = time.monotonic()
        playing = asyncio.create_task(
            play_scored(self._environment, task, watched, reward_range=self._request.reward_range),
            name=f"preflight {what}",
        )
        try:
            await asyncio.wait({playing}, timeout=self._request.play_s)
            if not playing.done():
                self._hangs = f"{what}: no end after {self._request.play_s:g} s, at turn {len(chat.calls)}"
        finally:
            playing.cancel()
            await asyncio.wait({playing})
        self._took_s += time.monotonic() - began
        result = RolloutResult(reason=InvalidReason.ENV_ERROR, detail="it cancelled its own task")
        if self._hangs is not None:
            result = RolloutResult(reason=InvalidReason.ENV_ERROR, detail=self._hangs)
        elif not playing.cancelled():
            result = playing.result()
        self._played.append(
            _Played(
                task_id=task.id,
                script=script,
                result=result,
                num_turns=len(chat.calls),
                rollout=_rollout(task, watched, result),
            )
        )

    # ------------------------------------------------------------ checks

    def _checks(self, chosen: Sequence[str]) -> tuple[Check, ...]:
        plain = [played for played in self._played if played.script != "full context"]
        return (
            _check("tasks", self._refused, f"{_count(len(chosen), 'task')} can be played"),
            _check("limits", [self._hangs] if self._hangs else [], self._ends_text()),
            self._valid("play", plain, (InvalidReason.ENV_ERROR, InvalidReason.INFRA), "no error in play"),
            self._valid("reward", plain, (InvalidReason.REWARD_ERROR,), self._reward_text()),
            self._gold_check(),
            self._valid(
                "full context",
                [played for played in self._played if played.script == "full context"],
                tuple(InvalidReason),
                "a conversation that fills the context has a reward",
            ),
        )

    def _ends_text(self) -> str:
        turns = max((played.num_turns for played in self._played), default=0)
        return f"each conversation ends within {self._request.play_s:g} s, after {_count(turns, 'turn')} at most"

    def _reward_text(self) -> str:
        low, high = self._request.reward_range
        return f"all rewards are numbers from {low:g} to {high:g}"

    def _valid(self, name: str, plays: Sequence[_Played], reasons: Sequence[InvalidReason], text: str) -> Check:
        """Failed where a play ended for one of these reasons."""
        if self._hangs is not None or not plays:
            return Check(name=name, state=CheckState.NOT_CHECKED, detail="nothing was played to its end")
        wrong = [
            f"task {played.task_id}, {played.script}: {played.result.detail}"
            for played in plays
            if played.result.reason in reasons
        ]
        return _check(name, wrong, text)

    def _gold_check(self) -> Check:
        gold, garbage = self._rewards("gold"), self._rewards("garbage")
        both = [task_id for task_id in gold if task_id in garbage]
        if not both:
            why = "no reward to compare"
            if self._without_gold:
                why = "the tasks have no `answer` and the environment has no `gold` of its own"
            return Check(name="gold", state=CheckState.NOT_CHECKED, detail=why)
        well, badly = (statistics.fmean(rewards[task_id] for task_id in both) for rewards in (gold, garbage))
        text = f"the gold answer earns {well:.3g}, garbage {badly:.3g}, over {_count(len(both), 'task')}"
        no_better = [task_id for task_id in both if gold[task_id] <= garbage[task_id]]
        if no_better:
            text += f"; gold earns no more than garbage on {_named(no_better)}"
        if self._without_gold:
            text += f"; without gold: {_named(self._without_gold)}"
        broken = self._broken_part(both)
        if well > badly and broken is None:
            return Check(name="gold", state=CheckState.OK, detail=text)
        why = f"; {broken}" if broken else ""
        hint = "; if the answer alone is not what earns the reward, define `gold`"
        return Check(name="gold", state=CheckState.FAILED, detail=text + why + hint)

    def _broken_part(self, task_ids: Sequence[str]) -> str | None:
        """What is wrong where the part of the reward that weighs most gives gold nothing on any task.

        One that catches its own error and calls it 0.0 looks so, while a lesser part, for the format say, tells gold
        from garbage all the same.
        """
        most = max(self._weights.values(), default=0.0)
        main = [name for name, weight in self._weights.items() if weight == most > 0]
        gold = {played.task_id: played.result.metrics for played in self._played if played.script == "gold"}
        if not main or any(gold[task_id].get(name) != 0 for name in main for task_id in task_ids):
            return None
        return (
            f"of the reward's parts {' and '.join(main)} weighs most, and gives 0 for each gold answer: an error that "
            "it catches itself looks like that"
        )

    async def _group_checks(self) -> list[Check]:
        """Whether the reward functions per group are those that the run asks for, and can score; [] without any."""
        functions = [each for each in self._environment.rewards if each.per is Per.GROUP]
        names, asked = ", ".join(each.name for each in functions), self._request.group_rewards
        rollouts = [played.rollout for played in self._played if played.rollout is not None]
        if asked is None or self._hangs is not None or (not functions and not asked):
            return []
        if not functions or not asked:
            text = f"the environment has reward functions per group ({names}): set group_rewards = true"
            if not functions:
                text = "group_rewards = true, and the environment has no reward function per group"
            return [Check(name="group rewards", state=CheckState.FAILED, detail=text)]
        self._playing(f"the reward functions per group, {names}")
        try:
            await asyncio.wait_for(weigh_group(functions, rollouts), self._request.play_s)
        except Exception as error:
            return [Check(name="group rewards", state=CheckState.FAILED, detail=describe(error))]
        text = f"{names} can score {_count(len(rollouts), 'rollout')}"
        return [Check(name="group rewards", state=CheckState.OK, detail=text)]

    def _rewards(self, script: str) -> dict[str, float]:
        """By task; of plays that were valid."""
        return {
            played.task_id: played.result.reward
            for played in self._played
            if played.script == script and played.result.reward is not None
        }


def _rollout(task: Task, chat: WatchedChat, result: RolloutResult) -> Rollout | None:
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


def _limited(turns: Iterable[ScriptedTurn], most: int, *, then_full: bool) -> Iterator[ScriptedTurn | Exception]:
    """At most so many turns; where there are more, or `then_full`, calls after that find the context full."""
    left = iter(turns)
    yield from itertools.islice(left, most)
    if then_full or next(left, None) is not None:
        while True:
            yield GenerationFailed(CONTEXT_LENGTH_EXCEEDED, "the conversation is full (preflight)")


def _check(name: str, wrong: Sequence[str], text: str) -> Check:
    """Failed where something is wrong; `text` says what is right."""
    if not wrong:
        return Check(name=name, state=CheckState.OK, detail=text)
    more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    return Check(name=name, state=CheckState.FAILED, detail="; ".join(wrong[:_MOST_NAMED]) + more)


def _named(task_ids: Sequence[str]) -> str:
    more = f" and {len(task_ids) - _MOST_NAMED} more" if len(task_ids) > _MOST_NAMED else ""
    return ", ".join(task_ids[:_MOST_NAMED]) + more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
