"""The processes of a run as the system sees them, whoever started them, also when nobody watches them any more."""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """A process that is there and no zombie."""

    pid: int
    # By SIGSTOP or a debugger.
    is_stopped: bool
    # Processor time that it has used so far.
    cpu_s: float
    # Unix seconds.
    started_at: float
    # When this was read, on the monotonic clock.
    at_s: float


def process_info(pid: int) -> ProcessInfo | None:
    """None for a process that has ended, even if its parent has not asked how yet."""
    try:
        return _info(psutil.Process(pid))
    except psutil.Error:
        return None


def role_processes(root: Path, run_id: str) -> dict[str, ProcessInfo]:
    """The role processes of a run by name."""
    found: dict[str, ProcessInfo] = {}
    for process in psutil.process_iter():
        role = role_of(process, root)
        if role is not None and role[0] == run_id and (info := process_info(process.pid)) is not None:
            found[role[1]] = info
    return found


def _info(process: psutil.Process) -> ProcessInfo | None:
    with process.oneshot():
        status = process.status()
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        times = process.cpu_times()
        return ProcessInfo(
            pid=process.pid,
            is_stopped=status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP),
            cpu_s=times.user + times.system,
            started_at=process.create_time(),
            at_s=time.monotonic(),
        )


def role_of(process: psutil.Process, root: Path) -> tuple[str, str] | None:
    """(run id, name of the role) of a process of one of the deployment's runs; None for any other one.

    By its command line, as the launcher writes it: `turnmill role ROLE --root ROOT --run RUN --name NAME`.
    """
    try:
        command = process.cmdline()
    except psutil.Error:
        # It ended while it was looked at, or is none of ours.
        return None
    if "role" not in command:
        return None
    rest = command[command.index("role") + 2 :]
    options = dict(zip(rest[::2], rest[1::2], strict=False))
    if not {"--root", "--run", "--name"} <= options.keys() or Path(options["--root"]).resolve() != root.resolve():
        return None
    return options["--run"], options["--name"]
