"""Whether an environment can be trained on: some tasks are played without a model, well and senselessly.

    tasks -> gold turns, garbage turns, the same again, a full context -> play_scored -> rewards and reasons -> checks
    other rows -> validate -> refused ones                                                                  -> report

Where rewards do not tell a right answer from nonsense there is nothing to learn, and an error that looks like a reward
would be learned. Nothing here knows processes: an environment that never lets go of its process is its caller's affair.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from turnmill.environment.base import Environment, ScriptedTurn, opening_messages
from turnmill.environment.boundary import WatchedChat, describe, play_scored
from turnmill.environment.preflight_checks import Findings, checks_of
from turnmill.environment.preflight_fields import recorded
from turnmill.environment.preflight_plays import GARBAGE, Play, Script, ScriptName, count, limited, rollout_of
from turnmill.environment.rewards import Per, weigh_group
from turnmill.errors import DataError
from turnmill.records import (
    Check,
    CheckState,
    InvalidReason,
    PreflightReport,
    PreflightRequest,
    RolloutResult,
    Task,
    encode,
)

__all__ = ["GARBAGE", "choose", "preflight", "rest"]

# Tasks that are played: the first ones, and some of the others. As many of them twice.
NUM_FIRST, NUM_SAMPLED, NUM_AGAIN = 4, 8, 4
# Rows that are looked at beside them, and their bytes: they travel to a box as one message.
_MOST_OTHERS, _MOST_OTHER_BYTES = 20_000, 64 << 20
# Share of the time for plays that the others may take after them.
_SHARE_OF_OTHERS = 0.5
# A token is hardly ever longer than this, whatever the tokenizer: bytes.
LONGEST_TOKEN = 16
# Turns after which a script ends as a context does that is full; a turn takes at least a token.
_MOST_TURNS = 200
# How often whoever watches is told of rows that are looked at, seconds.
_TELL_S = 1.0


def choose(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The first few tasks and a seeded sample of the others, in the order of the file."""
    others = range(NUM_FIRST, len(tasks))
    sampled = random.Random(f"preflight/{seed}").sample(others, min(NUM_SAMPLED, len(others)))
    return [*tasks[:NUM_FIRST], *(tasks[index] for index in sorted(sampled))]


def rest(tasks: Sequence[Task], chosen: Sequence[Task]) -> list[Task]:
    """The tasks that are not played, as many of them as can be looked at."""
    ids = {task.id for task in chosen}
    found: list[Task] = []
    num_bytes = 0
    for task in tasks:
        if task.id in ids:
            continue
        num_bytes += len(encode(task.metadata))
        if len(found) == _MOST_OTHERS or num_bytes > _MOST_OTHER_BYTES:
            break
        found.append(task)
    return found


async def preflight(
    environment: Environment,
    tasks: Sequence[Task],
    request: PreflightRequest,
    *,
    others: Sequence[Task] = (),
    playing: Callable[[str], None],
) -> PreflightReport:
    """Play `tasks` within the limits of `request`, and have the environment look at `others`.

    `playing` is told what is about to be done, for a watchdog. Raises nothing for what an environment does wrong: it
    is in the report.
    """
    return await _Preflight(environment, request, playing).run(tasks, others)


class _Preflight:
    """The plays of one report."""

    def __init__(self, environment: Environment, request: PreflightRequest, playing: Callable[[str], None]) -> None:
        self._environment = environment
        self._request = request
        self._playing = playing
        self._findings = Findings(request=request)
        self._took_s = 0.0

    async def run(self, tasks: Sequence[Task], others: Sequence[Task]) -> PreflightReport:
        found = self._findings
        self._read_weights()
        await self._play_tasks(tasks)
        await self._look_at(others)
        of_group = await self._group_checks()
        num_turns = sum(play.num_turns for play in found.plays)
        turn_s = [seconds for seconds, _ in found.turn_s()]
        means = {name: found.rewards(name) for name in (ScriptName.GOLD, ScriptName.GARBAGE)}
        return PreflightReport(
            checks=(*checks_of(found), *of_group),
            tasks=tuple(found.chosen),
            num_turns=num_turns,
            num_validated=found.num_validated,
            seconds_per_turn=self._took_s / num_turns if num_turns else None,
            median_turn_s=statistics.median(turn_s) if turn_s else None,
            longest_turn_s=max(turn_s, default=None),
            mean_rewards={str(name): statistics.fmean(each.values()) for name, each in means.items() if each},
        )

    def _read_weights(self) -> None:
        self._playing("its reward_weights")
        try:
            self._findings.weights = dict(self._environment.reward_weights)
        except Exception as error:  # the boundary to the environment's code, as everywhere here
            self._findings.refused.append(f"reward_weights fails: {describe(error)}")

    # ------------------------------------------------------------ rows

    def _fits(self, task: Task) -> bool:
        """Whether the task can be played at all; why not is kept."""
        refused = self._findings.refused
        try:
            self._environment.validate(task)
            size = len(encode(opening_messages(task)))
        except DataError as error:
            refused.append(str(error))
            return False
        except Exception as error:
            refused.append(f"task {task.id}: validate fails: {describe(error)}")
            return False
        if size > LONGEST_TOKEN * self._request.max_length:
            refused.append(
                f"task {task.id}: its prompt of {size} bytes leaves no room in max_length = {self._request.max_length} "
                "tokens"
            )
            return False
        return True

    async def _look_at(self, others: Sequence[Task]) -> None:
        """Have rows validated that are not played, until their time is over."""
        found = self._findings
        found.num_others = len(others)
        if found.hangs is not None:
            return
        began = told = time.monotonic()
        self._playing("the other rows, checking them")
        for task in others:
            # The process has others to answer to.
            await asyncio.sleep(0)
            now = time.monotonic()
            if now - began > _SHARE_OF_OTHERS * self._request.total_s:
                return
            if now - told > _TELL_S:
                told = now
                self._playing(f"task {task.id}, checking it")
            self._fits(task)
            found.num_validated += 1

    # ------------------------------------------------------------ plays

    async def _play_tasks(self, tasks: Sequence[Task]) -> None:
        found = self._findings
        end = time.monotonic() + self._request.total_s
        for task in tasks:
            if found.hangs is not None or (found.chosen and time.monotonic() > end):
                break
            found.chosen.append(task.id)
            self._playing(f"task {task.id}, checking it")
            if self._fits(task):
                await self._play_all(task)

    async def _play_all(self, task: Task) -> None:
        most = min(_MOST_TURNS, self._request.max_length)
        first = await self._play(
            task, ScriptName.GARBAGE, Script(limited(itertools.repeat(GARBAGE), most, then_full=True))
        )
        if (gold := self._gold(task)) is not None:
            first = await self._play(task, ScriptName.GOLD, Script(limited(gold, most, then_full=False)))
        if first is not None and len(self._findings.of(ScriptName.AGAIN)) < NUM_AGAIN:
            await self._play(task, ScriptName.AGAIN, Script(first.said))
        if not self._findings.of(ScriptName.FULL_CONTEXT):
            for turns in ((), (GARBAGE,)):
                await self._play(task, ScriptName.FULL_CONTEXT, Script(limited(turns, most, then_full=True)))

    def _gold(self, task: Task) -> Iterable[ScriptedTurn] | None:
        self._playing(f"task {task.id}, its gold answer")
        try:
            gold = self._environment.gold(task)
        except Exception as error:
            self._findings.refused.append(f"task {task.id}: gold fails: {describe(error)}")
            return None
        if gold is None:
            self._findings.without_gold.append(task.id)
        return gold

    async def _play(self, task: Task, script: ScriptName, chat: Script) -> Play | None:
        """The play; None where nothing more is to be played."""
        found = self._findings
        if found.hangs is not None:
            return None
        what = f"task {task.id}, {script}"
        self._playing(what)
        watched, (given, fields) = WatchedChat(chat), recorded(task)
        began = time.monotonic()
        playing = asyncio.create_task(
            play_scored(self._environment, given, watched, reward_range=self._request.reward_range),
            name=f"preflight {what}",
        )
        try:
            await asyncio.wait({playing}, timeout=self._request.play_s)
            chat.end_turn()
            if not playing.done():
                found.hangs = f"{what}: no end after {self._request.play_s:g} s, at turn {chat.num_calls}"
        finally:
            playing.cancel()
            await asyncio.wait({playing})
        self._took_s += time.monotonic() - began
        result = RolloutResult(reason=InvalidReason.ENV_ERROR, detail="it cancelled its own task")
        if found.hangs is not None:
            result = RolloutResult(reason=InvalidReason.ENV_ERROR, detail=found.hangs)
        elif not playing.cancelled():
            result = playing.result()
        play = Play(
            task_id=task.id,
            script=script,
            result=result,
            num_turns=chat.num_calls,
            said=chat.said,
            calls=chat.heard,
            turn_s=chat.turn_s,
            fields=fields,
            rollout=rollout_of(task, watched, result),
        )
        found.plays.append(play)
        return play

    # ------------------------------------------------------------ groups

    async def _group_checks(self) -> list[Check]:
        """Whether the reward functions per group are those that the run asks for, and can score; [] without any."""
        found = self._findings
        functions = [each for each in self._environment.rewards if each.per is Per.GROUP]
        names, asked = ", ".join(each.name for each in functions), self._request.group_rewards
        rollouts = [play.rollout for play in found.plays if play.rollout is not None]
        if asked is None or found.hangs is not None or (not functions and not asked):
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
        text = f"{names} can score {count(len(rollouts), 'rollout')}"
        return [Check(name="group rewards", state=CheckState.OK, detail=text)]
