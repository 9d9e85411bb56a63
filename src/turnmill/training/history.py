"""What the recorded batches of a run say: which of them count, and what that makes of its samples.

    scan -> live batches, one a step, gapless from step 1 -> state of every sample

Nothing but the batches decides. So whoever dies in the middle of a step, or of giving up steps, leaves nothing that the
next one can't put right.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from turnmill.errors import Conflict, RecordCorrupt
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import (
    Batch,
    BatchState,
    DropReason,
    Purpose,
    SampleRecord,
    SampleState,
    batch_prefix,
    decode,
    encode,
    sample_prefix,
)

logger = logging.getLogger(__name__)
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """A batch as read."""

    batch: Batch
    # Of the record.
    version: int


async def write_all(records: RecordStore, writes: Sequence[Write]) -> None:
    """Conditional writes that nobody else may have forestalled; raises `Conflict` naming the first lost one."""
    for write, done in zip(writes, await records.write(writes), strict=True):
        if not done:
            raise Conflict(
                f"{write.key} changed since it was read at version {write.expected}: another process wrote it"
            )


async def scan_all(records: RecordStore, prefix: str) -> list[Stored]:
    """All records below a prefix, by key."""
    found = page = await records.scan(prefix, limit=_PAGE)
    while len(page) == _PAGE:
        page = await records.scan(prefix, after=page[-1].key, limit=_PAGE)
        found = [*found, *page]
    return found


async def live_batches(records: RecordStore, run_id: str) -> list[StoredBatch]:
    """The batches that count, by step from 1; raises `RecordCorrupt` where one is missing or not applied in between.

    Two trainers can both have recorded a batch of one step only if the first had lost its run already: the later
    one's counts.
    """
    return live_of(run_id, await scan_all(records, batch_prefix(run_id)))


def live_of(run_id: str, found: Iterable[Stored]) -> list[StoredBatch]:
    """`live_batches` of a run's batch records."""
    by_step: dict[int, StoredBatch] = {}
    for stored in found:
        batch = decode(stored.value, Batch)
        if batch.key != stored.key:
            raise RecordCorrupt(f"record {stored.key} holds the batch {batch.key}")
        known = by_step.get(batch.step)
        if batch.state is not BatchState.SUPERSEDED and (known is None or known.batch.incarnation < batch.incarnation):
            by_step[batch.step] = StoredBatch(batch=batch, version=stored.version)
    live = [by_step[step] for step in sorted(by_step)]
    for step, item in enumerate(live, start=1):
        if item.batch.step != step:
            raise RecordCorrupt(
                f"run {run_id}: the batch of step {step} is missing, but step {item.batch.step} has one"
            )
        if item.batch.state is not BatchState.APPLIED and step < len(live):
            raise RecordCorrupt(f"{item.batch.key} was never applied, but step {step + 1} has a batch")
    return live


async def supersede(records: RecordStore, run_id: str, step: int) -> list[Batch]:
    """Give up every batch after `step`, the last one first, so that what is left always begins at step 1 without a gap.

    Returns them. What becomes of their samples is for `settle`. Call it when no trainer of the run is alive.
    """
    given_up = [item for item in await live_batches(records, run_id) if item.batch.step > step]
    for item in reversed(given_up):
        superseded = replace(item.batch, state=BatchState.SUPERSEDED)
        await write_all(records, [Write(key=superseded.key, value=encode(superseded), expected=item.version)])
    return [item.batch for item in given_up]


async def supersede_strays(records: RecordStore, run_id: str, live: Sequence[StoredBatch]) -> None:
    """Mark what a fenced trainer recorded beside the batches that count."""
    keys = {item.batch.key for item in live}
    for stored in await scan_all(records, batch_prefix(run_id)):
        batch = decode(stored.value, Batch)
        if batch.state is not BatchState.SUPERSEDED and batch.key not in keys:
            logger.warning("%s is superseded: its trainer had lost the run", batch.key)
            superseded = replace(batch, state=BatchState.SUPERSEDED)
            await write_all(records, [Write(key=batch.key, value=encode(superseded), expected=stored.version)])


async def settle(records: RecordStore, run_id: str, purpose: Purpose, live: Sequence[Batch]) -> Counter[SampleState]:
    """Bring every sample into the state that the live batches give it; how many were changed, by new state.

    In an applied batch it is TRAINED, in a recorded one BATCHED. Outside, what is open, REPORTED, BATCHED or TRAINED
    becomes DROPPED(superseded): its process died or its batch was given up. INVALID and DROPPED stay.
    """
    batch_of = {sample_id: batch for batch in live for sample_id in batch.sample_ids}
    changed: Counter[SampleState] = Counter()
    prefix = sample_prefix(run_id, purpose)
    waiting = await scan_all(records, prefix)
    while waiting:
        changes = [
            (after, stored.version)
            for stored in waiting
            if (after := _settled(decode(stored.value, SampleRecord), batch_of)) is not None
        ]
        writes = [Write(key=after.key, value=encode(after), expected=version) for after, version in changes]
        lost: list[str] = []
        for (after, _), done in zip(changes, await records.write(writes) if writes else [], strict=True):
            if done:
                changed[after.state] += 1
            else:
                lost.append(after.key)
        # A worker reported one of them just now: look again.
        waiting = [stored for stored in await records.get(lost) if stored is not None] if lost else []
    return changed


def _settled(sample: SampleRecord, batch_of: Mapping[str, Batch]) -> SampleRecord | None:
    """The sample as it must be; None where it is so already."""
    batch = batch_of.get(sample.sample_id) if sample.purpose is Purpose.TRAIN else None
    if batch is not None:
        state = SampleState.TRAINED if batch.state is BatchState.APPLIED else SampleState.BATCHED
        if (sample.state, sample.step) == (state, batch.step):
            return None
        if sample.state not in (SampleState.REPORTED, SampleState.BATCHED):
            raise RecordCorrupt(f"{sample.key}: state: expected {state!r} of {batch.key}, found {sample.state!r}")
        return replace(sample, state=state, step=batch.step)
    if sample.state in (SampleState.INVALID, SampleState.DROPPED):
        return None
    # Nothing is trained on an evaluation's sample, so that REPORTED is its end.
    if sample.purpose is not Purpose.TRAIN and sample.state is SampleState.REPORTED:
        return None
    return replace(sample, state=SampleState.DROPPED, drop_reason=DropReason.SUPERSEDED)
