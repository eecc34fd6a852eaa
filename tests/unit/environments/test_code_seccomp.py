"""The filter of system calls, run by a small machine of the same kind as the kernel's."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from shoal.environments.sandbox.seccomp import ARCHITECTURES, DENIED, NEWEST, assemble
from shoal.errors import EnvironmentSetupError

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
BOTH = pytest.mark.parametrize("machine", list(ARCHITECTURES))


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter answers to a call."""
    program = list(struct.iter_unpack("<HBBI", assemble(machine)))
    given = [argument & (1 << 64) - 1 for argument in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *given)
    at, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x06:
            return int(constant)
        else:
            truth = {0x15: value == constant, 0x25: value > constant, 0x45: bool(value & constant)}[code]
            at += if_true if truth else if_false


def number_of(machine: str, x86_64: int, aarch64: int) -> int:
    return {"x86_64": x86_64, "aarch64": aarch64}[machine]


@BOTH
def test_every_call_that_is_denied_is_refused(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    numbers = {name: both[column] for name, both in DENIED.items() if both[column] is not None}
    assert {name for name, number in numbers.items() if number and decide(machine, number) != EPERM} == set()
    assert len(set(numbers.values())) == len(numbers)


@BOTH
def test_what_programs_need_is_allowed(machine: str) -> None:
    needed = {
        "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "openat": (257, 56), "futex": (202, 98),
        "exit_group": (231, 94), "getrandom": (318, 278), "rt_sigaction": (13, 134), "socketpair": (53, 199),
    }  # fmt: skip
    assert {name for name, both in needed.items() if decide(machine, number_of(machine, *both)) != ALLOW} == set()


@BOTH
def test_threads_are_allowed_and_processes_are_not(machine: str) -> None:
    clone = number_of(machine, 56, 220)
    assert decide(machine, clone, 0x3D0F00) == ALLOW
    assert decide(machine, clone, 0x01200011) == EPERM
    assert decide(machine, clone, 0x10000000) == EPERM
    assert decide(machine, 435) == ENOSYS


@BOTH
def test_only_local_sockets(machine: str) -> None:
    families = {family for family in range(64) if decide(machine, number_of(machine, 41, 198), family) == ALLOW}
    assert families == {1}


@BOTH
def test_only_abort(machine: str) -> None:
    signals = {signal for signal in range(65) if decide(machine, number_of(machine, 234, 131), 1, 1, signal) == ALLOW}
    assert signals == {6}


@BOTH
def test_limits_are_read_and_only_ones_own_stack_is_set(machine: str) -> None:
    call = number_of(machine, 302, 261)
    assert all(decide(machine, call, process, kind, 0, 5) == ALLOW for process in (0, 1) for kind in range(16))
    for pointer in (0x7F00, 0x7F00_0000_0000, 1 << 32):
        allowed = {(p, k) for p in (0, 1) for k in range(16) if decide(machine, call, p, k, pointer) == ALLOW}
        assert allowed == {(0, 3)}


@BOTH
def test_no_other_signal_for_a_descriptor(machine: str) -> None:
    refused = {command for command in range(20) if decide(machine, number_of(machine, 72, 25), 3, command) == EPERM}
    assert refused == {10}


@BOTH
def test_unknown_calls_do_not_exist_and_other_architectures_are_killed(machine: str) -> None:
    assert decide(machine, NEWEST + 1) == ENOSYS
    assert decide(machine, 0x40000000) == ENOSYS
    assert decide(machine, 0xFFFFFFFF) == ENOSYS
    assert decide(machine, 0, architecture=0x40000003) == KILL


@BOTH
def test_the_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"the kernel's headers are not installed ({HEADERS[machine]})")
    pattern = re.compile(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", re.MULTILINE)
    known = {name: int(number) for name, number in pattern.findall(HEADERS[machine].read_text())}
    column = list(ARCHITECTURES).index(machine)
    assert {name: both[column] for name, both in DENIED.items()} == {name: known.get(name) for name in DENIED}


def test_another_machine_is_refused() -> None:
    with pytest.raises(EnvironmentSetupError, match="no filter of system calls for riscv64"):
        assemble("riscv64")
