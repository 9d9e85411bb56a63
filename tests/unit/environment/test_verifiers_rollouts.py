"""Environments of verifiers play tasks of the data through the chat of a rollout."""

import asyncio
import logging
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
from turnmill.environment.verifiers_adapter import adapt
from turnmill.errors import GenerationFailed, InvalidInput, LeaseLost
from turnmill.records import FinishReason, InvalidReason, StopReason

pytestmark = needs_verifiers
FULL = GenerationFailed("context_length_exceeded", "full")


# ---------------------------------------------------------------- the three kinds


async def test_a_single_turn_is_one_call_and_a_natural_end() -> None:
    chat = TokenChat(reply("hello"))
    result = await played(load_package("kind-words"), task("Say hello."), chat)
    assert result.reward == 1.0 and result.stop_reason is StopReason.END_OF_CONVERSATION
    assert result.metrics == {"polite": 1.0, "num_turns": 1.0}
    # Nothing about sampling: the run's own applies.
    assert chat.calls == [([{"role": "user", "content": "Say hello."}], {"return_token_ids": True})]


async def test_several_turns_are_one_conversation() -> None:
    chat = TokenChat(reply("5"), reply("7"))
    result = await played(load_package("number-guess"), task("Guess.", answer="7"), chat)
    assert result.reward == 1.0 and result.stop_reason is StopReason.END_OF_CONVERSATION
    assert result.metrics == {"reward": 1.0, "hints": 1.0, "num_turns": 2.0}
    assert [messages for messages, _ in chat.calls][1] == [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
    ]


async def test_the_last_turn_allowed_is_told_as_such() -> None:
    result = await played(
        load_package("number-guess", max_turns=2), task("Guess.", answer="7"), TokenChat(reply("5"), reply("6"))
    )
    assert result.reward == 0.0 and result.stop_reason is StopReason.MAX_TURNS


async def test_tools_are_sent_with_each_call_and_their_answers_come_back() -> None:
    call = tool_call("price", {"item": "apple"})
    chat = TokenChat(reply(None, tool_calls=[call]), reply("3"))
    result = await played(load_package("shop-tools"), task("How much is an apple?", answer="3"), chat)
    assert result.reward == 1.0 and result.metrics["price_calls"] == 1.0
    opening = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "How much is an apple?"}]
    assert chat.calls[0][0] == opening
    # The reply goes back as it came.
    assert chat.calls[1][0] == [
        *opening,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    ]
    tools = [params["tools"] for _, params in chat.calls]
    assert tools[0] == tools[1] and tools[0][0]["type"] == "function"
    function = tools[0][0]["function"]
    assert function["name"] == "price" and list(function["parameters"]["properties"]) == ["item"]


async def test_a_tool_call_that_fails_is_an_answer_of_the_tool() -> None:
    calls = [tool_call("price", {"item": "melon"}, "aaaaaaaaa"), tool_call("price", {"item": "pear"}, "bbbbbbbbb")]
    chat = TokenChat(reply(None, tool_calls=calls), reply("4"))
    result = await played(load_package("shop-tools"), task("How much?", answer="4"), chat)
    assert result.reward == 1.0
    assert [message["content"] for message in chat.calls[1][0][-2:]] == ["'melon'", "4"]


async def test_one_environment_plays_many_tasks_at_once() -> None:
    env = load_package("number-guess")
    environment_of = adapt(env)
    outcomes = await asyncio.gather(
        *(environment_of.play(task("Guess.", answer=str(n)), TokenChat(reply("5"), reply(str(n)))) for n in range(1, 5))
    )
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4


async def test_a_failing_reward_function_spoils_no_rollout_beside_it() -> None:
    env = load_package("kind-words", scored_by="careless_later")
    good, bad = await asyncio.gather(
        played(env, task(info={"score": 0.5}), TokenChat(reply())), played(env, task(info={}), TokenChat(reply()))
    )
    assert good.reward == 0.5 and bad.reason is InvalidReason.REWARD_ERROR


async def test_state_and_rewards_see_the_exact_tokens() -> None:
    from verifiers.rubrics.rubric import Rubric

    seen: list[Any] = []

    def tokens_of(state: Any) -> float:
        seen.extend(step["tokens"] for step in state["trajectory"])
        seen.append(dict(state["usage"]))
        return 1.0

    env = load_package("kind-words")
    env.rubric = Rubric(funcs=[tokens_of])
    assert (await played(env, task(), TokenChat(reply()))).reward == 1.0
    step, usage = seen
    assert step["prompt_ids"] == [1, 2, 3] and step["prompt_mask"] == [0, 0, 0]
    assert step["completion_ids"] == [4, 5] and step["completion_mask"] == [1, 1]
    assert step["completion_logprobs"] == [-0.5, -0.25]
    assert usage["input_tokens"] == 3 and usage["output_tokens"] == 2


@pytest.mark.parametrize(
    ("package", "answer", "said"),
    [
        ("kind-words", "hello", ["hello"]),
        ("number-guess", "7", ["5", "7"]),
        ("number-guess", "7", ["5", "6", "8"]),
        ("shop-tools", "3", ["3"]),
        ("always-zero-mended", '{"endpoint": "/", "params": {}}', ['<action>{"endpoint": "/"}</action>']),
    ],
)
async def test_reward_and_metrics_are_those_that_verifiers_gives(package: str, answer: str, said: list[str]) -> None:
    row = {"prompt": [{"role": "user", "content": "Go."}], "example_id": 0, "answer": answer}
    plain = await plain_output(load_package(package), row, *((200, text) for text in said))
    result = await played(load_package(package), task("Go.", answer=answer), TokenChat(*map(reply, said)))
    assert result.reward == pytest.approx(plain["reward"]) and result.metrics == pytest.approx(plain["metrics"])


# ---------------------------------------------------------------- ends


async def test_a_full_context_is_a_valid_end_that_is_scored() -> None:
    result = await played(load_package("number-guess"), task("Guess.", answer="7"), TokenChat(reply("5"), FULL))
    assert result.reward == 0.0 and result.stop_reason is StopReason.MAX_LENGTH


async def test_a_context_that_the_opening_fills_is_scored_as_silence() -> None:
    result = await played(load_package("number-guess"), task("Guess.", answer="7"), TokenChat(FULL))
    assert result.reward == 0.0 and result.stop_reason is StopReason.MAX_LENGTH
    assert result.metrics["num_turns"] == 0.0


async def test_a_reply_that_was_cut_is_an_end_by_length() -> None:
    cut = reply("hel", finish_reason=FinishReason.LENGTH)
    result = await played(load_package("kind-words"), task(), TokenChat(cut))
    assert result.reward == 1.0 and result.stop_reason is StopReason.MAX_LENGTH


async def test_an_empty_reply_is_what_the_policy_said() -> None:
    result = await played(load_package("number-guess"), task(answer="7"), TokenChat(reply(""), reply(""), reply("7")))
    assert result.reward == 1.0


async def test_an_error_of_the_environments_code_names_its_place() -> None:
    result = await played(load_package("number-guess"), task("Guess.", answer="seven"), TokenChat(reply("5")))
    assert result.reason is InvalidReason.ENV_ERROR
    assert "ValueError" in (result.detail or "") and "number_guess.py" in (result.detail or "")


async def test_a_lost_lease_ends_the_rollout_as_such() -> None:
    with pytest.raises(LeaseLost):
        await played(load_package("kind-words"), task(), TokenChat(LeaseLost("gone")))


async def test_a_request_that_is_refused_is_the_environments_error() -> None:
    refusal = InvalidInput("the proxy refused the request (unsupported_value): temperature = 0.1 is not served")
    result = await played(load_package("kind-words"), task(), TokenChat(refusal))
    assert result.reason is InvalidReason.ENV_ERROR and "temperature = 0.1" in (result.detail or "")


async def test_a_rollout_that_is_cancelled_is_cleaned_up() -> None:
    from verifiers.decorators import cleanup
    from verifiers.envs.singleturn_env import SingleTurnEnv

    cleaned: list[str] = []

    class Clean(SingleTurnEnv):
        @cleanup
        async def note(self, state: Any) -> None:
            cleaned.append(state["prompt"][0].content)

    class Silent(TokenChat):
        async def complete(self, messages: Any, **params: Any) -> Any:
            await asyncio.Event().wait()

    plain = load_package("kind-words")
    env = Clean(dataset=plain.dataset_source, rubric=plain.rubric)
    playing = asyncio.create_task(played(env, task("Say it."), Silent()))
    await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert cleaned == ["Say it."]


# ---------------------------------------------------------------- what the run decides


async def test_sampling_arguments_of_the_environment_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    sampling = {"temperature": 0.1, "max_tokens": 5, "stop": ["\n"], "extra_body": {"min_p": 0.1}}
    env = load_package("kind-words", sampling_args=sampling)
    chat = TokenChat(reply())
    with caplog.at_level(logging.WARNING):
        result = await played(env, task(), chat)
    assert result.reward == 1.0
    assert chat.calls[0][1] == {"stop": ["\n"], "return_token_ids": True}
    assert "sampling_args of the environment are not used" in caplog.text
    assert "max_tokens, min_p, temperature" in caplog.text


async def test_what_an_environment_asks_for_in_one_call_is_sent() -> None:
    env = load_package("kind-words")
    chat = TokenChat(reply(), reply())

    async def ask_again(state: Any) -> float:
        asked = {"temperature": 0.0, "n": 1, "seed": None, "extra_body": {"top_k": 4}}
        await env.get_model_response(state, state["prompt"], sampling_args=asked)
        return 1.0

    env.rubric.add_reward_func(ask_again, weight=0.0)
    assert (await played(env, task(), chat)).reward == 1.0
    # The proxy says whether it serves that.
    assert chat.calls[1][1] == {"temperature": 0.0, "top_k": 4, "return_token_ids": True}


async def test_a_time_limit_of_the_environment_gives_way_to_the_runs(caplog: pytest.LogCaptureFixture) -> None:
    env = load_package("kind-words", timeout_seconds=0.0)
    with caplog.at_level(logging.WARNING):
        result = await played(env, task(), TokenChat(reply()))
    assert result.reward == 1.0 and "training_timeout bounds a rollout" in caplog.text
