"""Texts of completions, which go on where the one before was cut off: in both forms of the proxy."""

from typing import TYPE_CHECKING

from tests.unit.conversation.talking import (
    Talk,
    Tokens,
    begin,
    check_sample,
)

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World


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
