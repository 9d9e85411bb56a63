"""A deployment in real processes: `turnmill up`, and the commands that people run beside it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.processes import PARAMETERS, Running, start_turnmill


@contextmanager
def start_up(root: Path, **changes: str) -> Iterator[Running]:
    """`turnmill up`, with small parameters and `changes` for every upload."""
    parameters = {**PARAMETERS, "max-steps": "1", **{name.replace("_", "-"): value for name, value in changes.items()}}
    flags = [part for name, value in parameters.items() for part in (f"--{name}", value)]
    with start_turnmill(root, ["up", "--root", str(root), *flags]) as running:
        yield running


def turnmill(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command that comes to its end."""
    command = [sys.executable, "-m", "turnmill", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def runs_of(root: Path) -> dict[str, dict[str, Any]]:
    """The runs' figures by upload; of several of one key the last one."""
    found: list[dict[str, Any]] = json.loads(turnmill(root, "runs", "--json").stdout)
    return {run["upload"]: run for run in found}


def has_status(root: Path, upload: str, status: str) -> bool:
    return runs_of(root).get(upload, {}).get("status") == status
