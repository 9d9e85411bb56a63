"""What single turns are worth: who may say it, and under which call's id it is reported."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.environment.verifiers_house import TokenChat, needs_verifiers, reply, signals_kept, task
from turnmill.environment import (
    Chat,
    End,
    Environment,
    Game,
    Message,
    Observation,
    Opening,
    Outcome,
    Rollout,
    Score,
    ScriptedChat,
    Step,
    Turn,
    metric,
    reward,
)
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.rewards import RewardFunction
from turnmill.environment.verifiers_adapter import adapt
from turnmill.errors import GenerationFailed
from turnmill.records import FinishReason, InvalidReason, Reply, RolloutResult, Task

TASK = Task(id="t_0", metadata={"prompt": "hello"})
FULL = GenerationFailed("context_length_exceeded", "full")


class Two(Environment):
    """Two turns."""

    def __init__(self, *functions: RewardFunction) -> None:
        self.rewards = functions

    async def play(self, task: Task, chat: Chat) -> Outcome:
        messages: list[Message] = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            messages.append((await chat.complete(messages)).message)
            messages.append({"role": "user", "content": "more"})
        return Outcome()


class Graded(Two):
    """Says itself what its turns are worth."""

    def __init__(self, turn_rewards: Any, *functions: RewardFunction) -> None:
        super().__init__(*functions)
        self.turn_rewards = turn_rewards

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await super().play(task, chat)
        return Outcome(reward=None if self.rewards else 0.5, turn_rewards=self.turn_rewards)


class Scored(Two):
    """Its `score` does."""

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        return Score(reward=1.0, turn_rewards=[0.25, 0.75])


async def played(environment: Environment, *turns: str | Exception) -> RolloutResult:
    chat = WatchedChat(ScriptedChat(turns or ("no", "yes")))
    return await play_scored(environment, TASK, chat, reward_range=(0.0, 1.0))


def brief(rollout: Rollout, turn: Turn) -> float:
    return 1.0 if len(turn.reply.content) < 3 else 0.0


def polite(rollout: Rollout, turn: Turn) -> float:
    return 0.5


def whole(rollout: Rollout) -> float:
    return 1.0


async def test_a_turn_is_worth_the_weighted_sum_of_the_functions_per_turn() -> None:
    functions = (
        reward(whole, weight=0.25),
        reward(brief, weight=0.5, per="turn"),
        reward(polite, weight=0.25, per="turn"),
        metric(lambda rollout, turn: 7, per="turn", name="seven"),
    )
    result = await played(Two(*functions))
    assert result.turn_rewards == {"call-1": 0.625, "call-2": 0.125}
    assert result.reward == pytest.approx(0.25 + 0.5 * 0.5 + 0.25 * 0.5)


async def test_without_a_function_per_turn_no_turn_is_worth_anything() -> None:
    assert (await played(Two(reward(whole), metric(brief, per="turn")))).turn_rewards == {}


async def test_a_full_context_leaves_the_turns_before_it_their_worth() -> None:
    result = await played(Two(reward(brief, per="turn")), "no", FULL)
    assert (result.reward, result.turn_rewards) == (1.0, {"call-1": 1.0})


@pytest.mark.parametrize("said", [{"call-2": -3}, [0.0, 1], (0.5, 0.25)])
async def test_play_may_say_it_by_call_or_for_all_turns_in_order(said: Any) -> None:
    result = await played(Graded(said))
    expected = said if isinstance(said, dict) else {"call-1": said[0], "call-2": said[1]}
    assert (result.reward, result.turn_rewards) == (0.5, expected)


async def test_so_may_a_score() -> None:
    assert (await played(Scored())).turn_rewards == {"call-1": 0.25, "call-2": 0.75}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"call-3": 1.0}, "no call that was answered has the id 'call-3'"),
        ([1.0], "turn_rewards has 1 numbers, and 2 calls were answered"),
        ({"call-1": float("nan")}, "turn_rewards of call-1 must be finite"),
        ([0.0, "1"], "turn_rewards[1] must be a number"),
        ({1: 0.5}, "a call id must be a text"),
        ("ab", "turn_rewards must be numbers by call id, or one a turn"),
    ],
)
async def test_what_fits_no_turn_or_is_no_number_has_a_reason_and_no_reward(said: Any, text: str) -> None:
    result = await played(Graded(said))
    assert result.reward is None and text in (result.detail or "")


async def test_it_comes_from_one_place() -> None:
    result = await played(Graded({"call-1": 1.0}, reward(brief, per="turn")))
    assert result.reason is InvalidReason.REWARD_ERROR and "it must come from one of them" in (result.detail or "")


async def test_a_chat_that_does_not_name_its_calls_leaves_their_turns_without_it() -> None:
    unnamed = [Reply(message={"role": "assistant", "content": text}, finish_reason=FinishReason.STOP) for text in "ab"]
    chat = WatchedChat(TokenChat(*unnamed))
    result = await play_scored(Two(reward(brief, per="turn")), TASK, chat, reward_range=(0.0, 1.0))
    assert (result.reward, result.turn_rewards) == (1.0, {})


class Steps(Game[list[str]]):
    """Each step but one says what the reply was worth."""

    max_turns = 3
    rewards = (reward(whole),)

    def reset(self, task: Task) -> Opening[list[str]]:
        return Opening(state=[], messages=[{"role": "user", "content": "Go."}])

    def step(self, state: list[str], reply: Reply) -> Observation | Step | End:
        state.append(reply.content)
        if reply.content == "end":
            return End(turn_reward=1.0)
        return "on" if reply.content == "nothing" else Step(told="on", turn_reward=-len(state) / 4)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["a", "nothing", "end"], {"call-1": -0.25, "call-3": 1.0}),
        (["a", "b", "c"], {"call-1": -0.25, "call-2": -0.5, "call-3": -0.75}),
        (["a", FULL], {"call-1": -0.25}),
    ],
)
async def test_the_steps_of_a_game_say_what_replies_were_worth(
    turns: list[str | Exception], expected: dict[str, float]
) -> None:
    result = await played(Steps(), *turns)
    assert (result.reward, result.turn_rewards) == (1.0, expected)


@needs_verifiers
async def test_steps_of_a_verifiers_trajectory_keep_the_rewards_that_they_were_given() -> None:
    import verifiers as vf
    from datasets import Dataset

    class Graded(vf.MultiTurnEnv):  # type: ignore[misc]
        """Two turns, of which the first is given a reward."""

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [vf.UserMessage(content="again")]

        async def add_trajectory_step(self, state: Any, trajectory_step: Any) -> None:
            await super().add_trajectory_step(state, trajectory_step)
            if len(state["trajectory"]) == 1:
                trajectory_step["reward"] = 0.25

    def right(completion: Any, answer: str) -> float:
        return float(completion[-1].content == answer)

    with signals_kept():
        env = Graded(
            dataset=Dataset.from_list([{"question": "unused", "answer": "1"}]),
            rubric=vf.Rubric(funcs=[right]),
            max_turns=2,
        )
    named = [
        Reply(message=each.message, finish_reason=each.finish_reason, tokens=each.tokens, call_id=f"t_0_{index}")
        for index, each in enumerate((reply("5"), reply("7")))
    ]
    chat = WatchedChat(TokenChat(*named))
    result = await play_scored(adapt(env), task("Guess.", answer="7"), chat, reward_range=(0.0, 1.0))
    assert (result.reward, result.turn_rewards) == (1.0, {"t_0_0": 0.25})
