"""The embedded backend: everything in one folder of this machine, in files, SQLite and child processes.

    ROOT/bucket/training-data/           what is uploaded
    ROOT/bucket/models/<run>/<version>/  published models
                quarantine/<run>/        what of that can't be trained, and why
    ROOT/records/                        the deployment's records
    ROOT/runs/<run>/records/<kind>.db    the run's records
                    queues/<name>.db     one file a queue; <name>.wake/ holds the pipes of those who wait at it.
                                         generate_response lies beside the calls, so that an answer is one transaction
                    blobs/  weights/  logs/  checkpoints/  metrics.jsonl  restarts.jsonl
                    locks/<name>.lock    held by the role process of that name as long as it lives

Survives SIGKILL of any process. Opening creates nothing: files come with the first write, or with `RunInfra.deploy`.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from turnmill.backends.embedded.activity import (
    BatchActivity,
    CallActivity,
    QueueActivity,
    SampleActivity,
    look_at_batches,
    look_at_calls,
    look_at_queue,
    look_at_recent_samples,
)
from turnmill.backends.embedded.blobs import FolderBlobStore
from turnmill.backends.embedded.bucket import FolderBucket
from turnmill.backends.embedded.counts import count, count_samples
from turnmill.backends.embedded.files import disk, process_lives, remove_abandoned, replacing
from turnmill.backends.embedded.infra import FolderRunInfra
from turnmill.backends.embedded.launcher import ProcessLauncher, log_tail
from turnmill.backends.embedded.letters import letters_in
from turnmill.backends.embedded.locks import holder_of, one_of_many, only_one, take_all, wait_until_gone
from turnmill.backends.embedded.looking import look
from turnmill.backends.embedded.metrics import JsonlMetricSink
from turnmill.backends.embedded.models import FolderModelStore
from turnmill.backends.embedded.outbox import SqliteOutbox
from turnmill.backends.embedded.processes import ProcessInfo, process_info, role_processes
from turnmill.backends.embedded.quarantine import Quarantine
from turnmill.backends.embedded.queue import SCHEMA as QUEUE_SCHEMA
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import SCHEMA as RECORDS_SCHEMA
from turnmill.backends.embedded.records import SqliteRecordStore, kind_of, scan
from turnmill.backends.embedded.restarts import count_restarts
from turnmill.backends.embedded.run_processes import RunProcess, end, process_of, processes_of
from turnmill.backends.embedded.sqlite import Database
from turnmill.backends.embedded.weights import FolderWeightStore, look_at_pointer
from turnmill.errors import InvalidInput
from turnmill.ports import DeadLetter, QueueCounts, RunPorts, Stored
from turnmill.records import Metric, Purpose, SampleState

__all__ = [
    "BatchActivity",
    "CallActivity",
    "FolderBucket",
    "ProcessInfo",
    "ProcessLauncher",
    "Quarantine",
    "QueueActivity",
    "RunProcess",
    "SampleActivity",
    "disk",
    "end",
    "holder_of",
    "log_tail",
    "look_at_batches",
    "look_at_calls",
    "look_at_dead_letters",
    "look_at_metrics",
    "look_at_pointer",
    "look_at_queue",
    "look_at_queues",
    "look_at_recent_samples",
    "look_at_restarts",
    "look_at_root_records",
    "look_at_run_records",
    "look_at_samples",
    "one_of_many",
    "only_one",
    "open_bucket",
    "open_quarantine",
    "open_root_records",
    "open_run",
    "process_info",
    "process_lives",
    "process_of",
    "processes_of",
    "queue_files",
    "remove_abandoned",
    "replacing",
    "role_processes",
    "take_all",
    "wait_until_gone",
]

_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def open_root_records(root: Path) -> SqliteRecordStore:
    """The deployment's records (`runs/...`); close it."""
    return SqliteRecordStore(root.absolute() / "records")


def open_bucket(root: Path) -> FolderBucket:
    """Where a deployment's uploads lie."""
    return FolderBucket(root.absolute() / "bucket")


def open_quarantine(root: Path) -> Quarantine:
    """Where uploads lie that can't be trained."""
    return Quarantine(root.absolute() / "bucket")


def open_run(root: Path, run_id: str, *, num_replicas: int) -> RunPorts:
    """The ports of one run, with `num_replicas` generate_request queues; raises `InvalidInput` for a bad run id."""
    folder = _run_folder(root, run_id)
    runs = open_root_records(root)
    calls = Database(folder / "records" / "calls.db", RECORDS_SCHEMA + QUEUE_SCHEMA)
    records = SqliteRecordStore(folder / "records", shared={"calls": calls, "tokens": calls})
    names = ["rollout_request", "rollout_response"]
    names += [f"generate_request-{index}" for index in range(num_replicas)]
    queues = {name: SqliteQueue(folder / "queues" / f"{name}.db") for name in names}
    answers = SqliteQueue(folder / "queues" / "generate_response.db", database=calls)
    queues["generate_response"] = answers
    closers: list[Callable[[], None]] = [queue.close for queue in queues.values()] + [records.close, runs.close]
    return RunPorts(
        runs=runs,
        records=records,
        blobs=FolderBlobStore(folder / "blobs"),
        weights=FolderWeightStore(folder / "weights"),
        models=FolderModelStore(root.absolute() / "bucket" / "models"),
        metrics=JsonlMetricSink(folder / "metrics.jsonl"),
        rollout_request=queues["rollout_request"],
        rollout_response=queues["rollout_response"],
        generate_request=[queues[f"generate_request-{index}"] for index in range(num_replicas)],
        generate_response=answers,
        answers=SqliteOutbox(calls, answers),
        infra=FolderRunInfra(folder, records, queues),
        close=partial(_close_all, closers),
    )


def look_at_queues(root: Path, run_id: str, *, num_replicas: int) -> dict[str, QueueCounts]:
    """The counts of each queue of a run by its name, as of now; nothing on disk changes and nobody has to wait.

    Raises `InvalidInput` for a bad run id, `BackendUnavailable` for a file that can't be read.
    """
    paths = queue_files(root, run_id, num_replicas=num_replicas)
    nothing = QueueCounts(available=0, in_flight=0, delayed=0, dead=0, num_sent=0)
    return {
        name: look(path, "dead", lambda connection: count(connection, time.monotonic())) or nothing
        for name, path in paths.items()
    }


def look_at_dead_letters(root: Path, run_id: str, *, num_replicas: int) -> dict[str, list[DeadLetter]]:
    """The dead letters of each queue of a run by its name, oldest first; as `look_at_queues`, it leaves no trace."""
    paths = queue_files(root, run_id, num_replicas=num_replicas)
    return {name: look(path, "dead", partial(letters_in, limit=-1)) or [] for name, path in paths.items()}


def queue_files(root: Path, run_id: str, *, num_replicas: int) -> dict[str, Path]:
    """Where each queue of a run lies, by its name; raises `InvalidInput` for a bad run id."""
    folder = _run_folder(root, run_id)
    names = ["rollout_request", "rollout_response", *(f"generate_request-{index}" for index in range(num_replicas))]
    paths = {name: folder / "queues" / f"{name}.db" for name in names}
    return paths | {"generate_response": folder / "records" / "calls.db"}


def look_at_root_records(root: Path, prefix: str) -> list[Stored]:
    """The deployment's records whose key starts with `prefix`, by key; as `look_at_queues`, it leaves no trace."""
    path = root.absolute() / "records" / f"{kind_of(prefix)}.db"
    return look(path, "records", partial(scan, prefix=prefix, after="", limit=-1)) or []


def look_at_run_records(root: Path, run_id: str, prefix: str, *, after: str = "", limit: int) -> list[Stored]:
    """As `look_at_root_records`, of the run's own the first `limit` after a key; raises `InvalidInput` for a bad run
    id."""
    path = _run_folder(root, run_id) / "records" / f"{kind_of(prefix)}.db"
    return look(path, "records", partial(scan, prefix=prefix, after=after, limit=limit)) or []


def look_at_samples(root: Path, run_id: str) -> dict[tuple[Purpose, SampleState], int]:
    """How many samples of a run are in which state; leaves no trace, and takes a second for some 100 000."""
    return look(_run_folder(root, run_id) / "records" / "samples.db", "records", count_samples) or {}


def look_at_metrics(root: Path, run_id: str) -> list[Metric]:
    """The metrics of a run by step, as they were written."""
    return JsonlMetricSink(_run_folder(root, run_id) / "metrics.jsonl").read_now(run_id)


def look_at_restarts(root: Path, run_id: str) -> dict[str, int]:
    """How often each role of a run, by its name, was started again after it had died."""
    return count_restarts(_run_folder(root, run_id) / "restarts.jsonl")


def _run_folder(root: Path, run_id: str) -> Path:
    if _RUN_ID.fullmatch(run_id) is None:
        raise InvalidInput(f"run id {run_id!r} can't name a folder: use letters, digits, '.', '_' and '-'")
    return root.absolute() / "runs" / run_id


def _close_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        close()
