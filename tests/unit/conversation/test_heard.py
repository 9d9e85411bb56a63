"""A request that goes on from what was heard is hashed from there on only: to the same hashes as in full."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from turnmill.conversation.branches import MAX_NESTING, prefix_hashes
from turnmill.conversation.messages import MAX_HEARD, Heard
from turnmill.conversation.requests import Offer, parse_chat
from turnmill.errors import InvalidRequest
from turnmill.records import encode


def hashes_of(heard: Heard, messages: list[dict[str, Any]]) -> list[bytes]:
    return heard.read(encode(messages)).hashes


# What JSON can hold, and texts that look like pieces of it.
VALUES: list[Any] = [
    0,
    1,
    1.0,
    True,
    False,
    None,
    "1",
    "",
    "a,b]",
    "}",
    "},{",
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    [1],
    [1.0],
    [],
    {},
]
VALUES += [-0.0, 1e22, 10**25, "\u00e9\u2028", {"a": [{"b": None}]}]
ARGUMENTS = ['{"a":1,"b":[1]}', '{"b":[1],"a":1}', '{"a":1.0}', '{"a":true}', "no json", " 1 "]


def in_full(messages: list[Any]) -> list[bytes] | str:
    """The hashes by a reader that has heard nothing, each message by itself; or the refusal."""
    hashes: list[bytes] = []
    try:
        for end in range(len(messages)):
            hashes = hashes_of(Heard(), messages[: end + 1])
    except InvalidRequest as error:
        return str(error)
    plain = [{**message, "content": text(message.get("content"))} for message in messages]
    for call in (call for message in plain for call in message.get("tool_calls") or ()):
        # A call without arguments has none.
        if call["function"]["arguments"] is None:
            call["function"] = {**call["function"], "arguments": "{}"}
    assert hashes == prefix_hashes(plain)
    return hashes


def text(content: Any) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def some_message(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.4:
        content = draw.choice(["a", "a ", "b", "a,", "]", "\\", '"', ""])
        role = draw.choice(["user", "system", "tool"])
        return {"role": role, "content": content, **({"tool_call_id": "1"} if role == "tool" else {})}
    if kind < 0.5:
        return {"content": draw.choice("ab"), "role": "user"}
    if kind < 0.65:
        parts = draw.choice([["a"], ["a", "b"], ["ab"], []])
        return {"role": "user", "content": [{"type": "text", "text": part} for part in parts]}
    if kind < 0.9:
        function = {"name": "f", "arguments": draw.choice([*VALUES, *ARGUMENTS])}
        calls = [{"id": draw.choice("12"), "function": function}]
        return {"role": "assistant", "content": draw.choice([None, "x"]), "tool_calls": calls}
    if kind < 0.95:
        return {"role": "user", "content": "a", "name": draw.choice("nm")}
    return draw.choice([{"role": "user", "content": 3}, {"role": "x"}, 5, {"role": "user", "content": "a", "odd": 1}])


def edited(messages: list[Any], draw: random.Random) -> list[Any]:
    """The conversation gone on with, and in some cases changed, reordered, cut or said in other numbers."""
    messages = copy.deepcopy(messages) + [some_message(draw) for _ in range(draw.randint(0, 2))]
    if messages and draw.random() < 0.4:
        at = draw.randrange(len(messages))
        how = draw.choice(["other", "keys", "cut", "value"])
        if how == "other":
            messages[at] = some_message(draw)
        elif how == "keys" and isinstance(messages[at], dict):
            messages[at] = dict(reversed(messages[at].items()))
        elif how == "cut":
            del messages[at:]
        elif how == "value" and isinstance(messages[at], dict) and messages[at].get("tool_calls"):
            messages[at]["tool_calls"][0]["function"]["arguments"] = draw.choice(VALUES)
    return messages


@pytest.mark.parametrize("seed", range(8))
def test_what_was_heard_changes_no_hash_and_no_refusal(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        heard, conversations = Heard(), [list[Any]()]
        for _ in range(14):
            messages = edited(draw.choice(conversations), draw)
            if not messages:
                continue
            try:
                found: list[bytes] | str = hashes_of(heard, messages)
            except InvalidRequest as error:
                found = str(error)
            assert found == in_full(messages), messages
            conversations.append(messages)


@pytest.mark.parametrize("other", [1.5, True, "1", [1], None])
def test_values_that_are_equal_in_python_only_are_told_apart(other: Any) -> None:
    def conversation(value: Any) -> list[Any]:
        call = {"id": "1", "function": {"name": "f", "arguments": {"x": value}}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "go on"}]

    heard = Heard()
    first = hashes_of(heard, conversation(1)[:1])
    second = hashes_of(heard, conversation(other))
    assert first[0] != second[0]
    assert hashes_of(heard, conversation(1))[:1] == first


def test_a_message_that_begins_like_another_is_another() -> None:
    heard = Heard()
    for content in ("a", "ab", "a,", 'a"', 'a"},{"role":"user","content":"b'):
        messages = [{"role": "user", "content": content}]
        assert hashes_of(heard, messages) == hashes_of(Heard(), messages)


def test_a_refused_request_is_not_heard() -> None:
    heard, good, bad = Heard(), {"role": "user", "content": "a"}, {"role": "user", "content": 5}
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content"):
            hashes_of(heard, [good, bad])
    assert hashes_of(heard, [good]) == hashes_of(Heard(), [good])
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content"):
        hashes_of(heard, [good, bad, good])


def test_more_branches_than_are_remembered_cost_time_and_nothing_else() -> None:
    heard = Heard()
    branches = [[{"role": "user", "content": str(number)}] for number in range(3 * MAX_HEARD)]
    for _ in range(4):
        for branch in branches:
            branch.append({"role": "user", "content": f"turn {len(branch)}"})
            assert hashes_of(heard, branch) == hashes_of(Heard(), branch)


# ---------------------------------------------------------------- nesting


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def body_with(arguments: str) -> bytes:
    """A chat body whose tool call has these arguments, as JSON."""
    call = '{"id":"1","function":{"name":"f","arguments":%s}}' % arguments  # noqa: UP031 - braces
    message = '{"role":"assistant","content":null,"tool_calls":[%s]}' % call  # noqa: UP031
    return b'{"messages":[%s,{"role":"user","content":"go on"}]}' % message.encode()


@pytest.mark.parametrize("depth", [MAX_NESTING, 400, 900])
def test_arguments_that_are_nested_deeply_are_refused_before_anybody_else_reads_them(depth: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.tool_calls is nested more than {MAX_NESTING} deep"):
        parse_chat(body_with(nested(depth)), Offer(), Heard())


@pytest.mark.parametrize("depth", [1, 10, 900, 2000, 200_000])
def test_arguments_as_text_may_be_nested_as_they_like(depth: int) -> None:
    request = parse_chat(body_with(encode(nested(depth)).decode()), Offer(), Heard())
    again = parse_chat(body_with(encode(f" {nested(depth)}\n").decode()), Offer(), Heard())
    other = parse_chat(body_with(encode(nested(depth - 1) or "0").decode()), Offer(), Heard())
    assert request.said.hashes == again.said.hashes != other.said.hashes


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: f'"{text}"'], ids=["json", "text"])
def test_a_body_that_no_reader_can_hold_is_a_bad_request(wrap: Callable[[str], str]) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body_with(wrap(nested(3000)) + "]"), Offer(), Heard())


@pytest.mark.parametrize("separator", [b",", b" , ", b",\n    "])
def test_a_request_is_read_from_where_an_earlier_one_ended(separator: bytes) -> None:
    said = [
        encode({"role": role, "content": f"{role} [{i}], {{}}"}) for i, role in enumerate(["user", "assistant"] * 5)
    ]
    heard = Heard()
    starts = []
    for end in (1, 3, 5, 5, 9):
        raw = b"[ " + separator.join(said[:end]) + b" ]"
        request = heard.read(raw)
        starts.append(request.start)
        assert request.hashes == Heard().read(raw).hashes
        assert request.since(0) == Heard().read(raw).since(0) and len(request.since(end - 1)) == 1
    assert starts == [0, 1, 3, 5, 5]


def test_a_beginning_that_only_looks_alike_is_none() -> None:
    heard = Heard()
    first = b'[{"role":"user","content":"a"}'
    heard.read(first + b"]")
    for rest in (b',{"role":"user","content":"b"}]', b'\t,{"role":"user","content":"b"}]'):
        assert heard.read(first + rest).hashes == Heard().read(first + rest).hashes
    other = b'[{"role":"user","content":"a"},{"role":"user","content":"c"}]'
    assert heard.read(other).hashes == Heard().read(other).hashes
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        heard.read(first + b",5]")
