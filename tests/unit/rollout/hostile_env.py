"""An environment that does what its task says, and what no environment should; runs in a box only.

Tests copy it into a package, so it imports nothing of theirs.
"""

import asyncio
import ctypes
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from turnmill.environment.base import Chat, Environment, Message, Outcome, Score, opening_messages
from turnmill.records import Task

# The control socket, as everything in the process can find it.
_CONTROL_FD = 3
_kept: list[Any] = []


def load_environment(*, fault: str = "", read: str = "") -> Environment:
    if fault == "raise":
        raise KeyError("load")
    if fault == "exit":
        sys.exit(3)
    if fault == "hang":
        time.sleep(600)
    if fault == "print":
        print("what went wrong")
        os._exit(4)
    if fault == "take_signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
    if fault == "say_what_terminals_do":
        raise KeyError("\x1b]0;owned\x07")
    return Hostile()


class Hostile(Environment):
    """`do` (or `task`) of a task names what it does before it asks the model once."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        does = task.metadata.get("do") or task.metadata.get("task", "play")
        metrics: dict[str, float] = {}
        if does != "play":
            found = await DEEDS[does](task)
            if isinstance(found, Outcome):
                return found
            metrics = found or {}
        await chat.complete(opening_messages(task))
        if does == "score":
            return Outcome()
        return Outcome(reward=0.5, metrics=metrics)

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        raise LookupError("score")


Deed = Callable[[Task], Awaitable[Outcome | dict[str, float] | None]]
DEEDS: dict[str, Deed] = {}


def deed(function: Deed) -> Deed:
    DEEDS[function.__name__] = function
    return function


# ---------------------------------------------------------------- time


@deed
async def hang(task: Task) -> None:
    await asyncio.Event().wait()


@deed
async def block(task: Task) -> None:
    time.sleep(600)  # noqa: ASYNC251


@deed
async def spin(task: Task) -> None:
    while True:
        pass


@deed
async def refuse_to_end(task: Task) -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue


@deed
async def cancel_itself(task: Task) -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(600)


# ---------------------------------------------------------------- errors and ends


@deed
async def score(task: Task) -> None:
    return None


@deed
async def fail(task: Task) -> None:
    raise KeyError("play")


@deed
async def exit_politely(task: Task) -> None:
    sys.exit(0)


@deed
async def exit_at_once(task: Task) -> None:
    os._exit(0)


@deed
async def crash(task: Task) -> None:
    ctypes.string_at(0)


@deed
async def stop_itself(task: Task) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# ---------------------------------------------------------------- rewards


@deed
async def return_reward(task: Task) -> Outcome:
    """Whatever the task says, past the checks of `Outcome`."""
    texts = {"nan": math.nan, "inf": math.inf}
    reward = task.metadata["reward"]
    outcome = Outcome(reward=0.0)
    object.__setattr__(outcome, "reward", texts.get(reward, reward) if isinstance(reward, str) else reward)
    return outcome


@deed
async def return_nothing(task: Task) -> Any:
    await asyncio.sleep(0)
    outcome: Any = object.__new__(Outcome)
    return outcome


@deed
async def return_odd_stop_reason(task: Task) -> Outcome:
    stop_reason: Any = "because"
    return Outcome(reward=0.5, stop_reason=stop_reason)


@deed
async def write_to_worker(task: Task) -> None:
    """A message of its own, in hex, as often as is said."""
    data = bytes.fromhex(task.metadata["hex"]) * int(task.metadata.get("times", 1))
    os.write(_CONTROL_FD, data) if len(data) < 4096 else _write_all(data)
    await asyncio.sleep(600)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(_CONTROL_FD, data) :]


@deed
async def claim_twice(task: Task) -> None:
    """Two ends of one rollout."""
    import msgspec

    content = msgspec.msgpack.encode({"type": "Ended", "play": int(task.metadata["play"]), "reward": 0.5})
    os.write(_CONTROL_FD, 2 * (struct.pack(">I", len(content)) + content))
    await asyncio.sleep(600)


@deed
async def claim_infra(task: Task) -> None:
    """As if the model had failed."""
    import msgspec

    content = msgspec.msgpack.encode({"type": "Ended", "play": 1, "reason": "infra", "detail": "not my fault"})
    os.write(_CONTROL_FD, struct.pack(">I", len(content)) + content)
    await asyncio.sleep(600)


@deed
async def close_control(task: Task) -> None:
    with socket.socket(fileno=os.dup(_CONTROL_FD)) as control:
        control.shutdown(socket.SHUT_WR)
    await asyncio.sleep(600)


@deed
async def use_loops_of_its_own(task: Task) -> dict[str, float]:
    """In threads, and through processes: what an honest environment does, too."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    there = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01, "there"), loop)
    alone = await asyncio.to_thread(asyncio.run, asyncio.sleep(0.01, "alone"))
    shell = await asyncio.create_subprocess_shell("exit 3")
    found = [await asyncio.wrap_future(there), alone, await shell.wait()]
    return {"is_right": float(found == ["there", "alone", 3])}


@deed
async def claim_without_a_call(task: Task) -> Outcome:
    return Outcome(reward=1.0)


@deed
async def claim_reward(task: Task) -> None:
    """Says itself how rollout 1 ended, as a player would."""
    import msgspec

    message = {
        "type": "Ended",
        "play": 1,
        "reward": task.metadata["reward"],
        "metrics": task.metadata.get("metrics", {}),
    }
    if message["reward"] == "nan":
        message["reward"] = math.nan
    content = msgspec.msgpack.encode(message)
    os.write(_CONTROL_FD, struct.pack(">I", len(content)) + content)
    await asyncio.sleep(600)


# ---------------------------------------------------------------- resources


@deed
async def leak(task: Task) -> None:
    while True:
        _kept.append(bytearray(32 << 20))
        await asyncio.sleep(0)


@deed
async def leak_shared(task: Task) -> None:
    while True:
        shared = mmap.mmap(-1, 32 << 20)
        for offset in range(0, 32 << 20, 4096):
            shared[offset] = 1
        _kept.append(shared)
        await asyncio.sleep(0.01)


@deed
async def open_files(task: Task) -> None:
    for number in range(10_000):
        _kept.append(open(f"file-{number}", "w"))  # noqa: ASYNC230, SIM115


@deed
async def fill_disk(task: Task) -> None:
    try:
        for number in range(10_000):
            with open(f"large-{number}", "wb") as file:  # noqa: ASYNC230
                file.write(b"x" * (8 << 20))
            await asyncio.sleep(0)
    finally:
        for number in range(10_000):
            Path(f"large-{number}").unlink(missing_ok=True)  # noqa: ASYNC240


@deed
async def flood_output(task: Task) -> None:
    for _ in range(int(task.metadata["mib"])):
        print("x" * (1 << 20))
        await asyncio.sleep(0)


@deed
async def flood_relay(task: Task) -> None:
    """Speaks no HTTP at what is its way to the model."""
    port = _relay_port()
    for _ in range(5000):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(b"nonsense\r\n\r\n")
        except OSError:
            continue
        await asyncio.sleep(0)


def _relay_port() -> int:
    """Of the listening socket in this network that is no other's."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        if fields[3] == "0A" and host == "0100007F":
            return int(port, 16)
    raise LookupError("there is no relay")


@deed
async def leave_files(task: Task) -> None:
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock"):
        try:
            Path(folder, task.metadata["mark"]).write_text("x")  # noqa: ASYNC240
        except OSError:
            continue


@deed
async def fork(task: Task) -> None:
    """Children, grandchildren that nobody waits for, and one that leads a session of its own."""
    for depth in range(3):
        if os.fork() == 0:
            for _ in range(depth):
                os.setsid() if os.getpid() != os.getsid(0) else None
                if os.fork() != 0:
                    os._exit(0)
            for fd in range(1024):
                try:
                    os.close(fd)
                except OSError:
                    continue
            os.execv("/bin/sleep", [task.metadata["mark"], "600"])
    await asyncio.sleep(0.2)


@deed
async def fork_bomb(task: Task) -> None:
    while True:
        try:
            if os.fork() == 0:
                continue
        except OSError:
            time.sleep(0.01)  # noqa: ASYNC251


@deed
async def hold_connections(task: Task) -> None:
    """More than a process may have files, each with a request that was answered."""
    request, port = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", _relay_port()
    for _ in range(2):
        if os.fork() == 0:
            for _ in range(700):
                connection = socket.create_connection(("127.0.0.1", port), timeout=20)
                connection.sendall(request)
                _kept.append(connection)
            time.sleep(600)  # noqa: ASYNC251
    await asyncio.sleep(600)


@deed
async def fill_with_empty_files(task: Task) -> dict[str, float]:
    """How many there may be in memory."""
    number = 0
    try:
        for number in range(100_000):
            os.close(os.open(f"/dev/shm/empty-{number}", os.O_CREAT))
    except OSError:
        pass
    return {"files": float(number)}


@deed
async def dig(task: Task) -> dict[str, float]:
    """1 for everything that gives it more than it was given."""
    libc = ctypes.CDLL(None, use_errno=True)
    unshared = _ends_well(lambda: libc.unshare(_NEW_USER | _NEW_MOUNTS))
    cloned = _ends_well(lambda: _cloned(libc))
    return {
        "namespaces": float(unshared),
        "namespaces_by_clone": float(cloned),
        "shared_memory": float(libc.shmget(0, 64 << 20, 0o1600) >= 0),
        "messages": float(libc.msgget(0, 0o1600) >= 0),
        "semaphores": float(libc.semget(0, 1, 0o1600) >= 0),
        "memory_files": float(libc.memfd_create(b"x", 0) >= 0),
        "keys": float(libc.syscall(_KEYCTL[os.uname().machine], 0, -3, 0) >= 0),
        "a_worker_is_first_to_go": float(int(Path("/proc/self/oom_score_adj").read_text()) < 500),  # noqa: ASYNC240
    }


_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x20000
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_CLONE = {"x86_64": 56, "aarch64": 220}


def _ends_well(job: Callable[[], int]) -> bool:
    """Whether the job returns 0, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if job() == 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _cloned(libc: Any) -> int:
    """-1, or the status of a child in a namespace of its own."""
    pid = libc.syscall(_CLONE[os.uname().machine], _NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return -1 if pid < 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------- signals


@deed
async def be_told_to_end(task: Task) -> None:
    """Its constructor took these signals for itself."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(600)


@deed
async def end_a_child(task: Task) -> dict[str, float]:
    child = await asyncio.create_subprocess_exec("/bin/sleep", "600")
    child.terminate()
    return {"code": float(await child.wait())}


# ---------------------------------------------------------------- what is not its business


@deed
async def kill_others(task: Task) -> None:
    for pid in (os.getppid(), 1, int(task.metadata["worker"])):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    await asyncio.sleep(0.1)


@deed
async def spy(task: Task) -> dict[str, float]:
    """1 for everything that could be read."""
    secret = task.metadata["secret"].encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] + [os.getppid(), int(task.metadata["worker"])]
    own = os.getpid()
    return {
        "environ": float(any(_holds(f"/proc/{pid}/environ", secret) for pid in pids if pid != own)),
        # The first process of a box by bwrap is of its user, and knows nothing.
        "memory": float(any(_opens(f"/proc/{pid}/mem") for pid in pids if pid != own and not _is_bwrap(pid))),
        "own_environ": float(_holds(f"/proc/{own}/environ", secret) or secret.decode() in os.environ.values()),
        "root": float(any(_lists(path) for path in task.metadata["folders"])),
        "files": float(any(_opens(path) for path in task.metadata["files"])),
        "written": float(any(_writes(path) for path in task.metadata["folders"])),
        "descriptors": float(_has_foreign_descriptors()),
        "root_user": float(os.getuid() == 0 or os.getgid() == 0 or bool(os.getgroups())),
    }


@deed
async def call_out(task: Task) -> dict[str, float]:
    """1 for every door that answers: the control API, the report route, the world."""
    found: dict[str, float] = {}
    for name, (host, port, request) in task.metadata["doors"].items():
        found[name] = float(_answers(host, int(port), request.encode()))
    return found


def _holds(path: str, secret: bytes) -> bool:
    try:
        return secret in Path(path).read_bytes()
    except OSError:
        return False


def _opens(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except OSError:
        return False


def _is_bwrap(pid: int) -> bool:
    return _holds(f"/proc/{pid}/comm", b"bwrap")


def _lists(path: str) -> bool:
    try:
        return bool(os.listdir(path))
    except OSError:
        return False


def _writes(path: str) -> bool:
    try:
        Path(path, "written").write_text("x")
    except OSError:
        return False
    return True


def _has_foreign_descriptors() -> bool:
    """Beside its standard streams, control socket, and what its own event loop has."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("/") and not target.startswith(("/dev/null", "/proc", "/dev/urandom")):
            return True
    return False


def _answers(host: str, port: int, request: bytes) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.sendall(request)
            return b" 200 " in connection.recv(1024).split(b"\r\n")[0]
    except OSError:
        return False
