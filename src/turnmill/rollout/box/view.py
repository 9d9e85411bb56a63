"""The file tree that a box sees: an empty one with what it needs, read-only, and a temporary folder of limited size.

    tmpfs at / <- /tmp <- system and Python folders, package, layer (read-only) <- empty folders over what is hidden
               <- /proc of its own processes, a small /dev

It is a list of what is there, so nothing has to be thought of to be hidden; `hidden` is for secret folders that lie
inside one that is needed.
"""

import os
from collections.abc import Iterable, Sequence

from turnmill.rollout.box import kernel
from turnmill.rollout.box.order import HOME, Order

_DEVICES = ("null", "zero", "full", "random", "urandom")
_FD_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
# Where the tree of the machine is while the new one is made.
_MACHINE = "/.machine"
_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV
_SMALL = "mode=0755,size=4m"


def enter(order: Order, uid: int) -> None:
    """Make the tree the root of this process's mount namespace, for a box that runs as `uid`."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", HOME, "tmpfs", _SAFE, _SMALL)
    os.mkdir(HOME + _MACHINE)
    os.chdir(HOME)
    # With it the machine's root is at _MACHINE, and its /tmp is no longer covered.
    kernel.pivot_root(".", "." + _MACHINE)
    os.chdir("/")
    os.makedirs(HOME, exist_ok=True)
    options = f"mode=0700,uid={uid},gid={uid},{_bounds(order.limits.temp_mb)}"
    kernel.mount("tmpfs", HOME, "tmpfs", _SAFE, options)
    for source, target in layout(order):
        if source is None:
            os.makedirs(target, exist_ok=True)
            kernel.mount("tmpfs", target, "tmpfs", _SAFE, _SMALL)
        else:
            _bind(_MACHINE + source, target, kernel.MS_RDONLY | _SAFE)
    _make_devices(order.limits.temp_mb)
    os.mkdir("/proc")
    kernel.mount("proc", "/proc", "proc", _SAFE | kernel.MS_NOEXEC)
    kernel.unmount(_MACHINE)
    os.rmdir(_MACHINE)
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _SAFE)


def layout(order: Order) -> list[tuple[str | None, str]]:
    """(what, where) in the order in which they are laid over one another; None: an empty folder over a hidden one."""
    shown = [(source, target) for source, target in order.read_only]
    covers = [(None, path) for path in order.hidden if any(_is_within(path, target) for _, target in shown)]
    laid: Sequence[tuple[str | None, str]] = [*shown, *covers]
    return sorted(laid, key=lambda pair: pair[1].count("/") if pair[1] != "/" else 0)


def bwrap_command(order: Order) -> list[str]:
    """The same tree as arguments of bubblewrap, before the command that it runs."""
    command = [order.bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if order.has_network:
        command.append("--share-net")
    size = str(order.limits.temp_mb << 20)
    command += ["--size", size, "--tmpfs", HOME]
    for source, target in layout(order):
        command += ["--tmpfs", target] if source is None else ["--ro-bind", source, target]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
    return [*command, "--chdir", HOME, "--"]


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        _touch(target)
    # Not recursive: what is mounted below a folder of the machine is not part of what was asked for.
    kernel.mount(source, target, None, kernel.MS_BIND)
    kernel.mount(None, target, None, kernel.MS_REMOUNT | kernel.MS_BIND | flags)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))


def _make_devices(temp_mb: int) -> None:
    os.makedirs("/dev", exist_ok=True)
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.MS_NOSUID, _SMALL)
    for name in _existing(_DEVICES):
        _bind(f"{_MACHINE}/dev/{name}", f"/dev/{name}", kernel.MS_NOSUID | kernel.MS_NOEXEC)
    for name, target in _FD_LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/shm")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", _SAFE, f"mode=1777,{_bounds(temp_mb)}")


def _bounds(temp_mb: int) -> str:
    """Options of a temporary folder: empty files take memory, too."""
    return f"size={temp_mb}m,nr_inodes={temp_mb * 64}"


def _existing(names: Iterable[str]) -> list[str]:
    return [name for name in names if os.path.exists(f"{_MACHINE}/dev/{name}")]
