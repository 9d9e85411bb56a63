"""Commands with the signals that a terminal gives them.

A process that was started with SIGINT or SIGHUP ignored (by nohup, or in the background of a script) ignores them, and
so do its children: tests that send them must not depend on how they were started themselves.
"""

import sys

_RESET = (
    "import os, signal, sys; "
    "[signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)]; "
    "os.execv(sys.executable, sys.argv[1:])"
)


def turnmill_command(*arguments: str) -> list[str]:
    """`turnmill ARGUMENTS`, unbuffered, which SIGINT and SIGHUP reach."""
    return [sys.executable, "-c", _RESET, sys.executable, "-u", "-m", "turnmill", *arguments]
