"""Memory by every route: it is asked for 128 MB, and each attack wants 700 and more."""

from __future__ import annotations

from dataclasses import replace

from rollgym.sandbox.types import Level, Limits

from .model import Attack, Step, attack, run, survived, told_or_killed

_F = "memory"
_SMALL = Limits(seconds=6, memory_mb=128, processes=16, open_files=200, file_mb=32, disk_mb=32)

_CHUNKS = """
say("TRIED")
kept = []
try:
    while len(kept) < 75: kept.append({chunk}); {fill}
    time.sleep(0.3); pwned(10 * len(kept), "MB held")
except (MemoryError, OSError) as error: kept = len(kept); held("stopped at", 10 * kept, "MB", error)
"""
_FILL = """
say("TRIED")
written = 0
try:
    for i in range(40):
        with open("{place}/fill%d" % i, "wb") as f:
            for _ in range(20): f.write(bytes(1 << 20)); f.flush(); written += 1
    pwned(written, "MB written to {place}")
except OSError as error: held("stopped at", written, "MB", error)
"""


def _hold(
    name: str, gain: str, chunk: str, fill: str = "pass", setup: str = "", *, control: bool = False
) -> Attack:
    code = setup + _CHUNKS.format(chunk=chunk, fill=fill)
    # Segments of System V would stay on the host.
    needs = Level.LANDLOCK if name == "system-v-segments" else Level.NONE
    return attack(_F, name, gain, code, judge=told_or_killed, limits=_SMALL, control=control, needs=needs)


def _fill(name: str, place: str, *, needs: Level = Level.LANDLOCK) -> Attack:
    code = _FILL.format(place=place)
    return attack(_F, name, "memory as files", code, judge=told_or_killed, limits=_SMALL, needs=needs)


_UNLINKED = """
import array, mmap
say("TRIED")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kept, held_mb = [], 0
def new():
    fd = os.open("hidden", os.O_CREAT | os.O_RDWR, 0o600); os.unlink("hidden"); return fd
def fill(fd):
    for _ in range(10): os.write(fd, bytes(1 << 20))
    return fd
try:
    pairs = []
    {setup}
    while held_mb < 400:
        {step}; held_mb += 10
        time.sleep(0.02)
    time.sleep(0.3); pwned(held_mb, "MB of disk held, 32 allowed")
except OSError as error: held("stopped at", held_mb, "MB", error)
"""
_HIDDEN = {
    "unlinked-files": ("pass", "kept.append(fill(new()))"),
    "unlinked-files-hidden": ("LIBC.prctl(4, 0, 0, 0, 0)", "kept.append(fill(new()))"),
    "preallocated-file": (
        "kept.append(new())",
        'call("fallocate", kept[0], 1, held_mb << 20, 10 << 20)',
    ),
    "unlinked-mapped-files": (
        "pass",
        "fd = fill(new()); kept.append(LIBC.mmap(None, 4096, 1, 1, fd, 0)); os.close(fd)",
    ),
    "unlinked-sent-files": (
        "pairs = socket.socketpair()",
        'fd = fill(new()); pairs[0].sendmsg([b"x"], [(1, 1, array.array("i", [fd]))]); os.close(fd)',
    ),
    "unlinked-in-thread": (
        "stacks = []",
        "fd = fill(new()); stacks.append(ctypes.create_string_buffer(65536)); "
        "LIBC.clone(LIBC.pause, ctypes.c_void_p(ctypes.addressof(stacks[-1]) + 65024), 0x10B00, None); "
        "os.close(fd)",
    ),
}
"""By name: what comes first, and what then holds ten more megabytes that no folder shows. The last one keeps
them in a thread with descriptors of its own."""


def _hidden(name: str, how: tuple[str, str]) -> Attack:
    setup, step = how
    code = _UNLINKED.format(setup=setup, step=step)
    return attack(
        _F,
        name,
        "disk that no folder shows",
        code,
        judge=told_or_killed,
        limits=replace(_SMALL, processes=64),
        needs=Level.LANDLOCK,
        slow=name != "unlinked-files",
    )


_TOUCH = "kept[-1].write(bytes(10 << 20))"

MEMORY: tuple[Attack, ...] = (
    _hold("grow-a-list", "memory of the host", 'b"x" * (10 << 20)', control=True),
    _hold(
        "map-private",
        "memory beside the allocator",
        "mmap.mmap(-1, 10 << 20, flags=34)",
        _TOUCH,
        "import mmap\n",
    ),
    _hold(
        "map-shared", "memory no process owns", "mmap.mmap(-1, 10 << 20, flags=33)", _TOUCH, "import mmap\n"
    ),
    _hold(
        "memory-files",
        "memory no process maps",
        'call("memfd_create", b"x", 0)',
        "os.write(kept[-1], bytes(10 << 20))",
    ),
    _hold(
        "system-v-segments",
        "memory that outlives its process",
        'call("shmget", 0, 10 << 20, 0o1600)',
        "a = LIBC.shmat(kept[-1], None, 0); ctypes.memset(a, 1, 10 << 20); LIBC.shmdt(ctypes.c_void_p(a))",
        "LIBC.shmat.restype = ctypes.c_void_p\n",
    ),
    _hold(
        "locked-memory",
        "memory that cannot be swapped",
        'b"x" * (10 << 20)',
        "LIBC.mlock(kept[-1], ctypes.c_size_t(10 << 20))",
        "LIBC.mlockall(3)\n",
    ),
    _fill("fill-dev-shm", "/dev/shm"),
    _fill("fill-tmp", "/tmp"),
    _fill("fill-working-folder", ".", needs=Level.NONE),
    attack(
        _F,
        "many-children",
        "each process within its limit, all together far above",
        """
say("TRIED")
children = 0
for _ in range(12):
    try:
        if not os.fork():
            data = b"x" * (90 << 20); time.sleep(1.5); os._exit(0)
        children += 1
    except (OSError, MemoryError): break
ended = [os.waitpid(-1, 0)[1] for _ in range(children)]
whole = ended.count(0)
pwned(whole, "children of 90 MB") if whole > 5 else held(whole, "children of 90 MB lived")
""",
        judge=told_or_killed,
        limits=_SMALL,
        control=True,
    ),
    attack(
        _F,
        "children-without-main-thread",
        "memory of processes that look dead",
        """
import threading
say("TRIED")
def hold():
    time.sleep(0.3); data = b"x" * (90 << 20); time.sleep(2); os._exit(0)
children = 0
for _ in range(12):
    try:
        if not os.fork():
            threading.Thread(target=hold).start(); call("exit", 0)
        children += 1
    except (OSError, MemoryError): break
ended = [os.waitpid(-1, 0)[1] for _ in range(children)]
whole = ended.count(0)
pwned(whole, "children of 90 MB") if whole > 5 else held(whole, "children of 90 MB lived")
""",
        judge=told_or_killed,
        limits=_SMALL,
    ),
    *(_hidden(name, how) for name, how in _HIDDEN.items()),
    attack(
        _F,
        "socket-buffers",
        "memory of the kernel, which no process owns",
        """
say("TRIED")
for _ in range(11):
    try:
        if not os.fork(): break
    except OSError: break
pairs, sent = [], 0
try:
    while len(pairs) < 90:
        pair = socket.socketpair(); pairs.append(pair)
        for end in pair:
            end.setblocking(False)
            try:
                while True: sent += end.send(bytes(65536))
            except BlockingIOError: pass
except OSError as error: say(error)
time.sleep(1.5)
""",
        judge=survived,
        limits=_SMALL,
        needs=Level.LANDLOCK,
        slow=True,
    ),
    attack(
        _F,
        "hoard-pipes",
        "other sandboxes of the user, a judge's among them, without their input",
        run(
            """
import fcntl
hoard, size = [], 1 << 20
while size >= 4096 and len(hoard) < 100:
    try:
        hoard.append(os.pipe())
        if fcntl.fcntl(hoard[-1][1], 1031, size) < size: size //= 2
    except OSError: size //= 2
"""
        ),
        Step(
            "exec", 'held("its input is there") if len(sys.stdin.read()) == 60_000 else pwned()', "x" * 60_000
        ),
    ),
    attack(
        _F,
        "pipe-buffers",
        "memory of the kernel, which no process owns",
        """
import fcntl
say("TRIED")
for _ in range(11):
    try:
        if not os.fork(): break
    except OSError: break
try:
    while True:
        r, w = os.pipe(); os.set_blocking(w, False)
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: os.write(w, bytes(65536))
        except BlockingIOError: pass
except OSError as error: say(error)
time.sleep(1)
""",
        judge=survived,
        limits=_SMALL,
        needs=Level.LANDLOCK,
        slow=True,
    ),
    attack(
        _F,
        "empty-files",
        "memory of the kernel by names alone",
        """
say("TRIED")
count, end = 0, time.time() + 4
os.mkdir("names"); os.chdir("names")
try:
    while time.time() < end and count < 400_000:
        os.close(os.open(str(count), os.O_CREAT | os.O_WRONLY)); count += 1
except OSError as error: say(error)
pwned(count, "names") if count >= 200_000 else held("stopped at", count)
""",
        judge=told_or_killed,
        limits=_SMALL,
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "blind-the-watch",
        "memory while the watchdog is kept busy",
        run(
            """
say("TRIED")
import stat
pipes = [fd for fd in range(3,
    64) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode)]
for _ in range(2):
    if not os.fork():
        while True:
            for fd in pipes:
                try: os.write(fd, b"x" * 4096)
                except OSError: pass
time.sleep(0.3)
for _ in range(9):
    try:
        if not os.fork():
            data = b"x" * (90 << 20); time.sleep(2.5); os._exit(0)
    except (OSError, MemoryError): break
time.sleep(3)
"""
        ),
        judge=survived,
        limits=_SMALL,
        slow=True,
    ),
    attack(
        _F,
        "large-sparse-file",
        "a file larger than allowed",
        """
def grow():
    with open("sparse", "wb") as f: f.truncate(1 << 40); return os.fstat(f.fileno()).st_size
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt(grow)
""",
        limits=_SMALL,
        control=True,
    ),
    attack(
        _F,
        "deep-recursion",
        "a crash of the interpreter that takes the worker along",
        'say("TRIED"); sys.setrecursionlimit(10 ** 9)\nf = lambda g: g(g)\neval("(" * 90 + ")" * 90)\nf(f)',
        judge=survived,
        limits=_SMALL,
    ),
)
