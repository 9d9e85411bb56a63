"""Requests of every kind to a run's sessions, as the routes parse them, and a replica that tells apart what it renders.

Tokens of a message follow from the message, and each sampled token is the only one with its id: so that two prompts
with the same tokens are the same prompt, and a token that is trained twice is found.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from turnmill.conversation.attempts import Answer
from turnmill.conversation.branches import canonical, conversation_start, prefix_hashes, request_identity
from turnmill.conversation.history import checked_call, read_calls
from turnmill.conversation.messages import Said
from turnmill.conversation.requests import ChatRequest
from turnmill.conversation.service import Service
from turnmill.ports import RecordStore
from turnmill.records import (
    TEXT_ROLE,
    Call,
    FinishReason,
    GenerateRequest,
    Purpose,
    Sampling,
    call_key,
    encode,
)
from turnmill.training.samples import Row, rows_of

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World

Messages = Sequence[dict[str, Any]]
SAMPLING = Sampling(max_new_tokens=64)
# Ids from here on are sampled.
FIRST_SAMPLED = 1_000_000


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool_of(name: str) -> dict[str, Any]:
    """A tool that is offered."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def request_of(said: Messages | str, **more: Any) -> ChatRequest:
    """A chat of these messages, or a text; `more` are fields of the request."""
    messages = [{"role": TEXT_ROLE, "content": said}] if isinstance(said, str) else list(said)
    request = ChatRequest(
        said=Said(
            raw=encode(messages),
            tail=messages,
            start=0,
            hashes=prefix_hashes(messages, conversation_start(more.get("tools"))),
            last_role=messages[-1]["role"],
        ),
        identity="",
        sampling=SAMPLING,
        model="turnmill",
        request_id=None,
        sample_id=None,
        is_text=isinstance(said, str),
        **more,
    )
    identity = request_identity(request.said.hashes[-1], SAMPLING, request.tool_choice, request.num_choices)
    return msgspec.structs.replace(request, identity=identity)


async def ask(service: Service, rollout: dict[str, Any], said: Messages | str, **more: Any) -> tuple[Answer, ...]:
    """The answers to a request, which `key` names as the client does."""
    key = more.pop("key", None)
    answers = await service.chat(secret_of(rollout), request_of(said, **more), key=key)
    assert isinstance(answers, tuple)
    return answers


def secret_of(rollout: dict[str, Any]) -> str:
    return str(rollout["base_url"].split("/")[-2])


def rendered(messages: Messages, tools: Messages | None = None) -> list[int]:
    """Two tokens a message, and two for the tools."""
    texts = [encode(tools)] if tools else []
    texts += [canonical(message) for message in messages]
    return [
        10 + int.from_bytes(hashlib.blake2b(text + part, digest_size=2).digest(), "big")
        for text in texts
        for part in (b"0", b"1")
    ]


@dataclass
class Tokens:
    """Makes the records of a scripted replica's answers, with a `tool_calls` where the text says so."""

    # By call: the whole prompt, and what was sampled.
    prompts: dict[str, list[int]] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    num_sampled: int = 0

    def make(self, request: GenerateRequest, text: str, parent: Call | None) -> Call:
        before = [] if parent is None else [*self.prompts[parent.call_id], *self.sampled[parent.call_id]]
        new = rendered(request.messages, None if parent else request.tools)
        num = 1 + len(text) % 3
        ids = [FIRST_SAMPLED + self.num_sampled + index for index in range(num)]
        self.num_sampled += num
        self.prompts[request.step_id], self.sampled[request.step_id] = [*before, *new], ids
        reply = assistant(text)
        if text.startswith("call "):
            called = {"name": "look", "arguments": '{"at": 1, "from": "here"}'}
            reply |= {"content": None, "tool_calls": [{"id": text[5:], "type": "function", "function": called}]}
        return Call(
            run_id=request.run_id,
            purpose=request.purpose,
            sample_id=request.sample_id,
            call_id=request.step_id,
            attempt=request.attempt,
            parent=request.parent,
            parent_digest=parent.digest if parent else "",
            choice=request.choice,
            num_choices=request.num_choices,
            tools=None if parent else request.tools,
            tool_choice=request.tool_choice,
            request_digest=request.request_digest,
            sampling=request.sampling,
            messages=request.messages,
            reply=reply,
            token_ids=[*new, *ids],
            loss_mask=[0] * len(new) + [1] * num,
            logprobs=[-0.5] * num,
            version="0.0",
            finish_reason=FinishReason.LENGTH if text.endswith("...") else FinishReason.STOP,
            created_at=time.time(),
        ).sealed()


async def calls_of(records: RecordStore, sample_id: str, call_ids: Sequence[str]) -> list[Call]:
    keys = [call_key("run-1", Purpose.TRAIN, sample_id, call_id) for call_id in call_ids]
    found = await records.get(keys)
    return [checked_call(stored) for stored in found if stored is not None]


async def check_sample(world: "World", tokens: Tokens, sample_id: str = "task_0") -> list[Row]:
    """The rows of a reported sample, once everything about them is checked against what the replica saw."""
    sample = await world.sample(sample_id)
    consumed = await calls_of(world.ports.records, sample_id, sample.calls)
    assert [call.call_id for call in consumed] == list(sample.calls)
    by_id = {call.call_id: call for call in await read_calls(world.ports.records, "run-1", Purpose.TRAIN, sample_id)}
    for call in by_id.values():
        path = [call]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        ids = [token for step in reversed(path) for token in step.token_ids]
        assert ids == [*tokens.prompts[call.call_id], *tokens.sampled[call.call_id]]
    rows = rows_of(sample, consumed)
    trained = [token for row in rows for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    gone_on_from = {call.parent for call in consumed}
    due = [call for call in consumed if call.num_choices == 1 or call.call_id in gone_on_from]
    assert sorted(trained) == sorted(token for call in due for token in tokens.sampled[call.call_id])
    assert all(row.num_trained for row in rows)
    for row in rows:
        last = row.spans[-1].call_id
        assert row.token_ids == [*tokens.prompts[last], *tokens.sampled[last]]
    return rows


class Talk:
    """Requests of one attempt, each at another one of the run's proxies."""

    def __init__(self, world: "World", rollout: dict[str, Any]) -> None:
        self.world, self.rollout, self._num = world, rollout, 0

    async def all(self, *said: dict[str, Any] | str, **more: Any) -> tuple[Answer, ...]:
        """The answers to messages, of which texts are the user's; the text `prompt` for a completion."""
        self._num += 1
        messages = [user(item) if isinstance(item, str) else item for item in said]
        service = self.world.services[self._num % len(self.world.services)]
        return await ask(service, self.rollout, more.pop("prompt", messages), **more)

    async def one(self, *said: dict[str, Any] | str, **more: Any) -> Answer:
        (answer,) = await self.all(*said, **more)
        return answer

    async def end(self) -> tuple[str, ...]:
        """The calls of the sample, which is reported."""
        assert (await self.world.report(self.rollout)).status == 200
        return (await self.world.sample()).calls


async def begin(world: "World") -> Talk:
    return Talk(world, await world.begin())
