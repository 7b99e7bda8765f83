"""System calls that untrusted code has no need of: each is a way to bugs of the kernel, or out."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import Attack, attack

_F = "kernel"
_USER, _MOUNT, _PID, _NET, _IPC, _UTS, _CGROUP, _TIME = (
    0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80,
)  # fmt: skip

# name: (gain, arguments): wrong on purpose where a right call would change the host.
_CALLS = {
    "io_uring_setup": ("system calls past the filter", "4, ctypes.create_string_buffer(200)"),
    "io_setup": ("memory in the kernel, from a number shared by all users",
        "16, ctypes.byref(ctypes.c_ulong())"),
    "file_setattr": ("attributes of files of the host",
        "-100, b'.', ctypes.create_string_buffer(24), 24, 0"),
    "file_getattr": ("a call that no filter knew",
        "-100, b'/', ctypes.create_string_buffer(24), 24, 0"),
    "cachestat": ("what others have read",
        "0, ctypes.create_string_buffer(16), ctypes.create_string_buffer(40), 0"),
    "statmount": ("mounts of the host", "ctypes.create_string_buffer(b'\\x20', 32), None, 0, 0"),
    "listmount": ("mounts of the host", "ctypes.create_string_buffer(b'\\x20', 32), None, 0, 0"),
    "set_mempolicy_home_node": ("memory of other nodes", "0, 0, 0, 1"),
    "lsm_set_self_attr": ("the label of a security module", "0, None, 0, 1"),
    "keyctl": ("keys of the kernel", "0, -3, 1"),
    "add_key": ("memory and messages in the kernel", 'b"user", b"rollgym", b"x", 1, -2'),
    "request_key": ("a helper program started by the kernel", 'b"user", b"rollgym", None, 0'),
    "bpf": ("programs in the kernel", "0, ctypes.create_string_buffer(120), 120"),
    "perf_event_open": ("what others compute",
        "ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x70', 128), 0, -1, -1, 0"),
    "userfaultfd": ("races in the kernel won at will", "1"),
    "mount": ("other files", 'b"none", b"/rollgym-none", b"tmpfs", 0, None'),
    "umount2": ("what lies below", 'b"/rollgym-none", 2'),
    "pivot_root": ("another root", 'b"/rollgym-none", b"/rollgym-none"'),
    "chroot": ("another root", 'b"/"'),
    "fsopen": ("other files", 'b"tmpfs", 0'),
    "open_tree": ("mounts taken along", '-100, b"/", 1'),
    "move_mount": ("mounts moved", '-1, b"", -1, b"", 0'),
    "mount_setattr": ("a writable root", '-100, b"/", 0, ctypes.create_string_buffer(32), 32'),
    "personality": ("addresses that are not random", "0x0040000"),
    "init_module": ("the kernel itself", 'ctypes.c_void_p(1), 1, b""'),
    "finit_module": ("the kernel itself", '0, b"", 0'),
    "kexec_load": ("another kernel", "0, 99999, None, 0"),
    "open_by_handle_at": ("any file of the disk by number",
        "-100, ctypes.create_string_buffer(b'\\x08\\0\\0\\0\\1', 64), 0"),
    "name_to_handle_at": (
        "numbers of files",
        "-100, b'/', ctypes.create_string_buffer(b'\\x80', 160), ctypes.create_string_buffer(8), 0",
    ),
    "fanotify_init": ("what others open", "0, 0"),
    "memfd_secret": ("memory that cannot be inspected", "0"),
    "msgget": ("messages to later executions", "0, 0o1600"),
    "semget": ("traces for later executions", "0, 1, 0o1600"),
    "kcmp": ("addresses of the kernel", "os.getpid(), os.getppid(), 0, 0, 0"),
    "quotactl": ("limits of the disk", "0x800001 << 8, None, 0, None"),
    "swapon": ("memory of the machine", "None, 0"),
    "reboot": ("the machine", "0, 0, 0, 0"),
    "syslog": ("what the kernel says", "10, None, 0"),
    "acct": ("records of all processes", "ctypes.c_void_p(1)"),
    "settimeofday": ("the clock", "None, None"),
    "sethostname": ("the name of the machine", "None, -1"),
    "migrate_pages": ("the worker's memory moved",
        "os.getppid(), 64, (ctypes.c_ulong * 1)(1), (ctypes.c_ulong * 1)(1)"),
}  # fmt: skip
_WITHOUT_WALLS = ("add_key", "name_to_handle_at", "personality")
_STAYS = ("msgget", "semget")
"""What they make would stay on the host."""

_UNSHARE = """
for name, flag in {flags}.items():
    def leave(): pwned(name, call("unshare", flag))
    in_child(leave)
"""
_CLONE = """
def child(): pass
for flag in {flags}:
    try:
        pid = call("clone", flag | 17, 0, 0, 0, 0)
        if not pid: os._exit(0)
        os.waitpid(pid, 0); pwned("clone", hex(flag))
    except OSError as error: held(error)
"""
_CLONE3 = """
arguments = (ctypes.c_ulonglong * 11)(0x10000000, 0, 0, 0, 17)
try:
    pid = call("clone3", arguments, 88)
    if not pid: os._exit(0)
    os.waitpid(pid, 0); pwned("clone3 with a new user namespace")
except OSError as error: held(error)
"""
_SETNS = """
for pid in {1, os.getppid(), STAGE["pid"]}:
    for name in ("mnt", "net", "pid", "user"):
        def join():
            fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            pwned(pid, name, call("setns", fd, 0))
        in_child(join)
"""
_OLD_ABI = """
import mmap
def old():
    if platform.machine() != "x86_64": raise OSError("no 32-bit calls on this machine")
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(b"\\x53\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\x5b\\xc3")
    enter = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    got = enter()
    pwned("a 32-bit getpid gave", got) if got == os.getpid() else held(got)
in_child(old)
"""
_X32 = """
def x32():
    if platform.machine() != "x86_64": raise OSError("no x32 on this machine")
    got = LIBC.syscall(ctypes.c_long(0x40000000 | 39))
    pwned("an x32 getpid gave", got) if got > 0 else held("x32", os.strerror(ctypes.get_errno()))
in_child(x32)
"""
_FUTURE = """
known = []
for number in (*range(337, 424), *range(463, 1024)):
    got = LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    if got >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM): known.append(number)
pwned("the kernel knows", known) if known else held("the kernel knows none")
"""
_FLAGS = """
import fcntl
open("mine", "w").close()
fd = os.open("mine", os.O_RDONLY)
for request, size in ((0x40086602, 8), (0x401C5820, 28), (0x40806685, 128)):
    try: fcntl.ioctl(fd, request, bytes(size)); pwned(hex(request))
    except OSError as error:
        held(error) if error.errno == errno.EPERM else pwned("reached the kernel:", hex(request), error)
"""
_SECCOMP = """
class Program(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("p", ctypes.c_void_p)]
before = LIBC.prctl(21, 0, 0, 0, 0)
LIBC.prctl(22, 0, 0, 0, 0); LIBC.prctl(38, 0, 0, 0, 0)
after, privileges = LIBC.prctl(21, 0, 0, 0, 0), LIBC.prctl(39, 0, 0, 0, 0)
held("seccomp", after, "no_new_privs", privileges) if after == 2 and privileges == 1 \\
    else pwned("seccomp", before, after, "no_new_privs", privileges)
"""


def _call(name: str) -> Attack:
    gain, arguments = _CALLS[name]
    code = f"reaches({name!r}, {arguments})"
    shown, real = name.replace("_", "-"), name in _WITHOUT_WALLS
    return attack(_F, shown, gain, code, control=real, needs=Level.LANDLOCK if name in _STAYS else Level.NONE)


KERNEL: tuple[Attack, ...] = (
    *map(_call, _CALLS),
    attack(
        _F,
        "unshare",
        "capabilities in new namespaces",
        _UNSHARE.format(
            flags={
                "user": _USER,
                "mount": _MOUNT,
                "pid": _PID,
                "net": _NET,
                "ipc": _IPC,
                "uts": _UTS,
                "cgroup": _CGROUP,
                "time": _TIME,
                "user and mount": _USER | _MOUNT,
            }  # fmt: skip
        ),
        control=True,
    ),
    attack(
        _F,
        "clone-namespaces",
        "capabilities in new namespaces",
        _CLONE.format(flags=[_USER, _USER | _NET, _USER | _PID | _MOUNT]),
        control=True,
    ),
    attack(_F, "clone3-namespaces", "the same, where a filter cannot look", _CLONE3, control=True),
    attack(_F, "setns", "namespaces of others", _SETNS),
    attack(_F, "int80", "system calls past a filter for 64 bits", _OLD_ABI),
    attack(_F, "x32", "system calls past a filter for 64 bits", _X32),
    attack(_F, "numbers-of-the-future", "calls that came after the filter", _FUTURE, control=True),
    attack(
        _F,
        "attributes-of-files",
        "files of the host that it may read made unchangeable",
        _FLAGS,
        control=True,
    ),
    attack(_F, "take-walls-down", "everything behind the filter", _SECCOMP, control=True),
)
