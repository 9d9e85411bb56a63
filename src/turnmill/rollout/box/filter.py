"""System calls that no code of a box may make, however it is isolated: a seccomp filter, for good and for all below it.

They are ways around the box's limits and into parts of the kernel that an environment has no use for: namespaces and
mounts of its own (a file system in memory has no limit but its own), memory and messages that nobody's process holds
(System V, memfd: they are counted nowhere, and the former outlive everybody), keys of the kernel, and the like. Who
asks is told as a kernel would that does not have them.
"""

import ctypes
import errno
import logging
import os
import platform
import struct
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
# What a filter answers: go on; an error, whose number is in the lower half.
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Instructions of a filter: load a word of the call, compare it, look at bits of it, answer.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
# Where a call has its number, its architecture, and the lower half of its first argument.
_NUMBER, _ARCHITECTURE, _FLAGS = 0, 4, 16
# Flags of clone for new namespaces: user, mounts, processes, network, IPC, names, control groups.
_NAMESPACES = 0x7E020000
# Calls of the other form of x86-64 (x32) begin there.
_X32 = 0x40000000

# The same numbers on all newer architectures; clone3, whose flags no filter can see, has clone to fall back to.
_COMMON = {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "clone3": 435, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_NUMBERS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    # Name of the machine: its audit architecture, and its numbers.
    "x86_64": (
        0xC000003E,
        {
            "clone": 56, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
            "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
            "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_create": 319,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "clone": 220, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
            "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
            "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "memfd_create": 279,
        },
    ),
}  # fmt: skip
# Programs have something else for these where a kernel does not know them.
_UNKNOWN = ("clone3", "memfd_create", "memfd_secret")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_calls() -> None:
    """From now on, for this process and all that come from it; it must have given up gaining privileges.

    Raises `OSError` where the kernel refuses the filter. Where this machine has no list, that is said.
    """
    machine = platform.machine()
    if machine not in _NUMBERS:
        logger.warning("no system calls are refused: there is no list of them for %s", machine)
        return
    instructions = program(machine)
    filter_ = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"system calls can't be refused (seccomp): {os.strerror(number)}")


def program(machine: str) -> bytes:
    """The filter as the kernel wants it."""
    architecture, own = _NUMBERS[machine]
    numbers = {**_COMMON, **own}
    clone = numbers.pop("clone")
    # A call in the form of another architecture has other numbers: there is none that is let through.
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_IF_EQUAL, architecture, then=1), _refuse(errno.EPERM)]
    steps += [_step(_LOAD, _NUMBER), _step(_IF_AT_LEAST, _X32, otherwise=1), _refuse(errno.ENOSYS)]
    for name, number in numbers.items():
        answer = errno.ENOSYS if name in _UNKNOWN else errno.EPERM
        steps += [_step(_IF_EQUAL, number, otherwise=1), _refuse(answer)]
    steps += [_step(_IF_EQUAL, clone, otherwise=3), _step(_LOAD, _FLAGS), _step(_IF_ANY, _NAMESPACES, otherwise=1)]
    return b"".join([*steps, _refuse(errno.EPERM), _step(_ANSWER, _ALLOW)])


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` are how many of the next ones are left out."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _step(_ANSWER, _ERRNO | number)
