"""The game style: reset and step, from which a rollout follows."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from turnmill.environment.base import ScriptedChat, ScriptedTurn
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.games import End, Game, Observation, Opening
from turnmill.environment.outcomes import Rollout
from turnmill.environment.rewards import reward
from turnmill.environment.tools import call_of
from turnmill.errors import GenerationFailed
from turnmill.records import InvalidReason, Reply, RolloutResult, StopReason, Task

TASK = Task(id="t_0", metadata={"prompt": "Count to 3.", "answer": "3"})


class Counter:
    def __init__(self) -> None:
        self.said = 0


def share(rollout: Rollout) -> float:
    said: int = rollout.state.said
    return said / 3


class Counting(Game[Counter]):
    """Say 1, then 2, then 3."""

    max_turns = 4
    rewards = (reward(share),)

    def reset(self, task: Task) -> Opening[Counter] | Awaitable[Opening[Counter]]:
        return Opening(state=Counter(), messages=[{"role": "user", "content": task.metadata["prompt"]}])

    def step(self, state: Counter, reply: Reply) -> Observation | End | Awaitable[Observation | End]:
        if reply.content == str(state.said + 1):
            state.said += 1
        return End(metrics={"said": state.said}) if state.said == 3 else f"so far: {state.said}"


class Slowly(Counting):
    """The same, async."""

    async def reset(self, task: Task) -> Opening[Counter]:
        await asyncio.sleep(0)
        opening = super().reset(task)
        assert isinstance(opening, Opening)
        return opening

    async def step(self, state: Counter, reply: Reply) -> Observation | End:
        await asyncio.sleep(0)
        told: Any = super().step(state, reply)
        return told  # type: ignore[no-any-return]


async def play(game: Game[Any], *turns: ScriptedTurn | Exception) -> tuple[RolloutResult, ScriptedChat]:
    chat = ScriptedChat(turns)
    return await play_scored(game, TASK, WatchedChat(chat), reward_range=(0, 1)), chat


@pytest.mark.parametrize("kind", [Counting, Slowly])
async def test_a_game_is_played_to_its_end_and_scored_by_its_state(kind: type[Counting]) -> None:
    result, chat = await play(kind(), "1", "2", "3")
    assert (result.reward, result.stop_reason) == (1.0, StopReason.END_OF_CONVERSATION)
    assert result.metrics == {"said": 3.0, "share": 1.0}
    assert [message["content"] for message in chat.calls[-1]] == ["Count to 3.", "1", "so far: 1", "2", "so far: 2"]


async def test_turns_that_run_out_and_a_full_context_are_scored_by_the_state() -> None:
    result, _ = await play(Counting(), "1", "x", "y", "z")
    assert (result.reward, result.stop_reason) == (1 / 3, StopReason.MAX_TURNS)
    result, _ = await play(Counting(), "1", "2", GenerationFailed("context_length_exceeded", "full"))
    assert (result.reward, result.stop_reason) == (2 / 3, StopReason.MAX_LENGTH)


async def test_games_side_by_side_have_states_of_their_own() -> None:
    game = Counting()
    results = await asyncio.gather(play(game, "1", "2", "3"), play(game, "x", "x", "x", "x"))
    assert [result.reward for result, _ in results] == [1.0, 0.0]


async def test_a_game_may_offer_tools_and_answer_their_calls() -> None:
    class Asking(Counting):
        def reset(self, task: Task) -> Opening[Counter]:
            schema = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
            return Opening(state=Counter(), messages=[{"role": "user", "content": "go"}], tools=[schema])

        def step(self, state: Counter, reply: Reply) -> Observation | End:
            if not reply.tool_calls:
                return End(reward=None)
            state.said += len(reply.tool_calls)
            return [
                {"role": "tool", "tool_call_id": call["id"], "content": str(state.said)} for call in reply.tool_calls
            ]

    result, chat = await play(Asking(), call_of("count"), call_of("count"), "done")
    assert result.reward == 2 / 3
    assert [message["role"] for message in chat.calls[-1]] == ["user", "assistant", "tool", "assistant", "tool"]


async def test_a_step_that_returns_no_observation_is_the_environment_s_fault() -> None:
    class Silent(Counting):
        def __init__(self, told: object) -> None:
            self._told = told

        def step(self, state: Counter, reply: Reply) -> Any:
            return self._told

    for told in (None, 5, [], [5], True):
        result, _ = await play(Silent(told), "1")
        assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR)
        assert "step must return a text, messages, a Step or an End" in str(result.detail)


async def test_an_error_of_the_model_s_side_is_not_swallowed() -> None:
    result, _ = await play(Counting(), "1", GenerationFailed("http_500", "away"))
    assert (result.reward, result.reason) == (None, InvalidReason.INFRA)
