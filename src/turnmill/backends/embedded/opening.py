"""Opening a deployment in a folder: its records, its bucket, and the ports of its runs. Opening creates nothing."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from turnmill.backends.embedded.blobs import FolderBlobStore
from turnmill.backends.embedded.bucket import FolderBucket
from turnmill.backends.embedded.infra import FolderRunInfra
from turnmill.backends.embedded.metrics import JsonlMetricSink
from turnmill.backends.embedded.models import FolderModelStore
from turnmill.backends.embedded.outbox import SqliteOutbox
from turnmill.backends.embedded.quarantine import Quarantine
from turnmill.backends.embedded.queue import SCHEMA as QUEUE_SCHEMA
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import SCHEMA as RECORDS_SCHEMA
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.backends.embedded.sqlite import Database
from turnmill.backends.embedded.weights import FolderWeightStore
from turnmill.errors import InvalidInput
from turnmill.ports import RunPorts, queue_names

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


def open_weights(root: Path, run_id: str) -> FolderWeightStore:
    """The weights of a run: on this machine whatever backend holds the rest, while its processes run here."""
    return FolderWeightStore(run_folder(root, run_id) / "weights")


def open_run(root: Path, run_id: str, *, num_replicas: int) -> RunPorts:
    """The ports of one run, with `num_replicas` generate_request queues; raises `InvalidInput` for a bad run id."""
    folder = run_folder(root, run_id)
    runs = open_root_records(root)
    calls = Database(folder / "records" / "calls.db", RECORDS_SCHEMA + QUEUE_SCHEMA)
    records = SqliteRecordStore(folder / "records", shared={"calls": calls, "tokens": calls})
    answers = SqliteQueue(queue_file(folder, "generate_response"), database=calls)
    queues = {
        name: answers if name == "generate_response" else SqliteQueue(queue_file(folder, name))
        for name in queue_names(num_replicas)
    }
    closers: list[Callable[[], None]] = [queue.close for queue in queues.values()] + [records.close, runs.close]
    return RunPorts(
        runs=runs,
        records=records,
        blobs=FolderBlobStore(folder / "blobs"),
        weights=open_weights(root, run_id),
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


def run_folder(root: Path, run_id: str) -> Path:
    """Where all of a run lies; raises `InvalidInput` for an id that can't name a folder."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise InvalidInput(f"run id {run_id!r} can't name a folder: use letters, digits, '.', '_' and '-'")
    return root.absolute() / "runs" / run_id


def queue_file(folder: Path, name: str) -> Path:
    """Where the queue of this name lies in the folder of a run."""
    return folder / "records" / "calls.db" if name == "generate_response" else folder / "queues" / f"{name}.db"


def _close_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        close()
