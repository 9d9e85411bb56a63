"""Stored conversations that are played again: the same answers to the same requests, and what differs told."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.unit.conversation.conftest import CONFIG
from tests.unit.conversation.speech import WEATHER, calling, spoken
from tests.unit.conversation.talking import calls_of
from turnmill.conversation.replayed import ReplayApp, Replayed, ReplayedChats
from turnmill.conversation.requests import Offer
from turnmill.conversation.serving import listening
from turnmill.records import GenerateRequest, Purpose, RunKind, SampleRecord, Sampling, StopReason, encode

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World


@dataclass
class Again:
    """A conversation that is played again, by HTTP."""

    http: aiohttp.ClientSession
    url: str
    replayed: Replayed

    async def post(self, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.url}/{route}", data=encode(body)) as response:
            return response.status, await response.json(content_type=None)

    async def chat(self, *messages: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        said = [{"role": "user", "content": item} if isinstance(item, str) else item for item in messages]
        return await self.post("chat/completions", model="turnmill", messages=said, **more)

    async def diverges(self, *messages: Any, **more: Any) -> str:
        """What is told to differ, on a first and on any other request from then on."""
        status, body = await self.chat(*messages, **more)
        assert (status, body["error"]["code"]) == (500, "diverged")
        assert (await self.chat("Guess."))[0] == 500
        assert self.replayed.divergence is not None
        return self.replayed.divergence.what


@asynccontextmanager
async def again(world: "World", sample: SampleRecord, **offers: Offer) -> AsyncIterator[Again]:
    """`offers` are others than the run's, by purpose."""
    offer = Offer.of(CONFIG, RunKind.TRAIN)
    by_purpose = {**dict.fromkeys(Purpose, offer), **{Purpose(name): other for name, other in offers.items()}}
    chats = ReplayedChats(offer=offer, offers=by_purpose, created_at=0.0)
    calls = await calls_of(world.ports.records, sample.sample_id, sample.calls)
    before = await world.stored_bytes()
    secret, replayed = chats.open(sample, calls)
    async with listening(ReplayApp(chats), host="127.0.0.1", port=0, name="replay") as port:
        yield Again(world.http, f"http://127.0.0.1:{port}/a/{secret}/v1", replayed)
    assert await world.stored_bytes() == before
    chats.close(secret)


async def ended(world: "World", rollout: dict[str, Any], **more: Any) -> SampleRecord:
    assert (await world.report(rollout, 0.5, **more)).status == 200
    return await world.sample()


async def two_turns(world: "World", **more: Any) -> tuple[SampleRecord, list[dict[str, Any]]]:
    """A sample of two calls, and their completions."""
    rollout = await world.begin()
    first = (await world.chat(rollout, "Guess.")).body
    second = (await world.chat(rollout, "Guess.", said_in(first), "Again.")).body
    return await ended(world, rollout, **more), [first, second]


def said_in(completion: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = completion["choices"][0]["message"]
    return message


# ---------------------------------------------------------------- the same requests


async def test_the_same_requests_get_the_stored_completions(lone_world: "World") -> None:
    sample, (first, second) = await two_turns(lone_world)
    async with again(lone_world, sample) as replay:
        assert await replay.chat("Guess.") == (200, first)
        # As a client may write it back.
        said = {**said_in(first), "content": f" {said_in(first)['content']}\n"}
        assert await replay.chat("Guess.", said, "Again.") == (200, second)
        assert [call.call_id for call in replay.replayed.consumed] == [first["id"], second["id"]]
        assert replay.replayed.divergence is None
        async with replay.http.get(f"{replay.url}/models") as models:
            assert models.status == 200


async def test_tokens_are_told_as_they_were_recorded(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    wanted = {"return_token_ids": True, "logprobs": True}
    first = (await lone_world.chat(rollout, "Guess.", **wanted)).body
    second = (await lone_world.chat(rollout, "Guess.", said_in(first), "Again.", **wanted)).body
    sample = await ended(lone_world, rollout)
    async with again(lone_world, sample) as replay:
        assert await replay.chat("Guess.", **wanted) == (200, first)
        assert await replay.chat("Guess.", said_in(first), "Again.", **wanted) == (200, second)
        assert second["prompt_token_ids"]


async def test_a_transport_retry_is_the_same_call_and_equal_requests_are_answered_in_their_order(
    lone_world: "World",
) -> None:
    rollout = await lone_world.begin()
    told = [(await lone_world.chat(rollout, "Guess.")).body for _ in range(2)]
    sample = await ended(lone_world, rollout)
    assert said_in(told[0]) != said_in(told[1])
    async with again(lone_world, sample) as replay:
        for completion in told:
            for _ in range(2):
                found = await replay.chat("Guess.", request_id=completion["id"])
                assert found == (200, completion)
        assert "asked for once more" not in (await replay.diverges("Guess."))
        assert replay.replayed.divergence is not None and replay.replayed.divergence.turn == 3


async def test_choices_branches_tools_and_texts_are_replayed(lone_world: "World") -> None:
    world = lone_world
    world.replica.make = spoken

    def reply(request: GenerateRequest) -> str:
        return calling(("weather", {"city": "Rome"})) if request.tools else f"answer {request.step_id}"

    world.replica.reply = reply
    rollout = await world.begin()
    chosen = (await world.chat(rollout, "Guess.", n=3)).body
    branch = [choice["message"] for choice in chosen["choices"]]
    left = (await world.chat(rollout, "Guess.", branch[2], "On.")).body
    right = (await world.chat(rollout, "Guess.", branch[0], "On.")).body
    called = (await world.chat(rollout, "Rome?", tools=[WEATHER])).body
    (call,) = said_in(called)["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "30"}
    after = (await world.chat(rollout, "Rome?", said_in(called), answer, tools=[WEATHER])).body
    text = (await world.post(f"{rollout['base_url']}/completions", {"prompt": "Once", "max_tokens": 5})).body
    longer = f"Once{text['choices'][0]['text']} upon"
    sample = await ended(world, rollout)

    async with again(world, sample) as replay:
        assert await replay.chat("Guess.", n=3) == (200, chosen)
        # In another order than then: each goes on below its own choice.
        assert await replay.chat("Guess.", branch[0], "On.") == (200, right)
        assert await replay.chat("Guess.", branch[2], "On.") == (200, left)
        assert await replay.chat("Rome?", tools=[WEATHER]) == (200, called)
        assert await replay.chat("Rome?", said_in(called), answer, tools=[WEATHER]) == (200, after)
        assert await replay.post("completions", prompt="Once", max_tokens=5) == (200, text)
        status, body = await replay.post("completions", prompt=longer, max_tokens=5)
        assert (status, body["error"]["code"]) == (500, "diverged")


# ---------------------------------------------------------------- other requests


async def test_another_prompt_another_answer_and_more_turns_are_told_apart(lone_world: "World") -> None:
    sample, (first, second) = await two_turns(lone_world)
    async with again(lone_world, sample) as replay:
        what = await replay.diverges("Guess!")
        assert what == "messages[0] is user 'Guess!', stored is user 'Guess.'"
        assert replay.replayed.divergence is not None and replay.replayed.divergence.turn == 1
    async with again(lone_world, sample) as replay:
        await replay.chat("Guess.")
        what = await replay.diverges("Guess.", said_in(first), "Once more.")
        assert what == "messages[2] is user 'Once more.', stored is user 'Again.'"
        assert replay.replayed.divergence is not None and replay.replayed.divergence.turn == 2
    async with again(lone_world, sample) as replay:
        await replay.chat("Guess.")
        await replay.chat("Guess.", said_in(first), "Again.")
        what = await replay.diverges("Guess.", said_in(first), "Again.", said_in(second), "On and on.")
        assert what == "the stored conversation ends before it; it goes on with user 'On and on.'"


async def test_parameters_that_differ_are_named(lone_world: "World") -> None:
    sample, _ = await two_turns(lone_world)
    for more, text in (
        ({"n": 2}, "n is 2, stored is 1"),
        ({"max_tokens": 3}, "max_new_tokens is 3, stored is 64"),
        ({"tools": [WEATHER]}, "tools is [{"),
    ):
        async with again(lone_world, sample) as replay:
            assert (await replay.diverges("Guess.", **more)).startswith(text)


async def test_what_a_call_is_sampled_with_depends_on_what_its_rollout_is_for(lone_world: "World") -> None:
    sample, (first, _) = await two_turns(lone_world)
    greedy = Offer(sampling=Sampling(temperature=0.0, max_new_tokens=64))
    async with again(lone_world, sample, eval=greedy) as replay:
        assert await replay.chat("Guess.") == (200, first)
    async with again(lone_world, sample, train=greedy) as replay:
        assert await replay.diverges("Guess.") == "temperature is 0.0, stored is 1.0"


async def test_a_history_that_is_changed_is_another_conversation(lone_world: "World") -> None:
    sample, (first, _) = await two_turns(lone_world)
    async with again(lone_world, sample) as replay:
        await replay.chat("Guess.")
        edited = {**said_in(first), "content": "something else"}
        assert "messages[1] is assistant 'something else'" in await replay.diverges("Guess.", edited, "Again.")


async def test_a_long_text_is_shown_around_its_first_difference(lone_world: "World") -> None:
    rollout = await lone_world.begin()
    await lone_world.chat(rollout, "x" * 500 + "old" + "y" * 500)
    sample = await ended(lone_world, rollout)
    async with again(lone_world, sample) as replay:
        what = await replay.diverges("x" * 500 + "new" + "y" * 500)
        assert f"…'{'x' * 40}new" in what and f"…'{'x' * 40}old" in what and len(what) < 300


async def test_a_context_that_was_full_is_full_again_but_not_where_it_can_t_have_been(tmp_path: Path) -> None:
    from tests.unit.conversation.conftest import open_world

    async with open_world(tmp_path) as world:
        world.replica.reply = lambda request: (
            {"code": "context_length_exceeded", "message": "full"} if request.parent else "so far"
        )
        rollout = await world.begin()
        first = (await world.chat(rollout, "Guess.")).body
        asked: Sequence[Any] = ("Guess.", said_in(first), "z" * 2000)
        assert (await world.chat(rollout, *asked)).status == 400
        sample = await ended(world, rollout, stop_reason="max_length")
        async with again(world, sample) as replay:
            await replay.chat("Guess.")
            status, body = await replay.chat(*asked)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert replay.replayed.divergence is None
        async with again(world, sample) as replay:
            await replay.chat("Guess.")
            assert "ends before it" in await replay.diverges("Guess.", said_in(first), "short")
        other = replace(sample, stop_reason=StopReason.END_OF_CONVERSATION.value)
        async with again(world, other) as replay:
            await replay.chat("Guess.")
            assert "ends before it" in await replay.diverges(*asked)


async def test_only_agents_are_served_and_only_while_their_conversation_is_open(lone_world: "World") -> None:
    sample, _ = await two_turns(lone_world)
    async with again(lone_world, sample) as replay:
        base = replay.url.partition("/a/")[0]
        async with replay.http.post(f"{base}/v1/rollouts/report", data=b"{}") as response:
            assert response.status == 404
        stranger = replace(replay, url=f"{base}/a/{'x' * 40}/v1")
        assert (await stranger.chat("Guess."))[0] == 401
        async with replay.http.get(f"{replay.url}/chat/completions/task_0_0") as response:
            assert response.status == 404
        status, body = await replay.chat("Guess.", temperature=0.3)
        assert (status, body["error"]["param"]) == (400, "temperature")
