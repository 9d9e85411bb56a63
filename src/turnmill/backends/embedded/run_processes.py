"""The processes of a run, found without the process that started them, and ended by their pids.

A process belongs to a run if its command line is that of a role of this run in this folder, or of its mirror, which may
outlive control for some seconds, or if such a one started it. Nothing is told by a name: another deployment's trainer
is a trainer too. That none was overlooked is told by the locks which the roles hold (see `locks.take_all`).
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from turnmill.backends.embedded.processes import role_of

# How long a process that was asked to end may take.
GRACE_S = 10.0
_INTERVAL_S = 0.05
_MIRROR = "turnmill.wiring.mirror_process"
# Reading about a process fails when it ends in this moment, or where it is somebody else's: it is none of ours then.
_UNKNOWN = (psutil.NoSuchProcess, psutil.AccessDenied)


@dataclass(frozen=True, kw_only=True)
class RunProcess:
    """A process that belongs to a run; it is told from a later one of the same pid."""

    run_id: str
    # Of the role, e.g. `trainer`, or what it was started as.
    name: str
    # On which it listens.
    ports: tuple[int, ...]
    process: psutil.Process

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def lives(self) -> bool:
        """It is there, and not just waiting for its parent to notice its end."""
        try:
            return bool(self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger: it does nothing until somebody lets it go on."""
        try:
            return self.process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False


def processes_of(root: Path, run_id: str | None) -> list[RunProcess]:
    """The role processes of a run, or of all runs of a deployment, and what they started; by pid."""
    found: dict[int, RunProcess] = {}
    for process in psutil.process_iter():
        role = role_of(process, root) or _mirror_of(process, root)
        if role is not None and run_id in (None, role[0]):
            for one in (process, *_descendants(process)):
                name = role[1] if one is process else f"{role[1]}: {_command_of(one)}"
                found.setdefault(one.pid, _run_process(one, role[0] or "", name))
    return sorted((one for one in found.values() if one.lives), key=lambda one: one.pid)


def _mirror_of(process: psutil.Process, root: Path) -> tuple[str | None, str] | None:
    """(run id, name) of what mirrors one run, or all of them: `python -m turnmill.wiring.mirror_process ROOT [RUN]`."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return None
    given = command[command.index(_MIRROR) + 1 :] if _MIRROR in command else []
    if not given or Path(given[0]).resolve() != root.resolve():
        return None
    return (given[1] if len(given) > 1 else None), "mlflow"


def process_of(pid: int, run_id: str, name: str) -> RunProcess | None:
    """The process with this pid; the caller has made sure that it is the one that is meant."""
    try:
        one = _run_process(psutil.Process(pid), run_id, name)
    except psutil.NoSuchProcess:
        return None
    return one if one.lives else None


def end(processes: Sequence[RunProcess], *, grace_s: float = GRACE_S) -> Iterator[RunProcess]:
    """Ask them to end, wait, then force those that did not; each as soon as it is gone.

    One that is stopped can't hear the request, and is forced at once.
    """
    left = list(processes)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.process.kill() if one.is_stopped else one.process.terminate()
    force_at = time.monotonic() + grace_s
    while left:
        for one in [one for one in left if not one.lives]:
            left.remove(one)
            yield one
        if time.monotonic() > force_at:
            force_at = float("inf")
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.process.kill()
        if left:
            time.sleep(_INTERVAL_S)


def _run_process(process: psutil.Process, run_id: str, name: str) -> RunProcess:
    return RunProcess(run_id=run_id, name=name, ports=_ports_of(process), process=process)


def _ports_of(process: psutil.Process) -> tuple[int, ...]:
    try:
        connections = process.net_connections(kind="inet")
    except _UNKNOWN:
        return ()
    return tuple(sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}))


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except _UNKNOWN:
        return []


def _command_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except _UNKNOWN:
        return "?"
