"""The walls that a process can raise around itself: seccomp, Landlock, and no way back. Runs inside."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many file rights each version of Landlock knows."""
READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute, read files, read folders."""
LIST = 1 << 3
FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Those that make sense for what is no folder."""

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl


def prctl(option: int, value: int, argument: Any = 0) -> None:
    """Call prctl, or raise."""
    if _prctl(option, value, argument, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _syscall(number: int, *arguments: Any) -> int:
    done = _libc.syscall(ctypes.c_long(number), *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(done)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install_filter(program: bytes) -> None:
    """Put a seccomp filter on this process and all it starts; raises where it is not in force afterwards."""
    buffer = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    shape = _Program(len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(shape))
    # io_uring_setup has this number everywhere; unfiltered, it answers EFAULT or ENOSYS to these arguments.
    if _libc.syscall(ctypes.c_long(425), 0, 0) != -1 or ctypes.get_errno() != 1:
        raise OSError("the seccomp filter is not in force")


def landlock_abi() -> int:
    """The version of Landlock here; 0 where there is none."""
    try:
        return _syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str], listed: Iterable[str] = ()) -> int:
    """Let this process see only these folders and files from now on; return the version of Landlock."""
    ruleset, abi = make_rules(read, write, listed)
    try:
        enforce(ruleset)
    finally:
        os.close(ruleset)
    return abi


def enforce(ruleset: int) -> None:
    """Put rules on this process, beside those that it has."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _syscall(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))


def make_rules(read: Iterable[str], write: Iterable[str], listed: Iterable[str] = ()) -> tuple[int, int]:
    """Rules for later, as a descriptor, and the version of Landlock; ``listed`` shows names alone."""
    abi = landlock_abi()
    if abi < 1:
        raise OSError("Landlock is not available")
    rights = (1 << RIGHTS[max(known for known in RIGHTS if known <= abi)]) - 1
    # Network rights since 4, abstract sockets and signals kept inside since 6.
    fields = struct.pack("QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _syscall(LANDLOCK_CREATE, fields, ctypes.c_size_t(len(fields)), ctypes.c_uint32(0))
    try:
        for paths, allowed in ((read, READ), (listed, LIST), (write, rights)):
            for path in paths:
                _allow(ruleset, path, allowed & rights)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset, abi


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= FILE_RIGHTS
        rule = struct.pack("<Qi", rights, target)
        _syscall(LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    finally:
        os.close(target)
