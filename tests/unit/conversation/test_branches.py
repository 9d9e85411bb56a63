"""Which call a request continues, and which recorded answer it replays."""

from typing import Any

import pytest
from msgspec import structs

from turnmill.conversation.branches import (
    BranchTable,
    Node,
    Replay,
    Siblings,
    Text,
    canonical,
    conversation_start,
    hash_after,
    in_order,
    prefix_hashes,
    request_digest,
    request_identity,
)
from turnmill.records import Call, FinishReason, Purpose, Sampling


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool_call(arguments: str, *, call_id: str = "1", name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (user("hi"), {"content": " hi\n", "role": "user"}),
        (user("hi"), {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}),
        (assistant(""), {"role": "assistant", "content": None}),
        (assistant("x"), {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}),
        (tool_call('{"a": 1, "b": [2]}'), tool_call('{"b":[2],"a":1}')),
        (tool_call('{"a": [1.0, {"b": -2.0}], "c": 1e3}'), tool_call('{"a":[1,{"b":-2}],"c":1000}')),
        (tool_call("no json "), tool_call("no json")),
    ],
)
def test_messages_that_differ_in_form_only_are_the_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert canonical(left) == canonical(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (user("hi"), assistant("hi")),
        (user("hi"), user("ho")),
        (user("a b"), user("a  b")),
        (user("hi"), {**user("hi"), "name": "me"}),
        (tool_call('{"a": 1}'), tool_call('{"a": 2}')),
        (tool_call('{"a": 1.5}'), tool_call('{"a": 1}')),
        (tool_call('{"a": 1e300}'), tool_call('{"a": 1e301}')),
        (tool_call("{}"), tool_call("{}", call_id="2")),
        (tool_call("{}"), tool_call("{}", name="other")),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, {"role": "tool", "content": "x", "tool_call_id": "2"}),
    ],
)
def test_messages_that_differ_in_meaning_are_not_the_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert canonical(left) != canonical(right)


def test_a_prefix_hash_is_independent_of_what_comes_after_and_chained() -> None:
    hashes = prefix_hashes([user("a"), assistant("b"), user("c")])
    assert prefix_hashes([user("a"), assistant("b")]) == hashes[:2]
    assert prefix_hashes([user("c")], hashes[1]) == hashes[2:]
    assert prefix_hashes([user("ab"), assistant("")])[1] != hashes[1]


def node(table: BranchTable, call_id: str, messages: list[dict[str, Any]], *, is_consumed: bool = True) -> Node:
    made = Node(call_id=call_id, parent=None, hash=prefix_hashes(messages)[-1], num_tokens=1, is_consumed=is_consumed)
    table.add(made)
    return made


def test_the_longest_known_beginning_is_continued() -> None:
    table = BranchTable()
    first = node(table, "s_0", [user("a"), assistant("b")])
    second = node(table, "s_1", [user("a"), assistant("b"), user("c"), assistant("d")])
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert table.match(prefix_hashes(messages)) == (second, 4)
    assert table.match(prefix_hashes(messages[:3])) == (first, 2)
    assert table.match(prefix_hashes([*messages[:3], assistant("edited"), user("e")])) == (first, 2)
    assert table.match(prefix_hashes([user("other"), assistant("b"), user("c")])) == (None, 0)
    # Nothing new is said: that is no continuation of itself.
    assert table.match(prefix_hashes(messages[:2])) == (None, 0)


def test_equal_branches_are_taken_in_turn_and_consumed_ones_first() -> None:
    table = BranchTable()
    conversation = [user("a"), assistant("b")]
    node(table, "s_0", conversation, is_consumed=False)
    second, third = node(table, "s_1", conversation), node(table, "s_2", conversation)
    hashes = prefix_hashes([*conversation, user("c")])
    assert table.match(hashes)[0] is second
    second.is_continued = True
    assert table.match(hashes)[0] is third
    third.is_continued = True
    assert table.match(hashes)[0] is third


# ---------------------------------------------------------------- tools


def test_a_conversation_starts_from_its_tools() -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    turned = {"function": {"parameters": {}, "name": "look"}, "type": "function"}
    write = {"type": "function", "function": {"name": "write", "parameters": {}}}
    assert conversation_start(None) == conversation_start([]) == b""
    assert conversation_start([look]) == conversation_start([turned])
    starts = {conversation_start(tools) for tools in ([look], [write], [look, write], [write, look])}
    assert len(starts) == 4
    assert not {prefix_hashes([user("a")], start)[0] for start in starts} & {prefix_hashes([user("a")])[0]}


# ---------------------------------------------------------------- texts


def text(content: str) -> dict[str, Any]:
    return {"role": "text", "content": content}


def text_node(table: BranchTable, call_id: str, whole: str, *, is_open: bool = True) -> Node:
    said = Text(whole)
    made = Node(
        call_id=call_id, parent=None, hash=said.hash, text=said, is_open=is_open, num_tokens=1, is_consumed=True
    )
    table.add(made)
    return made


def test_the_hash_of_a_text_is_the_same_however_it_grew() -> None:
    whole = Text("Once \u00e9 upon")
    assert Text("Once ").extended("\u00e9").extended("").extended(" upon").hash == whole.hash
    assert prefix_hashes([text("Once \u00e9 upon")]) == [whole.hash]
    assert hash_after([text("Once \u00e9 upon")], None, None)[0] == whole.hash
    before = Text("Once")
    assert before.extended(" upon").hash != before.extended(" a time").hash
    assert before.hash == Text("Once").hash, "what goes on from it leaves it as it is"


def test_every_character_of_a_text_counts_and_it_is_no_conversation() -> None:
    hashes = {Text(content).hash for content in ("a", " a", "a ", "a\n", "")}
    assert len(hashes) == 5
    assert not hashes & {prefix_hashes([user(content)])[0] for content in ("a", "")}
    assert canonical(text("a")) != canonical(text("a "))


def test_the_longest_known_beginning_of_a_text_is_continued() -> None:
    table = BranchTable()
    short, long = text_node(table, "s_0", "Once \u00e9"), text_node(table, "s_1", "Once \u00e9 upon a")
    text_node(table, "s_2", "Once \u00e9 upon a time", is_open=False)
    assert table.match_text("Once \u00e9 upon a time and") == (long, " time and")
    assert table.match_text("Once \u00e9 upon a") == (long, "")
    assert table.match_text("Once \u00e9 upon") == (short, " upon")
    # Half of the bytes of the last character are another one.
    assert table.match_text("Once \u00e8") == (None, "Once \u00e8")
    assert table.match_text("") == (None, "")
    assert table.match([Text("Once \u00e9").hash, b"next"]) == (short, 1)


# ---------------------------------------------------------------- calls


def call(c: int, *, parent: str | None = None, digest: str = "d", choice: int = 0, num_choices: int = 1) -> Call:
    return Call(
        run_id="r",
        purpose=Purpose.TRAIN,
        sample_id="s",
        call_id=f"s_{c}",
        attempt=1,
        parent=parent,
        parent_digest="",
        choice=choice,
        num_choices=num_choices,
        request_digest=digest,
        sampling=Sampling(),
        messages=[],
        reply=assistant("x"),
        token_ids=[],
        loss_mask=[],
        logprobs=[],
        version="0.0",
        finish_reason=FinishReason.STOP,
        created_at=0.0,
    )


def test_calls_are_ordered_by_number_and_not_by_text() -> None:
    assert [item.call_id for item in in_order([call(10), call(2), call(1)])] == ["s_1", "s_2", "s_10"]


def test_replay_hands_out_each_answer_once_below_its_parent() -> None:
    replay = Replay.of([call(10), call(2), call(3, parent="s_2"), call(4, digest="other")])
    taken = [replay.take(None, "d") for _ in range(3)]
    assert [item and item.call_id for item in taken] == ["s_2", "s_10", None]
    assert replay.take("s_10", "d") is None
    found = replay.take("s_2", "d")
    assert found is not None and found.call_id == "s_3"


def test_replay_gives_each_choice_an_answer_to_that_choice() -> None:
    calls = [call(c, choice=choice, num_choices=3) for c, choice in ((0, 0), (2, 2), (3, 0), (4, 1), (5, 2))]
    replay = Replay.of(calls)
    taken = [[replay.take(None, "d", choice) for choice in range(3)] for _ in range(3)]
    ids = [[item and item.call_id for item in choices] for choices in taken]
    assert ids == [["s_0", "s_4", "s_2"], ["s_3", None, "s_5"], [None, None, None]]


def test_calls_of_one_request_are_put_together_when_all_of_them_are_there() -> None:
    siblings = Siblings()
    assert siblings.complete(call(0)) == [call(0)]
    # Of the first request one was never recorded, of the second all were; a third one failed as the first.
    complete = [
        siblings.complete(call(c, choice=choice, num_choices=2))
        for c, choice in ((1, 1), (2, 0), (3, 1), (4, 0), (6, 0), (7, 1))
    ]
    found = [[item.call_id for item in calls] if calls else None for calls in complete]
    assert found == [None, None, ["s_2", "s_3"], None, None, ["s_6", "s_7"]]


def test_a_request_digest_covers_messages_tools_and_sampling() -> None:
    base = request_digest([user("a")], None, Sampling())
    assert base == request_digest([user(" a")], None, Sampling())
    others = [
        request_digest([user("b")], None, Sampling()),
        request_digest([user("a"), user("a")], None, Sampling()),
        request_digest([user("a")], [{"type": "function"}], Sampling()),
        request_digest([user("a")], None, structs.replace(Sampling(), max_new_tokens=5)),
        request_digest([user("a")], None, Sampling(), "none"),
        request_digest([user("a")], None, Sampling(), "auto", 2),
    ]
    assert len({base, *others}) == 7
    tools: list[dict[str, Any]] = [{"type": "function", "name": "x"}, {"name": "x", "type": "function"}]
    assert len({request_digest([user("a")], [tool], Sampling()) for tool in tools}) == 1
    assert request_digest([user("a")], [], Sampling()) == base


def test_the_identity_of_a_request_covers_its_parameters() -> None:
    base = request_identity(b"h", Sampling())
    assert base == request_identity(b"h", Sampling(), "auto", 1)
    others = [
        request_identity(b"i", Sampling()),
        request_identity(b"h", Sampling(max_new_tokens=5)),
        request_identity(b"h", Sampling(), "required"),
        request_identity(b"h", Sampling(), "auto", 2),
    ]
    assert len({base, *others}) == 5
