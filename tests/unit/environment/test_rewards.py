"""What reward functions return, and what becomes of it."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from turnmill.environment import Chat, Environment, Outcome, RewardError, Score
from turnmill.environment.base import Message, ScriptedChat
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.outcomes import Rollout, Turn
from turnmill.environment.rewards import RewardFunction, metric, reward, weigh_group
from turnmill.environment.watching import WATCH, JudgeUnavailable
from turnmill.errors import GenerationFailed
from turnmill.records import InvalidReason, RolloutResult, StopReason, Task

TASK = Task(id="t_0", metadata={"prompt": "hello", "answer": "yes"})


class Two(Environment):
    """Two turns; worth what its functions say."""

    def __init__(self, *functions: RewardFunction) -> None:
        self.rewards = functions

    async def play(self, task: Task, chat: Chat) -> Outcome:
        messages: list[Message] = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            messages.append((await chat.complete(messages)).message)
            messages.append({"role": "user", "content": "more"})
        return Outcome(metrics={"length": 2}, state={"seen": 2})


async def result_of(
    environment: Environment, *turns: str | Exception, reward_range: tuple[float, float] = (0.0, 1.0)
) -> RolloutResult:
    chat = WatchedChat(ScriptedChat(turns or ("no", "yes")))
    return await play_scored(environment, TASK, chat, reward_range=reward_range)


def solved(rollout: Rollout) -> float:
    return float(any(turn.reply.content == rollout.task.metadata["answer"] for turn in rollout.turns))


def brief(rollout: Rollout, turn: Turn) -> float:
    return 1.0 if len(turn.reply.content) < 3 else 0.0


async def slow(rollout: Rollout) -> float:
    await asyncio.sleep(0)
    return 0.5


async def test_a_reward_is_the_weighted_sum_and_each_value_is_a_metric() -> None:
    functions = (
        reward(solved, weight=0.5),
        reward(brief, weight=0.25, per="turn"),
        reward(slow, weight=0.25),
        metric(lambda rollout: -7, name="odd"),
    )
    result = await result_of(Two(*functions))
    assert result.reward == pytest.approx(0.5 + 0.25 * 0.5 + 0.25 * 0.5)
    assert result.metrics == {"length": 2, "solved": 1.0, "brief": 0.5, "slow": 0.5, "odd": -7.0}


async def test_a_function_sees_the_whole_rollout() -> None:
    seen: list[Rollout] = []

    def look(rollout: Rollout) -> bool:
        seen.append(rollout)
        return True

    assert (await result_of(Two(reward(look)))).reward == 1.0
    (rollout,) = seen
    assert (rollout.task, rollout.state, rollout.stop_reason) == (TASK, {"seen": 2}, StopReason.END_OF_CONVERSATION)
    assert [turn.reply.content for turn in rollout.turns] == ["no", "yes"]
    assert [len(turn.messages) for turn in rollout.turns] == [1, 3] and len(rollout.messages) == 4


async def test_a_full_context_is_scored_by_what_was_said() -> None:
    full = GenerationFailed("context_length_exceeded", "full")
    result = await result_of(Two(reward(solved, weight=0.5), reward(brief, weight=0.5, per="turn")), "no", full)
    assert (result.reward, result.stop_reason) == (0.5, StopReason.MAX_LENGTH)
    result = await result_of(Two(reward(brief, per="turn")), full)
    assert (result.reward, result.stop_reason) == (0.0, StopReason.MAX_LENGTH)


def giving(value: Any) -> Callable[[Rollout], Any]:
    def odd(rollout: Rollout) -> Any:
        return value

    return odd


@pytest.mark.parametrize("per", ["rollout", "turn"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "must be a number, not None"),
        ("1.0", "must be a number, not '1.0'"),
        ([1.0], "must be a number"),
        (math.nan, "must be finite, not nan"),
        (math.inf, "must be finite, not inf"),
        (1.5, "1.5 is outside its range [0, 1]"),
        (-0.1, "-0.1 is outside its range [0, 1]"),
    ],
)
async def test_a_value_that_is_no_reward_is_an_error_with_the_function_s_name(per: str, value: Any, text: str) -> None:
    one = giving(value)
    result = await result_of(Two(reward(lambda *given: one(given[0]), name="odd", per=per, weight=0.1)))
    assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)
    assert "reward function odd: its value" in str(result.detail) and text in str(result.detail)
    # Where the function is, not where its value was looked at.
    assert str(result.detail).endswith("in <lambda>)") and "test_rewards.py:" in str(result.detail)


async def test_a_function_that_raises_is_an_error_with_its_name_and_place() -> None:
    def broken(rollout: Rollout) -> float:
        return float(rollout.task.metadata["missing"])

    async def later(rollout: Rollout) -> float:
        await asyncio.sleep(0)
        raise ZeroDivisionError("of nothing")

    for function in (broken, later):
        for made in (reward(function), metric(function)):
            result = await result_of(Two(made))
            assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)
            assert f"reward function {function.__name__} raised" in str(result.detail)
            assert "test_rewards.py:" in str(result.detail) and f"in {function.__name__})" in str(result.detail)


async def test_one_function_that_fails_ends_the_others() -> None:
    ended = asyncio.Event()

    async def waits(rollout: Rollout) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    async def fails(rollout: Rollout) -> float:
        raise KeyError("x")

    result = await result_of(Two(reward(waits), reward(fails)))
    assert "reward function fails raised KeyError" in str(result.detail) and ended.is_set()


async def test_a_sum_outside_the_range_says_how_it_came_about() -> None:
    result = await result_of(Two(reward(solved, weight=1.0), reward(slow, weight=0.2)))
    assert result.reason is InvalidReason.REWARD_ERROR
    assert "reward 1.1 = 1 x solved 1 + 0.2 x slow 0.5 is outside the range [0.0, 1.0]" in str(result.detail)
    assert (await result_of(Two(reward(solved), reward(slow)), reward_range=(0, 2))).reward == 1.5


async def test_a_penalty_has_a_range_of_its_own() -> None:
    result = await result_of(Two(reward(solved), reward(lambda rollout: -0.5, low=-1, high=0, name="late")))
    assert result.reward == 0.5


async def test_a_reward_comes_from_one_place_alone() -> None:
    class Both(Two):
        async def score(self, task: Task, messages: Sequence[Message]) -> Score:
            return Score(reward=1.0)

    class Played(Two):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            return Outcome(reward=1.0)

    for kind, text in ((Both, "the class has a `score`"), (Played, "`play` returned a reward")):
        result = await result_of(kind(reward(solved)))
        assert result.reason is InvalidReason.REWARD_ERROR and text in str(result.detail)


async def test_two_functions_of_one_name_are_an_error() -> None:
    result = await result_of(Two(reward(solved), reward(slow, name="solved")))
    assert "two reward functions are called solved" in str(result.detail)


@pytest.mark.parametrize("swallow", [True, False])
async def test_a_judge_that_is_away_decides_the_rollout_whatever_the_function_makes_of_it(swallow: bool) -> None:
    async def judged(rollout: Rollout) -> float:
        WATCH.get().failure = away = JudgeUnavailable("judge strict: HTTP 503")
        if swallow:
            return 0.0
        raise away

    result = await result_of(Two(reward(judged)))
    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
    assert "judge strict: HTTP 503" in str(result.detail)


def test_a_function_that_can_not_be_one_is_refused_when_it_is_written() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        reward(lambda rollout: 1.0)
    for weight in (math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite"):
            reward(solved, weight=weight)
    with pytest.raises(ValueError, match="at most high"):
        reward(solved, low=1, high=0)
    with pytest.raises(ValueError, match="'word' is not a valid Per"):
        reward(solved, per="word")
    with pytest.raises(ValueError, match="a metric is of one rollout"):
        metric(solved, per="group")


def test_an_environment_says_which_metrics_make_up_its_reward() -> None:
    environment = Two(reward(solved, weight=0.5), reward(brief, weight=0.5, per="turn"), metric(slow))
    assert environment.reward_weights == {"solved": 0.5, "brief": 0.5} and Two().reward_weights == {}


# ---------------------------------------------------------------- per group


def rollouts_with(*rewards: float) -> list[Rollout]:
    return [
        Rollout(task=TASK, messages=[], turns=[], stop_reason=StopReason.MAX_TURNS, reward=value) for value in rewards
    ]


def best(rollouts: Sequence[Rollout]) -> list[bool]:
    most = max(rollout.reward or 0.0 for rollout in rollouts)
    return [rollout.reward == most for rollout in rollouts]


async def constant(rollouts: Sequence[Rollout]) -> tuple[float, ...]:
    await asyncio.sleep(0)
    return tuple(-1.0 for _ in rollouts)


async def test_what_a_group_adds_is_the_weighted_sum_for_each_rollout() -> None:
    functions = (
        reward(solved),
        reward(best, weight=0.5, per="group"),
        reward(constant, weight=0.1, per="group", low=-1, high=0),
    )
    assert await weigh_group(functions, rollouts_with(0.2, 0.9)) == pytest.approx([-0.1, 0.4])
    assert await weigh_group((reward(solved),), rollouts_with(0.2, 0.9)) == [0.0, 0.0]


async def test_functions_per_group_are_no_part_of_a_rollout_s_own_reward() -> None:
    result = await result_of(Two(reward(solved), reward(best, per="group")))
    assert (result.reward, result.metrics) == (1.0, {"length": 2.0, "solved": 1.0})

    class Played(Two):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            return Outcome(reward=0.5)

    assert (await result_of(Played(reward(best, per="group")))).reward == 0.5
    assert Two(reward(solved), reward(best, per="group")).reward_weights == {"solved": 1.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "must return a list with a number for each of 2 rollouts, not None"),
        ([1.0], "must return a list with a number for each of 2 rollouts"),
        ("ab", "must return a list"),
        ([1.0, None], "its value must be a number, not None"),
        ([1.0, math.nan], "its value must be finite"),
        ([1.0, 1.5], "outside its range [0, 1]"),
    ],
)
async def test_a_function_per_group_gives_a_number_for_each_rollout(value: Any, text: str) -> None:
    with pytest.raises(RewardError) as caught:
        await weigh_group((reward(lambda rollouts: value, name="odd", per="group"),), rollouts_with(0.0, 1.0))
    assert "reward function odd: " in str(caught.value) and text in str(caught.value)


async def test_a_function_per_group_that_raises_is_named_with_its_place() -> None:
    def broken(rollouts: Sequence[Rollout]) -> list[float]:
        return [rollout.metrics["missing"] for rollout in rollouts]

    with pytest.raises(RewardError, match=r"reward function broken raised KeyError: 'missing' \(.*\)"):
        await weigh_group((reward(broken, per="group"),), rollouts_with(0.0, 1.0))
