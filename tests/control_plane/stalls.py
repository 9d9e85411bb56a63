"""Twelve ways to bring a run to a halt, each with the part that is at fault, and how soon the doctor names it."""

import fcntl
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.processes import Running, start_run, wait_for
from tests.faults.disk import fill, small_disk
from turnmill.records import Alert, AlertKind
from turnmill.wiring.reading.runs import began
from turnmill.wiring.watching.alarms import look_at_alerts

# Deadlines of seconds, in their order: call < rollout < watchdog < stage.
WATCHDOG_S = 10.0
PARAMETERS = {
    "call-timeout-s": "6",
    "training-timeout": "8",
    "watchdog-s": f"{WATCHDOG_S:g}",
    "max-runtime-s": "600",
    "max-steps": "1000",
    "global-batch-size": "16",
    "number-generation": "4",
    "max-length": "160",
}
# By when, after the limit of the watchdog, the doctor must have named the part.
LATEST_S = 30.0
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One row of the table."""

    name: str
    # Whom the doctor has to name; `message` stands for the id that `induce` returns.
    role: str
    # Does the harm to a run that goes on; returns the id of a message where one is meant.
    induce: Callable[[Running, ExitStack], str | None]
    # While the control process lives and the run is not ended for it at once, the watchdog must say the same.
    has_watchdog: bool = True
    parameters: Mapping[str, str] = field(default_factory=dict)
    # The run makes no step before the harm is done.
    is_early: bool = False
    # Whom the doctor rightly names as long as it can't know better.
    before: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the doctor and the watchdog said, seconds after the harm was done."""

    name: str
    role: str
    doctor_s: float
    # None where there is no watchdog to say anything.
    watchdog_s: float | None
    verdict: str

    def line(self) -> str:
        watchdog = "no watchdog" if self.watchdog_s is None else f"watchdog {self.watchdog_s:.1f} s"
        return f"{self.name}: {self.role} named, doctor {self.doctor_s:.1f} s, {watchdog} (limit {WATCHDOG_S:g} s)"


# ---------------------------------------------------------------- harm


def stop(name: str) -> Callable[[Running, ExitStack], None]:
    """SIGSTOP, until the end of the test."""

    def induce(running: Running, stack: ExitStack) -> None:
        pid = running.process.pid if name == "control" else wait_for(name, lambda: running.role_pid(name))
        os.kill(pid, signal.SIGSTOP)
        stack.callback(_continue, pid)

    return induce


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def kill_for_good(name: str) -> Callable[[Running, ExitStack], None]:
    """SIGKILL, and its name is taken: control waits for the holder of its lock and can't start it again."""

    def induce(running: Running, stack: ExitStack) -> None:
        assert running.folder is not None
        fd = os.open(running.folder / "locks" / f"{name}.lock", os.O_RDWR)
        stack.callback(os.close, fd)
        running.kill(name)
        # Control pauses for a tenth of a second before it tries.
        fcntl.flock(fd, fcntl.LOCK_EX)

    return induce


def kill_control(running: Running, stack: ExitStack) -> None:
    running.process.kill()
    running.process.wait()


def hang_environment(running: Running, stack: ExitStack) -> None:
    folder = running.root / "failpoints"
    folder.mkdir(exist_ok=True)
    armed = folder / "environment-plays"
    armed.touch()
    stack.callback(armed.unlink)


def poison(running: Running, stack: ExitStack) -> str:
    """A rollout whose worker dies whenever it plays it."""
    database = wait_for("rollout requests", lambda: _file(running, "queues/rollout_request.db"), running.process)
    (sample,) = wait_for("a request", lambda: _first_request(database), running.process)
    ended = threading.Event()
    folder = running.root / "failpoints"
    folder.mkdir(exist_ok=True)
    armed = folder / f"play-{sample}"

    def arm() -> None:
        while not ended.wait(0.02):
            armed.touch()

    thread = threading.Thread(target=arm, name="poison")
    thread.start()
    stack.callback(thread.join)
    stack.callback(ended.set)
    return str(sample)


def _first_request(database: Path) -> tuple[str] | None:
    """The last message of the queue: it has not been played yet."""
    connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
    try:
        found: tuple[str] | None = connection.execute(
            "SELECT grp FROM messages WHERE num_receives = 0 ORDER BY id DESC LIMIT 1"
        ).fetchone()
    except sqlite3.OperationalError:
        return None  # no table yet
    finally:
        connection.close()
    return found


def _file(running: Running, name: str) -> Path | None:
    path = running.folder / name if running.folder else None
    return path if path is not None and path.exists() else None


def refuse_weights(running: Running, stack: ExitStack) -> None:
    """A version is damaged before the replica sees it; again with the next one where the replica was faster."""
    assert running.folder is not None
    weights = running.folder / "weights"
    pointer = weights / "current.json"
    while True:
        replica = wait_for("replica-0", lambda: running.role_pid("replica-0"))
        known = {path.name for path in (weights / "versions").iterdir()}

        def news(known: set[str] = known) -> list[Path]:
            return [path for path in (weights / "versions").iterdir() if path.name not in known and path.name[0] != "."]

        published = wait_for("another version", news, running.process)
        os.kill(replica, signal.SIGSTOP)
        try:
            for path in published:
                (path / "model.safetensors").write_bytes(b"damaged")
            name = published[0].name.split(".")
            wanted = {"incarnation": int(name[0]), "n": int(name[1])}
            is_wanted = partial(_names, pointer, wanted)
            wait_for("the pointer", is_wanted, running.process)
        finally:
            os.kill(replica, signal.SIGCONT)
        if _ends(replica, within_s=3.0):
            return


def _names(pointer: Path, version: dict[str, int]) -> bool:
    return bool(json.loads(pointer.read_bytes())["version"] == version)


def _ends(pid: int, *, within_s: float) -> bool:
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        if began(pid) is None:
            return True
        time.sleep(0.02)
    return False


def fill_up(running: Running, stack: ExitStack) -> None:
    ballast = running.root.parent / "ballast"
    fill(ballast)
    stack.callback(ballast.unlink)


STALLS = (
    *(Stall(name=f"SIGSTOP of {name}", role=name, induce=stop(name)) for name in ("worker-0", "replica-0", "trainer")),
    Stall(name="SIGSTOP of control", role="control", induce=stop("control"), has_watchdog=False),
    *(
        Stall(name=f"SIGKILL of {name}", role=name, induce=kill_for_good(name))
        for name in ("worker-0", "replica-0", "trainer")
    ),
    Stall(name="SIGKILL of control", role="control", induce=kill_control, has_watchdog=False),
    Stall(name="an environment that hangs", role="environment", induce=hang_environment),
    Stall(
        name="a poison message",
        role="message",
        induce=poison,
        # Its worker's crash loop ends the run at about the limit, and may do so before.
        has_watchdog=False,
        parameters={
            "max-concurrent-rollouts": "1",
            "global-batch-size": "4",
            "max-attempts": "20",
            "worker-lease-s": "1",
        },
        is_early=True,
        # Gone, until it is started again.
        before="worker-0",
    ),
    Stall(name="weights that are refused", role="replica-0", induce=refuse_weights),
    Stall(name="a full disk", role="disk", induce=fill_up, has_watchdog=False),
)

# ---------------------------------------------------------------- what is said


def doctor(root: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """`turnmill doctor --json` in a process of its own: exit code and report."""
    command = [sys.executable, "-m", "turnmill", "doctor", *arguments, "--root", str(root), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


@contextmanager
def started(root: Path, parameters: Mapping[str, str] = {}) -> Iterator[Running]:
    """A run with deadlines of seconds."""
    with start_run(root, data=None, evaluate=False, env={}, **{**PARAMETERS, **parameters}) as running:
        try:
            yield running
        finally:
            if running.process.poll() is not None:
                # Nobody has read what it said last.
                running.process.communicate()


def suffer(stall: Stall, root: Path) -> Outcome:
    """Start a run, halt it, and wait until both have named the part at fault; fails where one names another."""
    with ExitStack() as stack:
        running = stack.enter_context(started(root, stall.parameters))
        if not stall.is_early:
            wait_for("a step", lambda: running.num_steps() >= 1, running.process)
            code, report = doctor(root)
            assert (code, report["verdict"]) == (0, "progressing"), report
        message = stall.induce(running, stack)
        role = stall.role if message is None else f"message {message}"
        began = time.monotonic()
        by_doctor = by_watchdog = None
        report = {}
        while by_doctor is None or (stall.has_watchdog and by_watchdog is None):
            assert time.monotonic() - began < WATCHDOG_S + LATEST_S, f"{stall.name}: {report}\n{_log(running)}"
            if by_doctor is None:
                code, report = doctor(root, *([running.folder.name] if running.folder else []))
                if report["role"] not in (None, stall.before):
                    by_doctor = time.monotonic() - began
                    assert (code, report["role"]) == (1, role), f"{stall.name}: {report}\n{_log(running)}"
                    assert report["diagnoses"][0]["commands"], report
            if by_watchdog is None and (alerts := [alert for alert in look_at_alerts(root) if _is_stall(alert)]):
                by_watchdog = time.monotonic() - began
                assert role in alerts[0].summary and "turnmill doctor" in alerts[0].command, alerts
            time.sleep(_LOOK_S)
        return Outcome(
            name=stall.name, role=role, doctor_s=by_doctor, watchdog_s=by_watchdog, verdict=report["verdict"]
        )


def _is_stall(alert: Alert) -> bool:
    return alert.kind is AlertKind.RUN_STALLED


def _log(running: Running) -> str:
    try:
        return running.log("control")
    except FileNotFoundError:
        return ""


@contextmanager
def place_of(stall: Stall, folder: Path) -> Iterator[Path]:
    """Where its run lies: on a small disk for the one that fills it."""
    if stall.role != "disk":
        yield folder / "root"
        return
    with small_disk(folder / "disk"):
        (folder / "disk" / "root").mkdir()
        yield folder / "disk" / "root"
