"""How often roles of a run had to be started again: one line of JSON for each time, which outlives the launcher."""

import json
import time
from collections import Counter
from pathlib import Path

from turnmill.backends.embedded.files import disk


def note_restart(path: Path, role: str, exit_code: int | None) -> None:
    """Append one line in one system call; raises `BackendUnavailable`."""
    line = json.dumps({"time": time.time(), "role": role, "exit_code": exit_code}) + "\n"
    with disk(path), path.open("ab", buffering=0) as file:
        file.write(line.encode())


def count_restarts(path: Path) -> dict[str, int]:
    """By the name of the role; a line that was torn by a kill or a full disk counts for nobody."""
    if not path.exists():
        return {}
    with disk(path):
        lines = path.read_bytes().split(b"\n")
    return dict(Counter(role for line in lines if (role := _role_of(line)) is not None))


def _role_of(line: bytes) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return str(fields["role"]) if isinstance(fields, dict) and "role" in fields else None
