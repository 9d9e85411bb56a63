"""What an environment's code does, and what becomes of it."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest

from turnmill.environment.base import Chat, Environment, Message, Outcome, RewardError, Score, ScriptedChat, ScriptEnded
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.errors import BackendUnavailable, GenerationFailed, InvalidInput, LeaseLost
from turnmill.records import InvalidReason, Reply, RolloutResult, StopReason, Task

TASK = Task(id="t_0", metadata={"prompt": "hello"})
HELLO: list[Message] = [{"role": "user", "content": "hello"}]
FULL = GenerationFailed("context_length_exceeded", "full")

Play = Callable[[Chat], Awaitable[Outcome]]


class Plain(Environment):
    """Plays what it is given; has no score of its own."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def play(self, task: Task, chat: Chat) -> Outcome:
        return await self._play(chat)


class Scored(Plain):
    """Scores what it is given; keeps the conversations that it was asked about."""

    def __init__(self, play: Play, score: Callable[[], Any]) -> None:
        super().__init__(play)
        self._score = score
        self.scored: list[Sequence[Message]] = []

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        self.scored.append(messages)
        result: Score = self._score()
        return result


async def one_call(chat: Chat) -> Outcome:
    await chat.complete(HELLO)
    return Outcome()


async def two_calls(chat: Chat) -> Outcome:
    first = await chat.complete(HELLO)
    await chat.complete([*HELLO, first.message, {"role": "user", "content": "more"}])
    return Outcome()


async def swallow(chat: Chat) -> Outcome:
    """What careless environments do."""
    try:
        await chat.complete(HELLO)
    except Exception:
        return Outcome(reward=0.0)
    return Outcome(reward=1.0)


def giving(reward: Any) -> Play:
    async def play(chat: Chat) -> Outcome:
        return Outcome(reward=reward)

    return play


def failing(error: Exception) -> Any:
    def fail(*_: object) -> Any:
        raise error

    return fail


async def result_of(environment: Environment, turns: Iterable[str | Exception] = ("hi", "again")) -> RolloutResult:
    return await play_scored(environment, TASK, WatchedChat(ScriptedChat(turns)), reward_range=(0.0, 1.0))


async def test_a_reward_from_play_is_the_reward() -> None:
    assert await result_of(Plain(giving(1))) == RolloutResult(reward=1.0, stop_reason=StopReason.END_OF_CONVERSATION)


async def test_without_a_reward_from_play_score_decides_on_the_whole_conversation() -> None:
    environment = Scored(two_calls, lambda: Score(reward=0.25, metrics={"length": 4}))
    result = await result_of(environment)

    assert (result.reward, result.metrics) == (0.25, {"length": 4.0})
    assert [message["content"] for message in environment.scored[0]] == ["hello", "hi", "more", "again"]


async def test_metrics_of_play_and_score_are_joined() -> None:
    async def play(chat: Chat) -> Outcome:
        return Outcome(metrics={"a": 1})

    assert (await result_of(Scored(play, lambda: Score(reward=0, metrics={"b": 2})))).metrics == {"a": 1, "b": 2}


async def test_an_exception_in_play_is_an_env_error_with_its_type_and_last_frame() -> None:
    result = await result_of(Plain(failing(KeyError("word"))))

    assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR)
    assert result.detail is not None
    assert result.detail.startswith("KeyError: 'word' (")
    assert result.detail.endswith("in fail)")
    assert "test_boundary.py:" in result.detail


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, "one", [1.0]])
async def test_a_reward_that_is_no_finite_number_is_a_reward_error(reward: Any) -> None:
    for environment in (Plain(giving(reward)), Scored(one_call, lambda: Score(reward=reward))):
        result = await result_of(environment)
        assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)


async def test_a_reward_outside_the_range_is_a_reward_error() -> None:
    for reward in (-0.1, 1.5):
        result = await result_of(Plain(giving(reward)))
        assert result.reason is InvalidReason.REWARD_ERROR
        assert f"reward {reward} is outside the range [0.0, 1.0]" in str(result.detail)


async def test_a_score_that_raises_is_a_reward_error() -> None:
    result = await result_of(Scored(one_call, failing(ZeroDivisionError("no words"))))

    assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)
    assert "ZeroDivisionError: no words" in str(result.detail)


async def test_a_reward_error_raised_in_play_is_a_reward_error() -> None:
    result = await result_of(Plain(failing(RewardError("the judge is silent"))))

    assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)


async def test_no_reward_and_no_score_is_a_reward_error_that_says_what_to_do() -> None:
    result = await result_of(Plain(one_call))

    assert result.reason is InvalidReason.REWARD_ERROR
    assert "define `score`" in str(result.detail)


async def test_wrong_types_are_errors_and_never_rewards() -> None:
    async def nothing(chat: Chat) -> Any:
        return None

    assert (await result_of(Plain(nothing))).reason is InvalidReason.ENV_ERROR
    assert (await result_of(Scored(one_call, lambda: 1.0))).reason is InvalidReason.REWARD_ERROR


async def test_a_metric_that_is_not_finite_is_a_reward_error() -> None:
    async def play(chat: Chat) -> Outcome:
        return Outcome(reward=1.0, metrics={"speed": math.nan})

    assert (await result_of(Plain(play))).reason is InvalidReason.REWARD_ERROR


async def test_a_full_context_ends_the_conversation_and_what_was_said_is_scored() -> None:
    environment = Scored(two_calls, lambda: Score(reward=0.5))
    result = await result_of(environment, ["hi", FULL])

    assert (result.reward, result.stop_reason) == (0.5, StopReason.MAX_LENGTH)
    assert [message["content"] for message in environment.scored[0]] == ["hello", "hi", "more"]


async def test_an_environment_may_handle_a_full_context_itself() -> None:
    async def play(chat: Chat) -> Outcome:
        try:
            await chat.complete(HELLO)
        except GenerationFailed:
            return Outcome(reward=0.75, stop_reason=StopReason.MAX_LENGTH)
        return Outcome(reward=0.0)

    result = await result_of(Plain(play), [FULL])
    assert (result.reward, result.stop_reason) == (0.75, StopReason.MAX_LENGTH)


async def test_a_full_context_among_calls_side_by_side_is_a_valid_end() -> None:
    async def play(chat: Chat) -> Outcome:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(chat.complete(HELLO))
        return Outcome()

    result = await result_of(Scored(play, lambda: Score(reward=0.5)), [FULL, FULL])
    assert (result.reward, result.stop_reason) == (0.5, StopReason.MAX_LENGTH)


@pytest.mark.parametrize(
    "failure", [BackendUnavailable("away"), GenerationFailed("call_timeout", "slow"), GenerationFailed("http_500", "")]
)
@pytest.mark.parametrize("play", [one_call, swallow])
async def test_a_model_that_fails_is_infra_whatever_the_environment_makes_of_it(play: Play, failure: Exception) -> None:
    result = await result_of(Scored(play, lambda: Score(reward=0.0)), [failure])

    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
    assert type(failure).__name__ in str(result.detail)


@pytest.mark.parametrize("play", [one_call, swallow])
async def test_a_lost_lease_is_raised_whatever_the_environment_makes_of_it(play: Play) -> None:
    with pytest.raises(LeaseLost):
        await result_of(Plain(play), [LeaseLost("attempt 2 is current")])


async def test_a_request_that_is_not_allowed_is_an_env_error() -> None:
    assert (await result_of(Plain(one_call), [InvalidInput("no streaming")])).reason is InvalidReason.ENV_ERROR


async def test_an_environment_that_asks_for_more_than_its_script_is_an_env_error() -> None:
    result = await result_of(Plain(two_calls), ["only one"])

    assert result.reason is InvalidReason.ENV_ERROR
    assert ScriptEnded.__name__ in str(result.detail)


async def test_secrets_do_not_reach_the_detail() -> None:
    secret = "s3cr3t" * 5
    result = await result_of(Plain(failing(RuntimeError(f"http://127.0.0.1:1/a/{secret}/v1 is down"))))

    assert secret not in str(result.detail)


async def test_the_detail_is_bounded() -> None:
    assert len(str((await result_of(Plain(failing(RuntimeError("x" * 100_000))))).detail)) < 4000


async def test_tokens_that_were_asked_for_and_did_not_come_are_infra_and_a_script_has_some() -> None:
    async def play(chat: Chat) -> Outcome:
        reply = await chat.complete(HELLO, return_token_ids=True)
        return Outcome(reward=1.0, metrics={"sampled": len(reply.tokens.sampled_ids) if reply.tokens else 0})

    class Tokenless(ScriptedChat):
        async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
            return await super().complete(messages)

    assert (await result_of(Plain(play), ["hi"])).metrics == {"sampled": 2}
    result = await play_scored(Plain(play), TASK, WatchedChat(Tokenless(["hi"])))
    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)


async def test_a_group_that_is_none_is_a_reward_error() -> None:
    task = Task(id="group-t", metadata={"turnmill_group": {"members": [{"reward": "half"}]}})
    result = await play_scored(Plain(one_call), task, WatchedChat(ScriptedChat([])), reward_range=(0.0, 1.0))
    assert (result.reward, result.reason) == (None, InvalidReason.REWARD_ERROR)
