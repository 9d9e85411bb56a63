"""The shipped tool-calling model: its tokens spell any text, and its history is what its template says."""

import json
from contextlib import closing
from typing import Any

import pytest
from sql_agent.database import Database
from sql_agent.environment import Session

from turnmill import assets
from turnmill.environment import Tool, call_of
from turnmill.generation.renderer import Renderer
from turnmill.generation.replies import read_reply
from turnmill.records import FinishReason

QUESTION = {"role": "user", "content": "What is the price of lamp?"}
TEXTS = [
    "What is the price of lamp?",
    "SELECT cost FROM goods WHERE label = 'lamp'",
    "  two  spaces, a\ttab\r\nand a line\n",
    "Zürich, 東京, \U0001f600, e\u0301, \u202e, \x00, \x7f",
    '{"name": "run_sql", "arguments": {"query": "x"}}',
    "<0x0A><unk>▁Ġ<tool_call>",
    "",
    " ",
]
CALLS = [
    call_of("list_tables"),
    call_of("run_sql", query="SELECT cost FROM goods WHERE label = 'lamp'"),
    call_of("run_sql", query='SELECT "a\\b" FROM\n\tgöods'),
    call_of("answer", value="42"),
]
with closing(Database({})) as _database:
    TOOLS = [dict(Tool.of(tool).schema) for tool in Session(_database, "").tools]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(assets.model_folder("sql-tiny"))


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_spelled_and_comes_back(renderer: Renderer, text: str) -> None:
    assert renderer.decode(renderer.template.encode(text)) == text


def test_words_of_the_task_are_one_token_each(renderer: Renderer) -> None:
    query = "SELECT cost FROM goods WHERE label = 'lamp'"
    spelled = [renderer.token_of(token) for token in renderer.template.encode(query)]
    assert spelled == ["SELECT ", "cost", " FROM ", "goods", " WHERE ", "label", " = '", "lamp", "'"]


@pytest.mark.parametrize("call", CALLS)
def test_its_own_calls_are_read_and_rendered_again_as_they_were_written(
    renderer: Renderer, call: dict[str, Any]
) -> None:
    (function,) = (each["function"] for each in call["tool_calls"])
    call = {"role": "assistant", **call}
    rendered = renderer.template.render([QUESTION, call], TOOLS, generation_prompt=False)
    written = rendered[len(renderer.template.render([QUESTION], TOOLS, generation_prompt=True)) :].rstrip("\n")
    ids = renderer.template.encode(written)
    reply = read_reply(renderer, renderer.syntax, ids, call_id="c", finish_reason=FinishReason.STOP)
    assert reply.content == ""
    (read,) = reply.tool_calls
    assert read["function"]["name"] == function["name"]
    assert json.loads(read["function"]["arguments"]) == json.loads(function["arguments"])
    again = renderer.template.render([QUESTION, reply.message], TOOLS, generation_prompt=False)
    assert again == rendered


@pytest.mark.parametrize("num_results", [1, 2, 3])
def test_the_history_turn_by_turn_is_the_rendering_in_one_go(renderer: Renderer, num_results: int) -> None:
    calls = [
        call_of("run_sql", query=f"SELECT {n}", call_id=f"call0000{n}")["tool_calls"][0] for n in range(num_results)
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": str(n)} for n, call in enumerate(calls)]
    retort = [{"role": "assistant", "content": "So it is."}, {"role": "user", "content": "error: call a tool"}]
    messages = [QUESTION, turn, *results, *retort]
    whole = renderer.template.encode(renderer.template.render(messages, TOOLS, generation_prompt=True))

    ids = renderer.opening([QUESTION], TOOLS)
    prompt = renderer.template.render([QUESTION], TOOLS, generation_prompt=True)
    said = renderer.template.render([QUESTION, turn], TOOLS, generation_prompt=False)[len(prompt) :].rstrip("\n")
    ids += renderer.template.encode(said)
    ids += renderer.continuation(results, ended=True, tools=TOOLS)
    ids += renderer.template.encode("So it is.")
    ids += renderer.continuation([retort[1]], ended=False, tools=TOOLS)
    assert ids == whole


def test_a_forced_call_begins_with_the_tokens_that_it_would_have_said(renderer: Renderer) -> None:
    free = renderer.template.encode(
        '<tool_call>\n{"name": "run_sql", "arguments": {"query": "SELECT 1"}}\n</tool_call>'
    )
    for choice in ("required", "function:run_sql"):
        begun = renderer.template.encode(renderer.begun(choice, TOOLS))
        assert free[: len(begun)] == begun


def test_a_system_message_stands_in_front_of_the_tools(renderer: Renderer) -> None:
    system = {"role": "system", "content": "Be brief."}
    text = renderer.template.render([system, QUESTION], TOOLS, generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.\n\n"
        "Tools: list_tables(), describe_table(table), run_sql(query), answer(value)<|im_end|>\n"
        "<|im_start|>user\nWhat is the price of lamp?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = renderer.template.render([system, QUESTION], None, generation_prompt=False)
    assert plain.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
