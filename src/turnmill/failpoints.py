"""Named points at which a test can have a process killed or held up: between two writes of a step, for instance.

`hit(name)` does nothing at all unless the variable TURNMILL_FAILPOINTS names a folder. Then a file `<folder>/<name>`
arms the point: whoever takes the file away dies of SIGKILL at once, so that an armed point kills one process once.
`await wait(name)` does not go on while the file is there; it leaves it where it is.
"""

import asyncio
import os
import signal
from pathlib import Path

VARIABLE = "TURNMILL_FAILPOINTS"
_LOOK_S = 0.1


def _ignore(name: str) -> None:
    """No failpoint is armed in this process."""


def _die_if_armed(name: str) -> None:
    try:
        (Path(os.environ[VARIABLE]) / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


async def _go_on(name: str) -> None:
    """No failpoint is armed in this process."""


async def _wait_while_armed(name: str) -> None:
    path = Path(os.environ[VARIABLE]) / name
    while True:
        if not path.exists():
            return
        await asyncio.sleep(_LOOK_S)


hit = _die_if_armed if os.environ.get(VARIABLE) else _ignore
wait = _wait_while_armed if os.environ.get(VARIABLE) else _go_on
