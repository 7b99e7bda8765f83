"""Self-confinement of a process: seccomp and Landlock, irrevocable. Runs inside."""

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
"""Number of file rights per Landlock ABI version."""
READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute, read files, read folders."""
LIST = 1 << 3
FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that apply to files."""

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
    """Install a seccomp filter for this process and its children; raise if it is not active."""
    buffer = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    shape = _Program(len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(shape))
    # io_uring_setup has this number everywhere; unfiltered, it answers EFAULT or ENOSYS to these arguments.
    if _libc.syscall(ctypes.c_long(425), 0, 0) != -1 or ctypes.get_errno() != 1:
        raise OSError("the seccomp filter is not active")


def landlock_abi() -> int:
    """Return the Landlock ABI version; 0 if unavailable."""
    try:
        return _syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str], listed: Iterable[str] = ()) -> int:
    """Restrict this process to these folders and files; return the Landlock ABI version."""
    ruleset, abi = make_rules(read, write, listed)
    try:
        enforce(ruleset)
    finally:
        os.close(ruleset)
    return abi


def enforce(ruleset: int) -> None:
    """Apply further rules to this process."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _syscall(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))


def make_rules(read: Iterable[str], write: Iterable[str], listed: Iterable[str] = ()) -> tuple[int, int]:
    """Build a rule set; return its descriptor and the ABI version. ``listed`` paths show names only."""
    abi = landlock_abi()
    if abi < 1:
        raise OSError("Landlock is not available")
    rights = (1 << RIGHTS[max(version for version in RIGHTS if version <= abi)]) - 1
    # Network rights since ABI 4, scoped abstract sockets and signals since ABI 6.
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
