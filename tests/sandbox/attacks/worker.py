"""The process that runs the code, and other neighbors: traced, read, robbed, starved."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import Attack, attack

_F = "worker"

WORKER: tuple[Attack, ...] = (
    attack(
        _F,
        "trace-worker",
        "the worker's memory, and through it every result",
        """
for pid in {1, os.getppid()}:
    for request in (16, 0x4206): reaches("ptrace", request, pid, 0, 0)
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "read-worker-memory",
        "code and secrets of others",
        """
buffer = ctypes.create_string_buffer(8)
class Vec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here = Vec(ctypes.addressof(buffer), 8)
for pid in {1, os.getppid(), STAGE["pid"]}:
    for name in ("process_vm_readv", "process_vm_writev"):
        try: pwned(call(name, pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0))
        except OSError as error: pwned(error) if error.errno == errno.EFAULT else held(error)
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "steal-descriptor",
        "the worker's control channel",
        """
for pid in {1, os.getppid(), STAGE["pid"]}:
    try: handle = call("pidfd_open", pid, 0)
    except OSError as error: held(error); continue
    for fd in range(8): attempt(lambda: call("pidfd_getfd", handle, fd, 0))
""",
    ),
    attack(
        _F,
        "proc-of-others",
        "memory, environment and descriptors of other processes",
        """
held("looking")
for pid in others():
    if open(f"/proc/{pid}/comm").read().strip() == STAGE["mark"]: continue
    for name in ("environ", "mem", "maps", "auxv"):
        try: pwned(pid, name, open(f"/proc/{pid}/{name}", "rb").read(1 if name == "mem" else 4000)[:200])
        except OSError as error:
            pwned(pid, name, error) if error.errno == errno.EIO else held(pid, name, error)
    attempt(lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(lambda: os.readlink(f"/proc/{pid}/root"))
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "proc-of-worker-written",
        "the worker chosen by the out-of-memory killer, renamed, slowed",
        """
for pid in {1, os.getppid()}:
    for name in ("oom_score_adj", "oom_adj", "comm", "coredump_filter", "mem", "clear_refs",
        "timerslack_ns", "autogroup",
                 "uid_map", "setgroups", "sched", "fd/0", "fd/1", "fd/2", "fd/3", "fd/4", "fd/5"):
        attempt(lambda: (pid, name, os.write(os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_NONBLOCK),
            b"50000")))
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "limit-worker",
        "the worker starved",
        """
old = (ctypes.c_ulong * 2)()
for pid in {1, os.getppid()}:
    for what in (0, 1, 6, 7, 9):
        try: call("prlimit64", pid, what, None, old); pwned(call("prlimit64", pid, what, old, None))
        except OSError as error: held(error)
""",
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "slow-worker",
        "the worker scheduled behind all others",
        """
for pid in {1, os.getppid()}:
    attempt(lambda: ("setpriority", os.setpriority(os.PRIO_PROCESS, pid, 19)))
    attempt(lambda: ("group", os.setpriority(os.PRIO_PGRP, pid, 19)))
    attempt(lambda: ("scheduler", os.sched_setscheduler(pid, 5, os.sched_param(0))))
    attempt(lambda: ("affinity", os.sched_setaffinity(pid, {0})))
    attempt(lambda: ("ioprio", call("ioprio_set", 1, pid, 3 << 13)))
attempt(lambda: ("user", os.setpriority(os.PRIO_USER, os.getuid(), 1)))
""",
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "own-priority",
        "more of the machine than others",
        """
attempt(lambda: os.nice(-5))
attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt(lambda: call("ioprio_set", 1, 0, 1 << 13))
""",
        needs=Level.LANDLOCK,
    ),
)
