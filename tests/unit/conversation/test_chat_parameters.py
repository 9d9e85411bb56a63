"""What a chat may ask for beside an answer to its messages: tools, choices, sampling, the name of the model."""

from typing import Any

import pytest

from turnmill.config import Config
from turnmill.conversation.branches import conversation_start
from turnmill.conversation.messages import MAX_HEARD, Heard
from turnmill.conversation.requests import MAX_CHOICES, ChatRequest, Offer, parse_chat, parse_text
from turnmill.conversation.tools import MAX_TOOLS, MAX_TOOLS_BYTES
from turnmill.errors import InvalidRequest
from turnmill.records import TEXT_ROLE, RunKind, Sampling, encode

RUN = Offer(sampling=Sampling(max_new_tokens=64))
RECORDING = Offer(sampling=Sampling(max_new_tokens=64), takes_sampling=True)
HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def chat(*, offer: Offer = RUN, heard: Heard | None = None, messages: Any = HELLO, **changes: Any) -> ChatRequest:
    return parse_chat(encode({"model": "turnmill", "messages": messages, **changes}), offer, heard or Heard())


def text(*, offer: Offer = RUN, **changes: Any) -> ChatRequest:
    return parse_text(encode({"model": "turnmill", "prompt": "Once", **changes}), offer)


def tool(name: str = "weather", **changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **changes}}


# ---------------------------------------------------------------- tools


def test_tools_are_passed_on_with_what_a_template_may_render() -> None:
    request = chat(tools=[tool(description="Of a city.", strict=True), tool("now", parameters=None)])
    assert request.tools == [
        {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert request.tool_choice == "auto"


def test_with_other_tools_it_is_another_conversation_and_their_order_of_keys_does_not_matter() -> None:
    one, other = chat(tools=[tool()]), chat(tools=[tool("now")])
    swapped = chat(tools=[{"function": {"parameters": PARAMETERS, "name": "weather"}, "type": "function"}])
    assert one.said.hashes == swapped.said.hashes
    assert len({chat().said.hashes[0], one.said.hashes[0], other.said.hashes[0]}) == 3
    assert chat(tools=[]).said.hashes == chat(tools=None).said.hashes == chat().said.hashes
    assert conversation_start(None) == conversation_start([]) == b""


def test_a_turn_with_the_same_tools_goes_on_from_what_was_heard() -> None:
    heard = Heard()
    tools = [tool()]
    turns = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    assert chat(heard=heard, tools=tools).said.start == 0
    assert chat(heard=heard, tools=tools, messages=turns).said.start == 1
    # The same words without tools were never heard.
    without = chat(heard=heard, messages=turns)
    assert (without.said.start, without.said.hashes) == (0, chat(messages=turns).said.hashes)
    for index in range(2 * MAX_HEARD):
        assert chat(heard=heard, tools=[tool(f"t{index}")]).tools == [tool(f"t{index}")]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ("weather", "tools"),
        ([tool(f"t{index}") for index in range(MAX_TOOLS + 1)], "tools"),
        ([tool(description="x" * MAX_TOOLS_BYTES)], "tools"),
        ([5], "tools[0]"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0]"),
        ([{"type": "function", "function": None}], "tools[0]"),
        ([{**tool(), "cache_control": {}}], "tools[0].cache_control"),
        ([tool(), tool("has space")], "tools[1].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([tool(parameters={"type": "object", "properties": []})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"type": "object", "properties": {"a": 5}})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"type": "object", "required": "a"})], "tools[0].function.parameters.required"),
        ([tool(returns="text")], "tools[0].function.returns"),
    ],
)
def test_a_tool_that_is_not_served_is_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=tools)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("depth", [70, 400, 3000])
def test_parameters_that_are_nested_deeply_are_refused(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    body = '{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f",'
    body += f'"parameters":{{"type":"object","default":{nested}}}}}}}]}}'
    with pytest.raises(InvalidRequest, match=r"nested|JSON"):
        parse_chat(body.encode(), RUN, Heard())


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "now"}}, "function:now"),
    ],
)
def test_the_choice_of_a_tool_is_one_text(choice: Any, expected: str) -> None:
    assert chat(tools=[tool(), tool("now")], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([tool()], "any"),
        ([tool()], {"type": "function", "function": {"name": "other"}}),
        ([tool()], {"type": "function", "name": "weather"}),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ([tool()], ["auto"]),
        (None, "required"),
        (None, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_a_choice_among_tools_that_are_not_offered_is_refused(tools: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=tools, tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_without_tools_there_is_no_choice() -> None:
    assert {chat(tool_choice=choice).tool_choice for choice in ("none", "auto", None)} == {"auto"}


def test_calls_one_after_the_other_are_not_promised() -> None:
    assert chat(tools=[tool()], parallel_tool_calls=True).tools
    assert chat(parallel_tool_calls=False).tools is None
    with pytest.raises(InvalidRequest, match="samples freely"):
        chat(tools=[tool()], parallel_tool_calls=False)


# ---------------------------------------------------------------- sampling


def test_a_request_without_parameters_has_the_runs_own() -> None:
    assert chat().sampling is RUN.sampling
    assert chat(max_tokens=64, temperature=1, top_p=1, top_k=-1, stop=None, seed=None).sampling == RUN.sampling


def test_what_a_client_may_say_itself() -> None:
    request = chat(
        n=MAX_CHOICES,
        stop="\n",
        seed=-7,
        max_tokens=32,
        max_completion_tokens=16,
        logprobs=True,
        top_logprobs=0,
        return_token_ids=True,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert request.sampling == Sampling(max_new_tokens=16, stop=("\n",), seed=-7)
    assert request.sampling.is_trainable
    assert request.num_choices == MAX_CHOICES
    assert request.has_logprobs and request.has_token_ids and request.is_streamed and request.has_usage_chunk
    assert chat(stop=["a", "b"]).sampling.stop == ("a", "b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop", ["x" * 300]),
        ("seed", 2**63),
        ("seed", "1"),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", 10**400),
        # Logits divided by it would be no numbers, or nothing but noise.
        ("temperature", 1e-40),
        ("temperature", 0.001),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("top_k", -2),
        ("return_token_ids", 1),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("reasoning_effort", "low"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("modalities", ["text", "audio"]),
    ],
)
@pytest.mark.parametrize("offer", [RUN, RECORDING], ids=["refuse", "record"])
def test_a_parameter_that_is_not_served_is_named(offer: Offer, key: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(offer=offer, **{key: value})
    assert caught.value.param == key


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.5), ("temperature", 0), ("top_p", 0.9), ("top_k", 20)])
def test_other_sampling_than_the_runs_is_refused_or_recorded(key: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="the run samples with") as caught:
        chat(**{key: value})
    assert (caught.value.param, caught.value.code) == (key, "unsupported_value")
    recorded = chat(offer=RECORDING, **{key: value}).sampling
    assert getattr(recorded, key) == value
    # Another temperature is trained with the same one; what is cut off is not trained.
    assert recorded.is_trainable == (key == "temperature" and value > 0)


@pytest.mark.parametrize("options", [True, {"include_usage": 1}, {"other": True}, {"include_obfuscation": True}])
def test_options_of_a_stream_are_checked(options: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(stream=True, stream_options=options)
    assert (caught.value.param or "").startswith("stream_options")


def test_whatever_is_sampled_otherwise_is_another_request() -> None:
    tools = [tool()]
    variants: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"seed": 1},
        {"stop": "x"},
        {"max_tokens": 5},
        {"tools": tools},
        {"tools": tools, "tool_choice": "required"},
        {"tools": tools, "tool_choice": "none"},
    ]
    assert len({chat(**changes).identity for changes in variants}) == len(variants)
    # How it is told makes no difference.
    assert chat(stream=True, logprobs=True).identity == chat().identity


# ---------------------------------------------------------------- the model


def test_the_runs_model_has_names_and_no_other_is_answered() -> None:
    offer = Offer.of(Config(base_model="org/tiny"), RunKind.TRAIN, served_model_names=["gpt-any"])
    assert offer.models == ("turnmill", "org/tiny", "gpt-any")
    for name in offer.models:
        assert chat(offer=offer, model=name).model == name
    assert chat(offer=offer, model=None).model == "turnmill"
    for name in ("judge", "", "tiny"):
        with pytest.raises(InvalidRequest, match=r"turnmill, org/tiny, gpt-any") as caught:
            chat(offer=offer, model=name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_folder_with_a_model_is_called_by_its_name_and_a_foreign_model_has_none_here() -> None:
    config = Config(base_model="/models/tiny")
    assert Offer.of(config, RunKind.TRAIN).models == ("turnmill", "tiny")
    assert Offer.of(config, RunKind.EXTERNAL).models == ("turnmill",)


def test_a_run_says_whether_it_takes_the_sampling_of_clients() -> None:
    config = Config(temperature=0.9, max_new_tokens=32)
    assert Offer.of(config, RunKind.TRAIN).sampling == Sampling(temperature=0.9, max_new_tokens=32)
    assert not Offer.of(config, RunKind.TRAIN).takes_sampling
    assert Offer.of(config, RunKind.TRAIN, client_sampling="record").takes_sampling


# ---------------------------------------------------------------- messages


def test_messages_are_read_as_openai_has_them() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "In "}, {"type": "text", "text": "Rome?"}]},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18"}]},
        ]
    )
    assert request.said.since(0) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "In Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "18", "tool_call_id": "call_1"},
    ]
    assert request.said.last_role == "tool"


def test_a_call_that_a_client_put_together_from_deltas_is_the_same_call() -> None:
    def history(**changes: Any) -> list[Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, **changes}
        return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "on"}]

    expected = chat(messages=history()).said
    for changes in ({"index": 0}, {"function": {"name": "f", "arguments": {"a": 1}}}):
        said = chat(messages=history(**changes)).said
        assert said.hashes == expected.hashes
        assert set(said.since(0)[1]["tool_calls"][0]) == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (5, "tool_calls[0]"),
        ({"id": "1", "type": "custom", "custom": {"name": "f", "input": ""}}, "tool_calls[0]"),
        ({"id": "1", "function": {"arguments": "{}"}}, "tool_calls[0]"),
        ({"function": {"name": "f", "arguments": "{}"}}, "tool_calls[0].id"),
        ({"id": "", "function": {"name": "f", "arguments": "{}"}}, "tool_calls[0].id"),
    ],
)
def test_a_malformed_call_in_the_history_is_named(call: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "on"}])
    assert caught.value.param == f"messages[1].{param}"


# ---------------------------------------------------------------- texts


def test_a_text_is_a_chat_of_one_text() -> None:
    request = text(n=2, stop=["."], seed=3, stream=True, echo=False, best_of=1, suffix=None, logprobs=None)
    assert request.is_text and request.is_streamed and request.num_choices == 2
    assert request.said.since(0) == [{"role": TEXT_ROLE, "content": "Once"}]
    # OpenAI's default.
    assert request.sampling == Sampling(max_new_tokens=16, stop=(".",), seed=3)
    assert text(prompt=["Once"]).said.hashes == text().said.hashes == request.said.hashes
    assert text(max_tokens=64).sampling.max_new_tokens == 64
    assert text(offer=Offer(sampling=Sampling(max_new_tokens=8))).sampling.max_new_tokens == 8
    assert text(prompt="hello").said.hashes != chat().said.hashes


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"messages": HELLO}, "messages"),
        ({"tools": []}, "tools"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"model": "davinci-002"}, "model"),
    ],
)
def test_a_text_that_is_not_served_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(**changes)
    assert caught.value.param == param
