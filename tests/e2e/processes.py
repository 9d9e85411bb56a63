"""A run in real processes: start it, find its roles by their parent, kill them, read what is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnmill import assets, failpoints
from turnmill.records import Batch, BatchState, Purpose, SampleRecord, batch_prefix, decode, sample_prefix
from turnmill.wiring.backend import backend_of
from turnmill.wiring.event_loop import run_loop

# Small, and quick to notice a dead worker.
PARAMETERS = {
    "max-steps": "4",
    "global-batch-size": "16",
    "number-generation": "4",
    "max-refill-rounds": "50",
    "eval-rollouts": "10",
    "worker-lease-s": "2",
    "max-concurrent-rollouts": "32",
}
PATIENCE_S = 300.0


def wait_for(what: str, probe: Callable[[], Any], process: "subprocess.Popen[str] | None" = None) -> Any:
    """The first true value of `probe`; fails the test when the process has ended or patience is out."""
    end = time.monotonic() + PATIENCE_S
    while not (value := probe()):
        assert process is None or process.poll() is None, f"the run ended before: {what}"
        assert time.monotonic() < end, f"no {what} within {PATIENCE_S:.0f} s"
        time.sleep(0.02)
    return value


@dataclass
class Running:
    """A `turnmill run` in its own process."""

    root: Path
    process: "subprocess.Popen[str]"

    @property
    def folder(self) -> Path | None:
        """The run's folder, once it is there."""
        runs = self.root / "runs"
        return next(runs.iterdir(), None) if runs.is_dir() else None

    def num_steps(self) -> int:
        path = self.folder / "metrics.jsonl" if self.folder else None
        return len(path.read_text().splitlines()) if path and path.exists() else 0

    def num_steps_of_any(self) -> int:
        """Of all runs together."""
        return sum(len(path.read_text().splitlines()) for path in self.root.glob("runs/*/metrics.jsonl"))

    def role_pid(self, name: str) -> int | None:
        """Pid of the role process of this name, a child of ours."""
        for line in Path("/proc").iterdir():
            if not line.name.isdigit():
                continue
            try:
                parent = int((line / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (line / "cmdline").read_bytes().split(b"\0")
            except (OSError, IndexError, ValueError):
                continue
            if parent == self.process.pid and name.encode() in command:
                return int(line.name)
        return None

    def children(self) -> list[int]:
        """Pids of all role processes."""
        names = ("worker-0", "replica-0", "trainer")
        return [pid for name in names if (pid := self.role_pid(name)) is not None]

    def kill(self, name: str) -> int:
        pid = wait_for(name, lambda: self.role_pid(name), self.process)
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    def wait_for_steps(self, num_steps: int) -> None:
        wait_for(f"step {num_steps}", lambda: self.num_steps() >= num_steps, self.process)

    def wait_for_death(self, name: str, pid: int) -> None:
        wait_for(f"death of {name} {pid}", lambda: self.role_pid(name) != pid, self.process)

    def kill_trainer_at(self, points: Sequence[str]) -> None:
        """At each of these failpoints once, one after the other, always after one more step."""
        armed = self.root / "failpoints"
        armed.mkdir()
        for point in points:
            self.wait_for_steps(self.num_steps() + 1)
            pid = wait_for("trainer", lambda: self.role_pid("trainer"), self.process)
            (armed / point).touch()
            self.wait_for_death("trainer", pid)
            assert not (armed / point).exists()

    def finish(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the end; the JSON line of a run that succeeded."""
        out, err = self.process.communicate(timeout=patience_s)
        assert self.process.returncode == 0, f"exit code {self.process.returncode}\n{out}\n{err}"
        figures: dict[str, Any] = json.loads(out.splitlines()[-1])
        return figures

    def log(self, name: str) -> str:
        assert self.folder is not None
        return (self.folder / "logs" / f"{name}.log").read_text()


@contextmanager
def start_run(
    root: Path, *, data: Path | None = None, evaluate: bool = False, env: Mapping[str, str] = {}, **changes: str
) -> Iterator[Running]:
    """`turnmill run --json` with `PARAMETERS` and `changes`; ended by its pid if the test leaves it running."""
    parameters = {**PARAMETERS, **{name.replace("_", "-"): value for name, value in changes.items()}}
    command = ["run", "--json", "--root", str(root)]
    command += ["--data", str(data or assets.wordle_data("train"))]
    if evaluate:
        command += ["--eval-data", str(assets.wordle_data("eval"))]
    command += [part for name, value in parameters.items() for part in (f"--{name}", value)]
    with start_turnmill(root, command, env) as running:
        yield running


@contextmanager
def start_resume(root: Path, run_id: str, *options: str, env: Mapping[str, str] = {}) -> Iterator[Running]:
    """`turnmill resume --json`; ended by its pid if the test leaves it running."""
    with start_turnmill(root, ["resume", run_id, "--json", "--root", str(root), *options], env) as running:
        yield running


@contextmanager
def start_turnmill(root: Path, command: list[str], env: Mapping[str, str] = {}) -> Iterator[Running]:
    """`turnmill COMMAND`, with `env` added to its environment; its failpoints are the files in `root`/failpoints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "turnmill", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, failpoints.VARIABLE: str(root / "failpoints"), **env},
    )
    running = Running(root=root, process=process)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


def read_records(root: Path, run_id: str) -> tuple[list[SampleRecord], list[Batch]]:
    """All training samples of a run that has ended, and the batches that count."""

    async def read() -> tuple[list[SampleRecord], list[Batch]]:
        ports = backend_of(root).open_run(run_id, num_replicas=1)
        try:
            samples: list[SampleRecord] = []
            prefix = sample_prefix(run_id, Purpose.TRAIN)
            page = await ports.records.scan(prefix)
            while page:
                samples += [decode(item.value, SampleRecord) for item in page]
                page = await ports.records.scan(prefix, after=page[-1].key)
            batches = [decode(item.value, Batch) for item in await ports.records.scan(batch_prefix(run_id))]
            return samples, [batch for batch in batches if batch.state is not BatchState.SUPERSEDED]
        finally:
            ports.close()

    found: tuple[list[SampleRecord], list[Batch]] = run_loop(read())
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
