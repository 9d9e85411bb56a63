"""Which call a request continues, and which recorded answer it replays."""

from typing import Any

import pytest
from msgspec import structs

from turnmill.conversation.branches import (
    BranchTable,
    Node,
    Replay,
    canonical,
    in_order,
    prefix_hashes,
    request_digest,
)
from turnmill.conversation.calls import rendezvous
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


def call(c: int, *, parent: str | None = None, digest: str = "d") -> Call:
    return Call(
        run_id="r",
        purpose=Purpose.TRAIN,
        sample_id="s",
        call_id=f"s_{c}",
        attempt=1,
        parent=parent,
        parent_digest="",
        choice=0,
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


def test_a_request_digest_covers_messages_tools_and_sampling() -> None:
    base = request_digest([user("a")], None, Sampling())
    assert base == request_digest([user(" a")], None, Sampling())
    others = [
        request_digest([user("b")], None, Sampling()),
        request_digest([user("a"), user("a")], None, Sampling()),
        request_digest([user("a")], [{"type": "function"}], Sampling()),
        request_digest([user("a")], None, structs.replace(Sampling(), max_new_tokens=5)),
    ]
    assert len({base, *others}) == 5


def test_rendezvous_spreads_samples_and_moves_only_those_of_a_lost_replica() -> None:
    samples = [f"task-{index}_0" for index in range(4000)]
    four = {sample: rendezvous(sample, 4) for sample in samples}
    shares = [list(four.values()).count(index) for index in range(4)]
    assert all(850 < share < 1150 for share in shares)
    three = {sample: rendezvous(sample, 3) for sample in samples}
    assert all(three[sample] == four[sample] for sample in samples if four[sample] != 3)
