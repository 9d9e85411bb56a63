"""A wall clock that can be set and a disk that can be slowed, for all processes of a run: shim.c, compiled and mapped.

    test -> control file (mapped) -> clock_gettime, write, fsync ... of every process that was started with `env`

The dates of files come from the kernel, whose clock is not touched; neither are monotonic clocks.
"""

import mmap
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
# Places of the 64-bit integers in the control file: see `struct control` in shim.c.
_CLOCK, _WRITE, _SYNC, _NUM_CLOCKS, _NUM_WRITES, _NUM_SYNCS, _NUM_ALL = range(7)


def why_not() -> str | None:
    """Why neither clock nor disk can be disturbed here; None when they can."""
    if sys.platform != "linux":
        return f"LD_PRELOAD and /proc are Linux's, this is {sys.platform}"
    return None if _compiler() else "no C compiler (cc, gcc, clang) for tests/faults/shim.c"


def _compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


@dataclass(kw_only=True)
class Shim:
    """What the processes of one run share; `build` makes it."""

    library: Path
    control: Path
    values: memoryview

    def env(self, root: Path) -> dict[str, str]:
        """Variables for the run's first process, which hands them on; `root` must be there, its files are slowed."""
        return {"LD_PRELOAD": str(self.library), "FAULTS_CONTROL": str(self.control), "FAULTS_ROOT": str(root)}

    def step_clock(self, seconds: float) -> None:
        """Set the wall clock of all processes forward or back."""
        self.values[_CLOCK] += int(seconds * 1e9)

    def slow_disk(self, *, write_ms: float, sync_ms: float) -> None:
        """From now on each write, and each fsync, takes up to so much longer; 0: as fast as before."""
        self.values[_WRITE], self.values[_SYNC] = int(write_ms * 1000), int(sync_ms * 1000)

    @property
    def num_moved_clocks(self) -> int:
        """How often a clock was read that is not the machine's."""
        return self.values[_NUM_CLOCKS]

    @property
    def num_slow_writes(self) -> int:
        return self.values[_NUM_WRITES]

    @property
    def num_slow_syncs(self) -> int:
        return self.values[_NUM_SYNCS]


def build(folder: Path) -> Shim:
    """Compile the shim into `folder`, with a control file of its own; raises what the compiler says."""
    folder.mkdir(parents=True, exist_ok=True)
    library, control = folder / "shim.so", folder / "control"
    compiler = _compiler()
    assert compiler is not None, why_not()
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    control.write_bytes(bytes(8 * _NUM_ALL))
    fd = os.open(control, os.O_RDWR)
    try:
        values = memoryview(mmap.mmap(fd, 8 * _NUM_ALL)).cast("q")
    finally:
        os.close(fd)
    return Shim(library=library, control=control, values=values)
