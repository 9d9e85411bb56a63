"""`turnmill retry`: a run that came to nothing, done again from its beginning as a run of its own.

    run -> may it be done again? -> RetryClaim (compare-and-set) -> Run: QUEUED for `up`, or walked in the foreground

The claim names the new run before it is there: whoever finds a claim without its run makes that very run, so that a
kill in between leaves nothing behind and two retries at a time make one run.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from turnmill.backends.embedded import replacing
from turnmill.config import Resolved, from_dict, to_dict
from turnmill.errors import Conflict, DataError, InvalidInput
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import RecordStore, Write
from turnmill.records import RetryClaim, Run, RunKind, RunStatus, decode, encode, queued_key, retry_key, run_key
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.costs import admitted
from turnmill.wiring.reading.runs import as_seen
from turnmill.wiring.running.control import Order, Origin, check_order, new_run_id, resolve, with_absolute_model
from turnmill.wiring.running.resume import check_data

_ONCE_MORE = {
    RunKind.TRAIN: "`turnmill run` trains on the same file once more",
    RunKind.EVAL: "`turnmill eval` plays the same tasks once more",
    RunKind.EXTERNAL: "the foreign trainer begins another one",
}
# Where a parameter has its value from when nobody set it.
_UNSET = ("default", "recipe.toml")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """A run to be done again, as what, and with which parameters."""

    run: Run
    order: Order
    origin: Origin


def plan(root: Path, run: Run, *, file: Path | None, flags: Mapping[str, object]) -> Order:
    """What is done again: the run's data, and its parameters but for those that are given anew.

    Raises `InvalidInput` where it can't be.
    """
    _check_status(as_seen(run))
    order = Order(
        kind=run.kind,
        resolved=_changed(run, file, flags),
        data=Path(run.data_path) if run.data_path else None,
        eval_data=Path(run.eval_path) if run.eval_path else None,
    )
    check_data(run)
    try:
        check_order(root, order)
    except DataError as error:
        if run.upload is None:
            raise
        hint = f"correct it in quarantine, then `turnmill dlq redrive trigger/{run.run_id}` uploads it anew"
        text = str(error).replace(str(run.data_path), run.upload)
        raise DataError(f"{text}\n  {hint}") from error
    return order


def _check_status(run: Run) -> None:
    run_id = run.run_id
    if run.refused is not None:
        raise InvalidInput(
            f"run {run_id} had wrong parameters: `turnmill dlq redrive trigger/{run_id}` uploads it anew"
        )
    reasons = {
        RunStatus.QUEUED: "it waits for its turn",
        RunStatus.ACTIVE: f"it is active; `turnmill cancel {run_id}` ends it",
        RunStatus.SUCCEEDED: f"it has succeeded; {_ONCE_MORE[run.kind]}",
        RunStatus.DUPLICATE: f"it is a duplicate of run {run.duplicate_of}: retry that one",
        RunStatus.INTERRUPTED: f"it was interrupted: `turnmill resume {run_id}` goes on with it",
    }
    if run.status in reasons:
        raise InvalidInput(f"run {run_id} can't be retried: {reasons[run.status]}")


def _changed(run: Run, file: Path | None, flags: Mapping[str, object]) -> Resolved:
    given = resolve(file=file, environ={}, flags=flags)
    changes = {name: source for name, source in given.sources.items() if source not in _UNSET}
    values = to_dict(given.config)
    config = from_dict({**run.config, **{name: values[name] for name in changes}})
    return Resolved(config=with_absolute_model(config), sources={**run.sources, **changes})


async def claim(root: Path, run: Run, order: Order) -> Retry:
    """Claim the next retry of a run; raises `InvalidInput` while another one is on its way, or for one that its budgets
    or the deployment's ceilings would not let begin."""
    resolved = order.resolved
    await admitted(root, replace(run, run_id="", config=to_dict(resolved.config), sources=resolved.sources))
    runs = backend_of(root).open_records()
    try:
        claimed = await _claim(runs, run.run_id)
        # Told on both sides: the new one says so when it is made.
        await _tell(runs, run.run_id, claimed.retried_as)
    finally:
        runs.close()
    cause = f"retry/{run.run_id}/{claimed.num}"
    return Retry(run=run, order=order, origin=Origin(run_id=claimed.retried_as, cause=cause, retry_of=run.run_id))


async def _claim(runs: RecordStore, run_id: str) -> RetryClaim:
    while True:
        (stored,) = await runs.get([retry_key(run_id)])
        held = decode(stored.value, RetryClaim) if stored else None
        if held is not None:
            (record,) = await runs.get([run_key(held.retried_as)])
            if record is None:
                return held
            status = as_seen(decode(record.value, Run)).status
            if not status.is_final or status is RunStatus.INTERRUPTED:
                raise InvalidInput(f"run {run_id} is retried as {held.retried_as} already, which is {status}")
            if status is RunStatus.SUCCEEDED:
                raise InvalidInput(f"run {run_id} was retried as {held.retried_as}, which has succeeded")
        wanted = RetryClaim(run_id=run_id, num=held.num + 1 if held else 1, retried_as=new_run_id())
        write = Write(key=wanted.key, value=encode(wanted), expected=stored.version if stored else 0)
        (is_applied,) = await runs.write([write])
        if is_applied:
            return wanted


async def _tell(runs: RecordStore, run_id: str, retried_as: str) -> None:
    """Raises `InvalidInput` where the run was taken up in this moment."""
    while True:
        record = await RunRecord.open(runs, run_id)
        _check_status(as_seen(record.run))
        try:
            await record.save(replace(record.run, retried_as=retried_as))
        except Conflict:
            continue
        return


def _copy_data(folder: Path, order: Order) -> dict[Path, Path]:
    """Where the copies lie, by what was copied: nothing that becomes of the earlier run changes them."""
    copied = {path: folder.absolute() / path.name for path in (order.data, order.eval_data) if path}
    for source, target in copied.items():
        with source.open("rb") as file, replacing(target) as copy:
            shutil.copyfileobj(file, copy)
    return copied


async def queue(root: Path, retry: Retry) -> Run:
    """The new run of an upload, with a copy of its data: it waits for `turnmill up`.

    Raises `Conflict` where another `turnmill retry` made it in this moment.
    """
    origin, run = retry.origin, retry.run
    copied = await asyncio.to_thread(_copy_data, root / "runs" / origin.run_id / "data", retry.order)
    again = Run(
        run_id=origin.run_id,
        cause=origin.cause,
        retry_of=run.run_id,
        upload=run.upload,
        status=RunStatus.QUEUED,
        created_at=time.time(),
        kind=run.kind,
        config=to_dict(retry.order.resolved.config),
        sources=retry.order.resolved.sources,
        data_path=str(copied[retry.order.data]) if retry.order.data else None,
        eval_path=str(copied[retry.order.eval_data]) if retry.order.eval_data else None,
    )
    runs = backend_of(root).open_records()
    try:
        record = await RunRecord.create(runs, again)
        await runs.write([Write(key=queued_key(again.run_id), value=b"", expected=None)])
        return record.run
    finally:
        runs.close()
