"""The conversation store: calls and samples on a RecordStore, and the checks that what is read is what was written.

A call is a delta on its parent; `path_of` walks back to the start. A sample ends once: `dead_sample` and
`ended_message` are the forms in which proxy and scheduler say so.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from turnmill import __version__
from turnmill.conversation.branches import in_order
from turnmill.errors import RecordCorrupt
from turnmill.ports import Message, RecordStore, Stored, WorkQueue, Write
from turnmill.records import (
    Ask,
    Call,
    DeadSample,
    InvalidReason,
    Purpose,
    RolloutResponse,
    SampleRecord,
    SampleState,
    StopReason,
    ask_prefix,
    call_prefix,
    decode,
    encode,
)

T = TypeVar("T")
PAGE_SIZE = 1000


# ---------------------------------------------------------------- calls


def checked_call(stored: Stored) -> Call:
    """The call in a record; raises `RecordCorrupt` if it is under a foreign key or does not match its digest."""
    call = _decoded(stored, Call)
    check_call(call, stored.key)
    return call


def check_call(call: Call, key: str) -> None:
    """Raise `RecordCorrupt` if the call is not the one of `key` or does not match its digest."""
    if call.key != key:
        raise RecordCorrupt(f"record {key} holds the call {call.key}")
    expected = call.expected_digest()
    if call.digest != expected:
        raise RecordCorrupt(f"call {key} was altered: its digest is {expected}, recorded was {call.digest}")
    if not len(call.logprobs) <= len(call.token_ids) == len(call.loss_mask):
        raise RecordCorrupt(
            f"call {key} has {len(call.token_ids)} tokens, {len(call.loss_mask)} mask bits, "
            f"{len(call.logprobs)} log-probs"
        )


async def read_calls(records: RecordStore, run_id: str, purpose: Purpose, sample_id: str) -> list[Call]:
    """All recorded calls of a sample, of all attempts, in the order of their c; checked."""
    prefix, after = call_prefix(run_id, purpose, sample_id), ""
    calls: list[Call] = []
    while True:
        page = await records.scan(prefix, after=after, limit=PAGE_SIZE)
        # A sample id may itself hold a slash, so the prefix may cover a neighbour's calls too.
        calls += [call for call in map(checked_call, page) if call.sample_id == sample_id]
        if len(page) < PAGE_SIZE:
            return in_order(calls)
        after = page[-1].key


async def read_asks(records: RecordStore, run_id: str, purpose: Purpose, sample_id: str) -> list[Stored]:
    """The log of a sample's asks, in its order."""
    prefix, after = ask_prefix(run_id, purpose, sample_id), ""
    found: list[Stored] = []
    while True:
        page = await records.scan(prefix, after=after, limit=PAGE_SIZE)
        found += page
        if len(page) < PAGE_SIZE:
            return found
        after = page[-1].key


def checked_ask(stored: Stored) -> Ask:
    """The ask in a record; raises `RecordCorrupt` if it is under a foreign key."""
    ask = _decoded(stored, Ask)
    if ask.key != stored.key:
        raise RecordCorrupt(f"record {stored.key} holds the ask {ask.key}")
    return ask


async def write_calls(records: RecordStore, calls: Sequence[Call]) -> list[bool]:
    """Record sealed calls; False where another answer to that call was first (it stands, this one is discarded)."""
    return await records.write([Write(key=call.key, value=encode(call), expected=0) for call in calls])


def path_of(call: Call, calls: Mapping[str, Call]) -> list[Call]:
    """From the start of the conversation to `call`; raises `RecordCorrupt` where a link or its digest is missing."""
    path = [call]
    while path[-1].parent is not None:
        child = path[-1]
        parent = calls.get(child.parent or "")
        if parent is None:
            raise RecordCorrupt(f"call {child.key} continues {child.parent}, which is not recorded")
        if child.parent_digest != parent.digest:
            raise RecordCorrupt(f"call {child.key} continues another content of {child.parent} than is recorded")
        if len(path) > len(calls):
            raise RecordCorrupt(f"call {call.key} is its own ancestor")
        path.append(parent)
    return path[::-1]


# ---------------------------------------------------------------- samples


def checked_sample(stored: Stored) -> SampleRecord:
    """The sample in a record; raises `RecordCorrupt` if key or report digest do not match."""
    sample = _decoded(stored, SampleRecord)
    if sample.key != stored.key:
        raise RecordCorrupt(f"record {stored.key} holds the sample {sample.key}")
    if sample.report_digest is not None and sample.report_digest != sample.expected_report_digest():
        raise RecordCorrupt(
            f"sample {sample.key} was altered after its report: digest {sample.expected_report_digest()}, "
            f"recorded was {sample.report_digest}"
        )
    return sample


def failed_by_infra(sample: SampleRecord, detail: str) -> SampleRecord:
    """The sample as it ends when no attempt could end it."""
    return replace(sample, state=SampleState.INVALID, reason=InvalidReason.INFRA, reward=None, detail=detail)


def is_given_up(sample: SampleRecord) -> bool:
    """A foreign trainer was, or is to be, told that no attempt at its sample was scored."""
    return sample.wire_id is not None and sample.state is SampleState.INVALID


def dead_sample(sample: SampleRecord) -> Write:
    """The dead letter about a sample that ended by `failed_by_infra`; the first one about it stands."""
    letter = DeadSample(
        run_id=sample.run_id,
        purpose=sample.purpose,
        sample_id=sample.sample_id,
        num_attempts=sample.attempt,
        detail=sample.detail or "",
        dead_at=time.time(),
        request=sample.request,
        code_version=__version__,
    )
    return Write(key=letter.key, value=encode(letter), expected=0)


def ended_message(sample: SampleRecord) -> Message:
    """The news that a sample ended; sent again it is swallowed, which is right: the record is the truth.

    A foreign trainer knows no sample without a reward: it is told the low end of the range, and the reason.
    """
    reward = sample.reward
    if reward is None and sample.wire_id is not None:
        reward = sample.request.rewards["range"][0]
    response = RolloutResponse(
        sample_id=sample.wire_id or sample.sample_id,
        stop_reason=sample.stop_reason or sample.reason or StopReason.END_OF_CONVERSATION,
        rewards={"aggregate_score": reward},
        reason=sample.reason,
        run_id=sample.run_id,
        purpose=sample.purpose,
    )
    return Message(body=encode(response), group=sample.sample_id, dedup_id=f"{sample.key}#{sample.attempt}")


async def tell_ended(records: RecordStore, responses: WorkQueue, samples: Sequence[SampleRecord]) -> None:
    """Send the news that samples ended, except what a foreign trainer is known to have been told.

    Whoever dies before it is known sends it again within seconds, which the queue's deduplication swallows.
    """
    untold = [sample for sample in samples if not sample.is_told]
    if untold:
        await responses.send([ended_message(sample) for sample in untold])
    if foreign := [sample.key for sample in untold if sample.wire_id is not None]:
        stored = [item for item in await records.get(foreign) if item is not None]
        await write_samples(records, [(replace(checked_sample(item), is_told=True), item.version) for item in stored])


async def write_samples(records: RecordStore, changes: Iterable[tuple[SampleRecord, int]]) -> list[bool]:
    """Write samples, each only if its record is still at the version that comes with it."""
    return await records.write(
        [Write(key=sample.key, value=encode(sample), expected=version) for sample, version in changes]
    )


def _decoded(stored: Stored, kind: type[T]) -> T:
    try:
        return decode(stored.value, kind)
    except msgspec.DecodeError as error:
        raise RecordCorrupt(f"record {stored.key} is no {kind.__name__}: {error}") from error
