"""Several choices of one request, and the tokens of answers: in both forms of the proxy."""

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.conversation.talking import (
    Talk,
    Tokens,
    assistant,
    begin,
    check_sample,
    request_of,
    secret_of,
    user,
)
from turnmill.conversation.attempts import Pending
from turnmill.errors import GenerationFailed, InvalidRequest, NotFound
from turnmill.records import Call, GenerateRequest

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World


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


async def test_a_proxy_that_dies_between_two_choices_leaves_nothing_that_is_trained_unseen(
    world: "World", tokens: Tokens
) -> None:
    made: dict[str, Call] = {}

    def make(request: GenerateRequest, text: str, parent: Call | None) -> Call:
        """The same record for a request that is answered twice."""
        if request.step_id not in made:
            made[request.step_id] = tokens.make(request, text, parent)
        return made[request.step_id]

    world.replica.make = make
    talk = await begin(world)
    world.replica.may_answer.clear()
    asking = asyncio.create_task(talk.all("a", num_choices=2, key="k"))
    await world.replica.was_asked.wait()
    # One is recorded, the other comes when its client has asked the next proxy.
    await world.replica.answer(next(request for request in world.replica.requests if request.choice == 0))
    async with world.restarted() as second:
        later = Talk(second, second.here(talk.rollout))
        again = asyncio.create_task(later.all("a", num_choices=2, key="k"))
        await asyncio.sleep(0.1)
        world.replica.may_answer.set()
        choices = await again
        assert [answer.choice for answer in choices] == [0, 1]
        # One process may have forgotten what was not answered; many find it in the log.
        assert world.is_lone or choices[0].call_id == "task_0_0"
        last = await later.one("a", choices[1].reply, "b")
        consumed = await later.end()
    assert set(consumed) == {*(answer.call_id for answer in choices), last.call_id}
    (row,) = await check_sample(world, tokens)
    assert [span.call_id for span in row.spans] == [choices[1].call_id, last.call_id]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_more_choices_than_one_reservation_holds_have_numbers(world: "World", tokens: Tokens) -> None:
    talk = await begin(world)
    for turn in range(2):
        answers = await talk.all(f"{turn}", num_choices=100)
        assert [answer.call_id for answer in answers] == [f"task_0_{100 * turn + c}" for c in range(100)]
    await talk.end()


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
