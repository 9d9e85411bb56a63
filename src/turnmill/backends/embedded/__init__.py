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

from pathlib import Path

from turnmill.backends.embedded.backend import EmbeddedBackend
from turnmill.backends.embedded.bucket import FolderBucket
from turnmill.backends.embedded.files import disk, process_lives, remove_abandoned, replacing
from turnmill.backends.embedded.infra import RunFolder
from turnmill.backends.embedded.launcher import ProcessLauncher, log_tail
from turnmill.backends.embedded.locks import holder_of, one_of_many, only_one, take_all, wait_until_gone
from turnmill.backends.embedded.opening import (
    open_bucket,
    open_quarantine,
    open_root_records,
    open_run,
    open_weights,
    run_folder,
)
from turnmill.backends.embedded.processes import ProcessInfo, process_info, role_processes
from turnmill.backends.embedded.quarantine import Quarantine
from turnmill.backends.embedded.restarts import count_restarts
from turnmill.backends.embedded.run_processes import RunProcess, end, process_of, processes_of
from turnmill.backends.embedded.weights import look_at_pointer

__all__ = [
    "EmbeddedBackend",
    "FolderBucket",
    "ProcessInfo",
    "ProcessLauncher",
    "Quarantine",
    "RunFolder",
    "RunProcess",
    "disk",
    "end",
    "holder_of",
    "log_tail",
    "look_at_pointer",
    "look_at_restarts",
    "one_of_many",
    "only_one",
    "open_bucket",
    "open_quarantine",
    "open_root_records",
    "open_run",
    "open_weights",
    "process_info",
    "process_lives",
    "process_of",
    "processes_of",
    "remove_abandoned",
    "replacing",
    "role_processes",
    "run_folder",
    "take_all",
    "wait_until_gone",
]


def look_at_restarts(root: Path, run_id: str) -> dict[str, int]:
    """How often each role of a run, by its name, was started again after it had died."""
    return count_restarts(run_folder(root, run_id) / "restarts.jsonl")
