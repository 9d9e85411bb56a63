"""What `turnmill cleanup` would end, remove and keep: found without a trace, so that looking changes nothing.

The data of a deployment is its bucket: what was uploaded, what was put aside, and what was published. All else was made
by runs and can be made again: it goes, checkpoints that were not published included.
"""

import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from turnmill.backends.embedded import RunProcess, disk, holder_of, open_bucket, process_of, processes_of
from turnmill.errors import NotFound
from turnmill.records import Cause, Run, RunStatus, cause_key, decode
from turnmill.wiring.backend import RECORD, backend_of, remote_of
from turnmill.wiring.reading.runs import look_at_runs

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
# Of a deployment, in the order in which they are removed: what says what there is goes last. People give their own
# folders such names too, so of each it is told which names in it are Turnmill's.
ROOT_FOLDERS = {
    "runs": ("runs", re.compile(r"\d{8}-\d{6}-[0-9a-f]{4,}")),
    "bucket": ("the bucket", re.compile(r"training-data|quarantine|models")),
    "logs": ("logs", re.compile(r"(control|mlflow)\.log")),
    "records": ("records", re.compile(r"[a-z_]+\.db(-wal|-shm)?")),
    "locks": ("locks", re.compile(r"[a-z_]+\.lock")),
}
# They are there together, or the first one is somebody else's.
ROOT_FILES = {"control.json": "address of the API", "control.token": "token of the API"}


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
    # Where other services hold some of it, for people; it is removed, too.
    elsewhere: str | None = None

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
        elsewhere=_elsewhere(root),
    )


def plan_for_all(root: Path, *, retain_data: bool) -> Plan:
    """The whole deployment: what belongs to it, and nothing that somebody else put into its folder."""
    root = root.absolute()
    runs = tuple(look_at_runs(root))
    known = {run.run_id for run in runs}
    items = {name: _own_in(root / name, what, names, known) for name, (what, names) in ROOT_FOLDERS.items()}
    has_token = (root / "control.token").exists()
    files = [item for name, what in ROOT_FILES.items() if has_token for item in _items(what, root / name)]
    # Last: it says where the rest is.
    record = _items("which backend it is on", root / RECORD)
    of_runs, data = items.pop("runs"), items.pop("bucket")
    last = [item for own in items.values() for item in own]
    return Plan(
        root=root,
        runs=runs,
        run_id=None,
        processes=_processes(root, None, runs),
        removed=(*of_runs, *(() if retain_data else data), *files, *last, *record),
        retained=tuple(data) if retain_data else (),
        elsewhere=_elsewhere(root),
    )


def _elsewhere(root: Path) -> str | None:
    remote = remote_of(root)
    return None if remote is None else remote.place


def _own_in(folder: Path, what: str, names: re.Pattern[str], known: Set[str]) -> list[Item]:
    """The folder, if nothing in it is somebody else's; else what in it is Turnmill's, and a link that leads to it."""
    try:
        with disk(folder):
            there = sorted(os.listdir(folder))
    except NotFound:
        there = []
    own = [name for name in there if names.fullmatch(name) or (what == "runs" and name in known)]
    if own == there and not folder.is_symlink():
        return _items(what, folder)
    link = _items(f"link to {what}", folder) if own == there else []
    return [item for name in own for item in _items(what, folder / name)] + link


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
    found = [item for item in backend_of(root).look_at_records(key) if item.key == key]
    return decode(found[0].value, Cause) if found else None


def files_below(path: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder that is no folder, links not followed; what vanishes meanwhile is left out."""
    try:
        with disk(path):
            entries = list(os.scandir(path))
    except NotFound:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
        else:
            yield entry


def _parts_of(folder: Path) -> list[Item]:
    try:
        with disk(folder):
            others = sorted(name for name in os.listdir(folder) if name not in _PARTS)
    except NotFound:
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
