"""What is done to a run, one fault a function: it hurts, waits until the run has got over it, and says how it ended.

Every fault takes the victim and a source of chance, and returns its outcome in a few words. `OVER` says that the run
was at its end before the fault could be done: then it does not count.
"""

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from msgspec import structs

from tests.faults.shim import Shim
from tests.faults.victim import PATIENCE_S, ROLES, Defect, Victim
from turnmill.backends.embedded import open_run
from turnmill.conversation.history import ended_message
from turnmill.errors import NotFound
from turnmill.generation.answers import response_of
from turnmill.ports import Message, RunPorts, Stored
from turnmill.records import (
    Call,
    Purpose,
    SampleRecord,
    SampleState,
    Version,
    call_prefix,
    decode,
    encode,
    sample_prefix,
)
from turnmill.wiring.event_loop import run_loop

Fault = Callable[[Victim, Random], str]
OVER = "the run was over"
AGAIN = "started again"
RESUMED = "resumed"
EXACT = "the run goes on"
# A role whose process died oftener than that under one control process ends the run as a crash loop, rightly.
MOST_DEATHS = 4
# Roles that hold leases.
CONSUMERS = ("worker-0", "replica-0", "replica-1")
# Longest delays: of a busy disk for writes, of a spinning one for fsync.
SLOW_DISK = {"write_ms": 5.0, "sync_ms": 50.0}
CLOCK_STEP_S = 3600.0
# Places between two writes of a step at which a trainer can be made to die.
POINTS = (
    "batch-closed",
    "batch-recorded",
    "samples-batched",
    "step-made",
    "weights-stored",
    "batch-applied",
    "weights-pointed",
    "samples-trained",
    "metric-written",
    "checkpoint-written",
    "checkpoint-saved",
    "status-written",
)

# ---------------------------------------------------------------- deaths


def may_die(victim: Victim, name: str) -> bool:
    return name == "control" or victim.deaths.get(name, 0) < MOST_DEATHS


def kill_role(name: str) -> Fault:
    """SIGKILL of one role at whatever it does now."""

    def kill(victim: Victim, random: Random) -> str:
        pid = victim.kill(name, signal.SIGKILL)
        return OVER if pid is None else _await_successor(victim, name, pid)

    return kill


def _await_successor(victim: Victim, name: str, killed: int) -> str:
    victim.deaths[name] = victim.deaths.get(name, 0) + 1
    if victim.wait(lambda: victim.running.role_pid(name) not in (None, killed)):
        return AGAIN
    if not victim.has_ended:
        raise Defect(f"{name} was killed and not started again within {PATIENCE_S:.0f} s")
    # A run that this has brought to a bad end says so in `finish`.
    return "not needed any more"


def kill_trainer_at_point(victim: Victim, random: Random) -> str:
    """SIGKILL of the trainer between two chosen writes of a step."""
    pid = victim.pid("trainer")
    if pid is None:
        return OVER
    folder = victim.root / "failpoints"
    folder.mkdir(exist_ok=True)
    armed = folder / random.choice(POINTS)
    armed.touch()
    try:
        if not victim.wait(lambda: victim.running.role_pid("trainer") != pid):
            return OVER
    finally:
        armed.unlink(missing_ok=True)
    return _await_successor(victim, "trainer", pid)


def kill_control(victim: Victim, random: Random) -> str:
    """SIGKILL of the control process, with everything that it serves; then the run is resumed."""
    process = victim.running.process
    if victim.has_ended:
        return OVER
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    if process.returncode != -signal.SIGKILL:
        return OVER
    # At once, or when its orphans have noticed.
    time.sleep(random.choice((0.0, 3.0)))
    victim.resume()
    if victim.wait(lambda: victim.running.role_pid("worker-0")) is None and not victim.has_ended:
        raise Defect(f"the resumed run has no worker within {PATIENCE_S:.0f} s")
    return RESUMED


# ---------------------------------------------------------------- pauses and locks


def pause(name: str, seconds: float) -> Fault:
    """SIGSTOP for longer than the leases of the role hold, then SIGCONT: it is late with everything."""

    def stop(victim: Victim, random: Random) -> str:
        pid = victim.kill(name, signal.SIGSTOP)
        if pid is None:
            return OVER
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        return EXACT

    return stop


def lock_database(victim: Victim, random: Random) -> str:
    """Another process holds the write lock of one of the run's SQLite files for seconds."""
    files = sorted(victim.folder.rglob("*.db"))
    if not files or victim.has_ended:
        return OVER
    connection = sqlite3.connect(random.choice(files), timeout=PATIENCE_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        victim.sleep(random.uniform(2.0, 5.0))
        connection.execute("ROLLBACK")
    finally:
        connection.close()
    return EXACT


# ---------------------------------------------------------------- the machine


def step_clock(seconds: float) -> Fault:
    """The wall clock of all processes jumps, and at once one that holds leases dies: its work must not wait for it."""

    def step(victim: Victim, random: Random) -> str:
        assert victim.shim is not None, "the run was started without a shim"
        name = random.choice([name for name in CONSUMERS if may_die(victim, name)] or [None])
        if victim.has_ended:
            return OVER
        victim.shim.step_clock(seconds)
        pid = None if name is None else victim.kill(name, signal.SIGKILL)
        if name is not None and pid is not None:
            _await_successor(victim, name, pid)
        # The second one was begun after the step of the clock.
        victim.await_steps(2)
        return EXACT

    return step


def slow_disk(victim: Victim, random: Random) -> str:
    """For some seconds each write and each fsync of all processes takes milliseconds longer."""
    assert victim.shim is not None, "the run was started without a shim"
    if victim.has_ended:
        return OVER
    before = victim.shim.num_slow_writes
    victim.shim.slow_disk(**SLOW_DISK)
    try:
        # While roles are starting nobody may write for seconds.
        if not victim.wait(partial(_is_slower, victim.shim, before)):
            if not victim.has_ended:
                raise Defect("the disk was to be slow, but no write was slowed")
            return OVER
        victim.sleep(random.uniform(3.0, 6.0))
    finally:
        victim.shim.slow_disk(write_ms=0, sync_ms=0)
    return EXACT


def _is_slower(shim: Shim, num_before: int) -> bool:
    return shim.num_slow_writes > num_before


# ---------------------------------------------------------------- messages


def _with_ports(victim: Victim, action: Callable[[RunPorts], Awaitable[str]]) -> str:
    async def act() -> str:
        ports = open_run(victim.root, victim.run_id, num_replicas=2)
        try:
            return await action(ports)
        finally:
            ports.close()

    outcome: str = run_loop(act())
    return outcome


def repeat_message(*, late: bool) -> Fault:
    """A message that was delivered is sent once more, with a new delivery epoch: at once, or when its time is over."""

    def repeat(victim: Victim, random: Random) -> str:
        kind = random.choice(("rollout_request", "rollout_response", "generate_request", "generate_response"))

        async def act(ports: RunPorts) -> str:
            if kind.endswith("_request"):
                name = f"generate_request-{random.randrange(2)}" if kind == "generate_request" else kind
                sent = await asyncio.to_thread(_delivered, victim, name)
                queue = ports.generate_request[int(name[-1])] if kind == "generate_request" else ports.rollout_request
            else:
                sent = await _reported(ports, victim, random, kind)
                queue = ports.rollout_response if kind == "rollout_response" else ports.generate_response
            if sent is None:
                return OVER
            if late:
                await asyncio.to_thread(victim.sleep, random.uniform(3.0, 8.0))
            await queue.send([structs.replace(sent, dedup_id=f"{sent.dedup_id}/{random.random()}")])
            return f"{EXACT} ({kind})"

        return _with_ports(victim, act)

    return repeat


def _delivered(victim: Victim, queue: str) -> Message | None:
    """A message that is leased by its consumer now."""
    path = victim.folder / "queues" / f"{queue}.db"

    def look() -> Any:
        if not path.exists():
            return None
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PATIENCE_S)
        try:
            query = "SELECT body, grp FROM messages WHERE num_receives > 0 LIMIT 1"
            return connection.execute(query).fetchone()
        except sqlite3.OperationalError:
            # Its tables are just being made.
            return None
        finally:
            connection.close()

    found = victim.wait(look)
    return None if found is None else Message(body=found[0], group=found[1], dedup_id=f"again/{found[1]}")


async def _reported(ports: RunPorts, victim: Victim, random: Random, kind: str) -> Message | None:
    """The news of a sample that was reported, or of a call in it: made from the record, as its sender made it."""
    ended: list[Stored] = []
    end = time.monotonic() + PATIENCE_S
    while not ended and not victim.has_ended and time.monotonic() < end:
        found = await ports.records.scan(sample_prefix(victim.run_id, Purpose.TRAIN))
        ended = [item for item in found if decode(item.value, SampleRecord).calls]
        await asyncio.sleep(0.05)
    if not ended:
        return None
    sample = decode(random.choice(ended).value, SampleRecord)
    if kind == "rollout_response":
        return ended_message(replace(sample, state=SampleState.REPORTED))
    found = await ports.records.scan(call_prefix(victim.run_id, Purpose.TRAIN, sample.sample_id))
    call = decode(random.choice(found).value, Call)
    return Message(body=encode(response_of(call)), group=call.key, dedup_id=call.key)


# ---------------------------------------------------------------- weights


def serve_old_weights(victim: Victim, random: Random) -> str:
    """The pointer goes back to weights of before for a moment: nothing that they sample may be trained as if new."""

    async def act(ports: RunPorts) -> str:
        await asyncio.to_thread(victim.wait, lambda: (version := victim.version()) is not None and version.n > 0)
        now = victim.version()
        if now is None or victim.has_ended:
            return OVER
        folder = victim.folder / "weights" / "versions"
        older = [Version.parse(path.name) for path in folder.iterdir() if not path.name.startswith(".")]
        before = max((version for version in older if version.n < now.n), key=lambda v: v.n, default=None)
        if before is None:
            return OVER
        try:
            await ports.weights.point(before)
            await asyncio.to_thread(victim.sleep, random.uniform(0.5, 3.0))
            if victim.version() == before:
                await ports.weights.point(now)
        except NotFound:
            return f"{EXACT} (they had been removed)"
        return EXACT

    return _with_ports(victim, act)


def _names(prefix: str) -> dict[str, Fault]:
    return {f"{prefix} {name}": kill_role(name) for name in ROLES}


KILLS: dict[str, Fault] = {
    **_names("kill"),
    "kill trainer between writes": kill_trainer_at_point,
    "kill control": kill_control,
}
OTHERS: dict[str, Fault] = {
    "pause worker-0": pause("worker-0", 4.0),
    "pause replica-0": pause("replica-0", 12.0),
    "pause trainer": pause("trainer", 4.0),
    "doubled message": repeat_message(late=False),
    "late message": repeat_message(late=True),
    "old weights": serve_old_weights,
    "SQLite busy": lock_database,
}


# These need a shim under the run.
OF_THE_MACHINE: dict[str, Fault] = {
    "clock an hour forward": step_clock(CLOCK_STEP_S),
    "clock an hour back": step_clock(-CLOCK_STEP_S),
    "slow disk": slow_disk,
}


def victim_of(fault: str) -> str | None:
    """Which role a fault kills, if it kills one."""
    return fault.split()[1] if fault.startswith("kill") else None


def run_folder_exists(root: Path) -> bool:
    runs = root / "runs"
    return runs.is_dir() and any(runs.iterdir())
