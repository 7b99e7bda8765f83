"""A session that says its turn is over and goes on: memory, CPU and disk while no turn is watched."""

from __future__ import annotations

from rollgym.sandbox.types import Level, Limits

from .model import Attack, Step, attack, idle, run, told

_F = "between turns"
_SMALL = Limits(seconds=6, memory_mb=128, processes=16, open_files=128, file_mb=32, disk_mb=32)

_END_TURN = """
import json
def end_turn(pid=None):
    told, frame = {}, sys._getframe()
    while frame is not None: told.update(frame.f_locals); frame = frame.f_back
    turn = told["order"]["turn"] if isinstance(told.get("order"), dict) else 1
    for fd in range(3, 64):
        try: os.write(fd, json.dumps({"turn": turn, "code": 0, "pid": pid or os.getpid()}).encode() + b"\\n")
        except OSError: pass
def done(number):
    with open("progress", "r+b" if os.path.exists("progress") else "wb") as f: f.write(b"%12d" % number)
def burn():
    start, end = time.process_time(), time.time() + 2.5
    while time.time() < end: done((time.process_time() - start) * 1000)
say("TRIED"); done(0)
"""
_MEMORY = """
end_turn()
time.sleep(0.3)
kept = 0
for _ in range(8):
    try:
        if not os.fork(): data = b"x" * (100 << 20); time.sleep(3); os._exit(0)
        kept += 100
    except (OSError, MemoryError): break
    time.sleep(0.05); done(kept)
time.sleep(3)
"""
_DISK = """
end_turn()
time.sleep(0.2)
for count in range(100):
    file = os.open("fill%d" % count, os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(file, bytes(2 << 20)); os.close(file); done(2 * count + 2); time.sleep(0.005)
"""
_WAKE = """
# A stopped process runs again when SIGCONT comes: from a timer, a pipe, a folder, its parent or its group.
import fcntl
for s in (signal.SIGHUP, signal.SIGIO): signal.signal(s, signal.SIG_IGN)
signal.signal(signal.SIGCONT, lambda *_: None)
class Event(ctypes.Structure): _fields_ = [("v", ctypes.c_void_p), ("s", ctypes.c_int), ("n", ctypes.c_int),
    ("rest", ctypes.c_char * 48)]
class Spec(ctypes.Structure): _fields_ = [("numbers", ctypes.c_long * 4)]
def timer():
    number = ctypes.c_int()
    call("timer_create", 1, ctypes.byref(Event(None, signal.SIGCONT, 0)), ctypes.byref(number))
    spec = Spec((ctypes.c_long * 4)(0, 20_000_000, 0, 20_000_000))
    call("timer_settime", number.value, 0, ctypes.byref(spec), None)
def pipes(fd):
    fcntl.fcntl(fd, 10, signal.SIGCONT); fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
def folder():
    fd = os.open(".", os.O_RDONLY)
    fcntl.fcntl(fd, 10, signal.SIGCONT); fcntl.fcntl(fd, 1026, 0x8000003F)
if not os.fork():
    os.setpgid(0, 0)
    LIBC.prctl(1, signal.SIGCONT, 0, 0, 0)
    for way in (timer, folder, *(lambda fd=fd: pipes(fd) for fd in range(64))):
        try: way()
        except OSError: pass
    say("x" * 3000)
    if not call("clone", signal.SIGCONT, 0, 0, 0, 0): time.sleep(60); os._exit(0)
    end_turn(); burn(); os._exit(0)
time.sleep(3)
"""
_CONTINUE = """
say("TRIED")
for pid in others():
    try: os.kill(pid, signal.SIGCONT)
    except OSError: pass
"""
_KNOWN = "rgm-session-"
_READ = """
import re
needle = re.compile(rb"rgm-[s]ession-[0-9a-f]{8}")
say("TRIED")
try: pids = others()
except OSError as error: pids = []; held(error)
for pid in pids:
    try: maps, memory = open(f"/proc/{pid}/maps").readlines(), open(f"/proc/{pid}/mem", "rb", 0)
    except OSError as error: held(error); continue
    for line in maps:
        where, rights = line.split()[:2]
        start, end = (int(x, 16) for x in where.split("-"))
        if rights[0] != "r" or end - start > 1 << 28: continue
        try: memory.seek(start); found = needle.findall(memory.read(end - start))
        except (OSError, ValueError, OverflowError): continue
        if found: pwned(pid, found[:2])
    for name in ("environ", "auxv"):
        try: open(f"/proc/{pid}/{name}", "rb").read(1); pwned(pid, name)
        except OSError as error: held(error)
"""


def _between(name: str, gain: str, code: str, *more: Step, needs: Level = Level.LANDLOCK) -> Attack:
    steps = (run(_END_TURN + code), *more, Step("pause", "1.2"), Step("read", "progress"))
    return attack(_F, name, gain, *steps, judge=idle, limits=_SMALL, needs=needs, slow=True)


BETWEEN_TURNS: tuple[Attack, ...] = (
    _between("cpu-between-turns", "CPU time that no turn is charged for", "end_turn(); burn()"),
    _between("memory-between-turns", "memory while no turn is watched", _MEMORY),
    _between("disk-between-turns", "disk while no turn is watched", _DISK),
    _between("wake-between-turns", "a session that cannot be stopped", _WAKE),
    _between(
        "execution-wakes-session",
        "a session that another execution lets run",
        "end_turn(); burn()",
        Step("exec", _CONTINUE),
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "memory-of-parked-session",
        "what a session knows, read by an execution beside it",
        run(f'kept = "{_KNOWN}" + "5e55104e"; kept = [kept * 3]; say("TRIED")'),
        _READ,
        judge=told,
    ),
    attack(
        _F,
        "memory-of-session-rolled-back",
        "what a session knows, read by an execution beside it",
        run(f'kept = "{_KNOWN}" + "5e55104e"; kept = [kept * 3]; say("TRIED")'),
        run("kept = kept * 2; os._exit(1)"),
        _READ,
        judge=told,
    ),
)
