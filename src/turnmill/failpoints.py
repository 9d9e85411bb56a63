"""Named points at which a test can have a process killed: between two writes of a step, for instance.

`hit(name)` does nothing at all unless the variable TURNMILL_FAILPOINTS names a folder. Then a file `<folder>/<name>`
arms the point: whoever takes the file away dies of SIGKILL at once, so that an armed point kills one process once.
"""

import os
import signal
from pathlib import Path

VARIABLE = "TURNMILL_FAILPOINTS"


def _ignore(name: str) -> None:
    """No failpoint is armed in this process."""


def _die_if_armed(name: str) -> None:
    try:
        (Path(os.environ[VARIABLE]) / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


hit = _die_if_armed if os.environ.get(VARIABLE) else _ignore
