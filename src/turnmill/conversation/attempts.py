"""What a proxy remembers of one attempt of a sample while it is played. No storage and no clock: `Sessions` feeds it.

    chat request -> retry_of | begin -> (recorded answer | new call) -> deliver -> Answer

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
    extend_hash,
    in_order,
    prefix_hashes,
    request_digest,
    request_identity,
)
from turnmill.conversation.requests import ChatRequest, Heard
from turnmill.errors import GenerationFailed, InvalidRequest, RecordCorrupt
from turnmill.records import (
    Ask,
    Call,
    FinishReason,
    GenerateRequest,
    SampleRecord,
    Sampling,
    call_key,
)


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
    """One chat request of the attempt and the call that answers it."""

    call_id: str
    key: str
    # Over all its messages and parameters: what a transport retry repeats.
    identity: str
    # Of the conversation up to and with its last message.
    hash: bytes
    parent: Node | None
    # Messages after the parent's reply.
    messages: list[dict[str, Any]]
    digest: str
    # Neither: not answered yet.
    answer: Answer | None = None
    error: GenerationFailed | None = None
    # What waits for the answer on behalf of a client that may ask for it later.
    asking: "asyncio.Task[Answer] | None" = None


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
    num_replayed: int = 0
    # Call ids in order of first use.
    consumed: dict[str, None] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)
    # Entries whose answers can be asked for later, by call id.
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

    def begin(self, request: ChatRequest, key: str | None) -> tuple[Entry, Call | None]:
        """A new request's entry, and the recorded answer of an earlier attempt where it replays one."""
        parent, start = self._table.match(request.said.hashes)
        messages = request.said.since(start)
        self._go_on(parent, messages)
        digest = request_digest(messages, None, request.sampling)
        recorded = self._replay.take(parent.call_id if parent else None, digest)
        if recorded is None:
            call_id = f"{self.sample.sample_id}_{self.next_call}"
            self.next_call += 1
        else:
            call_id = recorded.call_id
            self.num_replayed += 1
        entry = self._entry(call_id, request.identity, request.said.hashes[-1], parent, messages, digest)
        self._latest[entry.identity] = entry
        if key is not None:
            self._keyed[key] = entry
        return entry, recorded

    def _go_on(self, parent: Node | None, messages: list[dict[str, Any]]) -> None:
        self.num_requests += 1
        # Assistant text that no call here produced is context (mask 0): the client edited its history.
        if (parent is None and self.num_requests > 1) or (parent and any(m["role"] == "assistant" for m in messages)):
            self.num_forks += 1
        if parent is not None:
            parent.is_continued = True
            self._consume(parent)

    def generate_request(self, entry: Entry, sampling: Sampling) -> GenerateRequest:
        """What the replica is sent: with a parent, only the messages after its reply."""
        return GenerateRequest(
            sample_id=self.sample.sample_id,
            step_id=entry.call_id,
            messages=entry.messages,
            parent=entry.parent.call_id if entry.parent else None,
            sampling=sampling,
            run_id=self.sample.run_id,
            purpose=self.sample.purpose,
            attempt=self.sample.attempt,
            request_digest=entry.digest,
            max_length=self.sample.request.max_length,
        )

    def deliver(self, entry: Entry, call: Call) -> Answer:
        """Take the recorded call as the entry's answer; raises `RecordCorrupt` if it answers something else."""
        if entry.answer is None:
            parent = entry.parent.call_id if entry.parent else None
            if call.request_digest != entry.digest or call.parent != parent:
                raise RecordCorrupt(
                    f"call {call.key} answers the request {call.request_digest} after {call.parent}, "
                    f"asked was {entry.digest} after {parent}"
                )
            node = self._node(call, entry.parent, entry.hash)
            self._consume(node)
            entry.answer = _answer(call, node.num_tokens)
        return entry.answer

    # ------------------------------------------------------------ records

    def load(self, calls: Iterable[Call]) -> None:
        """Take note of the recorded calls of the sample.

        Those of earlier attempts are for replay, except before a redrive, which begins anew. A restored attempt has
        consumed its own calls and what they continue; whatever else it may have replayed counts once a request goes on
        from it.
        """
        calls = in_order(call for call in calls if call.attempt > self.sample.redriven_after)
        if self.is_restored:
            for call in calls:
                self._restore(call)
            self._restored = {
                identity: entry
                for identity, entry in self._latest.items()
                if not self._table.nodes[entry.call_id].is_continued
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
        self.next_call += sum(not ask.is_replay for ask in asks)
        for ask in asks:
            if ask.attempt == self.sample.attempt:
                self._take_up(ask, by_id.get(ask.call_id))
        self._replay = Replay.of(
            call
            for call in calls
            if self.sample.redriven_after < call.attempt < self.sample.attempt and call.call_id not in self.steps
        )
        self.is_loaded = True

    def _take_up(self, ask: Ask, call: Call | None) -> None:
        parent = self._table.nodes.get(ask.parent) if ask.parent else None
        if (ask.parent and parent is None) or (ask.is_replay and call is None):
            raise RecordCorrupt(f"{ask.key} is about {ask.call_id} after {ask.parent}: one of them is not recorded")
        messages = call.messages if call is not None else ask.messages
        self._go_on(parent, messages)
        last_hash = prefix_hashes(messages, parent.hash if parent else b"")[-1]
        entry = self._entry(ask.call_id, ask.identity, last_hash, parent, messages, ask.request_digest)
        self.steps[entry.call_id] = self._latest[entry.identity] = entry
        if ask.idempotency_key is not None:
            self._keyed[ask.idempotency_key] = entry
        if call is not None:
            self.deliver(entry, call)
        elif ask.error is not None:
            entry.error = failure_of(ask.error)

    def _restore(self, call: Call) -> None:
        parent = self._table.nodes.get(call.parent) if call.parent else None
        if call.parent and parent is None:
            raise RecordCorrupt(f"call {call.key} continues {call.parent}, which is not recorded")
        start = parent.hash if parent else b""
        before = prefix_hashes(call.messages, start)[-1] if call.messages else start
        node = self._node(call, parent, before)
        if call.attempt == self.sample.attempt:
            self.num_requests += 1
            if parent is not None:
                parent.is_continued = True
            self._consume(node)
            identity = request_identity(before, call.sampling)
            entry = self._entry(call.call_id, identity, before, parent, call.messages, call.request_digest)
            entry.answer = _answer(call, node.num_tokens)
            self.steps[entry.call_id] = self._latest[identity] = entry

    def _node(self, call: Call, parent: Node | None, before: bytes) -> Node:
        node = Node(
            call_id=call.call_id,
            parent=parent,
            hash=extend_hash(before, call.reply),
            num_tokens=(parent.num_tokens if parent else 0) + len(call.token_ids),
            is_consumed=False,
        )
        self._table.add(node)
        return node

    def _entry(
        self,
        call_id: str,
        identity: str,
        last_hash: bytes,
        parent: Node | None,
        messages: list[dict[str, Any]],
        digest: str,
    ) -> Entry:
        sample = self.sample
        return Entry(
            call_id=call_id,
            key=call_key(sample.run_id, sample.purpose, sample.sample_id, call_id),
            identity=identity,
            hash=last_hash,
            parent=parent,
            messages=messages,
            digest=digest,
        )

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
    )
