"""The check before a run: a part of the reward that gives gold nothing, and scripts whose tokens are asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.unit.environment.test_preflight import request
from turnmill.environment.base import Chat, Environment, Message, Outcome, Score, ScriptedChat, opening_messages
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.preflight import preflight
from turnmill.errors import GenerationFailed
from turnmill.records import FinishReason, InvalidReason, PreflightReport, Reply, Task

TASK = Task(id="t_0", metadata={"prompt": "Say it.", "answer": "yes"})


class Parts(Environment):
    """One turn; the reward has a part for the answer and one for its form."""

    def __init__(self, weights: Any, answer_part: float = 0.0) -> None:
        self._weights = weights
        self._answer_part = answer_part

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return dict(self._weights)

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await chat.complete(opening_messages(task), return_token_ids=True)
        return Outcome()

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        parts = {"answer": self._answer_part, "form": float(messages[-1]["content"] == "yes")}
        return Score(reward=0.2 * parts["form"] + parts["answer"] * 0.8, metrics=parts)


async def report_on(environment: Environment) -> PreflightReport:
    return await preflight(environment, [TASK], request(), playing=lambda what: None)


async def test_a_main_part_that_gives_gold_nothing_fails_although_another_tells_it_from_garbage() -> None:
    report = await report_on(Parts({"answer": 0.8, "form": 0.2}))
    assert report.mean_rewards == {"gold": 0.2, "garbage": 0.0}
    (failed,) = report.failed
    assert failed.name == "gold" and "of the reward's parts answer weighs most, and gives 0" in failed.detail


@pytest.mark.parametrize(
    ("weights", "answer_part"), [({}, 0.0), ({"answer": 0.8, "form": 0.2}, 0.5), ({"answer": 0.5, "form": 0.5}, 0.0)]
)
async def test_parts_that_give_gold_something_pass(weights: dict[str, float], answer_part: float) -> None:
    assert (await report_on(Parts(weights, answer_part))).failed == ()


async def test_weights_that_can_not_be_read_are_in_the_report() -> None:
    (failed,) = (await report_on(Parts(None))).failed
    assert failed.name == "tasks" and "reward_weights fails: TypeError" in failed.detail


async def test_a_script_counts_each_byte_as_a_token() -> None:
    answer = await ScriptedChat(["hé"]).complete([{"role": "user", "content": "x"}], return_token_ids=True)
    assert answer.tokens is not None
    assert bytes(answer.tokens.sampled_ids) == "hé".encode() and answer.tokens.logprobs == [0.0] * 3
    assert b'"content":"x"' in bytes(answer.tokens.prompt_ids)
    assert (await ScriptedChat(["h"]).complete([])).tokens is None


async def test_tokens_that_were_asked_for_and_did_not_come_are_infra_whatever_the_environment_makes_of_it() -> None:
    class Forgetful:
        async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
            return Reply(message={"role": "assistant", "content": "yes"}, finish_reason=FinishReason.STOP)

    class Careless(Parts):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            try:
                return await super().play(task, chat)
            except GenerationFailed:
                return Outcome(reward=1.0)

    result = await play_scored(Careless({}), TASK, WatchedChat(Forgetful()))
    assert result.reward is None and result.reason is InvalidReason.INFRA
    assert "without its tokens" in (result.detail or "")
