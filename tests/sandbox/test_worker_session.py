"""The session in the worker, behind each kind of wall: state, files, and turns that are undone."""

import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from rollgym.core.errors import UsageError
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.types import Ended, Limits
from rollgym.sandbox.worker_limits import cpu_seconds, descendants, stat

code = textwrap.dedent


def test_a_session_keeps_names_and_files(sandbox: WorkerSandbox) -> None:
    assert sandbox.run("x = 20\ndef double(n): return 2 * n").state == "committed"
    assert sandbox.run("open('note.txt', 'w').write('hello'); print(double(x) + 2)").stdout == "42\n"
    assert sandbox.read("note.txt") == b"hello"
    ran = sandbox.run("1 / 0")
    assert (ran.exit_code, ran.state, ran.ended) == (1, "committed", Ended.EXIT)
    assert '  File "<turn 3>", line 1, in <module>' in ran.stderr
    assert sandbox.run("import sys; sys.exit(5)").exit_code == 5
    assert sandbox.run("print(x)").stdout == "20\n"


@pytest.mark.parametrize(
    ("turn", "limits", "ended"),
    [
        ("x = 2\nwhile True: pass", Limits(seconds=0.5), Ended.TIMEOUT),
        ("x = 2\nwhile True: print('x' * 1000)", Limits(output_mb=1), Ended.OUTPUT),
        ("x = 2\nimport os; os._exit(7)", Limits(), Ended.LOST),
        ("x = 2\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)", Limits(), Ended.LOST),
    ],
)
def test_a_turn_that_is_killed_never_was(
    sandbox: WorkerSandbox, turn: str, limits: Limits, ended: Ended
) -> None:
    sandbox.run("x = 1")
    ran = sandbox.run(turn, limits=limits)
    assert (ran.ended, ran.state, ran.exit_code) == (ended, "rolled_back", None)
    assert sandbox.run("print(x)").stdout == "1\n"


def test_a_turn_that_had_not_begun_when_its_time_was_over_never_begins(
    another: Callable[[], WorkerSandbox],
) -> None:
    sandbox = another()
    before = set(descendants(os.getpid()))
    sandbox.run("x = 1")
    (head,) = set(descendants(os.getpid())) - before
    until = time.monotonic() + 1.0

    def hold() -> None:
        while time.monotonic() < until:
            os.kill(head, signal.SIGSTOP)
        os.kill(head, signal.SIGCONT)

    later = threading.Thread(target=hold)
    later.start()
    ran = sandbox.run("import time; time.sleep(10); x = 2", limits=Limits(seconds=0.2))
    assert (ran.ended, ran.state) == (Ended.TIMEOUT, "rolled_back")
    later.join()
    assert sandbox.run("print(x)").stdout == "1\n"


GO_ON = code("""
    import json, os, sys, threading, time
    frame = sys._getframe()
    while "order" not in frame.f_locals: frame = frame.f_back
    said = {"turn": frame.f_locals["order"]["turn"], "code": 0, "pid": os.getpid()}
    def grow(end=time.time() + 5):
        held = []
        while time.time() < end:
            held.append(b"x" * 1000)
            with open("grown", "ab") as file: file.write(held[-1])
    threading.Thread(target=grow, daemon=True).start()
    for number in range(3, 32):
        try: os.write(number, json.dumps(said).encode() + b"\\n")
        except OSError: pass
    grow()
    """)
"""Says that its turn is over, and goes on in two threads."""


def test_between_turns_nothing_of_a_session_runs(another: Callable[[], WorkerSandbox]) -> None:
    sandbox = another()
    before = set(descendants(os.getpid()))
    assert sandbox.run(GO_ON).state == "committed"
    (head,) = set(descendants(os.getpid())) - before
    first = len(sandbox.read("grown")), cpu_seconds([head])
    time.sleep(0.4)
    assert (len(sandbox.read("grown")), cpu_seconds([head])) == first
    assert sandbox.exec("print('fresh')").stdout == "fresh\n"
    assert (len(sandbox.read("grown")), cpu_seconds([head])) == first
    assert stat(head)[0] == "T"


GROUP = "import os, threading, time\nthreading.Thread(target=time.sleep, args=[9]).start(); os.setpgid(0, 0)"


@pytest.mark.parametrize(
    "turn",
    ["y = 1", "1 / 0", "import os; os._exit(3)", "import time; time.sleep(9)", GROUP],
)
def test_a_session_is_stopped_however_its_turn_ended(another: Callable[[], WorkerSandbox], turn: str) -> None:
    sandbox = another()
    before = set(descendants(os.getpid()))
    sandbox.run("x = 41")
    sandbox.run(turn, limits=Limits(seconds=0.3))
    (head,) = set(descendants(os.getpid())) - before
    assert stat(head)[0] == "T"
    sandbox.exec("import os, signal\nfor n in range(2, 99):\n  try: os.kill(n, signal.SIGCONT)\n  except: 0")
    assert stat(head)[0] == "T"
    assert sandbox.run("print(x + 1)").stdout == "42\n"


def test_what_a_turn_holds_when_it_ends_is_counted(sandbox: WorkerSandbox) -> None:
    sandbox.run("x = 1")
    ran = sandbox.run("x = b'x' * (150 << 20)", limits=Limits(memory_mb=100))
    assert (ran.ended, ran.state) == (Ended.MEMORY, "rolled_back")
    # Both the turn and the state before it hold them, but they are the same pages.
    assert sandbox.run("x = b'x' * (60 << 20)", limits=Limits(memory_mb=100)).state == "committed"
    for _ in range(2):
        assert sandbox.run("print(len(x))", limits=Limits(memory_mb=100)).stdout == f"{60 << 20}\n"


def test_an_execution_cannot_read_the_memory_of_the_session(sandbox: WorkerSandbox) -> None:
    sandbox.run("x = 1")
    for turn in ("x = 2", "import os; os._exit(1)", "x = 3"):
        sandbox.run(turn)
        ran = sandbox.exec(
            code("""
            import os
            try: pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            except PermissionError: pids = [1, os.getppid()]
            others = [pid for pid in pids if pid != os.getpid()]
            print(len(others))
            for pid in others:
                for name in ("mem", "maps", "environ", "fd/0", "root/work"):
                    try: open(f"/proc/{pid}/{name}", "rb"); print("open", pid, name)
                    except PermissionError: pass
            """)
        )
        assert ran.stdout == "2\n", ran.stderr
    assert sandbox.run("import os; print(x, len(os.listdir('/proc/self/fd')) > 2 if x else 0)").stdout in (
        "3 True\n",
        "",  # Landlock gives no sight of /proc
    )


def test_threads_and_processes_end_with_the_turn(sandbox: WorkerSandbox) -> None:
    ran = sandbox.run(
        code("""
        import os, threading, time
        def tick():
            while True:
                open("ticks", "a").write("x"); time.sleep(0.01)
        threading.Thread(target=tick).start()
        if not os.fork():
            os.setsid()
            tick()
        """)
    )
    assert ran.state == "committed"
    sandbox.write("ticks", b"")
    time.sleep(0.2)
    assert sandbox.read("ticks") == b""
    assert sandbox.run("print(threading.active_count())").stdout == "1\n"


def test_reset_forgets_all(sandbox: WorkerSandbox) -> None:
    sandbox.run("x = 1; open('a', 'w')")
    sandbox.reset()
    assert "NameError" in sandbox.run("print(x)").stderr
    with pytest.raises(FileNotFoundError):
        sandbox.read("a")


def test_files_go_in_and_out_of_the_session(sandbox: WorkerSandbox) -> None:
    big = os.urandom(5_000_000)
    sandbox.write("data/a.bin", big)
    assert sandbox.run("print(len(open('data/a.bin', 'rb').read()))").stdout == "5000000\n"
    assert sandbox.read("data/a.bin") == big
    sandbox.write("empty", b"")
    assert sandbox.read("empty") == b""


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a\0b", "."])
def test_names_outside_the_folder_are_refused(sandbox: WorkerSandbox, name: str) -> None:
    for call in (
        lambda: sandbox.read(name),
        lambda: sandbox.write(name, b""),
        lambda: sandbox.exec("", files={name: b""}),
    ):
        with pytest.raises(UsageError, match="is not a valid sandbox file name"):
            call()


def test_links_and_pipes_are_no_files(sandbox: WorkerSandbox) -> None:
    sandbox.run(
        "import os; os.symlink('/usr/bin/env', 'link'); os.symlink('/usr', 'folder'); os.mkfifo('pipe')"
    )
    for name in ("link", "folder/bin/env", "pipe"):
        with pytest.raises(FileNotFoundError):
            sandbox.read(name)
    for name in ("link", "folder/x", "pipe"):
        with pytest.raises(OSError, match="cannot be written"):
            sandbox.write(name, b"x")
    assert sandbox.run("print('still here')").stdout == "still here\n"
