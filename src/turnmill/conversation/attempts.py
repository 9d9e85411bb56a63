"""What a proxy remembers of one attempt of a sample while it is played. No storage and no clock: `Sessions` feeds it.

    chat request -> retry_of | begin -> (recorded answer | new call) a choice -> deliver -> Answer a choice

Everything here can be built again from the records and is forgotten when the attempt ends: from the calls alone
(`load`), as far as they tell, or from the log of what was asked (`load_log`), exactly.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnmill.conversation.branches import (
    BranchTable,
    Node,
    Replay,
    Siblings,
    Text,
    extend_hash,
    hash_after,
    in_order,
    request_digest,
    request_identity,
    text_of,
)
from turnmill.conversation.messages import Heard
from turnmill.conversation.requests import ChatRequest
from turnmill.conversation.routing import Asked
from turnmill.errors import GenerationFailed, InvalidRequest, RecordCorrupt
from turnmill.records import TEXT_ROLE, Ask, Call, FinishReason, GenerateRequest, SampleRecord, call_key


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A call's answer for the client."""

    call_id: str
    # The assistant's message.
    reply: dict[str, Any]
    finish_reason: FinishReason
    # Tokens of the conversation before what was sampled, and sampled.
    num_prompt_tokens: int
    num_sampled_tokens: int
    created_at: float
    # Index among the choices of the request.
    choice: int = 0
    # What was sampled, and the log-prob of each token; () where the request did not ask for them.
    sampled_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    # The whole prompt; None where the request did not ask for it.
    prompt_ids: list[int] | None = None


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is still to come; it can be asked for under the name of the step."""

    step_id: str


class Entry(msgspec.Struct, kw_only=True):
    """One chat request of the attempt and the calls that answer it, one a choice."""

    call_ids: tuple[str, ...]
    # Over all its messages and parameters: what a transport retry repeats.
    identity: str
    # Of the conversation up to and with its last message; the same of a text, None for a conversation.
    hash: bytes
    text: Text | None
    parent: Node | None
    # Messages after the parent's reply.
    messages: list[dict[str, Any]]
    digest: str
    # What is told of the tokens to whoever asks for the answer later.
    has_logprobs: bool = False
    has_token_ids: bool = False
    # Neither: not answered yet. A request is answered once all its choices are, and has failed once one of them has.
    answers: tuple[Answer, ...] | None = None
    error: GenerationFailed | None = None
    # What waits for the answers on behalf of a client that may ask for them later.
    asking: "asyncio.Task[tuple[Answer, ...]] | None" = None
    # What a replica was asked by this process; () where an earlier one asked.
    asked: tuple[Asked, ...] = ()

    @property
    def step_id(self) -> str:
        return self.call_ids[0]


@dataclass(kw_only=True)
class Attempt:
    """One attempt: its branches, what it may replay, and the calls it consumed."""

    # As this process wrote it last.
    sample: SampleRecord
    # In which all its secrets begin.
    name: str
    # The next c; below `call_bound`, which is reserved in the sample's record.
    next_call: int
    call_bound: int
    # Of the sample's record as it was written here; None: written by another process. A report is written against it,
    # without a look at the record, where nobody changed it since.
    version: int | None = None
    # False: dropped, reported or leased again; its secrets open nothing any more.
    is_current: bool = True
    # Built again from the records, after another process (or this one before a restart) had leased it out.
    is_restored: bool = False
    # Earlier calls of the sample were read.
    is_loaded: bool = False
    num_requests: int = 0
    num_forks: int = 0
    # Call ids in order of first use.
    consumed: dict[str, None] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)
    # Entries whose answers can be asked for later, by the name of the step.
    steps: dict[str, Entry] = field(default_factory=dict)
    # Guards the reading of records on behalf of this attempt.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _table: BranchTable = field(default_factory=BranchTable)
    _replay: Replay = field(default_factory=Replay)
    # By Idempotency-Key or request id.
    _keyed: dict[str, Entry] = field(default_factory=dict)
    # The latest one by identity.
    _latest: dict[str, Entry] = field(default_factory=dict)
    # Answered before this proxy started and not gone on from, keys unknown; each stands for one keyed retry.
    _restored: dict[str, Entry] = field(default_factory=dict)

    # ------------------------------------------------------------ requests

    def retry_of(self, request: ChatRequest, key: str | None, is_retry: bool) -> Entry | None:
        """The entry that this request repeats as a transport retry; None: it is a new call.

        Raises `InvalidRequest` for a key that came with another request before.
        """
        if key is None and not is_retry:
            return None
        identity = request.identity
        if key is None:
            return self._latest.get(identity)
        entry = self._keyed.get(key)
        if entry is None:
            entry = self._restored.pop(identity, None)
            if entry is not None:
                self._keyed[key] = entry
        elif entry.identity != identity:
            raise InvalidRequest(
                "this Idempotency-Key came with another request before", param="Idempotency-Key", code="key_reused"
            )
        return entry

    def begin(self, request: ChatRequest, key: str | None) -> tuple[Entry, list[Call | None]]:
        """A new request's entry and, of each choice, the recorded answer of an earlier attempt where it replays one."""
        text: Text | None = None
        if request.is_text:
            prompt = request.said.tail[0]["content"]
            text = Text(prompt)
            parent, rest = self._table.match_text(prompt)
            messages = [{"role": TEXT_ROLE, "content": rest}]
        else:
            parent, start = self._table.match(request.said.hashes)
            messages = request.said.since(start)
        self._go_on(parent, messages)
        num = request.num_choices
        digest = request_digest(messages, request.tools, request.sampling, request.tool_choice, num)
        above = parent.call_id if parent else None
        recorded = [self._replay.take(above, digest, choice) for choice in range(num)]
        entry = Entry(
            call_ids=tuple(self._next_id() if call is None else call.call_id for call in recorded),
            identity=request.identity,
            hash=request.said.hashes[-1],
            text=text,
            parent=parent,
            messages=messages,
            digest=digest,
            has_logprobs=request.has_logprobs,
            has_token_ids=request.has_token_ids,
        )
        self._latest[entry.identity] = entry
        if key is not None:
            self._keyed[key] = entry
        return entry, recorded

    def _next_id(self) -> str:
        call_id = f"{self.sample.sample_id}_{self.next_call}"
        self.next_call += 1
        return call_id

    def _go_on(self, parent: Node | None, messages: list[dict[str, Any]]) -> None:
        self.num_requests += 1
        # Assistant text that no call here produced is context (mask 0): the client edited its history.
        if (parent is None and self.num_requests > 1) or (parent and any(m["role"] == "assistant" for m in messages)):
            self.num_forks += 1
        if parent is not None:
            parent.is_continued = True
            self._consume(parent)

    def generate_request(self, entry: Entry, request: ChatRequest, choice: int) -> GenerateRequest:
        """What the replica is sent: with a parent, only the messages after its reply."""
        return GenerateRequest(
            sample_id=self.sample.sample_id,
            step_id=entry.call_ids[choice],
            messages=entry.messages,
            parent=entry.parent.call_id if entry.parent else None,
            tools=request.tools,
            tool_choice=request.tool_choice,
            choice=choice,
            num_choices=request.num_choices,
            sampling=request.sampling,
            run_id=self.sample.run_id,
            purpose=self.sample.purpose,
            attempt=self.sample.attempt,
            request_digest=entry.digest,
            max_length=self.sample.request.max_length,
        )

    def key_of(self, call_id: str) -> str:
        """Of the record of a call."""
        return call_key(self.sample.run_id, self.sample.purpose, self.sample.sample_id, call_id)

    def path_of(self, call_id: str) -> list[str]:
        """The calls of a conversation up to this one, which is answered."""
        path: list[str] = []
        walk: Node | None = self._table.nodes[call_id]
        while walk is not None:
            path.append(walk.call_id)
            walk = walk.parent
        return path[::-1]

    def deliver(self, entry: Entry, calls: Sequence[Call]) -> tuple[Answer, ...]:
        """Take recorded calls as the entry's answers; raises `RecordCorrupt` if one answers something else."""
        if entry.answers is None:
            parent = entry.parent.call_id if entry.parent else None
            for choice, call in enumerate(calls):
                if call.request_digest != entry.digest or call.parent != parent or call.choice != choice:
                    raise RecordCorrupt(
                        f"call {call.key} answers choice {call.choice} of the request {call.request_digest} after "
                        f"{call.parent}, asked was {choice} of {entry.digest} after {parent}"
                    )
            for call in calls:
                self._add(call, entry.parent, entry.hash, entry.text)
            entry.answers = self._answers(calls)
        return entry.answers

    def _answers(self, calls: Sequence[Call]) -> tuple[Answer, ...]:
        """What the client is told of calls that have their places; from now on they count as consumed."""
        answers: list[Answer] = []
        for call in calls:
            self._consume(node := self._table.nodes[call.call_id])
            answers.append(_answer(call, node.num_tokens))
        return tuple(answers)

    # ------------------------------------------------------------ records

    def load(self, calls: Iterable[Call]) -> None:
        """Take note of the recorded calls of the sample.

        Those of earlier attempts are for replay, except before a redrive. A restored attempt has consumed its own calls
        and what they continue; what else it may have replayed counts once a request goes on from it.
        """
        calls = in_order(call for call in calls if call.attempt > self.sample.redriven_after)
        if self.is_restored:
            siblings = Siblings()
            for call in calls:
                self._restore(call, siblings)
            self._restored = {
                identity: entry
                for identity, entry in self._latest.items()
                if not any(self._table.nodes[call_id].is_continued for call_id in entry.call_ids)
            }
        self._replay = Replay.of(
            call for call in calls if call.attempt < self.sample.attempt and call.call_id not in self.consumed
        )
        self.is_loaded = True

    def load_log(self, asks: Sequence[Ask], calls: Sequence[Call]) -> None:
        """Take up what all attempts of the sample asked, in order, and the calls that are recorded.

        Consumed is what this attempt asked for and has an answer, whether or not its client has fetched it.
        """
        by_id = {call.call_id: call for call in calls}
        # A number is never used twice, whichever attempt used it.
        self.next_call += sum(not call.is_replay for ask in asks for call in ask.calls)
        taken: set[str] = set()
        for ask in asks:
            if ask.attempt == self.sample.attempt:
                self._take_up(ask, [by_id.get(call.call_id) for call in ask.calls])
                taken.update(call.call_id for call in ask.calls)
        self._replay = Replay.of(
            call
            for call in calls
            if self.sample.redriven_after < call.attempt < self.sample.attempt and call.call_id not in taken
        )
        self.is_loaded = True

    def _take_up(self, ask: Ask, recorded: Sequence[Call | None]) -> None:
        parent = self._table.nodes.get(ask.parent) if ask.parent else None
        is_lost = any(asked.is_replay and call is None for asked, call in zip(ask.calls, recorded, strict=True))
        if (ask.parent and parent is None) or is_lost:
            raise RecordCorrupt(f"{ask.key} is about {ask.step_id} after {ask.parent}: one of them is not recorded")
        calls = [call for call in recorded if call is not None]
        messages, tools = (calls[0].messages, calls[0].tools) if calls else (ask.messages, ask.tools)
        self._go_on(parent, messages)
        last_hash, text = hash_after(messages, parent, tools)
        entry = Entry(
            call_ids=tuple(call.call_id for call in ask.calls),
            identity=ask.identity,
            hash=last_hash,
            text=text,
            parent=parent,
            messages=messages,
            digest=ask.request_digest,
            has_logprobs=ask.has_logprobs,
            has_token_ids=ask.has_token_ids,
        )
        self.steps[entry.step_id] = self._latest[entry.identity] = entry
        if ask.idempotency_key is not None:
            self._keyed[ask.idempotency_key] = entry
        if len(calls) == len(ask.calls):
            self.deliver(entry, calls)
            return
        errors = [asked.error for asked, call in zip(ask.calls, recorded, strict=True) if call is None and asked.error]
        if errors:
            entry.error = failure_of(errors[0])

    def _restore(self, call: Call, siblings: Siblings) -> None:
        parent = self._table.nodes.get(call.parent) if call.parent else None
        if call.parent and parent is None:
            raise RecordCorrupt(f"call {call.key} continues {call.parent}, which is not recorded")
        last_hash, text = hash_after(call.messages, parent, call.tools)
        self._add(call, parent, last_hash, text)
        if call.attempt < self.sample.attempt:
            return
        if parent is not None:
            parent.is_continued = True
            self._consume(parent)
        choices = siblings.complete(call)
        if choices is None:
            return
        self.num_requests += 1
        entry = Entry(
            call_ids=tuple(choice.call_id for choice in choices),
            identity=request_identity(last_hash, call.sampling, call.tool_choice, call.num_choices),
            hash=last_hash,
            text=text,
            parent=parent,
            messages=call.messages,
            digest=call.request_digest,
        )
        entry.answers = self._answers(choices)
        self.steps[entry.step_id] = self._latest[entry.identity] = entry

    def _add(self, call: Call, parent: Node | None, before: bytes, text: Text | None) -> None:
        """Give a recorded call its place, behind what was asked: a text, or None."""
        if text is not None:
            text = text.extended(text_of(call.reply.get("content")))
        node = Node(
            call_id=call.call_id,
            parent=parent,
            hash=text.hash if text is not None else extend_hash(before, call.reply),
            text=text,
            is_open=text is None or call.finish_reason is FinishReason.LENGTH,
            num_tokens=(parent.num_tokens if parent else 0) + len(call.token_ids),
            is_consumed=False,
        )
        self._table.add(node)

    def _consume(self, node: Node) -> None:
        """Count the call and what it continues as used, the start of the conversation first."""
        path: list[Node] = []
        walk: Node | None = node
        while walk is not None and not walk.is_consumed:
            path.append(walk)
            walk = walk.parent
        for step in reversed(path):
            step.is_consumed = True
            self.consumed[step.call_id] = None


def failure_of(error: dict[str, str]) -> GenerationFailed:
    """The error that a call was answered with, as it is raised."""
    code = error.get("code", "generation_failed")
    return GenerationFailed(code, error.get("message", code))


def _answer(call: Call, num_tokens: int) -> Answer:
    return Answer(
        call_id=call.call_id,
        reply=call.reply,
        finish_reason=call.finish_reason,
        num_prompt_tokens=num_tokens - call.num_sampled,
        num_sampled_tokens=call.num_sampled,
        created_at=call.created_at,
        choice=call.choice,
    )
