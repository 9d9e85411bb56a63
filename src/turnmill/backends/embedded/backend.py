"""A deployment in a folder, for those who need to know no more than that it is one."""

import time
from functools import partial
from pathlib import Path

from turnmill.backends.embedded.activity import look_at_batches, look_at_calls, look_at_queue, look_at_recent_samples
from turnmill.backends.embedded.counts import count, count_samples
from turnmill.backends.embedded.letters import letters_in
from turnmill.backends.embedded.looking import look
from turnmill.backends.embedded.metrics import JsonlMetricSink
from turnmill.backends.embedded.opening import open_root_records, open_run, queue_file, run_folder
from turnmill.backends.embedded.records import SqliteRecordStore, kind_of, scan
from turnmill.ports import (
    BatchActivity,
    CallActivity,
    DeadLetter,
    QueueActivity,
    QueueCounts,
    RunPorts,
    SampleActivity,
    Stored,
)
from turnmill.records import Metric, Purpose, SampleState

_NOTHING = QueueCounts(available=0, in_flight=0, delayed=0, dead=0, num_sent=0)


class EmbeddedBackend:
    """Implements `ports.Backend` in the folder `root`."""

    hosts_proxy = True

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def open_records(self) -> SqliteRecordStore:
        """See `ports.Backend.open_records`."""
        return open_root_records(self._root)

    def open_run(self, run_id: str, *, num_replicas: int) -> RunPorts:
        """See `ports.Backend.open_run`."""
        return open_run(self._root, run_id, num_replicas=num_replicas)

    def look_at_records(self, prefix: str) -> list[Stored]:
        """See `ports.Backend.look_at_records`."""
        return _records_in(self._root / "records", prefix, after="", limit=-1)

    def reader(self, run_id: str) -> "FolderRunReader":
        """See `ports.Backend.reader`."""
        return FolderRunReader(run_folder(self._root, run_id), run_id)

    def activity(self, run_id: str) -> "FolderRunActivity":
        """See `ports.Backend.activity`."""
        return FolderRunActivity(run_folder(self._root, run_id))


class FolderRunReader:
    """Implements `ports.RunReader` in the folder of a run."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id

    def records(self, prefix: str, *, after: str = "", limit: int) -> list[Stored]:
        """See `ports.RunReader.records`."""
        return _records_in(self._folder / "records", prefix, after=after, limit=limit)

    def counts(self, queue: str) -> QueueCounts:
        """See `ports.RunReader.counts`."""
        path = queue_file(self._folder, queue)
        return look(path, "dead", lambda connection: count(connection, time.monotonic())) or _NOTHING

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """See `ports.RunReader.dead_letters`."""
        return look(queue_file(self._folder, queue), "dead", partial(letters_in, limit=-1)) or []

    def samples(self) -> dict[tuple[Purpose, SampleState], int]:
        """See `ports.RunReader.samples`; takes a second for some 100 000."""
        return look(self._folder / "records" / "samples.db", "records", count_samples) or {}

    def metrics(self) -> list[Metric]:
        """See `ports.RunReader.metrics`."""
        return JsonlMetricSink(self._folder / "metrics.jsonl").read_now(self._run_id)


class FolderRunActivity:
    """Implements `ports.RunActivity` in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def queue(self, name: str) -> QueueActivity:
        """See `ports.RunActivity.queue`."""
        return look_at_queue(queue_file(self._folder, name))

    def samples(self) -> SampleActivity:
        """See `ports.RunActivity.samples`."""
        return look_at_recent_samples(self._folder / "records" / "samples.db")

    def calls(self) -> CallActivity:
        """See `ports.RunActivity.calls`."""
        return look_at_calls(self._folder / "records" / "calls.db")

    def batches(self) -> BatchActivity:
        """See `ports.RunActivity.batches`."""
        return look_at_batches(self._folder / "records" / "batches.db")

    def steps_mark(self) -> object:
        """See `ports.RunActivity.steps_mark`."""
        paths = self._folder / "metrics.jsonl", *sorted((self._folder / "records").glob("training.db*"))
        return tuple(map(_mark_of, paths))


def _records_in(folder: Path, prefix: str, *, after: str, limit: int) -> list[Stored]:
    path = folder / f"{kind_of(prefix)}.db"
    return look(path, "records", partial(scan, prefix=prefix, after=after, limit=limit)) or []


def _mark_of(path: Path) -> tuple[str, int, int] | None:
    """Another one when the file was written to; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return path.name, status.st_mtime_ns, status.st_size
