"""Conversations that do not go straight on: each branch has exactly the tokens that its client said and heard.

At the end of each test the records of all calls, and the training rows of the sample, are checked against what the
replica was asked and what it sampled (`check_sample`).
"""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.conversation.talking import (
    Talk,
    Tokens,
    assistant,
    begin,
    check_sample,
    rendered,
    system,
    tool_of,
    user,
)
from turnmill.errors import InvalidRequest

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

Message = dict[str, Any]


# ---------------------------------------------------------------- edits


async def test_a_dropped_turn_goes_on_from_what_is_left(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    first = await talk.one("a")
    second = await talk.one("a", first.reply, "b")
    await talk.one("a", first.reply, "b", second.reply, "c")
    # The second turn is gone.
    short = await talk.one("a", first.reply, "c")
    assert tokens.prompts[short.call_id] == [
        *rendered([user("a")]),
        *tokens.sampled[first.call_id],
        *rendered([user("c")]),
    ]
    assert world.counts.num_forks == 0
    await talk.end()
    rows = await check_sample(world, tokens)
    assert [[span.call_id for span in row.spans] for row in rows] == [
        ["task_0_0", "task_0_1", "task_0_2"],
        ["task_0_0", "task_0_3"],
    ]
    # What both share is trained once.
    assert [row.num_trained for row in rows] == [
        sum(len(tokens.sampled[f"task_0_{c}"]) for c in (0, 1, 2)),
        len(tokens.sampled["task_0_3"]),
    ]


async def test_an_edited_system_prompt_is_another_conversation(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    first = await talk.one(system("Be kind."), user("a"))
    edited = await talk.one(system("Be short."), user("a"), first.reply, user("b"))
    said = [system("Be short."), user("a"), first.reply, user("b")]
    assert tokens.prompts[edited.call_id] == rendered(said), "the reply before is context, as it was written"
    assert world.counts.num_forks == 1
    plain = await talk.one(system("Be kind."), user("a"), first.reply, user("b"))
    assert tokens.prompts[plain.call_id][2:] != tokens.prompts[edited.call_id][2:]
    assert await talk.end() == tuple(answer.call_id for answer in (first, edited, plain))
    rows = await check_sample(world, tokens)
    assert [len(row.spans) for row in rows] == [1, 2]


async def test_edited_assistant_text_is_context_and_never_trained(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    first = await talk.one("a")
    second = await talk.one("a", first.reply, "b")
    better = await talk.one("a", first.reply, "b", assistant("a better answer"), "c")
    assert tokens.prompts[better.call_id] == [
        *rendered([user("a")]),
        *tokens.sampled[first.call_id],
        *rendered([user("b"), assistant("a better answer"), user("c")]),
    ]
    assert world.counts.num_forks == 1
    await talk.end()
    rows = await check_sample(world, tokens)
    spans = [{span.call_id for span in row.spans if any(row.loss_mask[span.start : span.end])} for row in rows]
    assert spans == [{first.call_id, second.call_id}, {better.call_id}]


async def test_a_compacted_context_is_a_conversation_of_its_own(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    said: list[Message] = [system("Find it."), user("start")]
    for turn in range(3):
        answer = await talk.one(*said)
        said += [answer.reply, user(f"found {turn}")]
    summary = await talk.one(*said[:-1], user("Sum up what you know."))
    compacted = [system("Find it."), user(f"So far: {summary.reply['content']}"), said[-1]]
    after = await talk.one(*compacted)
    assert tokens.prompts[after.call_id] == rendered(compacted)
    last = await talk.one(*compacted, after.reply, user("and now?"))
    assert world.counts.num_forks == 1
    await talk.end()
    rows = await check_sample(world, tokens)
    assert [[span.call_id for span in row.spans] for row in rows] == [
        ["task_0_0", "task_0_1", "task_0_2", summary.call_id],
        [after.call_id, last.call_id],
    ]


async def test_sub_agents_side_by_side_each_have_their_own_branch(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    plan = await talk.one(system("Lead."), "plan")

    async def work(number: int) -> list[str]:
        """An agent with a prompt of its own, for three turns."""
        said: list[Message] = [system(f"You are worker {number}."), user("go")]
        ids: list[str] = []
        for turn in range(3):
            answer = await talk.one(*said)
            said += [answer.reply, user(f"result {turn}")]
            ids.append(answer.call_id)
        return ids

    async def look(number: int) -> list[str]:
        """One that goes on from the plan itself."""
        said = [system("Lead."), user("plan"), plan.reply, user(f"look at {number}")]
        first = await talk.one(*said)
        second = await talk.one(*said, first.reply, user("more"))
        return [first.call_id, second.call_id]

    paths = await asyncio.gather(*map(work, range(3)), *map(look, range(3)))
    await talk.end()
    rows = await check_sample(world, tokens)
    found = {tuple(span.call_id for span in row.spans) for row in rows}
    assert found == {*map(tuple, paths[:3]), *((plan.call_id, *path) for path in paths[3:])}
    assert sum(any(row.loss_mask[: row.spans[0].end]) and row.spans[0].call_id == plan.call_id for row in rows) == 1


# ---------------------------------------------------------------- tools


async def test_other_tools_make_another_conversation(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    look, write = [tool_of("look")], [tool_of("look"), tool_of("write")]
    first = await talk.one("a", tools=look)
    same = await talk.one("a", first.reply, "b", tools=[dict(reversed(look[0].items()))])
    other = await talk.one("a", first.reply, "b", tools=write)
    none = await talk.one("a", first.reply, "b")
    parents = {request.step_id: request.parent for request in world.replica.requests}
    assert parents == {first.call_id: None, same.call_id: first.call_id, other.call_id: None, none.call_id: None}
    assert [request.tools for request in world.replica.requests[:3]][::2] == [look, write]
    assert world.replica.requests[1].tools in (look, [dict(reversed(look[0].items()))])
    assert tokens.prompts[other.call_id] == rendered([user("a"), first.reply, user("b")], write)
    assert world.counts.num_forks == 2
    await talk.end()
    await check_sample(world, tokens)


async def test_tool_calls_and_the_messages_behind_them_are_recognized(world: "World", tokens: Tokens) -> None:
    world.replica.reply = lambda request: "call " + request.step_id if request.parent is None else "done"
    talk = await begin(world)
    tools = [tool_of("look")]
    first = await talk.one("a", tools=tools)
    (called,) = first.reply["tool_calls"]
    # As a client may send it back: no content but "", its arguments in another order.
    function = {"name": "look", "arguments": '{"from":"here","at":1}'}
    call: Message = {"id": called["id"], "function": function}
    again: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    results = [{"role": "tool", "tool_call_id": f"{called['id']}", "content": f"result {n}"} for n in range(2)]
    second = await talk.one("a", again, *results, tools=tools)
    assert world.replica.requests[1].messages == results
    assert world.replica.requests[1].parent == first.call_id
    # Another id, another argument: not what was said.
    for changed in ({"id": "other"}, {"function": {**function, "arguments": '{"from":"here","at":2}'}}):
        wrong = {**again, "tool_calls": [{**call, **changed}]}
        await talk.one("a", wrong, *results, tools=tools)
    assert [request.parent for request in world.replica.requests] == [None, first.call_id, None, None]
    assert second.reply == assistant("done")
    await talk.end()
    await check_sample(world, tokens)


async def test_the_choice_among_tools_is_a_parameter_and_no_branch(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    tools = [tool_of("look")]
    first = await talk.one("a", tools=tools, tool_choice="required")
    second = await talk.one("a", first.reply, "b", tools=tools, tool_choice="none", key="k")
    assert [request.tool_choice for request in world.replica.requests] == ["required", "none"]
    assert world.replica.requests[1].parent == first.call_id
    with pytest.raises(InvalidRequest, match="another request"):
        await talk.one("a", first.reply, "b", tools=tools, tool_choice="auto", key="k")
    await world.lose_lease()
    later = Talk(world, await world.lease_one())
    assert (await later.one("a", tools=tools, tool_choice="required")).call_id == first.call_id
    other = await later.one("a", first.reply, "b", tools=tools, tool_choice="auto")
    assert other.call_id not in (first.call_id, second.call_id)
    assert await later.end() == (first.call_id, other.call_id)
    await check_sample(world, tokens)


async def test_a_restarted_proxy_knows_the_tools_of_a_conversation(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    tools = [tool_of("look")]
    first = await talk.one("a", tools=tools)
    lost = await talk.one("a", first.reply, "b", tools=tools, tool_choice="required", key="k")
    async with world.restarted() as second:
        later = Talk(second, second.here(talk.rollout))
        again = await later.one("a", first.reply, "b", tools=tools, tool_choice="required", key="k")
        assert again.call_id == lost.call_id
        await later.one("a", first.reply, "b", again.reply, "c", tools=tools)
        assert world.replica.requests[-1].parent == lost.call_id
        assert world.replica.requests[-1].tools == tools
        assert second.counts.num_forks == 0
        await later.end()
    await check_sample(world, tokens)
