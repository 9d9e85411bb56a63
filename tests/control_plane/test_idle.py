"""What a deployment costs while nothing happens, and how soon it notices that something does."""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.deployment import has_status, runs_of, start_up, turnmill
from tests.e2e.processes import wait_for
from turnmill import assets

IDLE_S = 20.0
# Of one core.
MOST_IDLE = 0.02
MOST_START_S = 2.0
NUM_UPLOADS = 3


def _cpu_s(pid: int) -> float:
    """User and system time of a process (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_deployment_idles_and_begins_with_an_upload_soon(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    root = tmp_path / "root"
    rows = assets.wordle_data("train").read_text().splitlines(keepends=True)
    with start_up(root) as running:
        wait_for("the folder", (root / "bucket" / "training-data").is_dir, running.process)
        time.sleep(3.0)
        before = _cpu_s(running.process.pid)
        time.sleep(IDLE_S)
        share = (_cpu_s(running.process.pid) - before) / IDLE_S
        took: list[float] = []
        for number in range(NUM_UPLOADS):
            name = f"{number}.jsonl"
            (root / "new.tmp").write_text("".join(rows[number:]))
            put_at = time.time()
            (root / "new.tmp").rename(root / "bucket" / "training-data" / name)
            wait_for("the end", partial(has_status, root, name, "succeeded"), running.process)
            run = json.loads(turnmill(root, "status", runs_of(root)[name]["run_id"], "--json").stdout)
            took.append(run["stages"][0]["started_at"] - put_at)
    record_property("figure", f"idle: {share:.2%} of one core over {IDLE_S:.0f} s (at most {MOST_IDLE:.0%})")
    shown = ", ".join(f"{seconds:.2f}" for seconds in took)
    record_property("figure", f"from an upload to its run's first stage: {shown} s (at most {MOST_START_S:.0f})")
    load = os.getloadavg()[0]
    record_property("figure", f"load of the machine: {load:.1f} on {os.cpu_count()} cores")
    assert share < MOST_IDLE
    assert max(took) <= MOST_START_S
