"""What the kernel counts for each user, and the host's processes of that user need too."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import Attack, attack

_F = "host resources"

_COUNT = """
made = 0
try:
    while made < {most}: {make}; made += 1
except OSError as error: say(error)
pwned(made, {what!r}) if made > {few} else held("stopped at", made)
"""


def _take(name: str, what: str, make: str, setup: str = "", most: int = 64, few: int = 0) -> Attack:
    code = setup + _COUNT.format(make=make, most=most, few=few, what=what)
    gain = f"{what}, of which the user of the host has a limited number"
    # The number of signals is limited without walls too.
    return attack(_F, name, gain, code, control=name != "queued-signals")


_EVENT = """
class Event(ctypes.Structure): _fields_ = [("v", ctypes.c_void_p), ("s", ctypes.c_int), ("n", ctypes.c_int),
    ("rest", ctypes.c_char * 48)]
event, number = Event(None, 34, 0), ctypes.c_int()
"""
_QUEUE = """
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
info = ctypes.create_string_buffer(128)
ctypes.memmove(info, (ctypes.c_int * 3)(40, 0, -1), 12)
"""

HOST_RESOURCES: tuple[Attack, ...] = (
    _take("inotify-instances", "inotify instances", 'call("inotify_init1", 0)'),
    _take(
        "inotify-watches",
        "inotify watches",
        'call("inotify_add_watch", watch, b"d%d" % made, 2)',
        """
try: watch = call("inotify_init1", 0)
except OSError as error: watch = 0; say(error)
for n in range(200): os.mkdir(f"d{n}")
""",
        most=200,
    ),
    _take("asynchronous-io", "AIO requests", 'call("io_setup", 16, ctypes.byref(ctypes.c_ulong()))'),
    _take(
        "posix-timers",
        "POSIX timers",
        'call("timer_create", 1, ctypes.byref(event), ctypes.byref(number))',
        _EVENT,
        most=2000,
    ),
    _take(
        "queued-signals",
        "queued signals",
        'call("rt_sigqueueinfo", os.getpid(), 40, info)',
        _QUEUE,
        most=20_000,
        few=1000,
    ),
    attack(
        _F,
        "segments-of-others",
        "shared memory and queues of the host's processes, by number",
        """
for name, args in (("shmat", (0, None, 0)), ("shmctl", (0, 2, ctypes.create_string_buffer(256))),
                   ("msgctl", (0, 2, ctypes.create_string_buffer(256))), ("semctl", (0, 0, 12, 0)),
                   ("msgrcv", (0, ctypes.create_string_buffer(64), 8, 0, 0o4000)),
                   ("semtimedop", (0, ctypes.create_string_buffer(64), 1, None)),
                   ("mq_unlink", (b"rollgym-no-such-queue",))):
    reaches(name, *args)
""",
        control=True,
    ),
    attack(
        _F,
        "flush-every-disk",
        "the disks of the host kept busy",
        'try: call("sync"); pwned("sync")\nexcept OSError as error: held(error)',
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "signal-by-descriptor",
        "a process of the host killed by SIGIO",
        """
import fcntl
def own():
    source, sink = os.pipe()
    fcntl.fcntl(source, fcntl.F_SETOWN, STAGE["pid"])
    fcntl.fcntl(source, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(sink, b"x"); time.sleep(0.1)
    raise OSError("judged by the host")
attempt(own)
def lease():
    with open("leased", "w"): pass
    fd = os.open("leased", os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK); fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
attempt(lease)
""",
        control=True,
    ),
)
