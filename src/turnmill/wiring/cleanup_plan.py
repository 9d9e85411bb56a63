"""What `turnmill cleanup` would end, remove and keep: found without a trace, so that looking changes nothing.

The data of a deployment is its bucket: what was uploaded, what was put aside, and what was published. All else was made
by runs and can be made again: it goes, checkpoints that were not published included.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnmill.backends.embedded import (
    RunProcess,
    holder_of,
    look_at_root_records,
    open_bucket,
    process_of,
    processes_of,
)
from turnmill.errors import NotFound
from turnmill.records import Cause, Run, RunStatus, cause_key, decode
from turnmill.wiring.reading import look_at_runs

# Parts of a run's folder by what they are; whatever else lies there is removed with it.
_PARTS = {
    "queues": "queues and wake pipes",
    "records": "records and conversations",
    "checkpoints": "checkpoints",
    "weights": "weights",
    "blobs": "blobs",
    "metrics.jsonl": "metrics",
    "restarts.jsonl": "restarts of roles",
    "data": "the run's copy of its data",
    "logs": "logs",
    "locks": "locks",
}
# Of a deployment, in the order in which they are removed: what says what there is goes last.
ROOT_PARTS = {
    "runs": "runs",
    "bucket": "the bucket",
    "control.json": "address of the API",
    "control.token": "token of the API",
    "logs": "logs",
    "records": "records",
    "locks": "locks",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """A file or a folder."""

    what: str
    path: Path
    num_files: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is there of a run, or of a whole deployment."""

    root: Path
    # Of those that are cleaned up; not of those whose records are gone already.
    runs: tuple[Run, ...]
    # None for the whole deployment.
    run_id: str | None
    processes: tuple[RunProcess, ...] = ()
    # In the order in which they are removed.
    removed: tuple[Item, ...] = ()
    retained: tuple[Item, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.processes or self.removed)


def plan_for_run(root: Path, run_id: str, *, retain_data: bool) -> Plan:
    """Raises `NotFound` where there is neither a record nor a folder of the run."""
    root = root.absolute()
    runs = tuple(run for run in look_at_runs(root) if run.run_id == run_id)
    folder = run_folder(root, run_id)
    if not runs and not folder.is_dir():
        raise NotFound(f"there is no run {run_id!r} in {root}; `turnmill runs` lists what there is")
    data = [item for run in runs for item in _data_of(root, run)]
    return Plan(
        root=root,
        runs=runs,
        run_id=run_id,
        processes=_processes(root, run_id, runs),
        removed=(*_parts_of(folder), *(() if retain_data else data)),
        retained=tuple(data) if retain_data else (),
    )


def plan_for_all(root: Path, *, retain_data: bool) -> Plan:
    """The whole deployment: what belongs to it, and nothing that somebody else put into its folder."""
    root = root.absolute()
    items = [item for name, what in ROOT_PARTS.items() for item in _items(what, root / name)]
    is_kept = {str(root / "bucket")} if retain_data else set()
    runs = tuple(look_at_runs(root))
    return Plan(
        root=root,
        runs=runs,
        run_id=None,
        processes=_processes(root, None, runs),
        removed=tuple(item for item in items if str(item.path) not in is_kept),
        retained=tuple(item for item in items if str(item.path) in is_kept),
    )


def run_folder(root: Path, run_id: str) -> Path:
    """Raises `NotFound` for an id that no run can have: it must not lead anywhere else."""
    if not run_id or run_id in (".", "..") or "/" in run_id or "\0" in run_id:
        raise NotFound(f"there is no run {run_id!r} in {root}")
    return root / "runs" / run_id


def control_of(root: Path, run: Run) -> RunProcess | None:
    """The process that has an active run and nothing else: not that of `turnmill up`, which has others too."""
    is_own = run.status is RunStatus.ACTIVE and run.pid != holder_of(root / "locks" / "control.lock")
    return process_of(run.pid, run.run_id, "control") if is_own and run.pid is not None else None


def _processes(root: Path, run_id: str | None, runs: Sequence[Run]) -> tuple[RunProcess, ...]:
    controls = [control for run in runs if (control := control_of(root, run)) is not None]
    return (*controls, *processes_of(root, run_id))


def cause_of(root: Path, run: Run) -> Cause | None:
    """The record of the upload that a run is made of."""
    key = cause_key(open_bucket(root).name, run.cause)
    found = [item for item in look_at_root_records(root, key) if item.key == key]
    return decode(found[0].value, Cause) if found else None


def files_below(path: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder that is no folder, links not followed; what vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
        else:
            yield entry


def _parts_of(folder: Path) -> list[Item]:
    try:
        others = sorted(entry.name for entry in os.scandir(folder) if entry.name not in _PARTS)
    except FileNotFoundError:
        return []
    names = {**{name: "temporary files" if name.startswith(".") else name for name in others}, **_PARTS}
    return [item for name, what in names.items() for item in _items(what, folder / name)]


def _data_of(root: Path, run: Run) -> list[Item]:
    """What lies in the bucket of a run: the upload, if it is still what the run was made of, and what came of it."""
    bucket = open_bucket(root)
    paths = bucket.paths_of(run.upload, run.cause) if run.upload is not None else []
    items = [item for path in paths for item in _items("upload", path)]
    items += _items("upload in quarantine", root / "bucket" / "quarantine" / run.run_id)
    return items + _items("published model", root / "bucket" / "models" / run.run_id)


def _items(what: str, path: Path) -> list[Item]:
    """One, or none where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        sizes = [_size_of(entry) for entry in files_below(path)]
    elif path.is_symlink() or path.exists():
        sizes = [path.lstat().st_size]
    else:
        return []
    return [Item(what=what, path=path, num_files=len(sizes), num_bytes=sum(sizes))]


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
