"""A run that ended early goes on: the same record, the same stages, from its last recorded step or an earlier one.

checks -> its role processes are gone -> run record ACTIVE again, next attempt -> leftovers removed -> control as before

What the trainer does to go on is its own affair (`training.resume`): it looks at the records whenever it starts.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from turnmill.alerts import Dispatcher
from turnmill.backends.embedded import wait_until_gone
from turnmill.budget import raised
from turnmill.config import Resolved, from_dict, to_dict
from turnmill.config.deployment import load_limits
from turnmill.errors import Cancelled, Conflict, InvalidInput, TurnmillError
from turnmill.intake.dataset import validate
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import RunPorts, Write
from turnmill.records import BatchState, Purpose, Run, RunKind, RunStatus, replica_key, worker_key
from turnmill.training.history import live_batches, scan_all, settle, supersede
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.costs import used_up_by, within_day
from turnmill.wiring.reading.runs import as_seen, began
from turnmill.wiring.running.cancelling import cancellable
from turnmill.wiring.running.control import Order, check_order, hash_of, new_token, open_control
from turnmill.wiring.running.walking import walk_monitored

# A trainer without its control process ends after the step that it makes.
ORPHANS_PATIENCE_S = 60.0


async def resume(
    root: Path,
    run_id: str,
    *,
    from_step: int | None,
    cancel: asyncio.Event,
    created: Callable[[Run], None],
    when_cancelled: RunStatus = RunStatus.CANCELLED,
    alarms: Dispatcher | None = None,
    budgets: Mapping[str, float] = {},
) -> tuple[Run, TurnmillError | None]:
    """Take a failed, cancelled or interrupted run to its end, as `control.execute` does with a new one.

    With `from_step` the batches after that step are given up, and a run that succeeded may go on as well. Raises
    `InvalidInput` when the run can't be resumed, `Conflict` when somebody else resumes it at the same moment. A run
    that has used up its budget and was not ended for it is ended now.
    `when_cancelled`: its status when `cancel` is set. `alarms`: see `walk_monitored`. `budgets`: parameters of
    `budget.PARAMETERS`, higher than before.
    """
    runs = backend_of(root).open_records()
    try:
        record = await RunRecord.open(runs, run_id)
        run = record.run
        # It reads the data whole: conversations of other runs go on meanwhile.
        await asyncio.to_thread(check_run, root, run, from_step)
        resolved = raised(from_dict(run.config), run.sources, budgets, load_limits(root)[0])
        resolved = await within_day(root, run, resolved)
        config = resolved.config
        wanted = replace(run, config=to_dict(config), sources=resolved.sources)
        used_up = await used_up_by(root, wanted, from_step=from_step)
        if used_up is not None and run.status.is_final:
            raise used_up
        async with cancellable(runs, run_id, cancel, when_cancelled) as why:
            token = await _take_over(root, record, resolved, from_step if used_up is None else None, cancel)
            created(record.run)
            async with open_control(root, record.run, config, token) as ctx:
                # What a control process that was killed has left behind is removed, and nothing else is done.
                return await walk_monitored(root, ctx, record, why, alarms, used_up)
    finally:
        runs.close()


async def _take_over(
    root: Path, record: RunRecord, resolved: Resolved, from_step: int | None, cancel: asyncio.Event
) -> str:
    """Make the run this process's own, rid of what earlier ones left; the token of its workers."""
    run_id = record.run.run_id
    ports = backend_of(root).open_run(run_id, num_replicas=resolved.config.generation_replicas)
    try:
        await _check_step(ports, run_id, from_step)
        await _wait_for_orphans(root, run_id, cancel)
        token = new_token()
        await _claim(record, resolved, hash_of(token))
        await _prepare(ports, run_id, from_step)
        return token
    finally:
        ports.close()


def check_run(root: Path, run: Run, from_step: int | None) -> None:
    """Raise `InvalidInput` unless this run may go on from there, on the data that it began with."""
    if run.kind is RunKind.EXTERNAL:
        raise InvalidInput(
            f"run {run.run_id} is of an external trainer and has no stages to go on with; while it is active, "
            f"`turnmill external begin {run.run_id}` completes it"
        )
    seen = as_seen(run)
    if seen.status is RunStatus.ACTIVE:
        raise InvalidInput(
            f"run {run.run_id} is active: its control process {run.pid} is running; "
            f"`turnmill watch {run.run_id}` follows it, Ctrl-C there or `kill -INT {run.pid}` stops it"
        )
    if run.refused is not None:
        # What it would go on with are not the parameters that its uploader meant.
        raise InvalidInput(f"run {run.run_id} had wrong parameters and can't go on: {run.refused}")
    if from_step is not None and run.kind is not RunKind.TRAIN:
        raise InvalidInput(f"run {run.run_id} is an evaluation: it has no steps to go on from (--from {from_step})")
    if seen.status is RunStatus.SUCCEEDED and from_step is None:
        raise InvalidInput(
            f"run {run.run_id} has succeeded: nothing is left to do; --from STEP goes on from an earlier step and "
            "gives up the later ones"
        )
    check_data(run)
    check_order(
        root,
        Order(
            kind=run.kind,
            resolved=Resolved(config=from_dict(run.config), sources=run.sources),
            data=Path(run.data_path) if run.data_path else None,
            eval_data=Path(run.eval_path) if run.eval_path else None,
        ),
    )


def check_data(run: Run) -> None:
    """Raise `InvalidInput` unless the files are those that were validated; those never found valid may be new ones."""
    reports = [stage.result for stage in run.stages if stage.name == "ValidateData" and stage.state == "done"]
    for report in reports[-1].values() if reports else ():
        path = Path(report["path"])
        found = validate(path)
        if found.digest != report["digest"]:
            what = "can't be read any more" if not found.digest else "has changed since the run began"
            raise InvalidInput(f"{path} {what}: put it back, or start a new run with the new content")


async def _check_step(ports: RunPorts, run_id: str, from_step: int | None) -> None:
    if from_step is None:
        return
    live = await live_batches(ports.records, run_id)
    num_applied = sum(item.batch.state is BatchState.APPLIED for item in live)
    if not 0 <= from_step <= num_applied:
        raise InvalidInput(f"--from {from_step}: run {run_id} has made {num_applied} steps; give 0 to {num_applied}")


async def _wait_for_orphans(root: Path, run_id: str, cancel: asyncio.Event) -> None:
    """What an earlier control process started ends by itself; raises `BackendUnavailable` where it does not."""
    waiting = asyncio.create_task(wait_until_gone(root, run_id, ORPHANS_PATIENCE_S), name="wait for orphans")
    cancelled = asyncio.create_task(cancel.wait(), name="wait for cancel")
    try:
        await asyncio.wait({waiting, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Cancelled("cancelled by the user before anything was changed")
        waiting.result()
    finally:
        waiting.cancel()
        cancelled.cancel()
        await asyncio.gather(waiting, cancelled, return_exceptions=True)


async def _claim(record: RunRecord, resolved: Resolved, token_hash: str) -> None:
    run = record.run
    try:
        await record.save(
            replace(
                run,
                status=RunStatus.ACTIVE,
                config=to_dict(resolved.config),
                sources=resolved.sources,
                attempt=run.attempt + 1,
                resumed_at=time.time(),
                ended_at=None,
                error=None,
                worker_token_hash=token_hash,
                pid=os.getpid(),
                pid_began=began(os.getpid()),
            )
        )
    except Conflict as error:
        raise Conflict(f"run {run.run_id} is being resumed by another process") from error


async def _prepare(ports: RunPorts, run_id: str, from_step: int | None) -> None:
    """Remove what the earlier processes left behind. Done again after a crash in the middle, it ends the same."""
    await ports.infra.retire()
    if from_step is not None:
        await supersede(ports.records, run_id, from_step)
    # Evaluations go on with what has ended; training samples are settled by the trainer, each time that it starts.
    for purpose in (Purpose.BASELINE, Purpose.EVAL):
        await settle(ports.records, run_id, purpose, [])
    # Processes that are gone must not look as if they were ready.
    for prefix in (replica_key(run_id, ""), worker_key(run_id, "")):
        gone = await scan_all(ports.records, prefix)
        await ports.records.write([Write(key=item.key, value=None, expected=None) for item in gone])
