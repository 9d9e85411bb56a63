"""Tools: what the model is told of them, and what becomes of its calls."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from turnmill.environment import Chat, Environment, Outcome
from turnmill.environment.base import Message, ScriptedChat, ScriptedTurn
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.tools import Talk, Tool, ToolError, ToolLimits, call_of, talk
from turnmill.errors import GenerationFailed
from turnmill.records import InvalidReason, StopReason, Task

HELLO: list[Message] = [{"role": "user", "content": "hello"}]
LIMITS = ToolLimits()


@dataclass
class Point:
    x: int
    y: int = 0


def find(
    query: str,
    limit: int = 5,
    order: Literal["new", "old"] = "new",
    near: Point | None = None,
    tags: tuple[str, ...] = (),
) -> list[str]:
    """Look for what
    matters.

    More for people.

    Args:
        query: what to look for,
            in plain words
        limit (int): most results
    """
    return [f"{query}/{limit}/{order}/{near}/{tags}"]


def divide(a: float, b: float) -> float:
    """Divide."""
    if b == 0:
        raise ToolError("Error: b is 0.")
    return a / b


def boom() -> None:
    """Fail."""
    raise KeyError("inside")


def calls(*functions: tuple[str, Mapping[str, Any] | str]) -> ScriptedTurn:
    """One message that calls several tools."""
    made = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for index, (name, given) in enumerate(functions)
    ]
    return {"content": "", "tool_calls": made}


async def talked(*turns: ScriptedTurn | Exception, limits: ToolLimits = LIMITS, functions: Any = None) -> Talk:
    return await talk(ScriptedChat(turns), HELLO, functions or [find, divide, boom], limits=limits)


def answers(talk: Talk) -> list[str]:
    return [message["content"] for message in talk.messages if message["role"] == "tool"]


def test_a_tool_s_schema_comes_from_its_signature_and_its_docstring() -> None:
    function = Tool.of(find).schema["function"]
    assert (function["name"], function["description"]) == ("find", "Look for what matters.")
    parameters = function["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["query"])
    properties = parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "what to look for, in plain words"}
    assert properties["limit"] == {"type": "integer", "description": "most results", "default": 5}
    assert properties["order"]["enum"] == ["new", "old"] and properties["tags"]["items"] == {"type": "string"}
    assert parameters["$defs"]["Point"]["required"] == ["x"]
    assert json.loads(json.dumps(Tool.of(find).schema)) == Tool.of(find).schema


def test_a_function_that_can_not_be_a_tool_is_refused() -> None:
    def untyped(x) -> None:  # type: ignore[no-untyped-def]
        ...

    def many(*values: int) -> None: ...

    def alien(x: ScriptedChat) -> None: ...

    def wrong(x: int) -> None:
        """Do.

        Args:
            y: nothing
        """

    for function, message in (
        (untyped, "x has no type"),
        (many, "can't be given by name"),
        (alien, "ScriptedChat"),
        (wrong, "describes y, no parameter"),
    ):
        with pytest.raises(TypeError, match=message):
            Tool.of(function)


async def test_the_model_calls_a_tool_hears_its_answer_and_ends_by_calling_none() -> None:
    ended = await talked(call_of("divide", a=1, b=4), "0.25")
    assert [message["role"] for message in ended.messages] == ["user", "assistant", "tool", "assistant"]
    assert ended.messages[2] == {"role": "tool", "tool_call_id": "call00001", "content": "0.25"}
    assert (ended.num_turns, ended.num_calls, ended.num_failed_calls) == (2, 1, 0)
    assert ended.stop_reason is StopReason.END_OF_CONVERSATION
    assert ended.outcome("state").metrics == {"turns": 2, "tool_calls": 1, "failed_tool_calls": 0}


async def test_the_schemas_go_with_each_call_and_so_do_further_parameters() -> None:
    class Noting(ScriptedChat):
        async def complete(self, messages: Any, **params: Any) -> Any:
            seen.append(params)
            return await super().complete(messages, **params)

    seen: list[dict[str, Any]] = []
    await talk(Noting([call_of("divide", a=1, b=1), "ok"]), HELLO, [divide], tool_choice="auto")
    assert seen == [{"tools": [Tool.of(divide).schema], "tool_choice": "auto"}] * 2


async def test_calls_of_one_reply_run_side_by_side_and_are_answered_in_its_order() -> None:
    first_waits, order = asyncio.Event(), []

    async def wait(name: str) -> str:
        """Wait."""
        if name == "a":
            await first_waits.wait()
        order.append(name)
        first_waits.set()
        return name

    ended = await talked(calls(("wait", {"name": "a"}), ("wait", {"name": "b"})), "ok", functions=[wait])
    assert order == ["b", "a"] and answers(ended) == ["a", "b"]
    assert [message["tool_call_id"] for message in ended.messages[2:4]] == ["call00000", "call00001"]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("nothing", {}, "Error: there is no tool 'nothing'; tools: find, divide, boom."),
        ("divide", {"a": 1, "b": 0}, "Error: b is 0."),
        ("divide", {"a": 1}, "missing required field `b`"),
        ("divide", {"a": 1, "b": "two"}, "Expected `float`, got `str` - at `$.b`"),
        ("divide", {"a": 1, "b": 2, "c": 3}, "unknown field `c`"),
        ("divide", "{not json", "Error: the arguments of divide do not fit: JSON is malformed"),
        ("divide", "[1, 2]", "Expected `object`, got `array`"),
        ("divide", "[" * 100_000, "Error: the arguments of divide do not fit"),
        ("find", {"query": "x", "order": "best"}, "Invalid enum value 'best'"),
    ],
)
async def test_what_the_model_does_wrong_is_told_to_it_and_the_talk_goes_on(
    name: str, arguments: Any, text: str
) -> None:
    ended = await talked(calls((name, arguments)), "sorry")
    assert text in answers(ended)[0] and ended.messages[-1]["content"] == "sorry"
    assert (ended.num_calls, ended.num_failed_calls) == (1, 1)


async def test_arguments_arrive_in_their_types_and_values_go_back_as_json() -> None:
    ended = await talked(call_of("find", query="x", near={"x": 1}), "ok")
    (answer,) = answers(ended)
    (text,) = json.loads(answer)
    assert text == "x/5/new/Point(x=1, y=0)/()"


class Playing(Environment):
    """Talks with `functions` within `limits`."""

    def __init__(self, *functions: Any, limits: ToolLimits = LIMITS) -> None:
        self._functions, self._limits = functions, limits

    async def play(self, task: Task, chat: Chat) -> Outcome:
        ended = await talk(chat, HELLO, self._functions, limits=self._limits)
        return Outcome(reward=0.0, stop_reason=ended.stop_reason)


async def test_what_a_tool_raises_by_itself_is_the_environment_s_fault() -> None:
    async def slow() -> None:
        """Wait."""
        await asyncio.Event().wait()

    async def own_timeout() -> None:
        """Wait."""
        raise TimeoutError("the store is away")

    for function, text in (
        (boom, "KeyError: 'inside'"),
        (slow, "TimeoutError: tool slow took longer than 0.05 s"),
        (own_timeout, "TimeoutError: the store is away"),
    ):
        chat = WatchedChat(ScriptedChat([calls((function.__name__, {}), (function.__name__, {})), "ok"]))
        result = await play_scored(Playing(function, limits=ToolLimits(call_s=0.05)), Task(id="t", metadata={}), chat)
        assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR) and text in str(result.detail)


async def test_limits_end_a_talk_or_are_told() -> None:
    again = call_of("divide", a=1, b=1)
    ended = await talked(again, again, again, limits=ToolLimits(max_turns=2))
    assert (ended.stop_reason, ended.num_turns, ended.messages[-1]["role"]) == (StopReason.MAX_TURNS, 2, "tool")
    ended = await talked(calls(*[("divide", {"a": 1, "b": 1})] * 3), "ok", limits=ToolLimits(max_calls=2))
    assert answers(ended) == ["1.0", "1.0", "Error: no more than 2 tools may be called at once."]

    def long() -> str:
        """Say much."""
        return "x" * 100

    ended = await talked(call_of("long"), "ok", limits=ToolLimits(max_chars=10), functions=[long])
    assert answers(ended) == ["x" * 10 + "\n... (90 more characters)"]


async def test_a_full_context_ends_a_talk_and_keeps_what_was_said() -> None:
    ended = await talked(call_of("divide", a=1, b=1), GenerationFailed("context_length_exceeded", "full"))
    assert (ended.stop_reason, ended.num_turns) == (StopReason.MAX_LENGTH, 1)
    assert ended.messages[-1]["role"] == "tool"
    with pytest.raises(GenerationFailed):
        await talked(GenerationFailed("http_500", "away"))


async def test_a_tool_may_end_the_talk_by_what_it_changes() -> None:
    given: list[str] = []

    def submit(answer: str) -> str:
        """Give the answer."""
        given.append(answer)
        return "Thank you."

    ended = await talk(ScriptedChat([call_of("submit", answer="42")]), HELLO, [submit], until=lambda: bool(given))
    assert given == ["42"] and ended.stop_reason is StopReason.END_OF_CONVERSATION
    assert ended.messages[-1]["content"] == "Thank you."


async def test_a_bound_method_is_a_tool_of_its_object() -> None:
    class World:
        def __init__(self) -> None:
            self.level = 0

        def climb(self, steps: int = 1) -> str:
            """Go up."""
            self.level += steps
            return f"level {self.level}"

    worlds = [World(), World()]
    for world in worlds:
        ended = await talk(ScriptedChat([call_of("climb", steps=2), call_of("climb"), "top"]), HELLO, [world.climb])
        assert answers(ended) == ["level 2", "level 3"]
