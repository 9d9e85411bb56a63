"""`turnmill cleanup`: nothing of a run remains, whatever state it was left in.

    executions stop -> processes end -> locks are held -> claims, cause -> files, folder by folder -> data -> the record

Every step may be repeated, and the record that names the run is removed last: cut short by a kill, the same command
completes it. While the locks are held no role of the run can be started again.
"""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from turnmill.backends.embedded import (
    RunProcess,
    disk,
    end,
    only_one,
    process_of,
    processes_of,
    remove_abandoned,
    take_all,
)
from turnmill.errors import BackendUnavailable, Conflict, InvalidInput, NotFound
from turnmill.intake.claims import Claim, claim_key
from turnmill.ports import Backend, RecordStore, Write
from turnmill.records import (
    LATEST_MODEL_PREFIX,
    LatestModel,
    Run,
    RunStatus,
    cancel_key,
    decode,
    encode,
    queued_key,
    retry_key,
    run_key,
    trigger_dead_letter_key,
)
from turnmill.wiring.backend import Remote, backend_of, remote_of
from turnmill.wiring.reading.runs import look_at_run, until_ended
from turnmill.wiring.running.cancelling import ask
from turnmill.wiring.running.cleanup_plan import (
    Plan,
    cause_of,
    control_of,
    files_below,
    plan_for_all,
    plan_for_run,
    run_folder,
)
from turnmill.wiring.running.foreground import removing

# How long the process that has a run may take to end it: its roles are asked one after the other, 10 s each.
PATIENCE_S = 90.0
# Until the kernel has given up the locks of a process that has ended.
_LOCKS_S = 10.0
_INTERVAL_S = 0.05
# A folder into which somebody writes while it is removed is removed again, so often.
_MOST_TRIES = 3
# Endings of the queues' files in a run's folder.
_QUEUE_FILES = (".db", ".db-wal", ".db-shm", ".wake")

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What is still there afterwards; all of it is empty, or the cleanup has failed."""

    processes: tuple[str, ...]
    ports: tuple[int, ...]
    temporary_folders: tuple[str, ...]
    queues: tuple[str, ...]
    files: tuple[str, ...]
    records: tuple[str, ...]
    # On services outside of the deployment's folder.
    elsewhere: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not any(vars(self).values())


async def clean_up(plan: Plan, *, retain_data: bool, tell: Tell, patience_s: float = PATIENCE_S) -> Remains:
    """Do what `plan` says, and look at what remains.

    Raises `Conflict` when a whole deployment is to go while it is up, or a run is taken up again in this moment;
    `BackendUnavailable` when a process or a file can't be got rid of.
    """
    # Before the folder goes, in which it is said where the rest is.
    backend, remote = backend_of(plan.root), remote_of(plan.root)
    if plan.run_id is not None:
        await _clean_run(plan, plan.run_id, retain_data=retain_data, tell=tell, patience_s=patience_s)
    elif plan.root.is_dir():
        lock = plan.root / "locks" / "control.lock"
        with only_one(lock, f"{plan.root} is served by `turnmill up`: end it before all of it is removed"):
            await _clean_all(plan, retain_data=retain_data, tell=tell, patience_s=patience_s)
        _remove_if_empty(plan.root / "locks", plan.root)
    remains = what_remains(plan, backend, retain_data=retain_data)
    left = await _left_elsewhere(plan, remote, retain_data=retain_data) if remote is not None else []
    return replace(remains, elsewhere=tuple(left))


async def _clean_run(plan: Plan, run_id: str, *, retain_data: bool, tell: Tell, patience_s: float) -> None:
    for run in plan.runs:
        await _stop_execution(plan.root, run.run_id, tell, patience_s)
    async with _quiet(plan.root, run_id, tell):
        if plan.runs:
            await _forget_content(plan.root, plan.runs[0], models=not retain_data)
        await _remove_elsewhere(plan.root, run_id, retain_data=retain_data, tell=tell)
        # Anew: what was written until the processes ended is removed as well.
        for item in plan_for_run(plan.root, run_id, retain_data=retain_data).removed:
            tell(f"removing {item.what}: {item.path}")
            remove(item.path)
        remove(run_folder(plan.root, run_id))
        if plan.runs:
            await _forget_run(plan.root, run_id)


async def _clean_all(plan: Plan, *, retain_data: bool, tell: Tell, patience_s: float) -> None:
    for run in plan.runs:
        await _stop_execution(plan.root, run.run_id, tell, patience_s)
    with removing(plan.root):
        await _stop_processes(plan.root, None, tell)
        if remote_of(plan.root) is not None:
            # Its table outlives the folder.
            for run in plan.runs:
                await _forget_content(plan.root, run, models=not retain_data)
                await _remove_elsewhere(plan.root, run.run_id, retain_data=retain_data, tell=tell)
                await _forget_run(plan.root, run.run_id)
        for item in plan_for_all(plan.root, retain_data=retain_data).removed:
            tell(f"removing {item.what}: {item.path}")
            remove(item.path)
    if retain_data:
        # What programs left half-copied is no data.
        for path, _, _ in os.walk(plan.root / "bucket"):
            remove_abandoned(Path(path))


# ---------------------------------------------------------------- executions and processes


async def _stop_execution(root: Path, run_id: str, tell: Tell, patience_s: float) -> None:
    """The run is final, and whoever walked its stages has left it."""
    run = look_at_run(root, run_id)
    if run.status is RunStatus.ACTIVE:
        await _stop_active(root, run, tell, patience_s)
    if look_at_run(root, run_id).status in (RunStatus.QUEUED, RunStatus.ACTIVE, RunStatus.INTERRUPTED):
        # Nobody has it (any more): it must not get its turn.
        await _ask(root, run_id)


async def _stop_active(root: Path, run: Run, tell: Tell, patience_s: float) -> None:
    """Its control process is asked to end it; one of its own that does not answer is ended."""
    control = control_of(root, run)
    owner = None if run.pid is None else process_of(run.pid, run.run_id, "control")
    if owner is None or not owner.is_stopped:
        tell(f"cancelling run {run.run_id}")
        await _ask(root, run.run_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await until_ended(root, run.run_id)
                if control is not None:
                    # It still says how the run ended.
                    await _until_gone(control)
                return
    if control is None:
        raise BackendUnavailable(
            f"run {run.run_id} belongs to `turnmill up` (pid {run.pid}), which does not answer: end that process, "
            "then clean up again"
        )
    tell(f"ending control (pid {control.pid}), which does not answer")
    await asyncio.to_thread(list, end([control]))


async def _until_gone(process: RunProcess) -> None:
    while True:
        if not process.lives:
            return
        await asyncio.sleep(_INTERVAL_S)


async def _ask(root: Path, run_id: str) -> None:
    with suppress(InvalidInput):  # it has ended in this moment, which is what was wanted
        await ask(root, run_id)


async def _stop_processes(root: Path, run_id: str | None, tell: Tell) -> None:
    found = await asyncio.to_thread(processes_of, root, run_id)
    for process in found:
        tell(f"ending {process.name} (pid {process.pid})")
    await asyncio.to_thread(list, end(found))


@asynccontextmanager
async def _quiet(root: Path, run_id: str, tell: Tell) -> AsyncIterator[None]:
    """No process of the run lives, and none is started while this holds; the locks themselves may be removed."""
    await _stop_processes(root, run_id, tell)
    held = await take_all(root, run_id, _LOCKS_S)
    try:
        try:
            status = look_at_run(root, run_id).status
        except NotFound:
            status = RunStatus.CANCELLED
        if status is RunStatus.ACTIVE:
            raise Conflict(f"run {run_id} was taken up again in this moment; clean up again to end it")
        yield
    finally:
        for fd in held:
            os.close(fd)


# ---------------------------------------------------------------- what is elsewhere


async def _remove_elsewhere(root: Path, run_id: str, *, retain_data: bool, tell: Tell) -> None:
    """What services outside of the folder hold of a run, but its record."""
    if (remote := remote_of(root)) is not None:
        tell(f"removing what is of run {run_id} on {remote.place}")
        await remote.remove_run(run_id, models=not retain_data)


async def _left_elsewhere(plan: Plan, remote: Remote, *, retain_data: bool) -> list[str]:
    run_ids = [run.run_id for run in plan.runs] if plan.run_id is None else [plan.run_id]
    return [left for run_id in run_ids for left in await remote.what_is_left(run_id, models=not retain_data)]


# ---------------------------------------------------------------- records


async def _forget_content(root: Path, run: Run, *, models: bool) -> None:
    """What was trained may be trained again when it is uploaded again; the file that lies there now is not.

    Its cause stays, and says so: cleaning up must never begin a run. With `models` nothing points to its models.
    """
    writes = [
        # Not if another run takes it over in this moment.
        Write(key=item.key, value=None, expected=item.version)
        for item in backend_of(root).look_at_records(claim_key(""))
        if decode(item.value, Claim).run_id == run.run_id
    ]
    cause = cause_of(root, run)
    if cause is not None and cause.run_id == run.run_id:
        removed = replace(cause, run_id=None, ignored=f"its run {run.run_id} was removed by `turnmill cleanup`")
        writes.append(Write(key=cause.key, value=encode(removed), expected=None))
    if models:
        writes += [
            Write(key=item.key, value=None, expected=item.version)
            for item in backend_of(root).look_at_records(LATEST_MODEL_PREFIX)
            if decode(item.value, LatestModel).run_id == run.run_id
        ]
    await _write(root, writes)


async def _forget_run(root: Path, run_id: str) -> None:
    """The run itself goes last: by it the command is found again."""
    keys = (trigger_dead_letter_key(run_id), retry_key(run_id), queued_key(run_id), cancel_key(run_id), run_key(run_id))
    await _write(root, [Write(key=key, value=None, expected=None) for key in keys])


async def _write(root: Path, writes: Sequence[Write]) -> None:
    records: RecordStore = (store := backend_of(root).open_records())
    try:
        await records.write(writes)
    finally:
        store.close()


# ---------------------------------------------------------------- files


def remove(path: Path) -> None:
    """A file or a folder with all that is in it; a link alone. What is not there is no error."""
    for left in reversed(range(_MOST_TRIES)):
        try:
            with disk(path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            return
        except NotFound:
            pass  # something in it vanished meanwhile
        except BackendUnavailable as error:
            cause = error.__cause__
            if not left or not isinstance(cause, OSError) or cause.errno != errno.ENOTEMPTY:
                raise
        time.sleep(_INTERVAL_S)


def _remove_if_empty(*folders: Path) -> None:
    """One that somebody mounted, linked to or may not remove stays: it holds nothing of ours."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            with suppress(OSError):
                folder.rmdir()


def what_remains(plan: Plan, backend: Backend, *, retain_data: bool) -> Remains:
    """Looked for anew, not inferred from what was done."""
    found = [*processes_of(plan.root, plan.run_id), *(one for one in plan.processes if one.lives)]
    processes: dict[int, RunProcess] = {one.pid: one for one in found}
    ports = {port for one in processes.values() for port in one.ports}
    folders = [item.path for item in plan.removed]
    if plan.run_id is None:
        # Not what somebody else has put into a folder of ours since it was seen.
        folders = [item.path for item in plan_for_all(plan.root, retain_data=retain_data).removed]
    else:
        folders.append(run_folder(plan.root, plan.run_id))
    files = {entry.path for folder in folders for entry in files_below(folder)}
    files |= {str(folder) for folder in folders if folder.exists()}
    records = backend.look_at_records(run_key(plan.run_id or ""))
    return Remains(
        processes=tuple(f"{one.name} (pid {one.pid})" for one in processes.values()),
        ports=tuple(sorted(ports)),
        temporary_folders=tuple(sorted(path for path in files if "/." in path.removeprefix(str(plan.root)))),
        queues=tuple(sorted(path for path in files if "/queues/" in path and path.endswith(_QUEUE_FILES))),
        files=tuple(sorted(files)),
        records=tuple(item.key for item in records if plan.run_id is None or item.key == run_key(plan.run_id)),
    )
