"""The way between host and worker: forged results, broken frames, what is left in memory."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import BRIEF, Attack, Step, attack, run, survived, told, truthful

_F = "control channel"
_FRAMES = """
import json, struct
def frames():
    claims = [{"ok": 1, "exit": 0, "exit_code": 0, "rc": 0, "code": 0, "ended": "exit",
        "stdout": "FORGED", "stderr": "",
               "state": "committed", "done": 1, "pid": pid, "status": 0}
               for pid in (os.getpid(), 1, -1, 2 ** 40)]
    for claim in claims:
        text = json.dumps(claim).encode()
        yield struct.pack(">I", len(text)) + text
        yield struct.pack(">II", len(text), 0) + text
        yield struct.pack("<I", len(text)) + text
        yield text + b"\\n"
def targets(first=3):
    for fd in range(first, 1024):
        try: os.fstat(fd); os.set_blocking(fd, False)
        except OSError: continue
        yield fd
def put(fd, data):
    try: os.write(fd, data)
    except OSError: pass
"""
_FORGE = """
say("TRIED")
for fd in targets():
    for frame in frames(): put(fd, frame)
"""
_SIZES = """
say("TRIED")
for fd in targets():
    for head in (b"\\xff" * 8, b"\\x00\\x00\\x00\\x01\\xff\\xff\\xff\\xff", b"\\x7f" * 4, b"\\x00" * 64):
        put(fd, head)
        put(fd, b"[" * 60000)
"""
_MARKED = "rgm-left-behind-"
_LEFT = """
import gc, re
say("TRIED")
needle = re.compile(rb"rgm-left-[b]ehind-[0-9a-f]{8}")
found = set()
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)):
        for part in (thing.values() if isinstance(thing, dict) else thing):
            if isinstance(part, str): part = part.encode("utf-8", "replace")
            if isinstance(part, (bytes, bytearray)): found.update(needle.findall(part))
try: memory, maps = open("/proc/self/mem", "rb", 0), open("/proc/self/maps").readlines()
except OSError as error: maps = []; held("only its objects were looked at:", error)
for line in maps:
    where, rights = line.split()[:2]
    start, end = (int(x, 16) for x in where.split("-"))
    if rights[0] != "r" or end - start > 1 << 28: continue
    try: memory.seek(start); found.update(needle.findall(memory.read(end - start)))
    except (OSError, ValueError, OverflowError): continue
pwned(sorted(found)[:3]) if found else held("nothing of the last execution is left")
"""
_SPY = """
# Say that the turn is over, and go on in the session's place: whatever runs next is looked at.
import json
say("TRIED")
told, frame, here = {}, sys._getframe(), os.getcwd()
while frame is not None: told.update(frame.f_locals); frame = frame.f_back
turn = told.get("order", {}).get("turn", 1) if isinstance(told.get("order"), dict) else 1
for fd in range(3, 64):
    try: os.write(fd, json.dumps({"turn": turn, "code": 0, "pid": os.getpid()}).encode() + b"\\n")
    except OSError: pass
top, end = os.path.dirname(here), time.time() + 3
while time.time() < end:
    for folder in os.listdir(top):
        path = os.path.join(top, folder)
        if path == here: continue
        try: seen = os.listdir(path)
        except OSError: continue
        for name in seen:
            try: text = open(os.path.join(path, name)).read()
            except OSError: continue
            open(here + "/loot", "w").write(name + text)
    for pid in others():
        try: where = os.readlink(f"/proc/{pid}/cwd"); memory = open(f"/proc/{pid}/mem", "rb")
        except OSError: continue
        if pid not in (1, os.getppid()) and where not in (here, "/"):
            open(here + "/loot", "w").write(f"memory of {pid} in {where}")
"""
_FRAMES_UP = """
say("TRIED")
seen, frame = [], sys._getframe()
while frame is not None:
    for names in (frame.f_globals, frame.f_locals):
        seen += [v for v in names.values() if isinstance(v, (str, bytes, bytearray))]
    frame = frame.f_back
import __main__
seen += [v for v in vars(__main__).values() if isinstance(v, (str, bytes, bytearray))]
texts = [bytes(v) if isinstance(v, bytearray) else v if isinstance(v, bytes) else v.encode("utf-8",
    "replace") for v in seen]
hits = [t[:60] for t in texts if b"rgm-left-" + b"behind-" in t]
pwned(hits[:2]) if hits else held("nothing of the last execution in", len(seen), "names")
"""

CHANNEL: tuple[Attack, ...] = (
    attack(
        _F,
        "forge-result",
        "a failed program counts as passed",
        _FRAMES + _FORGE + "os._exit(7)",
        judge=truthful,
    ),
    attack(
        _F,
        "forge-result-in-output",
        "a failed program counts as passed",
        _FRAMES + 'say("TRIED")\nfor f in frames(): os.write(1, f); os.write(2, f)\nos._exit(7)',
        judge=truthful,
    ),
    attack(
        _F,
        "forge-result-through-proc",
        "a failed program counts as passed",
        _FRAMES
        + """
say("TRIED")
for pid in {1, os.getppid()}:
    for fd in range(64):
        try: put(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), next(frames()))
        except OSError: continue
        pwned("the worker's descriptor", fd)
os._exit(7)
""",
        judge=truthful,
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "forge-session-status",
        "a session that says what did not happen",
        run("kept = 41"),
        run(_FRAMES + _FORGE + "time.sleep(0.2)\nsys.stdout.flush()\nos._exit(7)"),
        run('say("TRIED")'),
        judge=survived,
    ),
    attack(_F, "oversize-frames", "a host or worker that reads forever", _FRAMES + _SIZES, judge=survived),
    attack(
        _F,
        "oversize-session-frames",
        "a host or worker that reads forever",
        run(_FRAMES + _SIZES),
        run('say("TRIED")'),
        judge=survived,
    ),
    attack(
        _F,
        "replace-descriptors",
        "a worker that waits forever",
        run('say("TRIED")\nn = os.open("/dev/null", 2)\nfor fd in range(3, 128): os.dup2(n, fd)'),
        run('say("TRIED")'),
        judge=survived,
    ),
    attack(
        _F,
        "exit-in-session",
        "a turn that never tells",
        run('say("TRIED"); os._exit(0)'),
        run('say("TRIED")'),
        judge=survived,
    ),
    attack(
        _F,
        "replace-session-process",
        "another program in the session's place",
        run('say("TRIED"); os.execv("/bin/sh", ["sh", "-c", "sleep 30"])'),
        run('say("TRIED")'),
        judge=survived,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _F,
        "patch-the-runner",
        "code of the worker that reports, changed from inside",
        """
say("TRIED")
import builtins, json, struct
frame = sys._getframe().f_back
while frame is not None:
    for name, value in list(frame.f_globals.items()):
        if callable(value) and not name.startswith("__"): frame.f_globals[name] = lambda *a, **k: 0
    frame = frame.f_back
json.dumps = lambda *a, **k: '{"exit": 0}'
sys.exit = os._exit = lambda code=0: None
raise SystemExit(7)
""",
        judge=survived,
    ),
    attack(
        _F,
        "memory-of-last-execution",
        "hidden tests that ran before",
        Step(
            "exec",
            f'code = "{_MARKED}c0dec0de"; import sys; sys.stdin.read(); say("{_MARKED}00ff00ff")',
            f"{_MARKED}57d157d1",
        ),
        _LEFT,
    ),
    attack(
        _F,
        "names-of-last-execution",
        "hidden tests that ran before",
        Step("exec", f'code = "{_MARKED}c0dec0de"; import sys; sys.stdin.read()', f"{_MARKED}57d157d1"),
        _FRAMES_UP,
    ),
    attack(
        _F,
        "session-spies-on-execution",
        "hidden tests that run beside it",
        run(_SPY),
        Step("exec", 'time.sleep(0.3); say("TRIED")', files=(("hidden.py", _MARKED.encode()),)),
        run(
            """
try: loot = open("loot").read()
except OSError as error: held(error)
else: pwned(loot)
"""
        ),
        Step("read", "loot"),
        judge=told,
        slow=True,
    ),
    attack(
        _F,
        "memory-of-session",
        "what the session of another agent knew",
        run(f'kept = "{_MARKED}5e55104e"; say(kept)'),
        Step("reset"),
        _LEFT,
    ),
)
