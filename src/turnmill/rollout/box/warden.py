"""The process between a worker and a box: it makes the box, waits for its end, and leaves nothing of it behind.

    order on stdin -> claim a uid -> fork -> [first process: file tree, loopback -> fork] -> limits, uid -> exec player
    end of the player | end of file on stdin (the worker is gone, or wants the end) -> kill all -> exit as it did

It runs none of the environment's code and holds no secret. Everything of a box is killed as a whole: with its process
namespace where there is one, else all processes of its uid, else all descendants, however they try to get away (a
session of their own, an orphan's new parent), since this process adopts them.
"""

import errno
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from turnmill.rollout.box import kernel, view
from turnmill.rollout.box.order import CONTROL_FD, EXIT_NOT_EMPTY, EXIT_REFUSED, Isolation, Order

# How long processes may take to die of SIGKILL.
_EMPTY_S = 10.0
_POLL_MS = 500
# What the kernel adds for a box when it looks for who takes the most memory, in thousandths of all that there is.
_OOM_SCORE = 500
_MIB = 1 << 20
# Below it there may be persons and services.
_LOWEST_UID = 60_000
_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")


class Refused(Exception):
    """The box can't be made; the text is for the user."""


def main() -> NoReturn:
    """Make the box that the line on standard input orders; exits as its player did."""
    order = Order.from_line(sys.stdin.buffer.readline())
    os.umask(0o022)
    try:
        code = Warden(order).run()
    except (Refused, OSError) as error:
        print(f"the box can't be made: {error}", file=sys.stderr, flush=True)
        code = EXIT_REFUSED
    # Not by the interpreter's own way, which would wait for what a foreign fork may have left in it.
    os._exit(code)


class Warden:
    """One box."""

    def __init__(self, order: Order) -> None:
        self._order = order
        # None where the box has the uid of the worker. The socket holds the claim while this process lives.
        self._uid: int | None = None
        self._claim: socket.socket | None = None

    def run(self) -> int:
        order = self._order
        kernel.adopt_orphans()
        if order.isolation.has_uid:
            self._uid, self._claim = claim_uid(*order.uids)
            # Left by a warden that was killed.
            kill_all_of(self._uid, order.uids[0])
        if order.isolation is Isolation.NAMESPACES:
            kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            _run_child(self._be_first_process if order.isolation is Isolation.NAMESPACES else self._enter)
        # The worker must see the player's end of the control socket close.
        os.close(order.control_fd)
        status = _wait(pid)
        is_empty = self._empty()
        if order.base:
            # Here, since the worker may be gone.
            shutil.rmtree(order.base, ignore_errors=True)
            if self._uid is not None:
                remove_files_of(self._uid)
        return exit_code(status) if is_empty else EXIT_NOT_EMPTY

    def _be_first_process(self) -> NoReturn:
        """Process 1 of the box: its death is the death of all of them, and it dies with the warden."""
        kernel.die_with_parent()
        network = 0 if self._order.has_network else kernel.CLONE_NEWNET
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | network)
        socket.sethostname("box")
        if network:
            kernel.raise_loopback()
        assert self._uid is not None
        view.enter(self._order, self._uid)
        pid = os.fork()
        if pid == 0:
            _run_child(self._enter)
        os.closerange(0, 2)
        os.closerange(3, _max_fd())
        while True:
            ended, status = os.wait()
            if ended == pid:
                os._exit(exit_code(status))

    def _enter(self) -> NoReturn:
        """Become the player: nothing of the worker's rights, descriptors and variables is left in it."""
        order = self._order
        os.setsid()
        if order.control_fd != CONTROL_FD:
            os.dup2(order.control_fd, CONTROL_FD)
        os.set_inheritable(CONTROL_FD, True)
        nothing = os.open("/dev/null", os.O_RDONLY)
        os.dup2(nothing, 0)
        os.closerange(CONTROL_FD + 1, _max_fd())
        self._limit()
        _be_first_to_go()
        os.umask(0o077)
        if order.base and self._uid is not None:
            os.chown(order.home, self._uid, self._uid)
        if self._uid is not None:
            os.setgroups([])
            os.setresgid(self._uid, self._uid, self._uid)
            os.setresuid(self._uid, self._uid, self._uid)
        kernel.gain_no_privileges()
        kernel.die_with_parent()
        if order.isolation is Isolation.UID:
            _check_hidden(order)
        argv = order.argv
        if order.isolation is Isolation.BWRAP:
            argv = [*view.bwrap_command(order), *argv]
        elif not order.isolation.has_view:
            os.chdir(order.home)
        else:
            os.chdir("/tmp")
        if not os.access(argv[0], os.X_OK):
            raise Refused(
                f"{argv[0]} can't be executed by the user of the box (uid {os.getuid()}): install Python and Turnmill "
                "where every user may read them"
            )
        os.execve(argv[0], argv, order.environ)

    def _limit(self) -> None:
        limits = self._order.limits
        memory = limits.memory_mb * _MIB
        bounds = {
            resource.RLIMIT_CORE: 0,
            # Private memory; address space is not memory, but without any bound it costs page tables.
            resource.RLIMIT_DATA: memory,
            resource.RLIMIT_AS: 8 * memory,
            resource.RLIMIT_CPU: limits.cpu_s,
            resource.RLIMIT_NOFILE: limits.num_files,
            resource.RLIMIT_FSIZE: limits.temp_mb * _MIB,
        }
        if self._uid is not None:
            # Counted by user: with the worker's own uid it would count everything that this user runs.
            bounds[resource.RLIMIT_NPROC] = limits.num_processes
        for kind, bound in bounds.items():
            _, hard = resource.getrlimit(kind)
            bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (bound, bound))
        os.nice(1)

    def _empty(self) -> bool:
        """Kill whatever is left; whether nothing is."""
        give_up = time.monotonic() + _EMPTY_S
        while True:
            if self._order.isolation is Isolation.UID and self._uid is not None:
                # (A namespace of processes kills its own with its first one, and nothing can be forked into it then.)
                kill_all_of(self._uid, self._order.uids[0])
            left = descendants(os.getpid())
            for pid in left:
                _kill(pid)
            _reap()
            if not left and (self._uid is None or not processes_of(self._uid)):
                return True
            if time.monotonic() > give_up:
                return False
            time.sleep(0.01)


# ---------------------------------------------------------------- uids


def claim_uid(first: int, count: int) -> tuple[int, socket.socket]:
    """A uid that no other box on this machine has, and what holds it. Raises `Refused` when all are taken."""
    start = os.getpid() % (count - 1)
    for offset in range(count - 1):
        # The first one stays free: see `kill_all_of`.
        uid = first + 1 + (start + offset) % (count - 1)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # A name of the kernel's, not of a file: it goes with its process.
            claim.bind(f"\0turnmill-box-{uid}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return uid, claim
    raise Refused(f"all {count - 1} uids for boxes are taken")


def kill_all_of(uid: int, sweeper: int) -> None:
    """Kill every process of `uid` at once, so that none can make another one meanwhile.

    `sweeper` is a uid that no process has.
    """
    pid = os.fork()
    if pid == 0:
        _run_child(lambda: _kill_as(uid, sweeper))
    os.waitpid(pid, 0)


def _kill_as(uid: int, sweeper: int) -> NoReturn:
    """-1 is everything that this process may signal, so it must be nobody but `uid` by then."""
    if min(uid, sweeper) < _LOWEST_UID:
        raise Refused(f"uid {uid} may be a person's")
    # Its real and saved uid are nobody's: those that it kills can't stop it first.
    os.setresuid(sweeper, uid, sweeper)
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        os._exit(0)
    os._exit(0)


def processes_of(uid: int) -> list[int]:
    """Pids of the processes of `uid` that have not ended."""
    return [pid for pid in _pids() if _owner(pid) == uid and _state_and_parent(pid)[0] not in "ZX"]


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def remove_files_of(uid: int, folders: Sequence[str] = _SHARED_FOLDERS) -> None:
    """Remove what `uid`, which has no process any more, left where everybody may write."""
    for folder in folders:
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            # Others are free to remove what is theirs meanwhile.
            with suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    _remove(entry)


def _remove(entry: "os.DirEntry[str]") -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        os.unlink(entry.path)


# ---------------------------------------------------------------- processes


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid` that have not ended; its children that are zombies are not among them."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        state, parent = _state_and_parent(each)
        if state not in "ZX":
            children.setdefault(parent, []).append(each)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _state_and_parent(pid: int) -> tuple[str, int]:
    """("X", 0) for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in parentheses may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "X", 0
    return fields[0].decode(), int(fields[1])


def _wait(pid: int) -> int:
    """The status of `pid`, which is killed when nobody holds the other end of standard input any more."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    pidfd = os.pidfd_open(pid)
    poll.register(pidfd, select.POLLIN)
    while True:
        for fd, _ in poll.poll(_POLL_MS):
            if fd == 0:
                _kill(pid)
                poll.unregister(0)
        # Also those that were adopted.
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError as error:
                raise Refused("the end of the box was not seen: SIGCHLD is ignored here") from error
            if ended == pid:
                os.close(pidfd)
                return status
            if ended == 0:
                break


def exit_code(status: int) -> int:
    """As a shell says it: 128 + the signal for one that was killed."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap() -> None:
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            return


def _check_hidden(order: Order) -> None:
    """Without a file tree of its own only permissions keep the box out."""
    for path in order.hidden:
        if os.access(path, os.R_OK) or os.access(path, os.X_OK):
            raise Refused(f"{path} can be read by other users, so the environment could: chmod 700 {path}")


def _be_first_to_go() -> None:
    """Where the machine has no memory left it is a box that ends, and not a worker, a trainer or a database.

    Where a container does not let that be said, its own limit of memory counts.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(max(score, _OOM_SCORE)))


def _max_fd() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft, 1 << 20) if soft != resource.RLIM_INFINITY else 1 << 20


def _run_child(job: Callable[[], object]) -> NoReturn:
    """In a forked process: nothing of what the parent has to do may be done twice."""
    try:
        job()
    except BaseException as error:  # the boundary of a process: whatever it is, its parent learns of it
        os.write(2, f"the box can't be made: {error}\n".encode(errors="replace"))
    os._exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
