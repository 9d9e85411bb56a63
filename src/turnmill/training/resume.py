"""Brings a new trainer process to where the run's records say that it is.

    live batches -> samples settled -> latest checkpoint on their way, from the folder or the store (or the base model)
        -> replay the applied batches after it, each to its recorded weights -> serve that version
        -> apply the batch that was recorded and not applied -> go on

A run's first trainer goes the same way, with nothing on it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore
from turnmill.records import Batch, BatchState, Progress, Purpose
from turnmill.training import snapshot
from turnmill.training.checkpoint import Checkpoints
from turnmill.training.history import live_batches, settle, supersede_strays
from turnmill.training.keeper import Keeper
from turnmill.training.status import Status
from turnmill.training.stepper import Stepper
from turnmill.training.trainer import StepResult

logger = logging.getLogger(__name__)
# What is to be told and stored after a step, where that was not done before.
Finish = Callable[[Batch, StepResult], Awaitable[None]]


async def resume(
    records: RecordStore,
    run_id: str,
    *,
    status: Status,
    stepper: Stepper,
    checkpoints: Checkpoints,
    keeper: Keeper | None,
    finish: Finish,
    stop: asyncio.Event,
) -> Progress | None:
    """Bring `stepper` to the last recorded step; where in the data to go on, or None when asked to stop on the way.

    `finish` is told each step that is made. Raises `AuditFailed` where a replayed step gives other weights.
    """
    await stepper.begin()
    await asyncio.to_thread(checkpoints.clean)
    live = await live_batches(records, run_id)
    await supersede_strays(records, run_id, live)
    changed = await settle(records, run_id, Purpose.TRAIN, [item.batch for item in live])
    applied = [item.batch for item in live if item.batch.state is BatchState.APPLIED]
    await status.write("running", len(applied))
    if live:
        logger.info(
            "going on from step %d of %d recorded; samples settled: %s",
            len(applied),
            len(live),
            {state.value: num for state, num in changed.items()} or "none",
            extra={"at": run_id},
        )
    stepper.follow(applied)
    if keeper is not None:
        await keeper.bring_back(applied)
    await asyncio.to_thread(_restore, stepper, checkpoints, applied)
    if keeper is not None:
        # What an earlier process saved and did not store.
        keeper.look()
    for batch in applied[stepper.step :]:
        if stop.is_set():
            return None
        result = await stepper.replay(batch)
        if batch is applied[-1]:
            # What may still have to be measured of it is played by replicas.
            await stepper.point()
        await finish(batch, result)
    await stepper.point()
    for item in live[len(applied) :]:
        if stop.is_set():
            return None
        taken = await stepper.retake(item)
        groups = await stepper.load(taken.batch, [sample for sample, _ in taken.samples])
        # The replicas that sampled it may have been replaced since; the audit of each token stays.
        result = await stepper.make(taken, groups, is_vouched=False)
        await stepper.commit(taken, item.batch.values)
        await stepper.settle(taken)
        await finish(item.batch, result)
    return live[-1].batch.progress if live else Progress()


def _restore(stepper: Stepper, checkpoints: Checkpoints, applied: Sequence[Batch]) -> None:
    """Load the latest checkpoint that holds a step of `applied`; the others are of steps that were given up."""
    by_step = {batch.step: batch for batch in applied}
    for manifest in reversed(checkpoints.stable()):
        batch = by_step.get(manifest.step)
        path = checkpoints.path(manifest.step)
        if batch is None or (batch.version, batch.digest) != (manifest.version, manifest.digest):
            logger.warning("%s holds a step that was given up and is removed", path)
            checkpoints.remove(manifest.step)
            continue
        try:
            snapshot.restore(stepper.trainer, path, manifest)
        except RecordCorrupt as error:
            # An earlier one, or the base model, leads to the same weights: each replayed step is checked.
            logger.error("%s; it is removed, going back further", error)
            checkpoints.remove(manifest.step)
            continue
        stepper.step, stepper.version = manifest.step, manifest.version
        logger.info("loaded %s", path)
        return
