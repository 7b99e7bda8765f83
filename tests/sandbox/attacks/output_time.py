"""Output that never ends or is no text, and time that never ends."""

from __future__ import annotations

from dataclasses import replace

from .model import BRIEF, LIMITS, Attack, attack, bounded, run, stopped, survived

_O, _T = "output", "time"

OUTPUT: tuple[Attack, ...] = (
    attack(
        _O,
        "stdout-flood",
        "memory and disk of the host",
        'while True: os.write(1, b"flood of words\\n" * 4000)',
        judge=bounded,
    ),
    attack(
        _O,
        "stderr-flood",
        "memory and disk of the host",
        'while True: os.write(2, b"flood of words\\n" * 4000)',
        judge=bounded,
    ),
    attack(
        _O,
        "one-endless-line",
        "a reader of lines that never returns",
        'while True: os.write(1, b"x" * 65536)',
        judge=bounded,
    ),
    attack(
        _O,
        "flood-by-children",
        "more than one process may write",
        """
for _ in range(6):
    if not os.fork(): break
while True: os.write(1, b"child\\n" * 9000); os.write(2, b"child\\n" * 9000)
""",
        judge=bounded,
    ),
    attack(
        _O,
        "session-flood",
        "the memory of the host, turn by turn",
        run('while True: print("flood" * 1000)'),
        run('say("after")'),
        judge=bounded,
    ),
    attack(
        _O,
        "binary-junk",
        "the host's reader raises or writes control codes to files as no text",
        """
os.write(1, bytes(range(256)) * 40 + b"\\xed\\xa0\\x80\\xf0\\x9f\\x98" + b"\\x00" * 99 + b"\\xff\\xfe")
sys.stdout.buffer.write(os.urandom(30000)); sys.stdout.flush()
os.write(2, b"\\xe2\\x82")
""",
        judge=bounded,
    ),
    attack(
        _O,
        "slow-drip",
        "a deadline that restarts with every output",
        'say("TRIED")\nwhile True: say("drip"); time.sleep(0.05)',
        judge=stopped,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _O,
        "close-everything",
        "a reader that waits forever",
        'say("TRIED"); os.closerange(0, 1024); time.sleep(60)',
        run('say("TRIED"); os.closerange(0, 1024); time.sleep(60)'),
        judge=survived,
        limits=BRIEF,
        slow=True,
    ),
)

_UNWAITED = """
say("TRIED")
no_wait = ctypes.create_string_buffer(152)
ctypes.memmove(ctypes.addressof(no_wait) + 136, (ctypes.c_int * 1)(2), 4)
try: {before}
except OSError as error: say(error)
burnt, source, sink = 0.0, *os.pipe()
while burnt < 2.2:
    try:
        if not os.fork():
            while time.process_time() < 0.03: pass
            os.write(sink, b"."); os._exit(0)
    except OSError: break
    os.read(source, 1); burnt += 0.03
if burnt < 2.2: os.wait()
while burnt < 2.2: pass
pwned(round(burnt, 1), "seconds of CPU time, 1 allowed")
"""

TIME: tuple[Attack, ...] = (
    attack(_T, "busy-loop", "a CPU", 'say("TRIED")\nwhile True: pass', judge=stopped, limits=BRIEF),
    attack(
        _T,
        "sleep",
        "a place in the pool",
        'say("TRIED"); time.sleep(60)',
        judge=stopped,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _T,
        "ignore-every-signal",
        "a program that cannot be stopped",
        """
say("TRIED")
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: time.sleep(1)
""",
        judge=stopped,
        limits=BRIEF,
    ),
    attack(
        _T,
        "handle-cpu-limit",
        "unlimited CPU time",
        """
say("TRIED")
signal.signal(signal.SIGXCPU, lambda *_: None)
while True: pass
""",
        judge=stopped,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _T,
        "stop-itself",
        "an execution that neither runs nor ends",
        'say("TRIED"); os.kill(os.getpid(), signal.SIGSTOP)',
        judge=stopped,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _T,
        "burn-in-children",
        "uncounted CPU time",
        """
say("TRIED")
while True:
    pid = os.fork()
    if not pid:
        end = time.time() + 0.2
        while time.time() < end: pass
        os._exit(0)
    os.waitpid(pid, 0)
""",
        judge=stopped,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _T,
        "burn-in-orphans",
        "uncounted CPU time",
        """
say("TRIED")
burnt = 0.0
while burnt < 3.5:
    source, sink = os.pipe()
    if not os.fork():
        if not os.fork():
            while time.process_time() < 0.2: pass
            os.write(sink, b"."); os._exit(0)
        os._exit(0)
    os.wait(); os.read(source, 1); os.close(source); os.close(sink); burnt += 0.2
pwned(round(burnt, 1), "seconds of processor time, 1 allowed")
""",
        judge=stopped,
        limits=replace(LIMITS, seconds=12, cpu_seconds=1),
        slow=True,
    ),
    *(
        attack(
            _T,
            name,
            "CPU time counted for none",
            _UNWAITED.format(before=before),
            judge=stopped,
            limits=replace(LIMITS, seconds=20, cpu_seconds=1, processes=64),
            slow=True,
        )
        for name, before in (
            ("burn-in-unwaited-children", "pass"),
            ("burn-in-ignored-children", "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"),
            ("burn-in-unreported-children", "LIBC.sigaction(17, no_wait, None)"),
        )
    ),
    attack(
        _T,
        "hold-the-interpreter",
        "a computation that no Python signal handler interrupts",
        'say("TRIED"); x = 3 ** (10 ** 8); say("PWNED" if len(str(x)) else "")',
        judge=stopped,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _T,
        "never-leave",
        "an end that does not end",
        """
import atexit, threading
say("TRIED")
def stay():
    while True: time.sleep(1)
atexit.register(stay)
class Stay:
    def __del__(self): stay()
kept = Stay()
threading.Thread(target=stay).start()
""",
        judge=survived,
        limits=BRIEF,
        slow=True,
    ),
    attack(
        _T,
        "session-busy-loop",
        "the session",
        run("kept = 41"),
        run('say("TRIED")\nkept = 0\nwhile True: pass'),
        run("kept == 41 or pwned('what a killed turn did is still there', kept)"),
        judge=survived,
        limits=BRIEF,
    ),
)
