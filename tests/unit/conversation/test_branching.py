"""Conversations that do not go straight on: each branch has exactly the tokens that its client said and heard.

At the end of each test the records of all calls, and the training rows of the sample, are checked against what the
replica was asked and what it sampled (`check_sample`).
"""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.conversation.talking import (
    Tokens,
    ask,
    assistant,
    check_sample,
    rendered,
    request_of,
    secret_of,
    system,
    tool_of,
    user,
)
from turnmill.conversation.attempts import Answer, Pending
from turnmill.errors import GenerationFailed, InvalidRequest, NotFound

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

Message = dict[str, Any]


@pytest.fixture
def tokens(world: "World") -> Tokens:
    """Of the world's replica, whose replies are unlike one another unless a test says otherwise."""
    tokens = Tokens()
    world.replica.make = tokens.make
    return tokens


class Talk:
    """Requests of one attempt, each at another one of the run's proxies."""

    def __init__(self, world: "World", rollout: dict[str, Any]) -> None:
        self.world, self.rollout, self._num = world, rollout, 0

    async def all(self, *said: Message | str, **more: Any) -> tuple[Answer, ...]:
        """The answers to messages, of which texts are the user's; the text `prompt` for a completion."""
        self._num += 1
        messages = [user(item) if isinstance(item, str) else item for item in said]
        service = self.world.services[self._num % len(self.world.services)]
        return await ask(service, self.rollout, more.pop("prompt", messages), **more)

    async def one(self, *said: Message | str, **more: Any) -> Answer:
        (answer,) = await self.all(*said, **more)
        return answer

    async def end(self) -> tuple[str, ...]:
        """The calls of the sample, which is reported."""
        assert (await self.world.report(self.rollout)).status == 200
        return (await self.world.sample()).calls


async def begin(world: "World") -> Talk:
    return Talk(world, await world.begin())


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


# ---------------------------------------------------------------- choices


async def test_each_choice_is_a_call_and_what_is_gone_on_from_is_trained(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    first = await talk.one("a")
    choices = await talk.all("a", first.reply, "b", num_choices=3)
    assert [(answer.call_id, answer.choice) for answer in choices] == [(f"task_0_{c}", c - 1) for c in (1, 2, 3)]
    asked = world.replica.requests[1:]
    assert sorted((request.choice, request.num_choices, request.parent) for request in asked) == [
        (choice, 3, first.call_id) for choice in range(3)
    ]
    last = await talk.one("a", first.reply, "b", choices[1].reply, "c")
    assert world.counts.num_forks == 0
    assert await talk.end() == ("task_0_0", "task_0_1", "task_0_2", "task_0_3", "task_0_4")
    (row,) = await check_sample(world, tokens)
    assert [span.call_id for span in row.spans] == [first.call_id, choices[1].call_id, last.call_id]


async def test_several_choices_may_be_gone_on_from(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    choices = await talk.all("a", num_choices=4)
    lasts = [await talk.one("a", choice.reply, "b") for choice in choices[1:3]]
    # And none of these is.
    await talk.all("a", choices[1].reply, "b", lasts[0].reply, "c", num_choices=2)
    await talk.end()
    rows = await check_sample(world, tokens)
    assert [[span.call_id for span in row.spans] for row in rows] == [
        [choices[1].call_id, lasts[0].call_id],
        [choices[2].call_id, lasts[1].call_id],
    ]


async def test_a_sample_of_choices_only_has_no_rows(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    await talk.all("a", num_choices=2)
    assert len(await talk.end()) == 2
    assert await check_sample(world, tokens) == []


async def test_equal_choices_are_gone_on_from_in_their_order(world: "World", tokens: Tokens) -> None:
    world.replica.reply = lambda request: "same"
    talk = await begin(world)
    choices = await talk.all("a", num_choices=3)
    for _ in range(2):
        await talk.one("a", choices[0].reply, "b")
    parents = [request.parent for request in world.replica.requests[3:]]
    assert parents == [choices[0].call_id, choices[1].call_id]
    await talk.end()
    await check_sample(world, tokens)


async def test_a_retry_gives_all_choices_again(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    choices = await talk.all("a", num_choices=2, key="k")
    assert await talk.all("a", num_choices=2, key="k") == choices
    with pytest.raises(InvalidRequest, match="another request"):
        await talk.all("a", num_choices=3, key="k")
    assert len(world.replica.requests) == 2
    async with world.restarted() as second:
        later = Talk(second, second.here(talk.rollout))
        again = await later.all("a", num_choices=2, key="k")
        assert [answer.call_id for answer in again] == [answer.call_id for answer in choices]
        await later.one("a", choices[1].reply, "b")
        assert len(await later.end()) == 3
    await check_sample(world, tokens)


async def test_choices_that_are_late_are_one_step(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    world.replica.may_answer.clear()
    secret, service = secret_of(talk.rollout), world.services[0]
    pending = await service.chat(secret, request_of([user("a")], num_choices=2, has_logprobs=True), hold_s=0)
    assert pending == Pending(step_id="task_0_0")
    with pytest.raises(NotFound):
        await service.step(secret, "task_0_1")
    assert await service.step(secret, "task_0_0") == pending
    world.replica.may_answer.set()
    answers = await service.step(secret, "task_0_0", hold_s=20)
    assert isinstance(answers, tuple)
    assert [answer.call_id for answer in answers] == ["task_0_0", "task_0_1"]
    assert [answer.sampled_ids for answer in answers] == [tokens.sampled[f"task_0_{c}"] for c in range(2)]
    await talk.end()
    await check_sample(world, tokens)


async def test_one_failed_choice_fails_the_request_and_its_siblings_are_not_consumed(
    world: "World", tokens: Tokens
) -> None:
    too_long = {"code": "context_length_exceeded", "message": "too long"}
    world.replica.reply = lambda request: too_long if request.step_id == "task_0_1" else "fine"
    talk = await begin(world)
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="too long"):
            await talk.all("a", num_choices=3, key="k")
    assert len(world.replica.requests) == 3
    fine = await talk.one("b")
    assert await talk.end() == (fine.call_id,)
    await check_sample(world, tokens)


async def test_choices_are_replayed_one_by_one(world: "World", tokens: Tokens) -> None:
    failed = {"code": "engine_failed", "message": "out of memory"}
    world.replica.reply = lambda request: failed if request.step_id == "task_0_1" else f"answer {request.step_id}"
    talk = await begin(world)
    with pytest.raises(GenerationFailed):
        await talk.all("a", num_choices=3)
    chosen = await talk.all("b", num_choices=2)
    await world.lose_lease()
    second = Talk(world, await world.lease_one())
    # What is recorded is replayed in its place, what is not is asked for.
    ids = [answer.call_id for answer in await second.all("a", num_choices=3)]
    assert (ids[0], ids[2]) == ("task_0_0", "task_0_2")
    assert ids[1] not in {f"task_0_{c}" for c in range(5)}
    # One of another number is another request.
    alone = await second.one("b")
    assert alone.call_id not in {answer.call_id for answer in chosen}
    assert await second.all("b", num_choices=2) == chosen
    last = await second.one("a", assistant(f"answer {ids[1]}"), "c")
    assert world.replica.requests[-1].parent == ids[1]
    assert set(await second.end()) == {*ids, alone.call_id, last.call_id, *(answer.call_id for answer in chosen)}
    rows = await check_sample(world, tokens)
    assert [[span.call_id for span in row.spans] for row in rows] == [[alone.call_id], [ids[1], last.call_id]]


async def test_a_restarted_proxy_goes_on_from_choices_that_two_attempts_made(world: "World", tokens: Tokens) -> None:
    failed = {"code": "engine_failed", "message": "out of memory"}
    world.replica.reply = lambda request: failed if request.step_id == "task_0_1" else f"answer {request.step_id}"
    talk = await begin(world)
    with pytest.raises(GenerationFailed):
        await talk.all("a", num_choices=2)
    await world.lose_lease()
    second = Talk(world, await world.lease_one())
    old, new = await second.all("a", num_choices=2)
    assert (old.call_id, world.replica.requests[-1].step_id) == ("task_0_0", new.call_id)
    async with world.restarted() as other:
        later = Talk(other, other.here(second.rollout))
        lasts = [await later.one("a", choice.reply, "b") for choice in (new, old)]
        assert [request.parent for request in world.replica.requests[-2:]] == [new.call_id, old.call_id]
        assert other.counts.num_forks == 0
        assert set(await later.end()) == {old.call_id, new.call_id, *(answer.call_id for answer in lasts)}
    rows = await check_sample(world, tokens)
    assert sorted([span.call_id for span in row.spans] for row in rows) == sorted(
        [[new.call_id, lasts[0].call_id], [old.call_id, lasts[1].call_id]]
    )


async def test_more_choices_than_one_reservation_holds_have_numbers(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    for turn in range(2):
        answers = await talk.all(f"{turn}", num_choices=100)
        assert [answer.call_id for answer in answers] == [f"task_0_{100 * turn + c}" for c in range(100)]
    await talk.end()


# ---------------------------------------------------------------- texts


async def test_a_text_that_begins_with_prompt_and_reply_goes_on_from_there(world: "World", tokens: Tokens) -> None:
    world.replica.reply = lambda request: f" word {request.step_id}..."
    talk = await begin(world)
    first = await talk.one(prompt="Once upon")
    whole = "Once upon" + first.reply["content"]
    second = await talk.one(prompt=f"{whole} a  time \u00e9")
    assert world.replica.requests[1].parent == first.call_id
    assert world.replica.requests[1].messages == [{"role": "text", "content": " a  time \u00e9"}]
    longest = f"{whole} a  time \u00e9{second.reply['content']}"
    third = await talk.one(prompt=longest)
    assert (world.replica.requests[2].parent, world.replica.requests[2].messages[0]["content"]) == (second.call_id, "")
    # From the middle, as a branch of its own.
    await talk.one(prompt=f"{whole} or twice")
    assert world.replica.requests[3].parent == first.call_id
    # White space counts, and so does each character of the reply.
    for other in (f" {whole}", whole[:-1], "Once upon"):
        await talk.one(prompt=other)
        assert world.replica.requests[-1].parent is None
    assert world.counts.num_forks == 3
    await talk.end()
    rows = await check_sample(world, tokens)
    assert [span.call_id for span in rows[0].spans] == [first.call_id, second.call_id, third.call_id]


async def test_a_text_whose_end_was_sampled_is_not_gone_on_from(world: "World", tokens: Tokens) -> None:
    world.replica.reply = lambda request: " the end."
    talk = await begin(world)
    first = await talk.one(prompt="Once")
    await talk.one(prompt="Once the end. And then")
    assert [request.parent for request in world.replica.requests] == [None, None]
    assert first.reply["content"] == " the end."
    await talk.end()
    assert len(await check_sample(world, tokens)) == 2


async def test_texts_and_conversations_never_continue_one_another(world: "World", tokens: Tokens) -> None:
    world.replica.reply = lambda request: "b..."
    talk = await begin(world)
    chat, text = await talk.one("a"), await talk.one(prompt="a")
    await talk.one("a", chat.reply, "c")
    await talk.one(prompt="ab...c")
    await talk.one("a", text.reply, "c")
    parents = [request.parent for request in world.replica.requests[2:]]
    assert parents == [chat.call_id, text.call_id, chat.call_id]
    await talk.end()
    await check_sample(world, tokens)


async def test_a_restarted_proxy_goes_on_with_a_text(world: "World", tokens: Tokens) -> None:
    world.replica.reply = lambda request: f" {request.step_id}..."
    talk = await begin(world)
    first = await talk.one(prompt="Once ")
    lost = await talk.one(prompt=f"Once {first.reply['content']} more", key="k")
    async with world.restarted() as second:
        later = Talk(second, second.here(talk.rollout))
        again = await later.one(prompt=f"Once {first.reply['content']} more", key="k")
        assert again.call_id == lost.call_id
        await later.all(prompt=f"Once {first.reply['content']} more{lost.reply['content']} and more", num_choices=2)
        assert {request.parent for request in world.replica.requests[2:]} == {lost.call_id}
        await later.end()
    await check_sample(world, tokens)


# ---------------------------------------------------------------- tokens


async def test_tokens_are_told_to_those_who_ask(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    first = await talk.one("a")
    assert (first.sampled_ids, first.logprobs, first.prompt_ids) == ((), (), None)
    second = await talk.one("a", first.reply, "b", has_logprobs=True, key="k")
    assert second.sampled_ids == tokens.sampled[second.call_id]
    assert second.logprobs == [-0.5] * len(second.sampled_ids)
    assert second.prompt_ids is None
    again = await talk.one("a", first.reply, "b", has_token_ids=True, key="k")
    assert again.call_id == second.call_id
    assert (again.prompt_ids, again.sampled_ids) == (tokens.prompts[second.call_id], second.sampled_ids)
    assert again.num_prompt_tokens == len(again.prompt_ids or ())
    choices = await talk.all("a", first.reply, "c", has_token_ids=True, num_choices=2)
    assert [answer.prompt_ids for answer in choices] == [tokens.prompts[answer.call_id] for answer in choices]
    assert [answer.sampled_ids for answer in choices] == [tokens.sampled[answer.call_id] for answer in choices]
    await talk.end()


async def test_the_tokens_of_a_replayed_call_are_told_too(world: "World", tokens: Tokens) -> None:
    first = await (await begin(world)).one("a")
    await world.lose_lease()
    talk = Talk(world, await world.lease_one())
    again = await talk.one("a", has_token_ids=True)
    assert (again.call_id, again.prompt_ids) == (first.call_id, tokens.prompts[first.call_id])
    await talk.end()
