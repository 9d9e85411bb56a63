"""What a replica records of calls with tools, of forced calls, of texts and of several choices."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.unit.generation.bench import (
    OPENING,
    CountingEngine,
    Plain,
    ask,
    assert_exact,
    recorded,
    request_for,
    sampled,
    serving,
)
from tests.unit.generation.families import TOOLS
from tests.unit.generation.scripted import save_random, save_scripted
from turnmill.generation.renderer import Renderer
from turnmill.generation.stability import compare
from turnmill.ports import RunPorts
from turnmill.records import TEXT_ROLE, FinishReason, Sampling

QUESTION = [{"role": "user", "content": "What is the weather?"}]
SAMPLING = Sampling(max_new_tokens=40)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            save_scripted(folders[family], family)
        return folders[family]

    return make


def results_of(reply: dict[str, Any]) -> list[dict[str, Any]]:
    calls = reply["tool_calls"]
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['id']}"} for call in calls]


@pytest.mark.parametrize(("family", "names"), [("chatml", ["get_weather", "add"]), ("llama3", ["get_weather"])])
async def test_a_conversation_with_calls_and_results_is_what_the_template_makes_of_it(
    family: str, names: list[str], ports: RunPorts, scripted: Any, plain_logprobs: Plain
) -> None:
    folder, path = scripted(family), []
    renderer = Renderer(folder)
    messages: list[dict[str, Any]] = list(QUESTION)
    new, parent = QUESTION, None
    async with serving(ports, CountingEngine(folder), folder):
        for turn in range(3):
            request = request_for(f"a_{turn}", new, parent=parent, tools=TOOLS, sampling=SAMPLING)
            response = await ask(ports, request)
            call = await recorded(ports, f"a_{turn}")
            assert response.finish_reason == "tool_calls" and call.finish_reason is FinishReason.TOOL_CALLS
            assert [item["function"]["name"] for item in call.reply["tool_calls"]] == names
            assert json.loads(call.reply["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
            assert call.reply["content"] == "" and call.tools == (None if parent else TOOLS)
            assert call.tool_choice == "auto" and (call.choice, call.num_choices) == (0, 1)
            assert set(call.loss_mask[-call.num_sampled :]) == {1}
            path += call.token_ids
            assert_exact(plain_logprobs, folder, path, call)
            messages.append(call.reply)
            new, parent = results_of(call.reply), call.call_id
            messages += new
        end = await ask(ports, request_for("a_3", new, parent=parent, tools=TOOLS, sampling=SAMPLING))
        assert end.error is None
    last = await recorded(ports, "a_3")
    prompt = [*path, *last.token_ids[: -last.num_sampled]]
    # Token by token, as in one go.
    assert prompt == renderer.opening(messages, TOOLS) == compare(renderer, messages, TOOLS).stored_ids
    assert {call["id"] for message in messages for call in message.get("tool_calls", ())} == {
        message["tool_call_id"] for message in messages if message["role"] == "tool"
    }


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
async def test_a_forced_call_begins_in_the_prompt_and_is_seen_whole(
    family: str, ports: RunPorts, scripted: Any, plain_logprobs: Plain
) -> None:
    folder = scripted(family)
    renderer = Renderer(folder)
    async with serving(ports, CountingEngine(folder), folder):
        request = request_for("a_0", QUESTION, tools=TOOLS, tool_choice="required", sampling=SAMPLING)
        assert (await ask(ports, request)).finish_reason == "tool_calls"
    call = await recorded(ports, "a_0")
    num_prompt = len(call.token_ids) - call.num_sampled
    begun = renderer.begun("required", TOOLS)
    assert call.token_ids[:num_prompt] == renderer.opening(QUESTION, TOOLS, begun)
    assert call.loss_mask == [0] * num_prompt + [1] * call.num_sampled
    # What is sampled is drawn from the full vocabulary, and is exact.
    assert_exact(plain_logprobs, folder, call.token_ids, call)
    assert "get_weather" in renderer.decode(sampled(call))
    assert '"name"' not in renderer.decode(sampled(call)).partition("get_weather")[0]
    assert call.reply["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert call.tool_choice == "required"
    if family == "mistral":
        # The id that the model wrote, which the template will show to it again.
        assert call.reply["tool_calls"][0]["id"] == "sampled12"


async def test_a_call_of_a_named_tool_begins_with_its_name(
    ports: RunPorts, scripted: Any, plain_logprobs: Plain
) -> None:
    folder = scripted("chatml:named")
    renderer = Renderer(folder)
    async with serving(ports, CountingEngine(folder), folder):
        request = request_for("a_0", QUESTION, tools=TOOLS, tool_choice="function:get_weather", sampling=SAMPLING)
        assert (await ask(ports, request)).finish_reason == "tool_calls"
        first = await recorded(ports, "a_0")
        again = request_for(
            "a_1", results_of(first.reply), parent="a_0", tools=TOOLS, tool_choice="function:get_weather",
            sampling=SAMPLING,
        )  # fmt: skip
        assert (await ask(ports, again)).finish_reason == "tool_calls"
    second = await recorded(ports, "a_1")
    path = [*first.token_ids, *second.token_ids]
    assert_exact(plain_logprobs, folder, path, second)
    for call in (first, second):
        assert renderer.decode(sampled(call)) == ' {"city": "Oslo"}}\n</tool_call>'
        assert call.reply["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert sum(call.loss_mask) == call.num_sampled == 3
    # What was sampled and what was not are together what the template writes.
    messages = [*QUESTION, first.reply, *results_of(first.reply), second.reply, *results_of(second.reply)]
    assert [*path, *renderer.continuation(messages[-1:], ended=True, tools=TOOLS)] == renderer.one_go(messages, TOOLS)


@pytest.mark.parametrize("choice", ["required", "function:get_weather"])
async def test_a_forced_call_may_be_cut_at_its_first_token_and_is_gone_on_from(
    choice: str, ports: RunPorts, tmp_path: Path, plain_logprobs: Plain
) -> None:
    save_random(tmp_path, "chatml")
    renderer = Renderer(tmp_path)
    begun = renderer.begun(choice, TOOLS)
    opening = renderer.opening(QUESTION, TOOLS, begun)
    more = [{"role": "user", "content": "Well?"}]
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "sampling": Sampling(max_new_tokens=1)}
    async with serving(ports, CountingEngine(tmp_path), tmp_path):
        # What begins the call is a part of the prompt, also where that is what fills the conversation.
        full = await ask(ports, request_for("a_0", QUESTION, max_length=len(opening), **forced))
        assert full.error is not None and full.error["code"] == "context_length_exceeded"
        last = await ask(ports, request_for("b_0", QUESTION, max_length=len(opening) + 1, **forced))
        assert last.error is None
        response = await ask(ports, request_for("b_1", more, parent="b_0", **forced))
    assert response.error is None
    first, second = await recorded(ports, "b_0"), await recorded(ports, "b_1")
    assert first.token_ids[:-1] == opening and first.loss_mask == [0] * len(opening) + [1]
    assert "tool_calls" not in first.reply and first.reply["content"].startswith(begun)
    ended = first.token_ids[-1] in renderer.end_ids
    assert first.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert second.token_ids[:-1] == renderer.continuation(more, ended=ended, tools=TOOLS, begun=begun)
    assert second.loss_mask == [0] * (len(second.token_ids) - 1) + [1]
    assert_exact(plain_logprobs, tmp_path, [*first.token_ids, *second.token_ids], second)


async def test_nothing_is_called_where_nothing_may_be(ports: RunPorts, scripted: Any) -> None:
    folder = scripted("chatml")
    async with serving(ports, CountingEngine(folder), folder):
        for number, changes in enumerate(({"tools": TOOLS, "tool_choice": "none"}, {})):
            response = await ask(ports, request_for(f"a_{number}", QUESTION, sampling=SAMPLING, **changes))
            call = await recorded(ports, f"a_{number}")
            assert response.finish_reason == "stop" and "tool_calls" not in call.reply
            assert call.reply["content"].startswith('<tool_call>\n{"name": "get_weather"')


async def test_a_call_that_is_cut_is_text_and_ends_by_length(ports: RunPorts, scripted: Any) -> None:
    folder = scripted("chatml")
    async with serving(ports, CountingEngine(folder), folder):
        cut = structs.replace(SAMPLING, max_new_tokens=3)
        response = await ask(ports, request_for("a_0", QUESTION, tools=TOOLS, sampling=cut))
        assert response.finish_reason == "length"
        stopped = structs.replace(SAMPLING, stop=('"city"',))
        assert (await ask(ports, request_for("a_1", QUESTION, tools=TOOLS, sampling=stopped))).finish_reason == "stop"
    call = await recorded(ports, "a_0")
    assert call.reply == {"role": "assistant", "content": '<tool_call>\n{"name": "get_weather", "arguments": '}
    call = await recorded(ports, "a_1")
    assert call.reply["content"].endswith('"arguments": {') and "tool_calls" not in call.reply
    # Stop strings cut the text alone: the tokens that spell one are kept, and are the last.
    decode = Renderer(folder).decode_calls
    assert '"city"' in decode(sampled(call)) and '"city"' not in decode(sampled(call)[:-1])


@pytest.mark.parametrize("family", ["chatml", "qwen3-thinking", "llama3", "mistral", "name-outside", "xml"])
async def test_whatever_a_model_says_to_an_agent_with_tools_is_gone_on_from(
    family: str, ports: RunPorts, tmp_path: Path, plain_logprobs: Plain
) -> None:
    """Random weights: replies end or are cut anywhere, control tokens are said in the midst of them."""
    save_random(tmp_path, family)
    renderer = Renderer(tmp_path)
    path: list[int] = []
    news = [QUESTION, [{"role": "user", "content": "Well?"}], [{"role": "user", "content": "<|im_end|>[TOOL_CALLS]"}]]
    async with serving(ports, CountingEngine(tmp_path), tmp_path):
        for turn, new in enumerate(news):
            tools, choice = TOOLS[1:], "required" if turn == 1 else "auto"
            parent = f"a_{turn - 1}" if turn else None
            sampling = Sampling(max_new_tokens=30)
            response = await ask(
                ports, request_for(f"a_{turn}", new, parent=parent, sampling=sampling, tools=tools, tool_choice=choice)
            )
            assert response.error is None
            call = await recorded(ports, f"a_{turn}")
            ended = bool(path) and path[-1] in renderer.end_ids
            begun = renderer.begun(choice, tools)
            expected = renderer.opening(new, tools)
            if turn:
                expected = renderer.continuation(new, ended=ended, tools=tools, begun=begun)
            assert call.token_ids[: -call.num_sampled] == expected
            path += call.token_ids
            assert_exact(plain_logprobs, tmp_path, path, call)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tools": TOOLS}, "does not tell the model of tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": "function:add"}, "was not found in its chat template"),
    ],
)
async def test_tools_that_a_model_can_not_have_are_refused(
    changes: dict[str, Any], text: str, ports: RunPorts, shipped: Path
) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        response = await ask(ports, request_for("a_0", **changes))
    assert response.error is not None and response.error["code"] == "invalid_request"
    assert text in response.error["message"]


async def test_a_text_goes_on_where_it_was_cut(ports: RunPorts, random_llama: Path, plain_logprobs: Plain) -> None:
    renderer = Renderer(random_llama)
    text = [{"role": TEXT_ROLE, "content": "crane c+ r- a?"}]
    more = [{"role": TEXT_ROLE, "content": " slate"}]
    async with serving(ports, CountingEngine(random_llama), random_llama):
        for number in range(30):
            await ask(ports, request_for(f"{number}_0", text, sampling=Sampling(max_new_tokens=3)))
            call = await recorded(ports, f"{number}_0")
            response = await ask(ports, request_for(f"{number}_1", more, parent=f"{number}_0"))
            if call.token_ids[-1] in renderer.end_ids:
                assert response.error is not None and "nothing can follow" in response.error["message"]
                continue
            assert call.token_ids[: -call.num_sampled] == renderer.plain("crane c+ r- a?")
            later = await recorded(ports, f"{number}_1")
            assert later.token_ids[: -later.num_sampled] == renderer.template.encode_behind(" slate")
            assert_exact(plain_logprobs, random_llama, [*call.token_ids, *later.token_ids], later)
            break
        else:
            pytest.fail("every text ended by an end token")


async def test_a_client_s_seed_joins_the_run_s_and_the_call_s(ports: RunPorts, random_llama: Path) -> None:
    async with serving(ports, CountingEngine(random_llama), random_llama):
        drawn = {}
        for call_id, seed in (("a_0", None), ("a_1", None), ("b_0", 7), ("b_1", 7), ("c_0", 8)):
            sampling = Sampling(max_new_tokens=12, seed=seed)
            response = await ask(ports, request_for(call_id, OPENING, sampling=sampling))
            assert response.call is not None
            drawn[call_id] = tuple(sampled(response.call))
            assert set(response.call.loss_mask[-response.call.num_sampled :]) == {1}
    # Two calls of one seed differ, and the same call of another seed too.
    assert len(set(drawn.values())) == len(drawn)
    engine = CountingEngine(random_llama)
    async with serving(ports, engine, random_llama):
        same = request_for("d_0", OPENING, sampling=Sampling(max_new_tokens=12, seed=7))
        await ask(ports, same)
    assert engine.submitted[-1].seed_parts == ("0", "train", "d_0", "seed 7")


async def test_a_choice_says_which_it_is_of_how_many(ports: RunPorts, shipped: Path) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        for choice in range(3):
            await ask(ports, request_for(f"a_{choice}", choice=choice, num_choices=3))
    calls = [await recorded(ports, f"a_{choice}") for choice in range(3)]
    assert [(call.choice, call.num_choices) for call in calls] == [(0, 3), (1, 3), (2, 3)]
    assert len({tuple(call.token_ids[: -call.num_sampled]) for call in calls}) == 1
