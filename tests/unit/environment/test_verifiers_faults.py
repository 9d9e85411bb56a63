"""What verifiers passes over in silence, each beside what comes of the same environment here."""

from typing import Any

import pytest

from tests.unit.environment.verifiers_house import (
    TokenChat,
    load_package,
    needs_verifiers,
    plain_output,
    played,
    reply,
    task,
    tool_call,
)
from turnmill.errors import BackendUnavailable, GenerationFailed
from turnmill.records import InvalidReason

pytestmark = needs_verifiers
ROW = {"prompt": [{"role": "user", "content": "Say it."}], "example_id": 0, "answer": "hello", "info": {}}


@pytest.mark.parametrize(
    "failure", [GenerationFailed("internal_error", "no model"), BackendUnavailable("no proxy")], ids=["model", "proxy"]
)
async def test_a_rollout_whose_model_fails_has_no_reward_where_verifiers_gives_it_full_marks(
    failure: Exception,
) -> None:
    plain = await plain_output(load_package("kind-words"), ROW, (500, "no model"))
    assert plain["reward"] == 1.0 and plain["error"] is not None

    result = await played(load_package("kind-words"), task(), TokenChat(failure))
    assert result.reward is None and result.reason is InvalidReason.INFRA
    assert str(failure) in (result.detail or "")


@pytest.mark.parametrize("function", ["careless", "careless_later"])
async def test_a_reward_function_that_raises_is_an_error_where_verifiers_gives_zero(function: str) -> None:
    plain = await plain_output(load_package("kind-words", scored_by=function), ROW, (200, "hello"))
    assert plain["reward"] == 0.0 and plain["error"] is None and plain["metrics"][function] == 0.0

    result = await played(load_package("kind-words", scored_by=function), task(info={}), TokenChat(reply()))
    assert result.reward is None and result.reason is InvalidReason.REWARD_ERROR
    assert f"reward function {function} raised KeyError: 'score'" in (result.detail or "")
    assert "kind_words.py" in (result.detail or "")


async def test_a_reward_that_is_no_number_is_an_error_where_verifiers_gives_zero() -> None:
    env = load_package("kind-words", scored_by="careless")
    plain = await plain_output(env, {**ROW, "info": {"score": "high"}}, (200, "hello"))
    assert plain["reward"] == 0.0 and plain["error"] is None

    result = await played(env, task(info={"score": "nan"}), TokenChat(reply()))
    assert result.reason is InvalidReason.REWARD_ERROR
    assert "reward function careless can't be used: its value must be finite, not nan" in (result.detail or "")


async def test_missing_tokens_are_an_error_where_verifiers_says_nothing() -> None:
    plain = await plain_output(load_package("kind-words"), ROW, (200, "hello"))
    assert plain["reward"] == 1.0 and plain["error"] is None
    assert [step["tokens"] for step in plain["trajectory"]] == [None]

    result = await played(load_package("kind-words"), task(), TokenChat(reply(has_tokens=False)))
    assert result.reward is None and result.reason is InvalidReason.INFRA
    assert "without its tokens" in (result.detail or "")


async def test_an_error_that_verifiers_keeps_in_the_state_is_the_environments() -> None:
    env = load_package("shop-tools", stop_on_errors=True)
    chat = TokenChat(reply(None, tool_calls=[tool_call("price", {"item": "melon"})]))
    result = await played(env, task(answer="7"), chat)
    assert result.reward is None and result.reason is InvalidReason.ENV_ERROR
    assert "ToolCallError <- KeyError: 'melon'" in (result.detail or "")


@pytest.mark.parametrize("given", [None, "high"], ids=["nothing", "text"])
async def test_a_rubric_that_gives_no_number_is_an_error(given: object) -> None:
    from verifiers.rubrics.rubric import Rubric

    class Odd(Rubric):
        async def score_rollout(self, state: Any) -> None:
            state["reward"] = given

    env = load_package("kind-words")
    env.rubric = Odd(funcs=[lambda: 1.0])
    result = await played(env, task(), TokenChat(reply()))
    assert result.reason is InvalidReason.REWARD_ERROR
    assert f"the reward of the rubric must be a number, not {given!r}" in (result.detail or "")


async def test_a_rubric_that_raises_is_an_error_of_the_reward() -> None:
    from verifiers.rubrics.rubric import Rubric

    class Broken(Rubric):
        async def score_rollout(self, state: Any) -> None:
            raise LookupError("no such judge")

    env = load_package("kind-words")
    env.rubric = Broken(funcs=[lambda: 1.0])
    result = await played(env, task(), TokenChat(reply()))
    assert result.reason is InvalidReason.REWARD_ERROR
    assert "the rubric raised LookupError: no such judge" in (result.detail or "")


async def test_weights_that_add_up_to_one_stay_within_the_range() -> None:
    from verifiers.rubrics.rubric import Rubric

    weights = [0.05, 0.55, 0.3, 0.1]
    assert sum(weights) > 1.0
    env = load_package("kind-words")
    env.rubric = Rubric(funcs=[lambda: 1.0 for _ in weights], weights=weights)
    assert (await played(env, task(), TokenChat(reply()))).reward == 1.0
