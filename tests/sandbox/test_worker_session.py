"""The session in the worker, behind each kind of wall: state, files, and turns that are undone."""

import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from rollgym.errors import UsageError
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.types import Ended, Limits
from rollgym.sandbox.worker_limits import descendants

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
    os.kill(head, signal.SIGSTOP)
    later = threading.Timer(1.0, os.kill, [head, signal.SIGCONT])
    later.start()
    ran = sandbox.run("import time; time.sleep(10); x = 2", limits=Limits(seconds=0.2))
    assert (ran.ended, ran.state) == (Ended.TIMEOUT, "rolled_back")
    later.join()
    assert sandbox.run("print(x)").stdout == "1\n"


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
        with pytest.raises(UsageError, match="no name for a file"):
            call()


def test_links_and_pipes_are_no_files(sandbox: WorkerSandbox) -> None:
    sandbox.run(
        "import os; os.symlink('/usr/bin/env', 'link'); os.symlink('/usr', 'folder'); os.mkfifo('pipe')"
    )
    for name in ("link", "folder/bin/env", "pipe"):
        with pytest.raises(FileNotFoundError):
            sandbox.read(name)
    for name in ("link", "folder/x", "pipe"):
        with pytest.raises(OSError, match="could not be written"):
            sandbox.write(name, b"x")
    assert sandbox.run("print('still here')").stdout == "still here\n"
