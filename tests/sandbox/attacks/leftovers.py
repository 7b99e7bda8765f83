"""What one execution leaves for the next, and a session after its end."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import BRIEF, Attack, Step, run, survived
from .model import attack as plain_attack

_F = "leftovers"
_PLACES = (
    '{os.getcwd(), os.path.dirname(os.getcwd()), "/tmp", "/work", "/dev/shm", "/var/tmp", "/run", '
    'os.environ.get("HOME", "/tmp"), os.environ.get("TMPDIR", "/tmp")}'
)
_PLANT = f"""
say("TRIED")
for place in {_PLACES}:
    try: open(place + "/left-" + STAGE["mark"], "w").write("x")
    except OSError: pass
"""
_FIND = f"""
held("looking")
for place in {_PLACES}:
    for here, _, names in os.walk(place):
        for name in names:
            if STAGE["mark"] in name: pwned("left:", os.path.join(here, name))
"""
_SHADOW = f"""
say("TRIED")
for place in {_PLACES}:
    for name in ("json", "random", "sitecustomize", "usercustomize", "colorsys"):
        try: open(f"{{place}}/{{name}}.py",
            "w").write("shadow = 'PWNED: code of another execution runs here'; print(shadow)")
        except OSError: pass
"""


def attack(*words: str | Step, **more: object) -> Attack:
    """Never tried without walls: the leftovers would be the host's."""
    return plain_attack(_F, *words, needs=Level.LANDLOCK, **more)  # type: ignore[arg-type]


_QUEUE = """
name = b"rollgym-" + STAGE["mark"].encode()
"""

LEFTOVERS: tuple[Attack, ...] = (
    attack("files", "messages to later executions", _PLANT, _FIND),
    attack(
        "locked-folders",
        "files that cannot be cleared away",
        """
say("TRIED")
for place in ("/tmp", "."):
    os.makedirs(place + "/a/b/c"); open(place + "/a/b/c/left-" + STAGE["mark"], "w").close()
    for name in ("/a/b/c", "/a/b", "/a"): os.chmod(place + name, 0)
os.mkdir("/tmp/x"); os.chmod("/tmp/x", 0o111)
""",
        _FIND,
    ),
    attack(
        "locked-top",
        "folders that later executions cannot use",
        """
say("TRIED")
for place in ("/tmp", "/work", "/dev/shm", os.getcwd(), os.path.dirname(os.getcwd())):
    try: os.chmod(place, 0)
    except OSError as error: held(place, error)
""",
        """
import tempfile
for place in (None, os.getcwd()):
    try: tempfile.TemporaryFile(dir=place).close(); held("usable", place)
    except OSError as error: pwned("not usable:", place, error)
""",
    ),
    attack(
        "deep-folders",
        "a clean-up that recurses too deep",
        """
say("TRIED")
for place in ("/tmp", os.getcwd()):
    os.chdir(place)
    for _ in range(3000): os.mkdir("d"); os.chdir("d")
    open("left-" + STAGE["mark"], "w").close()
""",
        """
held("looking")
for place in ("/tmp", os.getcwd()):
    left = [n for n in os.listdir(place) if n == "d" or n.startswith(".")]
    if left: pwned("left in", place, left[:3])
""",
        slow=True,
    ),
    attack(
        "next-folder-taken",
        "a folder in the place of the next one",
        r"""
import re
say("TRIED")
number = re.search(r"\d+$", os.getcwd())
base = os.getcwd()[: number.start()] if number else os.getcwd()
for i in range(int(number.group()) + 1 if number else 0, (int(number.group()) if number else 0) + 40):
    try: os.mkdir(f"{base}{i}"); open(f"{base}{i}/json.py", "w").write("shadow = 1")
    except OSError as error: held(error); break
""",
        """
import json
pwned("code of another execution") if hasattr(json, "shadow") else held("its own folder")
""",
    ),
    attack(
        "names-of-the-sweeper",
        "a clean-up that stumbles over its own names",
        """
say("TRIED")
for place in ("/tmp", os.getcwd(), os.path.dirname(os.getcwd())):
    for pid in (1, os.getppid()):
        for i in range(40):
            try: os.makedirs(f"{place}/.swept-{pid}-{i}/x/y"); os.makedirs(f"{place}/d{i}/a/b/c")
            except OSError: break
""",
        """
held("looking")
for place in (os.getcwd(), "/tmp"):
    left = [n for n in os.listdir(place) if n.startswith((".swept", "d")) and n[-1].isdigit()]
    if left: pwned(place, left[:4])
""",
    ),
    attack(
        "odd-names",
        "a clean-up that stumbles over a name",
        """
say("TRIED")
for place in (b"/tmp/", b"./"):
    for name in (b"\\xff\\xfe", b"-rf", b" ", b"\\n", b"x" * 255, b"..." , b"\\x1b[2J"):
        os.mkdir(place + name + STAGE["mark"].encode() if len(name) < 200 else place + name)
    os.symlink(b"/",
        place + b"root"); os.mkfifo(place + b"pipe"); socket.socket(socket.AF_UNIX).bind(place + b"socket")
""",
        """
held("looking")
for place in (b"/tmp", b"."):
    names = os.listdir(place)
    if names and any(STAGE["mark"].encode() in n or n in (b"root", b"pipe", b"socket",
        b"x" * 255) for n in names): pwned(names)
""",
    ),
    attack(
        "patched-builtins",
        "tests that later pass",
        """
import builtins, json
say("TRIED")
builtins.len = lambda x: 42; builtins.rgm = 1; json.dumps = lambda *a: "forged"
sys.modules["rgm"] = json; os.environ["RGM"] = "1"
sys.setrecursionlimit(99999); sys.path.insert(0, "/rgm"); signal.signal(signal.SIGUSR1, signal.SIG_IGN)
""",
        """
import builtins, json
wrong = [len([]) != 0, hasattr(builtins, "rgm"), json.dumps(1) != "1", "rgm" in sys.modules,
    "RGM" in os.environ, "/rgm" in sys.path,
         signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN]
pwned(wrong) if any(wrong) else held("all as new")
""",
    ),
    attack(
        "patched-by-session",
        "tests that later pass",
        run(
            """
import builtins
say("TRIED")
builtins.len = lambda x: 42; builtins.rgm = 1; sys.modules["rgm"] = os
"""
        ),
        """
import builtins
wrong = [len([]) != 0, hasattr(builtins, "rgm"), "rgm" in sys.modules]
pwned(wrong) if any(wrong) else held("all as new")
""",
    ),
    attack(
        "shadow-modules",
        "its own modules in another execution",
        run(_SHADOW),
        _SHADOW,
        """
import random, json, colorsys
bad = [m.__name__ for m in (random, json, colorsys) if hasattr(m, "shadow")]
pwned(bad) if bad else held("modules of the library")
""",
    ),
    attack(
        "state-after-reset",
        "another agent's names and files",
        run('kept = 41; os.environ["RGM"] = "1"; os.chdir("/tmp")' + _PLANT),
        Step("reset"),
        run('pwned("names") if "kept" in globals() or "RGM" in os.environ else held("no names")' + _FIND),
    ),
    attack(
        "message-queues",
        "messages to later executions",
        _QUEUE + 'say("TRIED")\nattributes = (ctypes.c_long * 8)(0, 4, 64)\n'
        """
try:
    queue = call("mq_open", name, os.O_CREAT | os.O_RDWR, 0o600, attributes)
    call("mq_timedsend", queue, b"message", 7, 0, None)
except OSError as error: held(error)
""",
        _QUEUE
        + """
buffer = ctypes.create_string_buffer(64)
try:
    queue = call("mq_open", name, os.O_RDWR | os.O_NONBLOCK, 0, None)
    call("mq_timedreceive", queue, buffer, 64, None, None); LIBC.mq_unlink(name); pwned(buffer.value)
except OSError as error: held(error)
""",
    ),
    attack(
        "files-after-timeout",
        "messages to later executions",
        _PLANT + "while True: pass",
        _FIND,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        "disk-left-full",
        "no room for later executions",
        """
say("TRIED")
for place in ("/tmp", ".", "/dev/shm"):
    try:
        for i in range(400):
            with open(f"{place}/fill{i}", "wb") as f: f.write(bytes(1 << 20))
    except OSError: pass
""",
        """
import tempfile
say("TRIED")
for place in (tempfile.gettempdir(), "."):
    try: open(place + "/new", "wb").write(bytes(4 << 20))
    except OSError as error: pwned(place, error)
""",
        judge=survived,
    ),
)
