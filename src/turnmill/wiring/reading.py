"""What the records of a deployment say. Nothing here writes."""

import os
from dataclasses import replace
from pathlib import Path

from turnmill.backends.embedded import open_root_records, open_run
from turnmill.pipeline.engine import load_run
from turnmill.records import RUN_PREFIX, Metric, Run, RunStatus, decode


def as_seen(run: Run) -> Run:
    """The run as its record says, or interrupted where it is active and its control process is gone."""
    if run.status is RunStatus.ACTIVE and run.pid is not None and not _exists(run.pid):
        return replace(run, status=RunStatus.INTERRUPTED, error="its control process ended without finishing the run")
    return run


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to somebody else
    return True


async def list_runs(root: Path) -> list[Run]:
    """All runs of a deployment, oldest first."""
    if not (root / "records").is_dir():
        return []
    found: list[Run] = []
    runs = open_root_records(root)
    try:
        page = await runs.scan(RUN_PREFIX)
        while page:
            found += [as_seen(decode(item.value, Run)) for item in page]
            page = await runs.scan(RUN_PREFIX, after=page[-1].key)
    finally:
        runs.close()
    return sorted(found, key=lambda run: run.created_at)


async def read_run(root: Path, run_id: str) -> Run:
    """One run; raises `NotFound`."""
    runs = open_root_records(root)
    try:
        return as_seen(await load_run(runs, run_id))
    finally:
        runs.close()


async def read_metrics(root: Path, run_id: str) -> list[Metric]:
    """The metrics of a run by step."""
    ports = open_run(root, run_id, num_replicas=0)
    try:
        return await ports.metrics.read(run_id)
    finally:
        ports.close()
