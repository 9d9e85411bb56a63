"""Entries of the log of asks: how one is made of a request, and what whoever generates is asked for it.

Attempt.begin -> new_ask -> Ask, appended by `SharedSessions` -> messages_of -> generate_request, one a choice
"""

import secrets
import time
from collections.abc import Sequence

from turnmill.conversation.attempts import Attempt, Entry
from turnmill.conversation.foreign import generate_request as foreign_request
from turnmill.conversation.foreign import step_id_of
from turnmill.conversation.history import path_of
from turnmill.conversation.requests import ChatRequest
from turnmill.errors import RecordCorrupt
from turnmill.ports import Message
from turnmill.records import Ask, AskedCall, Call, GenerateRequest, SampleRecord, encode


def new_ask(
    attempt: Attempt,
    entry: Entry,
    request: ChatRequest,
    key: str | None,
    recorded: Sequence[Call | None],
    *,
    index: int,
    replica: int,
) -> Ask:
    """The entry of a request that has just begun, to be appended under `index`; `recorded` is what it replays.

    `replica` is the index of the one that is asked for the rest.
    """
    sample, now = attempt.sample, time.time()
    is_replay = None not in recorded
    is_opening = entry.parent is None and not is_replay
    return Ask(
        run_id=sample.run_id,
        purpose=sample.purpose,
        sample_id=sample.sample_id,
        index=index,
        attempt=sample.attempt,
        calls=_asked(attempt, entry, recorded),
        parent=entry.parent.call_id if entry.parent else None,
        messages=[] if is_replay else entry.messages,
        tools=request.tools if is_opening else None,
        tool_choice=request.tool_choice,
        sampling=request.sampling,
        request_digest=entry.digest,
        identity=entry.identity,
        idempotency_key=key,
        nonce=secrets.token_hex(8),
        has_logprobs=request.has_logprobs,
        has_token_ids=request.has_token_ids,
        created_at=now,
        sent_at=now,
        replica=replica,
    )


def _asked(attempt: Attempt, entry: Entry, recorded: Sequence[Call | None]) -> tuple[AskedCall, ...]:
    """The calls of a new entry; those that are not recorded have taken the last numbers."""
    number = attempt.next_call - sum(call is None for call in recorded)
    asked: list[AskedCall] = []
    for call_id, call in zip(entry.call_ids, recorded, strict=True):
        if call is not None:
            asked.append(AskedCall(call_id=call_id, step_id=call_id, is_replay=True))
        else:
            asked.append(AskedCall(call_id=call_id, step_id=step_id_of(attempt.sample, call_id, number)))
            number += 1
    return tuple(asked)


def messages_of(sample: SampleRecord, ask: Ask, calls: Sequence[Call]) -> list[Message]:
    """The generate requests of an entry, but for those that one of these recorded calls answers."""
    recorded = {call.call_id: call for call in calls}
    path: list[Call] = []
    if ask.parent is not None:
        if ask.parent not in recorded:
            raise RecordCorrupt(f"{ask.key} goes on from {ask.parent}, which is not recorded")
        path = path_of(recorded[ask.parent], recorded)
    make = foreign_request if sample.wire_id is not None else own_request
    messages: list[Message] = []
    for choice, asked in enumerate(ask.calls):
        if not asked.is_replay and asked.error is None and asked.call_id not in recorded:
            body = encode(make(sample, ask, choice, path))
            dedup_id = f"{ask.key_of(asked)}#{ask.epoch}"
            messages.append(Message(body=body, group=asked.step_id, dedup_id=dedup_id))
    return messages


def own_request(sample: SampleRecord, ask: Ask, choice: int, path: Sequence[Call]) -> GenerateRequest:
    """What one of our own replicas is asked: with a parent, only the messages after its reply, which ends the path."""
    return GenerateRequest(
        sample_id=ask.sample_id,
        step_id=ask.calls[choice].step_id,
        messages=ask.messages,
        parent=ask.parent,
        tools=path[0].tools if path else ask.tools,
        tool_choice=ask.tool_choice,
        choice=choice,
        num_choices=len(ask.calls),
        sampling=ask.sampling,
        epoch=ask.epoch,
        run_id=ask.run_id,
        purpose=ask.purpose,
        attempt=ask.attempt,
        request_digest=ask.request_digest,
        max_length=sample.request.max_length,
    )
