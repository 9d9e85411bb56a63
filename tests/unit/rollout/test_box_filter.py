"""Which system calls the filter of a box lets through, by running it as the kernel does."""

import errno
import struct

import pytest

from turnmill.rollout.box.filter import program

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEW_USER = 0x10000000


def answer(machine: str, number: int, *, architecture: int | None = None, flags: int = 0) -> int:
    """0: it may be made; else the error that its caller gets."""
    architecture = ARCHITECTURES[machine] if architecture is None else architecture
    call = struct.pack("=IIQQ", number, architecture, 0, flags)
    steps = list(struct.iter_unpack("=HBBI", program(machine)))
    value = at = 0
    while True:
        code, then, otherwise, operand = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", call, operand)
        elif code == 0x06:
            return 0 if operand == ALLOW else operand - ERRNO
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += then if holds else otherwise


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [
        # read, openat, execve, clone without a namespace, wait4, futex, io_uring_setup
        ("x86_64", [0, 257, 59, 56, 61, 202, 425]),
        ("aarch64", [63, 56, 221, 220, 260, 98, 425]),
    ],
)
def test_what_programs_need_is_let_through(machine: str, numbers: list[int]) -> None:
    assert {number: answer(machine, number) for number in numbers} == dict.fromkeys(numbers, 0)


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [
        # unshare, setns, mount, keyctl, bpf, shmget, semget, msgget, fsopen, mount_setattr
        ("x86_64", [272, 308, 165, 250, 321, 29, 64, 68, 430, 442]),
        ("aarch64", [97, 268, 40, 219, 280, 194, 190, 186, 430, 442]),
    ],
)
def test_what_leads_around_limits_is_refused(machine: str, numbers: list[int]) -> None:
    assert {number: answer(machine, number) for number in numbers} == dict.fromkeys(numbers, errno.EPERM)


@pytest.mark.parametrize(("machine", "clone", "memfd"), [("x86_64", 56, 319), ("aarch64", 220, 279)])
def test_what_programs_have_something_else_for_is_unknown(machine: str, clone: int, memfd: int) -> None:
    assert answer(machine, clone, flags=NEW_USER) == errno.EPERM
    # clone3: its flags are in memory, where no filter looks.
    assert (answer(machine, 435), answer(machine, memfd)) == (errno.ENOSYS, errno.ENOSYS)


def test_the_numbers_of_another_architecture_are_no_way_around() -> None:
    i386, x32 = 0x40000003, 0x40000000
    assert answer("x86_64", 21, architecture=i386) == errno.EPERM
    assert answer("x86_64", x32 + 272) == errno.ENOSYS
