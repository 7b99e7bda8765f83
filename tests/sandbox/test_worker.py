"""Fresh executions in the worker, behind each kind of wall."""

import subprocess
import sys
import textwrap

import pytest

from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.types import Ended, Limits

code = textwrap.dedent


def test_a_program_prints_and_exits(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec("import sys\nprint('hé')\nprint('no', file=sys.stderr)\nsys.exit(3)")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended) == ("hé\n", "no\n", 3, Ended.EXIT)
    assert (ran.state, ran.truncated, ran.ok) == ("fresh", False, False)
    assert sandbox.exec("pass").ok


def test_an_error_shows_the_line_and_nothing_of_the_worker(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec("x = 1\nprint(x / 0)")
    assert ran.exit_code == 1
    assert ran.stderr.startswith(
        'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n'
    )
    assert "print(x / 0)" in ran.stderr
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in sandbox.exec("x = = 1").stderr


@pytest.mark.parametrize("size", [0, 10, 70_000, 3_000_000])
def test_input_of_any_size_arrives(sandbox: WorkerSandbox, size: int) -> None:
    ran = sandbox.exec("import sys; print(len(sys.stdin.read()))", stdin="x" * size)
    assert ran.stdout == f"{size}\n"


def test_files_are_there_and_can_be_imported(sandbox: WorkerSandbox) -> None:
    files = {"helper.py": b"ANSWER = 42", "data/deep/a.bin": bytes(range(256))}
    ran = sandbox.exec(
        "import helper; print(helper.ANSWER, len(open('data/deep/a.bin','rb').read()))", files=files
    )
    assert ran.stdout == "42 256\n"


def test_an_execution_leaves_nothing_to_the_next(sandbox: WorkerSandbox) -> None:
    first = sandbox.exec(
        "import builtins, os, tempfile; builtins.mine = 1; open('f','w'); tempfile.mkdtemp()"
    )
    assert first.ok
    ran = sandbox.exec(
        code("""
        import builtins, os, tempfile
        print(hasattr(builtins, 'mine'), os.listdir('.'), os.listdir(tempfile.gettempdir()), os.listdir('..'))
        """)
        if sandbox.backend == "namespaces"
        else "import builtins, os; print(hasattr(builtins, 'mine'), os.listdir('.'), [], ['session', '_'])"
    )
    assert ran.stdout.startswith("False [] [] ["), ran.stderr


def test_a_fresh_program_is_like_a_program_of_its_own(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec(
        code("""
        import atexit, pickle, sys, threading, time
        class Thing: pass
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
        assert "rollgym" not in sys.modules and __name__ == "__main__"
        print("end")
        """)
    )
    assert ran.stdout.split("\n") == ["end", "thread", "at exit", ""], ran.stderr


def test_sets_have_the_same_order_in_every_sandbox(sandbox: WorkerSandbox) -> None:
    assert (
        sandbox.exec("print(hash('rollgym') % 1000)").stdout
        == sandbox.exec("print(hash('rollgym') % 1000)").stdout
    )
    done = subprocess.run(
        [sys.executable, "-c", "print(hash('rollgym') % 1000)"],
        env={"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert sandbox.exec("print(hash('rollgym') % 1000)").stdout == done.stdout


def test_random_numbers_differ_between_executions(sandbox: WorkerSandbox) -> None:
    assert len({sandbox.exec("import random; print(random.random())").stdout for _ in range(4)}) == 4


def test_the_head_and_the_tail_of_long_output_are_kept(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec("print('a' * 5000 + 'b' * 90000 + 'c' * 5000)", limits=Limits(output_chars=1000))
    assert ran.truncated
    assert ran.exit_code == 0
    assert ran.stdout == "a" * 500 + "\n[... 99,001 bytes left out ...]\n" + "c" * 499 + "\n"
    whole = sandbox.exec("print('é' * 999)", limits=Limits(output_chars=1000))
    assert (whole.stdout, whole.truncated) == ("é" * 999 + "\n", False)


def test_bytes_that_are_no_text_do_no_harm(sandbox: WorkerSandbox) -> None:
    assert sandbox.exec("import os; os.write(1, bytes([255, 65, 200]))").stdout == "\ufffdA\ufffd"
    assert sandbox.exec("print('\\ud800')").ok
    assert sandbox.exec("print(len('\ud800'))").stdout == "1\n"
