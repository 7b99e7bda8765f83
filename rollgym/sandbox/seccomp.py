"""Seccomp filter as BPF for x86_64 and aarch64, without a library.

A deny list up to the last reviewed syscall number: untrusted code is ordinary Python,
and a list of what is allowed would have to follow every C library. A refused call fails with EPERM, as if the
caller lacked a right; a number beyond the list with ENOSYS, as on a kernel that is older than the call.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rollgym.core.errors import UsageError
from rollgym.sandbox.syscalls import CHECKED, FIRST_UNKNOWN, GAP, NUMBERS, SHARED, SIGNALS

LOAD, AND, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Per machine: column of its syscall numbers and the kernel's architecture constant."""
X32 = 0x40000000
"""First x32 syscall number on x86_64: the same calls would bypass the list."""
AF_UNIX, AF_INET, SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET = 1, 2, 1, 2, 5
IPPROTO_TCP, IPPROTO_UDP = 6, 17
NEW_NAMESPACES = 0x7E020000
MAP_SHARED, MAP_SHARED_VALIDATE, MAP_ANONYMOUS, MAP_HUGETLB = 1, 3, 0x20, 0x40000
SIGCHLD = 17
FCNTLS = (10, 1024, 1026)
"""F_SETSIG, F_SETLEASE, F_NOTIFY: a signal of choice, SIGCONT for one, whenever a pipe or a folder changes;
and files that keep others waiting."""
F_SETOWN, F_SETOWN_EX = 8, 15
IOCTLS = (0x5412, 0x541C, 0x40086602, 0x401C5820, 0x40087602, 0x40806685, 0x800C6613)
"""TIOCSTI, TIOCLINUX; FS_IOC_SETFLAGS, _FSSETXATTR, _SETVERSION, _ENABLE_VERITY, _SET_ENCRYPTION_POLICY: what
is typed for others, and attributes of files, for which it is enough to read them."""
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902

FARTHEST = 200
"""Maximum jump length; the kernel allows 255."""

Instruction = tuple[int, int, int, int]
"""Instruction: operation, jump if true, jump if false, constant."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Additional restrictions."""

    shared_host: bool = False
    """The code shares the host's files, processes and sockets: deny what nothing else restricts."""
    no_signals: bool = False
    no_shared_memory: bool = False
    """Deny shared anonymous memory, which is not measured without a cgroup."""
    inet: bool = False
    """Allow TCP and UDP over IPv4: for a network namespace that has nothing but loopback."""


def program(profile: Profile | None = None, machine: str | None = None) -> bytes:
    """Build the filter for a machine (default: this one)."""
    profile = profile or Profile()
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        machines = " or ".join(ARCHITECTURES)
        raise UsageError(f"No seccomp filter for {machine}; supported: {machines}.")
    column, audit = ARCHITECTURES[machine]
    steps: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    first, after = GAP[column]
    steps += [(AT_LEAST, 2, 0, FIRST_UNKNOWN), (AT_LEAST, 0, 2, first), (AT_LEAST, 1, 0, after)]
    steps += [_refuse(errno.ENOSYS)]
    # First those that the kernel cannot remember as allowed, because their arguments count.
    for name, checks in _checks(profile).items():
        # Every path of these instructions returns.
        steps += [(EQUAL, 0, len(checks), CHECKED[name][column]), *checks]
    refused = dict(NUMBERS)
    if profile.shared_host:
        refused |= SHARED
    if profile.no_signals:
        refused |= SIGNALS
    denied = [number for numbers in refused.values() if (number := numbers[column]) is not None]
    for at in range(0, len(denied), FARTHEST):
        steps += [*_any_of(denied[at : at + FARTHEST]), _refuse()]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])


def _refuse(why: int = errno.EPERM) -> Instruction:
    return RETURN, 0, 0, 0x00050000 | why


def _argument(index: int) -> Instruction:
    """Return the offset of an argument's lower half (little endian)."""
    return LOAD, 0, 0, 16 + 8 * index


def _unless(index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Deny a call whose argument is one of these values."""
    return [_argument(index), *_any_of(values), _refuse(), (RETURN, 0, 0, ALLOW)]


def _any_of(values: Sequence[int]) -> list[Instruction]:
    """Continue with the next instruction if the value matches, otherwise with the one after.

    The kernel runs the filter for every number at installation: one instruction each is enough.
    """
    last = len(values) - 1
    return [(EQUAL, last - at, 1 if at == last else 0, value) for at, value in enumerate(values)]


def _checks(profile: Profile) -> dict[str, list[Instruction]]:
    allow: Instruction = (RETURN, 0, 0, ALLOW)
    family = [_argument(0), (EQUAL, 1, 0, AF_UNIX), _refuse(errno.EAFNOSUPPORT)]
    # The kernel's pool of huge pages is the host's.
    small: list[Instruction] = [_argument(3), (ANY_BIT, 0, 1, MAP_HUGETLB), _refuse(errno.ENOMEM)]
    # The children of a process that ignores SIGCHLD are never waited for, and their CPU time would be lost.
    # To ask for the present action is allowed: both halves of the pointer to a new one are 0.
    ask: list[Instruction] = [_argument(1), (EQUAL, 0, 2, 0), (LOAD, 0, 0, 16 + 8 + 4), (EQUAL, 1, 0, 0)]
    checks = {
        # Its flags are in memory, which a filter cannot read; the C library then takes clone.
        "clone3": [_refuse(errno.ENOSYS)],
        "clone": [_argument(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), _refuse(), allow],
        "socket": [*family, allow],
        "socketpair": [*family, allow],
        "prlimit64": [_argument(0), (EQUAL, 1, 0, 0), _refuse(), allow],
        "ioctl": _unless(1, IOCTLS),
        "mmap": [*small, allow],
        "rt_sigaction": [_argument(0), (EQUAL, 0, 1 + len(ask), SIGCHLD), *ask, _refuse(), allow],
        "fcntl": _unless(1, FCNTLS),
    }
    if profile.inet:
        plain: list[Instruction] = [_argument(0), (EQUAL, 0, 1, AF_UNIX), allow]
        plain += [(EQUAL, 1, 0, AF_INET), _refuse(errno.EAFNOSUPPORT)]
        plain += [_argument(1), (AND, 0, 0, 0xF), (EQUAL, 2, 0, SOCK_STREAM), (EQUAL, 1, 0, SOCK_DGRAM)]
        plain += [_refuse(), _argument(2), *_any_of((0, IPPROTO_TCP, IPPROTO_UDP)), allow]
        checks["socket"] = [*plain, _refuse()]
    if profile.shared_host:
        # Sockets of the host have names in its file system; a pair that is connected cannot reach them.
        checks["socket"] = [_refuse(errno.EAFNOSUPPORT)]
        kind: list[Instruction] = [_argument(1), (AND, 0, 0, 0xF), (EQUAL, 2, 0, SOCK_STREAM)]
        checks["socketpair"] = [*family, *kind, (EQUAL, 1, 0, SOCK_SEQPACKET), _refuse(), allow]
        # SIGIO to a process of the host.
        checks["fcntl"] = _unless(1, (*FCNTLS, F_SETOWN, F_SETOWN_EX))
        checks["ioctl"] = _unless(1, (*IOCTLS, FIOSETOWN, SIOCSPGRP))
        # In one call more disk than any watch can see in time. The C library writes zeros instead.
        checks["fallocate"] = [_refuse(errno.EOPNOTSUPP)]
    if profile.no_shared_memory:
        shared: list[Instruction] = [(AND, 0, 0, 0xF), (EQUAL, 1, 0, MAP_SHARED)]
        shared += [(EQUAL, 0, 1, MAP_SHARED_VALIDATE), _refuse(), allow]
        checks["mmap"] = [*small, (ANY_BIT, 0, len(shared) - 1, MAP_ANONYMOUS), *shared]
    return checks
