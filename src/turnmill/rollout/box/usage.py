"""What the processes of a box use, as the machine sees them."""

import os
from dataclasses import dataclass
from pathlib import Path

from turnmill.rollout.box.order import Limits
from turnmill.rollout.box.warden import descendants

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of all processes of one box together."""

    memory_bytes: int
    num_processes: int
    # None where the kernel limits it.
    temp_bytes: int | None

    def breach_of(self, limits: Limits) -> str | None:
        """Which limit is exceeded, in words."""
        if self.memory_bytes > limits.memory_mb * _MIB:
            return f"it uses {self.memory_bytes // _MIB} MiB of memory, more than {limits.memory_mb}"
        if self.num_processes > limits.num_processes:
            return f"it has {self.num_processes} processes, more than {limits.num_processes}"
        if self.temp_bytes is not None and self.temp_bytes > limits.temp_mb * _MIB:
            return f"its files have more than {limits.temp_mb} MiB"
        return None


def usage_of(warden: int, home: Path | None, limits: Limits) -> Usage:
    """`home` is the temporary folder, where its size has to be watched."""
    pids = descendants(warden)
    memory = sum(_resident(pid) for pid in pids)
    if memory > limits.memory_mb * _MIB:
        # Pages that they share were counted once for each.
        memory = sum(_proportional(pid) for pid in pids)
    most = limits.temp_mb * _MIB
    return Usage(
        memory_bytes=memory,
        num_processes=len(pids),
        temp_bytes=None if home is None else _size(home, most),
    )


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        # Not ours to look at, or gone.
        return _resident(pid)
    return _resident(pid)


def _size(folder: Path, most: int) -> int:
    """Bytes of the files below `folder`, or somewhat more than `most`."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
            if total > most:
                return total
    return total
