"""A rollout that no attempt could end is played once more: a new attempt, in which nothing earlier is replayed.

    DeadSample + sample INVALID(infra) -> REQUESTED(redriven_after = its last attempt) -> rollout_request -> ...

Its group was given another sample in its place when it ended without a reward, so that what comes of it is for people
to see and is not trained: when the run's processes have ended, it becomes DROPPED(surplus). Only where the scheduler
had not heard of its end yet is it still awaited, and counts like any other. Whatever is killed in between, doing it
again goes on from where it was.
"""

import time
from dataclasses import replace

from turnmill.conversation.history import checked_sample, write_samples
from turnmill.errors import InvalidInput
from turnmill.pipeline.engine import load_run
from turnmill.pipeline.stages import LAST_STAGE
from turnmill.ports import Message, RecordStore, RunPorts, Write
from turnmill.records import (
    Batch,
    BatchState,
    DeadSample,
    DropReason,
    InvalidReason,
    Purpose,
    Run,
    RunStatus,
    SampleRecord,
    SampleState,
    batch_prefix,
    decode,
    encode,
    redriven_key,
    redriven_prefix,
    sample_key,
)
from turnmill.training.history import scan_all
from turnmill.wiring.reading.runs import as_seen

# About how long a new attempt may take, as the record says it for people.
_PATIENCE_S = 3600.0


async def redrive_sample(ports: RunPorts, letter: DeadSample) -> None:
    """Have the sample of a dead letter played again; raises `InvalidInput` where its run is not going on."""
    check_goes_on(await load_run(ports.runs, letter.run_id))
    key = sample_key(letter.run_id, letter.purpose, letter.sample_id)
    while True:
        (stored,) = await ports.records.get([key])
        if stored is None:
            raise InvalidInput(f"sample {letter.sample_id} has no record any more; purge its dead letter")
        sample = checked_sample(stored)
        if sample.wire_id is not None:
            raise InvalidInput(
                f"sample {letter.sample_id} was answered to its foreign trainer, which may ask for it again; "
                "purge its dead letter"
            )
        if sample.redriven_after >= letter.num_attempts:
            # Somebody was killed before the letter was removed, or does the same right now.
            break
        if sample.state is not SampleState.INVALID or sample.reason is not InvalidReason.INFRA:
            raise InvalidInput(f"sample {letter.sample_id} is {sample.state}, not given up; purge its dead letter")
        # First what makes it findable: nobody else knows that somebody has to end it.
        mark = Write(key=redriven_key(letter.run_id, key), value=key.encode(), expected=None)
        again = Write(key=key, value=encode(_requested(sample)), expected=stored.version)
        _, is_written = await ports.records.write([mark, again])
        if is_written:
            break
    dedup_id = f"{key}#redriven {letter.num_attempts}"
    await ports.rollout_request.send([Message(body=encode(letter.request), group=letter.sample_id, dedup_id=dedup_id)])
    await ports.records.write([Write(key=letter.key, value=None, expected=None)])
    try:
        check_goes_on(await load_run(ports.runs, letter.run_id))
    except InvalidInput:
        # It came to its end meanwhile, and may have given up what was redriven before this sample was.
        await give_up_redriven(ports.records, letter.run_id)
        raise


def check_goes_on(run: Run) -> None:
    """Raise `InvalidInput` unless workers play samples of the run."""
    seen = as_seen(run)
    if seen.status is not RunStatus.ACTIVE or any(stage.name == LAST_STAGE for stage in run.current_stages):
        status = "about to end" if seen.status is RunStatus.ACTIVE else seen.status.value
        raise InvalidInput(
            f"run {run.run_id} is {status}: a rollout is redriven only while its run is active; "
            f"`turnmill resume {run.run_id}` goes on with one that ended early, `turnmill dlq purge` removes the letter"
        )


def _requested(sample: SampleRecord) -> SampleRecord:
    """The sample as it waits for its next attempt; how it ended before is forgotten, its calls stay recorded."""
    return replace(
        sample,
        state=SampleState.REQUESTED,
        redriven_after=sample.attempt,
        deadline=time.time() + _PATIENCE_S,
        chat_secret_hash=None,
        report_secret_hash=None,
        lease_token_hash=None,
        receipt=None,
        reason=None,
        detail=None,
        report_digest=None,
    )


async def give_up_redriven(records: RecordStore, run_id: str) -> int:
    """Drop as surplus what was redriven and is in no batch; how many.

    When no process of the run is left, or it has come to its end: nobody else ends these samples or waits for them.
    """
    keys = [item.value.decode() for item in await scan_all(records, redriven_prefix(run_id))]
    batched = await _in_batches(records, run_id) if keys else set()
    num_dropped = 0
    while keys:
        stored = [item for item in await records.get(keys) if item is not None]
        changes = [
            (replace(sample, state=SampleState.DROPPED, drop_reason=DropReason.SURPLUS), item.version)
            for item in stored
            if _is_left(sample := checked_sample(item)) and sample.key not in batched
        ]
        written = await write_samples(records, changes) if changes else []
        num_dropped += sum(written)
        # Changed in this moment: look again.
        keys = [sample.key for (sample, _), ok in zip(changes, written, strict=True) if not ok]
    return num_dropped


def _is_left(sample: SampleRecord) -> bool:
    # Of an evaluation REPORTED is the end: nothing is trained on it, and it counts only where it was awaited.
    is_played = sample.state is SampleState.REPORTED and sample.purpose is Purpose.TRAIN
    return sample.redriven_after > 0 and (sample.state.is_open or is_played)


async def _in_batches(records: RecordStore, run_id: str) -> set[str]:
    """Keys of the samples in batches that count: those of a batch just recorded may not say so themselves yet."""
    batches = [decode(item.value, Batch) for item in await scan_all(records, batch_prefix(run_id))]
    return {
        sample_key(run_id, Purpose.TRAIN, sample_id)
        for batch in batches
        if batch.state is not BatchState.SUPERSEDED
        for sample_id in batch.sample_ids
    }
