"""A run under fire: its control process now, those before it, and what the machine has to be rid of at the end."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.processes import Running, start_resume, start_run
from tests.faults.shim import Shim
from turnmill.records import Version

ROLES = ("worker-0", "replica-0", "replica-1", "trainer")
# Small steps, two replicas, leases that run out while one looks on.
PARAMETERS = {
    "max_steps": "10",
    "global_batch_size": "16",
    "number_generation": "8",
    "max_length": "160",
    "worker_lease_s": "2",
    "max_attempts": "4",
    "generation_replicas": "2",
    "save_steps": "3",
    "save_top_k": "2",
    "call_timeout_s": "60",
}
# Longest wait for one thing to happen, on a machine that others use as well.
PATIENCE_S = 90.0


class Defect(Exception):
    """Something that must not happen to a run has happened."""


@dataclass
class Victim:
    """`turnmill run`, and `turnmill resume` each time that its control process has ended without finishing it."""

    root: Path
    stack: ExitStack
    parameters: dict[str, str] = field(default_factory=lambda: dict(PARAMETERS))
    # None: its clock can't be set and its disk not be slowed.
    shim: Shim | None = None
    # How often each role was killed under the control process that runs now.
    deaths: dict[str, int] = field(default_factory=dict)
    # Ports that the proxies of the run listened at.
    ports: set[int] = field(default_factory=set)
    num_resumed: int = 0
    _running: Running | None = None

    def start(self) -> None:
        self.root.mkdir(exist_ok=True)
        begun = start_run(self.root, data=None, evaluate=False, env=self._env(), **self.parameters)
        self._running = self.stack.enter_context(begun)

    def resume(self) -> None:
        """Go on with the run in another control process."""
        self._running = self.stack.enter_context(start_resume(self.root, self.run_id, env=self._env()))
        self.num_resumed += 1
        self.deaths.clear()

    def _env(self) -> dict[str, str]:
        return {} if self.shim is None else self.shim.env(self.root)

    @property
    def running(self) -> Running:
        assert self._running is not None, "the run was not started"
        return self._running

    @property
    def run_id(self) -> str:
        folder = self.running.folder
        assert folder is not None, "the run has no folder yet"
        return folder.name

    @property
    def folder(self) -> Path:
        return self.root / "runs" / self.run_id

    @property
    def has_ended(self) -> bool:
        """Its control process has; whether well is for `finish` to say."""
        return self.running.process.poll() is not None

    def wait(self, probe: Callable[[], Any], *, patience_s: float = PATIENCE_S) -> Any:
        """The first true value of `probe`; None when the control process ended or patience is out before that."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end and not self.has_ended:
            if value := probe():
                return value
            time.sleep(0.02)
        return None

    def sleep(self, seconds: float) -> None:
        """No longer than the run lives."""
        self.wait(lambda: False, patience_s=seconds)

    def await_steps(self, num: int) -> None:
        """Until so many more steps were made or the run has ended; raises `Defect` when it makes none for long."""
        for _ in range(num):
            before = self.running.num_steps()
            if not self.wait(partial(self._is_beyond, before)) and not self.has_ended:
                raise Defect(f"run {self.run_id} made no step for {PATIENCE_S:.0f} s after step {before}")

    def _is_beyond(self, step: int) -> bool:
        return self.running.num_steps() > step

    def pid(self, name: str) -> int | None:
        """Of the role, once it runs; None when the run is over."""
        pid = self.wait(lambda: self.running.role_pid(name))
        if pid is not None and name == "worker-0":
            self._note_port(pid)
        return None if pid is None else int(pid)

    def version(self) -> Version | None:
        """Which weights are current, by the pointer."""
        try:
            found = json.loads((self.folder / "weights" / "current.json").read_bytes())["version"]
        except FileNotFoundError:
            return None
        return Version(incarnation=found["incarnation"], n=found["n"])

    def kill(self, name: str, signal_number: int) -> int | None:
        """Send a signal to a role; its pid, None when the run is over."""
        pid = self.pid(name)
        if pid is None:
            return None
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            return None
        return pid

    def _note_port(self, worker: int) -> None:
        """A worker is told where its proxy listens."""
        try:
            variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        except OSError:
            return
        for variable in variables:
            if variable.startswith(b"TURNMILL_PROXY_URL="):
                self.ports.add(int(variable.rsplit(b":", 1)[1]))

    def end(self) -> tuple[int, str, str]:
        """Wait for the control process; its exit code, its output and its errors."""
        out, err = self.running.process.communicate(timeout=10 * PATIENCE_S)
        return self.running.process.returncode, out, err

    def finish(self) -> dict[str, Any]:
        """The JSON line of the run, which must have succeeded; raises `Defect`."""
        code, out, err = self.end()
        if code == 2 and self.num_resumed and "has succeeded" in err:
            # The control process was killed in the instant between the end of its run and its own.
            command = [sys.executable, "-m", "turnmill", "status", self.run_id, "--root", str(self.root), "--json"]
            status = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            figures: dict[str, Any] = json.loads(status)["summary"]
            return figures
        if code != 0:
            raise Defect(f"run {self.run_id} ended with exit code {code}:\n{err[-3000:]}")
        figures = json.loads(out.splitlines()[-1])
        return figures


def processes_of(root: Path, besides: Sequence[int] = ()) -> list[int]:
    """Every process that names this folder in its arguments, zombies left out, this one too."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) in (os.getpid(), *besides):
            continue
        try:
            arguments = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"turnmill" in arguments and str(root).encode() in arguments:
            found.append(int(path.name))
    return found


def listens(port: int) -> bool:
    """Whether somebody takes connections at this port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
