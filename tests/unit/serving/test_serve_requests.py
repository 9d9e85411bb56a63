"""What clients of a served model may ask, and what is refused by name."""

import json
from typing import Any

import pytest

from turnmill.errors import InvalidRequest
from turnmill.serving.requests import Wish, parse_wish

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "hello"}]


def chat(**changes: Any) -> Wish:
    body = {"model": "m", "messages": HELLO, **changes}
    return parse_wish(json.dumps(body).encode(), is_chat=True, temperature=0.7)


def complete(**changes: Any) -> Wish:
    body = {"model": "m", "prompt": "hello", **changes}
    return parse_wish(json.dumps(body).encode(), is_chat=False, temperature=0.7)


def test_what_is_not_given_is_as_in_training() -> None:
    wish = chat()
    assert (wish.sampling.temperature, wish.sampling.top_p, wish.max_tokens, wish.num_choices) == (0.7, 1.0, None, 1)
    assert wish.messages == HELLO and wish.text is None and not wish.is_streamed
    assert complete().max_tokens == 16 and complete(prompt=["hello"]).text == "hello"


def test_what_is_given_counts() -> None:
    wish = chat(
        temperature=0, top_p=0.5, top_k=3, seed=-4, n=2, stop="x", max_tokens=9, max_completion_tokens=5, stream=True,
        stream_options={"include_usage": True}, presence_penalty=0, logit_bias={}, tools=[], user="me", top_logprobs=0,
    )  # fmt: skip
    assert wish.sampling.temperature == 0.0 and wish.sampling.top_p == 0.5 and wish.sampling.top_k == 3
    assert wish.sampling.stop == ("x",) and (wish.seed, wish.num_choices, wish.max_tokens) == (-4, 2, 5)
    assert wish.is_streamed and wish.has_usage_chunk
    assert chat(temperature=None, stop=None, n=None, stream=None) == chat()
    assert chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]).messages == HELLO


def test_tools_and_the_choice_of_them_are_taken() -> None:
    assert (chat().tools, chat().tool_choice) == (None, "auto")
    assert chat(tools=[TOOL]).tools == [TOOL] and chat(tools=[TOOL], tool_choice="none").tool_choice == "none"
    assert chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=True).tool_choice == "required"
    one = {"type": "function", "function": {"name": "look"}}
    assert chat(tools=[TOOL], tool_choice=one).tool_choice == "function:look"
    assert chat(tools=[], tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"prompt": "hello"}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        # A whole number that no float holds.
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"logprobs": True, "stream": True}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "retrieval"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tempreture": 1}, "tempreture"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**changes)
    assert refused.value.param == param and param.partition("[")[0] in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"messages": HELLO}, "messages"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_completions_refuse_by_name_as_well(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        complete(**changes)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "m"', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_wish(body, is_chat=True, temperature=1.0)
