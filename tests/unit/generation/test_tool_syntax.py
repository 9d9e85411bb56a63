"""Tool calls in what a model says: read as its template writes them, text where they can't be, begun where forced."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.generation.families import FAMILIES, TOOLS
from turnmill.errors import GenerationFailed
from turnmill.generation.renderer import Renderer
from turnmill.generation.replies import ReadReply, read_reply, read_text, reads_calls
from turnmill.records import FinishReason, encode

KNOWN = ["chatml", "qwen3", "qwen3-thinking", "llama3", "llama3-parallel", "mistral", "name-outside", "xml"]
# The published Llama 3 template writes one call a reply.
SEVERAL = [name for name in KNOWN if name != "llama3"]
QUESTION = {"role": "user", "content": "What is the weather?"}
NESTED = {"city": "Paris", "near": {"a": [{"b": "}]} </tool_call>"}], "c": None}, "text": 'quoted " and \\ and {'}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'


@pytest.fixture(scope="session")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    made: dict[str, Renderer] = {}

    def make(name: str) -> Renderer:
        if name not in made:
            made[name] = FAMILIES[name].renderer(tmp_path_factory.mktemp(name))
        return made[name]

    return make


def read(renderer: Renderer, text: str) -> ReadReply:
    return read_text(renderer.syntax, text, call_id="a_0", finish_reason=FinishReason.STOP)


def functions(reply: ReadReply) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reply.tool_calls]


def calls_of(*arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"callcall{index}", "type": "function", "function": {"name": f"f{index}", "arguments": json.dumps(item)}}
        for index, item in enumerate(arguments)
    ]


@pytest.mark.parametrize(
    ("family", "num_calls"), [*((family, 1) for family in KNOWN), *((family, n) for family in SEVERAL for n in (2, 3))]
)
def test_calls_that_the_template_writes_are_read_from_their_tokens(
    family: str, num_calls: int, renderers: Callable[[str], Renderer]
) -> None:
    renderer = renderers(family)
    arguments: list[dict[str, Any]] = [NESTED, {}, {"n": 1.5, "deep": [[["x"]]]}]
    calls = calls_of(*arguments[:num_calls])
    ids = renderer.said({"role": "assistant", "content": "", "tool_calls": calls}, TOOLS)
    reply = read_reply(renderer, renderer.syntax, ids, call_id="a_0", finish_reason=FinishReason.STOP)
    assert functions(reply) == [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.content == ""
    if family == "mistral":
        # The model writes ids of its own, and its template shows them to it again.
        assert [call["id"] for call in reply.tool_calls] == [call["id"] for call in calls]
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in reply.tool_calls)
    assert len({call["id"] for call in reply.tool_calls}) == num_calls
    # Without tools, or where none may be called, the same tokens are text.
    plain = read_reply(renderer, None, ids, call_id="a_0", finish_reason=FinishReason.STOP)
    assert plain.tool_calls == [] and plain.finish_reason is FinishReason.STOP and "Paris" in plain.content


@pytest.mark.parametrize(
    ("family", "text", "content", "names"),
    [
        ("chatml", f"Let me see.\n{HERMES}", "Let me see.\n", ["f"]),
        ("chatml", f"{HERMES}\n{HERMES}", "", ["f", "f"]),
        # White space is as the model likes it, and what stands between calls and behind them is text.
        ("chatml", '<tool_call>{"name":"f","arguments":{}}</tool_call>', "", ["f"]),
        ("chatml", f"One\n{HERMES}\nTwo\n{HERMES}\nThree\n", "One\nTwo\nThree\n", ["f", "f"]),
        # Arguments first, and as text.
        ("chatml", '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', "", ["f"]),
        ("chatml", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ["f"]),
        # A tool that nobody offers: whoever acts on it answers.
        ("chatml", HERMES.replace('"f"', '"no such tool"'), "", ["no such tool"]),
        # The second call is cut: it stays text.
        ("chatml", f"{HERMES}\n{HERMES[:-14]}", HERMES[:-14], ["f"]),
        (
            "qwen3",
            f"<think>\nI could {HERMES}.\n</think>\n\n{HERMES}",
            f"<think>\nI could {HERMES}.\n</think>\n\n",
            ["f"],
        ),
        ("qwen3", HERMES.replace("1", '"</think>"'), "", ["f"]),
        ("qwen3-thinking", f"I could {HERMES}.\n</think>\n\n{HERMES}", f"I could {HERMES}.\n</think>\n\n", ["f"]),
        ("llama3", f"\n{LLAMA}\n", "", ["f"]),
        ("llama3-parallel", f"{LLAMA};{LLAMA} ; {LLAMA}", "", ["f", "f", "f"]),
        ("mistral", MISTRAL, "", ["f"]),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"g","arguments":{}}]', "", ["f", "g"]),
        ("mistral", f"Let me see. {MISTRAL}", "Let me see. ", ["f"]),
    ],
)
def test_calls_are_read_as_models_write_them(
    family: str, text: str, content: str, names: list[str], renderers: Callable[[str], Renderer]
) -> None:
    reply = read(renderers(family), text)
    assert [call["function"]["name"] for call in reply.tool_calls] == names
    assert reply.content == content
    assert reply.message["content"] == content and len(reply.message["tool_calls"]) == len(names)


def test_arguments_without_quotes_are_what_the_tool_wants(renderers: Callable[[str], Renderer]) -> None:
    properties = {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "data": {"type": "object"},
        "none": {"type": "null"},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    arguments = {
        "text": "20\n<parameter",
        "maybe": "null",
        "count": 20,
        "flag": True,
        "data": {"a": ["x", 1.5, None]},
        "none": None,
        "other": "plain words",
        "number": -3,
    }
    (call,) = calls_of(arguments)
    call["function"]["name"] = "f"
    renderer = renderers("xml")
    ids = renderer.said({"role": "assistant", "content": "", "tool_calls": [call]}, [tool])
    syntax = reads_calls(renderer, [tool], "auto")
    reply = read_reply(renderer, syntax, ids, call_id="a_0", finish_reason=FinishReason.STOP)
    assert functions(reply) == [("f", arguments)]
    # As models write it as well.
    loose = (
        "<tool_call><function=f><parameter=text> a </parameter><parameter=count>7</parameter></function></tool_call>"
    )
    reply = read_text(syntax, loose, call_id="a_0", finish_reason=FinishReason.STOP)
    assert functions(reply) == [("f", {"text": " a ", "count": 7})]
    for broken in (
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=>\nx\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>",
    ):
        assert read_text(syntax, broken, call_id="a_0", finish_reason=FinishReason.STOP).content == broken


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("chatml", "no call at all"),
        ("chatml", ""),
        ("chatml", HERMES[:-1]),
        ("chatml", HERMES[:20]),
        ("chatml", "<tool_call>"),
        ("chatml", "<tool_call>\nf(a=1)\n</tool_call>"),
        ("chatml", "<tool_call>\n[1, 2]\n</tool_call>"),
        ("chatml", HERMES.replace('{"a": 1}', "[1]")),
        ("chatml", HERMES.replace('{"a": 1}', '"[1]"')),
        ("chatml", HERMES.replace('{"a": 1}', "null")),
        ("chatml", HERMES.replace('{"a": 1}', '{"a": NaN}')),
        ("chatml", HERMES.replace('"f"', '""')),
        ("chatml", HERMES.replace('"f"', "7")),
        ("chatml", HERMES.replace('"name"', '"nom"')),
        ("chatml", HERMES.replace('{"a": 1}', "{'a': 1}")),
        ("chatml", HERMES.replace('{"a": 1}', '{"a": 1e999}')),
        ("chatml", HERMES.replace('{"a": 1}', '{"a": ' + "9" * 5000 + "}")),
        # Half of a surrogate pair can't be sent to anybody.
        ("chatml", HERMES.replace('"a"', '"\\ud800"')),
        ("chatml", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}</tool_call>"),
        ("chatml", "{" * 5000),
        # It never ended thinking.
        ("qwen3", f"<think>\nI could {HERMES}"),
        ("llama3", f"I call {LLAMA}"),
        ("llama3", f"{LLAMA} is the call"),
        ("llama3", f"{LLAMA}; {LLAMA}"),
        ("llama3", '{"name": "f"}'),
        ("llama3-parallel", f"{LLAMA}; {LLAMA[:-2]}"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", MISTRAL[:-1]),
        ("name-outside", "<|calls|><|call|>function<|sep|>f\n```json\n[]\n```<|/call|><|/calls|>"),
    ],
)
def test_what_can_not_be_read_as_a_call_stays_text(
    family: str, text: str, renderers: Callable[[str], Renderer]
) -> None:
    reply = read(renderers(family), text)
    assert reply == ReadReply(content=text, tool_calls=[], finish_reason=FinishReason.STOP)
    assert reply.message == {"role": "assistant", "content": text}


def test_a_model_without_a_known_syntax_says_text(renderers: Callable[[str], Renderer]) -> None:
    assert renderers("pythonic").syntax is None
    assert read(renderers("pythonic"), HERMES).content == HERMES


def test_ids_are_the_same_for_the_same_call_and_different_within_a_reply(
    renderers: Callable[[str], Renderer],
) -> None:
    renderer = renderers("mistral")
    taken = '{"name": "f", "arguments": {}, "id": "sameidsam"}'
    text = f'[TOOL_CALLS] [{taken}, {taken}, {{"name": "f", "arguments": {{}}, "id": "short"}}]'
    ids = [call["id"] for call in read(renderer, text).tool_calls]
    assert ids[0] == "sameidsam" and len(set(ids)) == 3 and all(len(item) == 9 and item.isalnum() for item in ids)
    assert [call["id"] for call in read(renderer, text).tool_calls] == ids
    other = read_text(renderer.syntax, text, call_id="a_1", finish_reason=FinishReason.STOP)
    assert other.tool_calls[1]["id"] not in ids


@pytest.mark.parametrize(
    ("stops", "content", "num_calls"),
    [
        (("</tool_call>",), 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n', 0),
        (('"arguments"',), 'Hm.\n<tool_call>\n{"name": "f", ', 0),
        (("Done",), "Hm.\n", 1),
        (("not there",), "Hm.\nDone.", 1),
        (("Done", "Hm"), "", 0),
    ],
)
def test_a_stop_string_cuts_what_the_client_sees_and_a_call_in_two(
    stops: tuple[str, ...], content: str, num_calls: int, renderers: Callable[[str], Renderer]
) -> None:
    renderer = renderers("chatml")
    ids = renderer.template.encode(f"Hm.\n{HERMES}\nDone.")
    reply = read_reply(renderer, renderer.syntax, ids, call_id="a_0", stops=stops, finish_reason=FinishReason.LENGTH)
    assert (reply.content, len(reply.tool_calls)) == (content, num_calls)
    expected = FinishReason.TOOL_CALLS if num_calls else FinishReason.STOP
    assert reply.finish_reason is expected


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize(
    "text",
    [
        "Plain words, and no end",
        f"<think>\nI could {HERMES}.\n</think>\n\nLet me see.\n\n{HERMES}\n{HERMES}",
        f"Hm {{ [ <tool {HERMES} and on",
        MISTRAL,
        f"Let me see. {MISTRAL} [TOOL_CALLS]",
        LLAMA,
        f"{LLAMA}; {LLAMA[:-2]}",
        f"<think>\n{LLAMA}\n</think>\n\n{LLAMA}",
        "  \n{ is a brace",
        "<|calls|><|call|>function<|sep|>f\n```json\n{}\n```<|/call|><|/calls|>\n",
    ],
)
def test_what_is_certain_of_a_growing_text_is_how_its_content_begins(
    text: str, family: str, renderers: Callable[[str], Renderer]
) -> None:
    renderer = renderers(family)
    assert renderer.syntax is not None
    content, _ = renderer.syntax.read(text)
    before = 0
    for length in range(len(text) + 1):
        num = renderer.syntax.num_certain(text[:length])
        assert before <= num <= length
        assert content.startswith(text[:num])
        before = num


def shown(text: str) -> str:
    """Some tokenizers put a space behind each control token."""
    return text.replace(" ", "")


ARGUMENTS = {"xml": "<parameter=city>"}


@pytest.mark.parametrize("family", KNOWN)
def test_a_forced_call_is_begun_as_the_template_writes_it(family: str, renderers: Callable[[str], Renderer]) -> None:
    renderer = renderers(family)
    (call,) = calls_of({"city": "Paris"})
    call["function"]["name"] = "get_weather"
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = renderer.template.render([QUESTION, said], TOOLS, generation_prompt=False)
    decode = renderer.template.tokenizer.decode
    for choice, follows in (("required", "get_weather"), ("function:get_weather", ARGUMENTS.get(family, '{"city"'))):
        begun = renderer.begun(choice, TOOLS)
        # No space at its end: it belongs to the token that follows.
        assert begun == begun.rstrip()
        assert whole[whole.index(begun) + len(begun) :].lstrip().startswith(follows)
        opening = renderer.opening([QUESTION], TOOLS, begun)
        assert shown(decode(opening)).endswith(shown(begun))
        assert len(opening) > len(renderer.opening([QUESTION], TOOLS))
        after = renderer.continuation([QUESTION], ended=True, tools=TOOLS, begun=begun)
        assert shown(decode(after)).endswith(shown(begun))
        reply = read(renderer, whole[whole.index(begun) :].removesuffix(renderer.template.end_text).rstrip())
        assert [item["function"]["name"] for item in reply.tool_calls] == ["get_weather"]
    assert renderer.begun("auto", TOOLS) == renderer.begun("none", None) == ""


def test_a_forced_call_that_can_not_be_kept_is_refused(renderers: Callable[[str], Renderer]) -> None:
    cases: list[tuple[str, str, list[dict[str, Any]] | None, str]] = [
        ("chatml", "required", None, "needs tools"),
        ("chatml", "function:other", TOOLS, "none of the tools"),
        ("chatml", "function:other", [{"type": "function"}, {"function": 7}], "none of the tools"),
        ("pythonic", "required", TOOLS, "was not found in its chat template"),
        ("pythonic", "function:add", TOOLS, "was not found in its chat template"),
    ]
    for family, choice, tools, text in cases:
        with pytest.raises(GenerationFailed, match=text) as failed:
            renderers(family).begun(choice, tools)
        assert failed.value.code == "invalid_request"


def test_a_template_that_writes_arguments_first_begins_calls_but_not_by_name(tmp_path: Path) -> None:
    family = FAMILIES["mistral"]
    family.save(tmp_path)
    turned = family.template.replace(
        "{%- set out = call.function | tojson %}",
        '{%- set out = \'{"arguments": \' + call.function.arguments | tojson + \', "name": "\' + call.function.name'
        " + '\"}' %}",
    )
    (tmp_path / "chat_template.jinja").write_text(turned, encoding="utf-8")
    renderer = Renderer(tmp_path)
    assert functions(read(renderer, MISTRAL)) == [("f", {"a": 1})]
    with pytest.raises(GenerationFailed, match="can't be begun by their name"):
        renderer.begun("function:add", TOOLS)


def test_parts_of_a_call_may_lie_deeper_and_arguments_be_text(tmp_path: Path) -> None:
    """As in OpenAI's own form, printed as it is."""
    family = FAMILIES["mistral"]
    family.save(tmp_path)
    whole = family.template.replace("{%- set out = call.function | tojson %}", "{%- set out = call | tojson %}")
    whole = whole.replace("""', "id": "' + call.id + '"}'""", "'}'")
    (tmp_path / "chat_template.jinja").write_text(whole, encoding="utf-8")
    renderer = Renderer(tmp_path)
    said = '[TOOL_CALLS] [{"id": "ownidowni", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]'
    reply = read(renderer, said)
    assert functions(reply) == [("f", {"a": 1})] and reply.tool_calls[0]["id"] == "ownidowni"


@pytest.mark.parametrize("family", KNOWN)
def test_anything_a_model_may_say_is_read(family: str, renderers: Callable[[str], Renderer]) -> None:
    """Pieces of calls in any order: nothing raises, what is certain begins the content, and calls can be sent."""
    renderer = renderers(family)
    assert renderer.syntax is not None
    pieces = [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", ",", ";", " ", "\n", "x", "</think>"),
        *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}, "id": "abcdefgh1"}', '"name"', "<think>"),
        *("<|calls|>", "<|call|>function<|sep|>f", "\n```json\n{}\n```", "<|/call|>", "<|/calls|>", "\ud7ff", "\ufffd"),
    ]
    (call,) = calls_of({"a": [1, "}"]})
    whole = renderer.decode_calls(renderer.said({"role": "assistant", "content": "", "tool_calls": [call]}, TOOLS))
    rng = random.Random(family)
    num_calls = 0
    for _ in range(3000):
        text = "".join(rng.choice([whole, rng.choice(pieces)]) for _ in range(rng.randint(1, 8)))
        reply = read(renderer, text)
        num_calls += len(reply.tool_calls)
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in reply.tool_calls)
        assert reply.tool_calls or reply.content == text
        cut = text[: rng.randint(0, len(text))]
        assert reply.content.startswith(cut[: renderer.syntax.num_certain(cut)])
        encode(reply.message)
    assert num_calls > 10
