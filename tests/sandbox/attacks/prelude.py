"""What stands before every attack program: the stage it plays on, and a few words to try and tell."""

from __future__ import annotations

# name: (x86_64, aarch64); from 424 on they are the same everywhere.
NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "cachestat": (451, 451),
    "capset": (126, 91),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "exit": (60, 93),
    "fallocate": (285, 47),
    "fanotify_init": (300, 262),
    "file_getattr": (468, 468),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "getpid": (39, 172),
    "getxattrat": (464, 464),
    "init_module": (175, 105),
    "inotify_add_watch": (254, 27),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "listmount": (458, 458),
    "lsm_set_self_attr": (460, 460),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semtimedop": (220, 192),
    "set_mempolicy_home_node": (450, 450),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "statmount": (457, 457),
    "swapon": (167, 224),
    "sync": (162, 81),
    "syslog": (103, 116),
    "timer_create": (222, 107),
    "timer_settime": (223, 110),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}

PRELUDE = """\
import ctypes, errno, os, platform, signal, socket, sys, time
STAGE = {stage!r}
NUMBERS = {numbers!r}
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.prctl(15, STAGE["mark"].encode(), 0, 0, 0)
def say(*words): print(*words, flush=True)
def pwned(*words): say("PWNED", *words)
def held(*words): say("HELD", *words)
def attempt(action):
    try: got = action()
    except (OSError, MemoryError, RuntimeError) as error: held(type(error).__name__, error); return None
    pwned(repr(got)[:200]); return got
def call(name, *args):
    number = NUMBERS[name][platform.machine() == "aarch64"]
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    got = LIBC.syscall(ctypes.c_long(number), *plain)
    if got < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()) + " (" + name + ")")
    return got
def reaches(name, *args):
    try: pwned(name, call(name, *args))
    except OSError as error:
        known = error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT)
        held(error) if known else pwned("reached the kernel:", error)
def in_child(action):
    pid = os.fork()
    if not pid:
        try: action()
        except (OSError, MemoryError, RuntimeError) as error: held(error)
        finally: sys.stdout.flush(); os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status): held("killed by signal", os.WTERMSIG(status))
def neighbors():
    found = others()
    return [1, STAGE["pid"], *found] if len(found) < 20 else [STAGE["pid"]]
def others():
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
"""


def program(code: str, stage: dict[str, object]) -> str:
    """A program as it is sent."""
    return PRELUDE.format(stage=stage, numbers=NUMBERS) + code.strip("\n") + "\n"
