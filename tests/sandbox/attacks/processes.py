"""Other processes: too many, surviving, killed, stopped, looked into."""

from __future__ import annotations

from rollgym.sandbox.types import Level

from .model import BRIEF, Attack, Step, attack, run, survived, told_or_killed

_F = "processes"

_LAST = """
    signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60); os._exit(0)
"""
_DAEMON = (
    """
say("TRIED")
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    for fd in (0, 1, 2): os.close(fd)
"""
    + _LAST
    + "time.sleep(0.3)"
)
_SEE_MARK = """
say("TRIED")
for pid in others():
    try: name = open(f"/proc/{pid}/comm").read().strip()
    except OSError: continue
    if name == STAGE["mark"]: pwned("process", pid, "of the last execution lives")
held("none is left")
"""

PROCESSES: tuple[Attack, ...] = (
    attack(
        _F,
        "fork-bomb",
        "all processes of the machine",
        """
say("TRIED")
count = 0
try:
    for _ in range(300):
        if not os.fork(): time.sleep(3); os._exit(0)
        count += 1
except OSError as error: say(error)
pwned(count, "processes") if count > 100 else held("stopped at", count)
""",
        judge=told_or_killed,
        control=True,
    ),
    attack(
        _F,
        "fork-bomb-doubling",
        "all processes of the machine, fast",
        """
say("TRIED")
end = time.time() + 2
depth = 0
while time.time() < end and depth < 9:
    try: os.fork(); depth += 1
    except OSError: time.sleep(0.01)
time.sleep(2)
""",
        judge=survived,
        needs=Level.NAMESPACES,
        slow=True,
    ),
    attack(
        _F,
        "thread-bomb",
        "all threads of the machine",
        """
import threading
say("TRIED")
count = 0
try:
    for _ in range(400):
        threading.Thread(target=time.sleep, args=(1.5,), daemon=True).start(); count += 1
except RuntimeError as error: say(error)
pwned(count, "threads") if count > 200 else held("stopped at", count)
""",
        judge=told_or_killed,
        control=True,
    ),
    attack(_F, "daemon", "a process that stays", _DAEMON, _SEE_MARK, judge=survived),
    attack(
        _F,
        "daemon-holds-output",
        "a process that stays and keeps the pipes open",
        'say("TRIED")\nif not os.fork():\n    os.setsid()' + _LAST,
        _SEE_MARK,
        judge=survived,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _F,
        "survive-timeout",
        "a process that is still there in the next execution",
        _DAEMON + "\nwhile True: time.sleep(1)",
        _SEE_MARK,
        judge=survived,
        limits=BRIEF,
        needs=Level.LANDLOCK,
    ),
    attack(
        _F,
        "fork-away-from-killing",
        "a chain that forks faster than it is killed",
        """
say("TRIED")
end = time.time() + 20
while time.time() < end:
    try:
        if os.fork(): os._exit(0)
    except OSError: time.sleep(0.001)
""",
        _SEE_MARK,
        judge=survived,
        limits=BRIEF,
        needs=Level.LANDLOCK,
        slow=True,
    ),
    attack(
        _F,
        "session-fork-storm",
        "processes that are born faster than they are killed",
        run(
            """
say("TRIED")
end = time.time() + 60
for _ in range(6):
    if not os.fork():
        while time.time() < end:
            try:
                if os.fork() and os.getpid() % 4: os._exit(0)
            except OSError: pass
time.sleep(60)
"""
        ),
        run('say("TRIED")'),
        judge=survived,
        limits=BRIEF,
        needs=Level.NAMESPACES,
        slow=True,
    ),
    attack(
        _F,
        "session-daemon",
        "a process that outlives the session",
        run(_DAEMON),
        Step("reset"),
        _SEE_MARK,
        judge=survived,
    ),
    attack(
        _F,
        "kill-everybody",
        "every process of the user",
        'say("TRIED"); os.kill(-1, 9); time.sleep(0.2); say("TRIED")',
        run('say("TRIED"); os.kill(-1, 9)'),
        run('say("TRIED")'),
        judge=survived,
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "kill-host-process",
        "a process of the host",
        'for s in (0, 19, 18, 9): attempt(lambda: os.kill(STAGE["pid"], s) or STAGE["pid"])',
        control=True,
    ),
    attack(
        _F,
        "kill-worker",
        "the process that runs the code",
        """
say("TRIED")
for pid in (1, os.getppid()):
    for s in (9, 15, 2, 3, 6):
        try: os.kill(pid, s)
        except OSError as error: say(error)
""",
        judge=survived,
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "every-signal-to-worker",
        "the process that runs the code",
        """
say("TRIED")
for s in range(1, 65):
    for pid in (1, os.getppid()):
        for way in (lambda: os.kill(pid, s), lambda: os.killpg(pid, s),
            lambda: signal.pidfd_send_signal(os.pidfd_open(pid), s)):
            try: way()
            except OSError: pass
""",
        judge=survived,
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "kill-session-head",
        "the session hangs or is forged",
        run('say("TRIED"); x = 1; os.kill(os.getppid(), 9); time.sleep(0.1)'),
        run('say("TRIED")'),
        judge=survived,
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "stop-session-head",
        "the session hangs",
        run('say("TRIED"); os.kill(os.getppid(), 19)'),
        run('say("TRIED")'),
        judge=survived,
        limits=BRIEF,
        needs=Level.NAMESPACES,
    ),
    attack(
        _F,
        "stop-everybody",
        "the sandbox hangs",
        'say("TRIED"); os.kill(-1, 19)',
        run('say("TRIED"); os.kill(-1, 19)'),
        run('say("TRIED")'),
        judge=survived,
        limits=BRIEF,
        needs=Level.NAMESPACES,
        slow=True,
    ),
)
