"""Tools of an agent: plain Python functions that the model may call, and the loop that runs them.

    messages -> model -> tool calls, side by side -> tool messages -> model -> ... -> a reply without calls

A function's signature and docstring say what the model is told and what it may send. What the model does wrong (an
unknown tool, arguments that do not fit, a `ToolError`) is told to it as the tool's text, and the conversation goes on;
whatever else a function raises is the environment's fault and ends the rollout.
"""

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from turnmill.environment.base import Chat, is_context_full
from turnmill.environment.outcomes import Message, Outcome
from turnmill.environment.rewards import settled
from turnmill.records import StopReason

# `name: text` or `name (type): text`, below `Args:`.
_ARGUMENT = re.compile(r"\s+(\w+)(?:\s*\([^)]*\))?:\s+(.*)")


class ToolError(Exception):
    """What the model asked of a tool can't be done; raised by a tool, and its text is the tool's answer."""


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """How far a conversation with tools may go."""

    # Replies of the model.
    max_turns: int = 10
    # Calls of one reply; those beyond are told to be too many.
    max_calls: int = 16
    # Seconds of one call of an async tool. Longer is the environment's fault, as every wall-clock deadline is.
    call_s: float = 30.0
    # Longest text of one answer; what is beyond is cut, and the model is told so.
    max_chars: int = 8000


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One function as the model sees it."""

    name: str
    # In OpenAI's form, as a request holds it.
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    # What arguments are read into.
    arguments: type[msgspec.Struct]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """A function or a bound method, sync (quick: it holds up all rollouts) or async.

        Each parameter needs a type that JSON has (int, float, str, bool, list, dict, Literal, a union or a dataclass of
        those). The docstring's first paragraph describes the tool; lines `name: text` below `Args:` its parameters.
        Raises `TypeError` for a function that can't be a tool.
        """
        name = function.__name__
        description, of_arguments = _described(function)
        arguments = _arguments(function, of_arguments)
        parameters = _parameters(arguments)
        schema = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }
        return cls(name=name, schema=schema, function=function, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation with tools that came to its end."""

    # All of it, the model's last reply included unless the context was full before.
    messages: Sequence[Message]
    stop_reason: StopReason
    num_turns: int
    num_calls: int
    # Calls that were the model's mistake, or that a tool refused with `ToolError`.
    num_failed_calls: int

    def outcome(self, state: Any = None) -> Outcome:
        """It as what `play` returns, counts as metrics."""
        metrics = {"turns": self.num_turns, "tool_calls": self.num_calls, "failed_tool_calls": self.num_failed_calls}
        return Outcome(stop_reason=self.stop_reason, metrics=metrics, state=state)


async def talk(
    chat: Chat,
    messages: Sequence[Message],
    functions: Iterable[Callable[..., Any]],
    *,
    limits: ToolLimits = ToolLimits(),
    until: Callable[[], bool] = lambda: False,
    **params: Any,
) -> Talk:
    """Let the model talk and call `functions` until it calls none, `until()` holds, or a limit is met.

    Calls of one reply run side by side, their answers are in its order. A context that is full ends it too
    (`max_length`): what was said so far counts. `params` are further fields of each request. Raises `TimeoutError` for
    a tool that takes too long, and whatever a tool raises but `ToolError`.
    """
    tools = {tool.name: tool for tool in map(Tool.of, functions)}
    said: list[Message] = list(messages)
    num_turns = num_calls = num_failed = 0
    stop_reason = StopReason.MAX_TURNS
    while num_turns < limits.max_turns:
        try:
            reply = await chat.complete(said, tools=[tool.schema for tool in tools.values()], **params)
        except Exception as error:
            if not is_context_full(error):
                raise
            stop_reason = StopReason.MAX_LENGTH
            break
        said.append(reply.message)
        num_turns += 1
        answers = await _answers(tools, reply.tool_calls, limits)
        num_calls += len(answers)
        num_failed += sum(answer.is_failure for answer in answers)
        said += [answer.message for answer in answers]
        if not answers or until():
            stop_reason = StopReason.END_OF_CONVERSATION
            break
    return Talk(
        messages=said,
        stop_reason=stop_reason,
        num_turns=num_turns,
        num_calls=num_calls,
        num_failed_calls=num_failed,
    )


def call_of(name: str, *, call_id: str = "call00001", **arguments: Any) -> dict[str, Any]:
    """An assistant message that calls one tool: a turn of gold, or of a script in a test."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


# ---------------------------------------------------------------- running


@dataclass(frozen=True, kw_only=True)
class _Answer:
    message: Message
    is_failure: bool


async def _answers(tools: Mapping[str, Tool], calls: Sequence[Mapping[str, Any]], limits: ToolLimits) -> list[_Answer]:
    """Of all calls, in their order; the first fault of the environment ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer(tools, call, limits, is_beyond=index >= limits.max_calls))
                for index, call in enumerate(calls)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def _answer(
    tools: Mapping[str, Tool], call: Mapping[str, Any], limits: ToolLimits, *, is_beyond: bool
) -> _Answer:
    try:
        if is_beyond:
            raise ToolError(f"Error: no more than {limits.max_calls} tools may be called at once.")
        tool, arguments = _read(tools, call["function"])
        # An argument's value is read from its field: a nested dataclass stays what it is.
        values = {field: getattr(arguments, field) for field in arguments.__struct_fields__}
        try:
            async with asyncio.timeout(limits.call_s) as timer:
                text = _text(await settled(tool.function(**values)))
        except TimeoutError as error:
            # A tool may meet a time-out of its own.
            if not timer.expired():
                raise
            raise TimeoutError(f"tool {tool.name} took longer than {limits.call_s:g} s") from error
        is_failure = False
    except ToolError as error:
        text, is_failure = str(error), True
    if len(text) > limits.max_chars:
        text = text[: limits.max_chars] + f"\n... ({len(text) - limits.max_chars} more characters)"
    return _Answer(message={"role": "tool", "tool_call_id": call["id"], "content": text}, is_failure=is_failure)


def _read(tools: Mapping[str, Tool], function: Mapping[str, Any]) -> tuple[Tool, msgspec.Struct]:
    """The tool that is meant, and its arguments; raises `ToolError` with what is wrong, for the model."""
    tool = tools.get(function["name"])
    if tool is None:
        raise ToolError(f"Error: there is no tool {function['name']!r}; tools: {', '.join(tools)}.")
    try:
        return tool, msgspec.json.decode(function["arguments"] or "{}", type=tool.arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ToolError(f"Error: the arguments of {tool.name} do not fit: {error}.") from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# ---------------------------------------------------------------- schemas


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph of the docstring, and what it says of each parameter."""
    text = inspect.getdoc(function) or ""
    head, _, below = text.partition("\nArgs:")
    of_arguments: dict[str, str] = {}
    name = ""
    for line in below.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # the next section
        if found := _ARGUMENT.fullmatch(line):
            name = found[1]
            of_arguments[name] = found[2].strip()
        elif name and line.strip():
            of_arguments[name] += f" {line.strip()}"
    return " ".join(head.split("\n\n")[0].split()), of_arguments


def _arguments(function: Callable[..., Any], described: Mapping[str, str]) -> type[msgspec.Struct]:
    """A struct with a field for each parameter."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {function.__name__}: the parameter {parameter} can't be given by name")
        if name not in hints:
            raise TypeError(f"tool {function.__name__}: the parameter {name} has no type")
        kind = hints[name]
        if name in described:
            kind = Annotated[kind, msgspec.Meta(description=described[name])]
        if parameter.default is parameter.empty:
            fields.append((name, kind))
        else:
            fields.append((name, kind, parameter.default))
    if unknown := set(described) - {field[0] for field in fields}:
        raise TypeError(f"tool {function.__name__}: its docstring describes {', '.join(sorted(unknown))}, no parameter")
    return msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _parameters(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """The struct as JSON schema; raises `TypeError` for a type that JSON has not."""
    (reference,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    name = reference["$ref"].removeprefix("#/$defs/")
    schema = dict(components.pop(name))
    schema.pop("title", None)
    # Told to models whose templates know no other way to say that there is nothing else.
    schema.pop("additionalProperties", None)
    made = {**schema, **({"$defs": components} if components else {})}
    # As it comes out of a request: a default may be a tuple or a dataclass.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return plain
