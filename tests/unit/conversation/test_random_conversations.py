"""Random conversations with everything that clients do: forks, edits, choices, texts, tools, retries, failures,
restarts of the proxy, attempts that die. Each request must get the prompt that it means, by a reading of the rules that
knows no hashes; at the end each sampled token is trained once or not at all (`check_sample`).
"""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conversation.conftest import Form, World, open_world
from tests.unit.conversation.talking import Tokens, ask, assistant, check_sample, rendered, system, tool_of, user
from turnmill.conversation.attempts import Answer
from turnmill.errors import GenerationFailed
from turnmill.records import GenerateRequest

Message = dict[str, Any]
TOOLS = (None, [tool_of("look")], [tool_of("look"), tool_of("write")])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request."""

    # A chat, or a text.
    said: tuple[Message, ...] | str
    tools: list[Message] | None
    num_choices: int
    key: str


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the client has heard: one answer and what it was the answer to."""

    said: tuple[Message, ...] | str
    tools: list[Message] | None
    answer: Answer

    @property
    def whole(self) -> tuple[Message, ...] | str:
        if isinstance(self.said, str):
            return self.said + str(self.answer.reply["content"])
        return (*self.said, self.answer.reply)


@dataclass
class Player:
    """The client of one sample."""

    world: World
    tokens: Tokens
    sample_id: str
    rng: random.Random
    rollout: dict[str, Any] = field(default_factory=dict)
    known: list[Known] = field(default_factory=list)
    # What was asked in this attempt, with the ids of the calls that answered it; none where it failed.
    script: list[tuple[Asked, tuple[str, ...]]] = field(default_factory=list)
    # Calls that may be trained: the client has their answers.
    heard: set[str] = field(default_factory=set)

    # ------------------------------------------------------------ requests

    async def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            await self.step()

    async def step(self) -> None:
        if self.rng.random() < 0.25:
            await asyncio.gather(*(self.ask(self.invent()) for _ in range(self.rng.randint(2, 3))))
        else:
            await self.ask(self.invent())

    async def ask(self, asked: Asked) -> tuple[str, ...]:
        """The calls that answered; none where one of them failed."""
        has_token_ids = self.rng.random() < 0.3
        service = self.rng.choice(self.world.services)
        told = {"tools": asked.tools, "num_choices": asked.num_choices, "key": asked.key}
        parent = self.parent_of(asked)
        try:
            answers = await ask(service, self.rollout, asked.said, has_token_ids=has_token_ids, **told)
        except GenerationFailed:
            self.script.append((asked, ()))
            return ()
        assert [answer.choice for answer in answers] == list(range(asked.num_choices))
        expected = self.prompt_of(asked, parent)
        for answer in answers:
            assert self.tokens.prompts[answer.call_id] == expected
            if has_token_ids:
                assert answer.prompt_ids == expected
                assert answer.sampled_ids == self.tokens.sampled[answer.call_id]
            self.heard.add(answer.call_id)
            self.known.append(Known(said=asked.said, tools=asked.tools, answer=answer))
        ids = tuple(answer.call_id for answer in answers)
        self.script.append((asked, ids))
        if self.rng.random() < 0.2:
            # As one that did not get them.
            again = await ask(self.rng.choice(self.world.services), self.rollout, asked.said, **told)
            assert tuple(answer.call_id for answer in again) == ids
        return ids

    def parent_of(self, asked: Asked) -> Known | None:
        """The longest known beginning; replies are unlike one another, so that there is one."""
        if isinstance(asked.said, str):
            texts = [
                item
                for item in self.known
                if isinstance(item.whole, str)
                and asked.said.startswith(item.whole)
                and item.answer.finish_reason == "length"
            ]
            return max(texts, key=lambda item: len(item.whole), default=None)
        chats = [
            item
            for item in self.known
            if not isinstance(item.whole, str)
            and item.tools == asked.tools
            and asked.said[: len(item.whole)] == item.whole
        ]
        return max(chats, key=lambda item: len(item.whole), default=None)

    def prompt_of(self, asked: Asked, parent: Known | None) -> list[int]:
        before = parent.whole if parent else ()
        rest: tuple[Message, ...]
        if isinstance(asked.said, str):
            rest = ({"role": "text", "content": asked.said[len(before) :]},)
        else:
            rest = asked.said[len(before) :]
        if parent is None:
            return rendered(rest, asked.tools)
        call_id = parent.answer.call_id
        return [*self.tokens.prompts[call_id], *self.tokens.sampled[call_id], *rendered(rest)]

    # ------------------------------------------------------------ what to ask

    def invent(self) -> Asked:
        rng = self.rng
        chats = [item for item in self.known if not isinstance(item.whole, str)]
        texts = [item for item in self.known if isinstance(item.whole, str)]
        kind = rng.random()
        tools: list[Message] | None = None
        said: tuple[Message, ...] | str
        if kind < 0.15:
            item = rng.choice(texts) if texts and rng.random() < 0.7 else None
            said = (str(item.whole) if item else "") + rng.choice(["", " and", " a  b ", "\u00e9\n"])
            said = said or "Once"
        elif chats and kind < 0.85:
            # The latest more often than not: conversations grow.
            item = chats[-1] if rng.random() < 0.6 else rng.choice(chats)
            said, tools = self.changed(item.whole), item.tools  # type: ignore[arg-type]
            if rng.random() < 0.1:
                tools = rng.choice(TOOLS)
        else:
            tools = rng.choice(TOOLS)
            said = (system(rng.choice(["Be kind.", "Be short."])), user(f"start {rng.randint(0, 2)}"))
        num_choices = 1 if rng.random() < 0.75 else rng.randint(2, 4)
        return Asked(said=said, tools=tools, num_choices=num_choices, key=f"key {rng.getrandbits(64)}")

    def changed(self, whole: tuple[Message, ...]) -> tuple[Message, ...]:
        """It goes on, mostly as it is; else with a turn dropped, something edited, or its beginning summed up."""
        rng = self.rng
        said = list(whole)
        kind = rng.random()
        if kind < 0.08 and len(said) > 4:
            del said[-4:-2]
        elif kind < 0.16:
            place = rng.randrange(len(said))
            said[place] = {**said[place], "content": f"edited {rng.randint(0, 2)}", "tool_calls": []}
        elif kind < 0.24 and len(said) > 4:
            said = [said[0], user("summed up"), *said[-rng.randint(0, 2) :]]
        if said[-1].get("tool_calls"):
            call_id = said[-1]["tool_calls"][0]["id"]
            said += [{"role": "tool", "tool_call_id": call_id, "content": f"result {n}"} for n in range(2)]
        if kind > 0.9:
            said.append(assistant("what nobody said"))
        return (*said, user(f"turn {rng.randint(0, 3)}"))

    # ------------------------------------------------------------ attempts

    async def begin(self) -> None:
        """The next attempt, which asks the same for a while, and is answered the same."""
        if self.rollout:
            receipt = (await self.world.sample(self.sample_id)).receipt
            await self.world.ports.rollout_request.release([receipt or ""])
        else:
            await self.world.add_sample(self.sample_id)
        self.rollout = await self.world.lease_one()
        script, self.script, self.known, self.heard = self.script, [], [], set()
        for asked, ids in script[: self.rng.randint(0, len(script))]:
            before = len(self.script)
            found = await self.ask(asked)
            if ids:
                assert found == ids
            # One that failed is asked again; what follows may go on from what it is now.
            assert len(self.script) == before + 1

    async def end(self, *, is_exact: bool) -> int:
        """Report; how many calls the sample has."""
        assert (await self.world.report(self.rollout)).status == 200
        calls = (await self.world.sample(self.sample_id)).calls
        assert set(calls) <= self.heard and len(set(calls)) == len(calls)
        if is_exact:
            assert set(calls) == self.heard
        await check_sample(self.world, self.tokens, self.sample_id)
        return len(calls)


def reply(request: GenerateRequest) -> str | dict[str, str]:
    """One in twenty fails; the others say something that no other call does."""
    rng = random.Random(request.step_id)
    if rng.random() < 0.05:
        return {"code": "engine_failed", "message": "out of memory"}
    if request.messages[0]["role"] == "text":
        return f" {request.step_id}{rng.choice(['...', '.', '...'])}"
    if request.tools and rng.random() < 0.5:
        return f"call {request.step_id}"
    return f"{request.step_id}{'!' * rng.randint(0, 2)}"


async def play(folder: Path, form: Form, seed: int, num_samples: int) -> int:
    """Many samples side by side; how many calls they consumed."""
    rng = random.Random(seed)
    async with open_world(folder, form=form) as world, AsyncExitStack() as stack:
        tokens = Tokens()
        world.replica.make, world.replica.reply = tokens.make, reply
        players = [Player(world, tokens, f"task{seed}_{n}", random.Random(rng.random())) for n in range(num_samples)]
        for player in players:
            await player.begin()
        await asyncio.gather(*(player.play(rng.randint(2, 6)) for player in players))
        is_exact = True
        for _ in range(rng.randint(0, 2)):
            for player in rng.sample(players, len(players) // 3):
                await player.begin()
            if rng.random() < 0.6:
                if form is Form.LONE:
                    # It would take the news from the next one.
                    await world.sessions.__aexit__()
                    is_exact = False
                world = await stack.enter_async_context(world.restarted())
            for player in players:
                player.world = world
            await asyncio.gather(*(player.play(rng.randint(1, 4)) for player in players))
        return sum([await player.end(is_exact=is_exact) for player in players])


@pytest.mark.parametrize("form", list(Form))
async def test_random_conversations_are_exact(tmp_path: Path, form: Form) -> None:
    assert await play(tmp_path, form, seed=1, num_samples=6) > 20


@pytest.mark.slow
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("seed", range(10, 20))
async def test_hundreds_of_random_conversations_are_exact(tmp_path: Path, form: Form, seed: int) -> None:
    assert await play(tmp_path, form, seed=seed, num_samples=25) > 100
