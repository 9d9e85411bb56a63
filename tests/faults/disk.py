"""A disk that fills up under a run (a small tmpfs as its root), and one that is slow from a run's start to its end."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.faults import shim
from tests.faults.faults import SLOW_DISK
from tests.faults.verdict import check_gone, judge
from tests.faults.victim import PARAMETERS, Defect, Victim

SIZE_MB = 192


def why_not() -> str | None:
    """Why no tmpfs can be mounted here; None when one can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        return f"no {error.filename} here"
    return None if tried.returncode == 0 else f"no tmpfs can be mounted: {tried.stderr.strip()}"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs of `SIZE_MB` at `folder` while the block runs."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file that takes all the space that is left."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            return


def fill_disk(folder: Path) -> str:
    """A run on a disk that fills up ends with a clear error and no leftovers; with space again it is resumed.

    Returns the outcome; raises `Defect`.
    """
    with small_disk(folder):
        root = folder / "root"
        with ExitStack() as stack:
            victim = Victim(root=root, stack=stack, parameters={**PARAMETERS, "max_steps": "8"})
            victim.start()
            if not victim.wait(lambda: victim.running.num_steps() >= 2):
                raise Defect(f"no second step: {victim.end()}")
            victim.pid("worker-0")
            ballast = folder / "ballast"
            fill(ballast)
            code, _, err = victim.end()
            if code != 1 or "disk is full" not in err or "Traceback" in err:
                raise Defect(f"a full disk must end the run with exit code 1 and a clear error, not {code}:\n{err}")
            check_gone(victim)
            ballast.unlink()
            victim.resume()
            judge(victim, victim.finish())
    return "a clear error; resumed to its end with space again"


def slow_disk(folder: Path) -> str:
    """Every write and fsync of a run is slow, and the run ends as any other one.

    Returns the outcome; raises `Defect`.
    """
    built = shim.build(folder / "shim")
    built.slow_disk(**SLOW_DISK)
    with ExitStack() as stack:
        victim = Victim(root=folder / "root", stack=stack, parameters={**PARAMETERS, "max_steps": "4"}, shim=built)
        victim.start()
        judge(victim, victim.finish())
    num_writes, num_syncs = built.num_slow_writes, built.num_slow_syncs
    if min(num_writes, num_syncs) == 0:
        raise Defect(f"the disk was to be slow, but {num_writes} writes and {num_syncs} syncs were slowed")
    return f"an exact account; {num_writes} writes and {num_syncs} syncs were slowed"
