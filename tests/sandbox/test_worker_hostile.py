"""Code that fights the worker, and workers that fail."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from rollgym.core.errors import UsageError, WorkerLost
from rollgym.sandbox import client, protocol
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.types import Level, Limits
from rollgym.sandbox.worker_limits import alive, descendants

code = textwrap.dedent


def processes(sandbox: WorkerSandbox) -> list[int]:
    """Of a sandbox: the worker first, what started it last."""
    first: int = sandbox._channel.pid  # type: ignore[attr-defined]
    return [*reversed(descendants(first)), first]


def test_nothing_of_an_earlier_execution_is_in_memory(sandbox: WorkerSandbox) -> None:
    half = "zebra-73519"
    secret = f"{half}-{half}"
    # More than the next request overwrites by chance, and less than is given back to the kernel.
    program = f"key = '{secret}'\nprint(input()); print(key * 500)"
    assert sandbox.exec(program, stdin=secret, files={"f": secret.encode() * 2000}).ok
    sandbox.run(f"other = '{secret}' * 500; print(other)")
    sandbox.reset()
    search = code(f"""
        import ctypes, os
        needle = b"-".join([b"{half}"] * 2)
        libc = ctypes.CDLL(None)
        heap = []
        try:
            for line in open("/proc/self/maps"):
                where, rights, *rest = line.split()
                if rights.startswith("rw") and "[v" not in line:
                    first, last = (int(word, 16) for word in where.split("-"))
                    heap.append(ctypes.string_at(first, last - first))
        except PermissionError:
            print("hidden")
        else:
            print(sum(part.count(needle) for part in heap) <= 2, len(heap) > 3)
        """)
    # Twice at most: the needle that was just built, and the copy that the search holds.
    assert sandbox.exec(search).stdout in ("True True\n", "hidden\n")


FORGED = {
    "a result": "{'turn': 2, 'code': 0, 'pid': os.getpid()}",
    "another process": "{'turn': 2, 'code': 0, 'pid': 1}",
    "no such process": "{'turn': 2, 'code': 0, 'pid': 999999}",
    "not numbers": "{'turn': 2, 'code': 'x', 'pid': [1]}",
    "a list": "[1, 2, 3]",
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_status_harms_only_the_session(sandbox: WorkerSandbox, what: str) -> None:
    sandbox.run("x = 1")
    sandbox.run(
        code(f"""
        import json, os, time
        for number in range(3, 50):
            try: os.write(number, json.dumps({FORGED[what]}).encode() + b"\\n")
            except OSError: pass
        time.sleep(0.3)
        """)
    )
    sandbox.run("print(x)", limits=Limits(seconds=1))  # however it ends
    assert sandbox.exec("print('fresh')").stdout == "fresh\n"
    sandbox.reset()
    assert sandbox.run("print('well')").stdout == "well\n"


@pytest.mark.parametrize(
    "attack",
    [
        "import os; os.closerange(3, 100)",
        "import os\nfor n in range(3, 50):\n  try: os.write(n, os.urandom(2000))\n  except OSError: pass",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "import sys; sys.stdout = sys.stderr = None",
        "import os; os.close(1); os.close(2)",
        "import builtins; builtins.print = builtins.exec = builtins.compile = None",
        "raise KeyboardInterrupt",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import gc\nfor thing in gc.get_objects():\n  if type(thing) in (dict, list, set): thing.clear()",
    ],
)
def test_a_hostile_turn_does_not_reach_the_worker(sandbox: WorkerSandbox, attack: str) -> None:
    sandbox.run("x = 1")
    assert sandbox.run(attack, limits=Limits(seconds=2)).state in ("committed", "rolled_back", "lost")
    assert sandbox.exec(attack, limits=Limits(seconds=2)).state == "fresh"
    sandbox.run("pass", limits=Limits(seconds=2))
    assert sandbox.exec("print(6 * 7)").stdout == "42\n"
    sandbox.reset()
    assert sandbox.run("print(6 * 7)").stdout == "42\n"


def test_the_control_channel_is_out_of_reach(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec(
        code("""
        import os
        held = []
        for number in range(3, 256):
            try: os.fstat(number); held.append(number)
            except OSError: pass
        print(held)
        for what in ("fd", "mem", "environ"):
            try:
                look = os.listdir if what == "fd" else open
                look(f"/proc/{os.getppid()}/{what}")
                print("open", what)
            except PermissionError: print("closed")
        """)
    )
    assert ran.stdout == "[]\nclosed\nclosed\nclosed\n"


def test_a_sandbox_whose_worker_died_says_so(another: Callable[[], WorkerSandbox]) -> None:
    one = another()
    for pid in processes(one):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="died"):
        one.exec("pass")
    with pytest.raises(WorkerLost, match="closed"):
        one.exec("pass")
    one.close()


def test_a_silent_worker_is_killed(
    another: Callable[[], WorkerSandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = another()
    pids = processes(one)
    os.kill(pids[0], signal.SIGSTOP)
    monkeypatch.setattr(client, "GRACE_SECONDS", 0.2)
    with pytest.raises(WorkerLost, match="did not answer in time"):
        one.exec("pass", limits=Limits(seconds=0.1))
    assert not any(alive(pid) for pid in pids)


def test_all_is_gone_when_the_host_is_killed(sandbox: WorkerSandbox) -> None:
    host = code(f"""
        import os, threading, time
        from rollgym.sandbox.factory import OPENERS
        from rollgym.sandbox.types import SandboxSettings
        from rollgym.sandbox.worker_limits import descendants
        sandbox = OPENERS[{sandbox.backend!r}](SandboxSettings())
        sandbox.run("x = 1")
        before = len(descendants(os.getpid()))
        def tell():
            while len(pids := descendants(os.getpid())) == before: time.sleep(0.01)
            print(*pids, flush=True)
        threading.Thread(target=tell, daemon=True).start()
        sandbox.exec("import time; time.sleep(60)")
        """)
    process = subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) >= 3
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def test_a_sandbox_outlives_the_thread_that_opened_it(another: Callable[[], WorkerSandbox]) -> None:
    made: list[WorkerSandbox] = []
    thread = threading.Thread(target=lambda: made.append(another()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert made[0].exec("print(1)").stdout == "1\n"


def test_frames_that_are_too_large_are_refused(sandbox: WorkerSandbox) -> None:
    with pytest.raises(UsageError, match="are limited to 64 MB"):
        sandbox.exec("pass", stdin="x" * (65 << 20))
    assert sandbox.exec("print(1)").ok


def test_a_frame_must_be_a_frame() -> None:
    def fill_from(data: bytes) -> Callable[[memoryview], None]:
        stream = memoryview(data)

        def fill(view: memoryview) -> None:
            nonlocal stream
            view[:], stream = stream[: len(view)], stream[len(view) :]

        return fill

    whole = protocol.prefix({"a": 1}, 3) + b"xyz"
    assert protocol.receive(fill_from(whole)) == ({"a": 1}, bytearray(b"xyz"))
    deep = b"[" * 100_000
    nested = len(deep).to_bytes(4, "big") + bytes(4) + deep
    for broken in (b"\xff" * 8, b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\1\0\0\0\0{", nested):
        with pytest.raises(protocol.FrameError):
            protocol.receive(fill_from(broken))


class Nonsense:
    """A channel to a worker that was taken over: it answers with a header of its own."""

    def __init__(self, header: dict[str, object]) -> None:
        self._data = protocol.prefix(header, 0)

    def write(self, data: bytes | memoryview, deadline: float) -> None: ...

    def read_into(self, view: memoryview, deadline: float) -> None:
        view[:], self._data = self._data[: len(view)], self._data[len(view) :]

    def close(self) -> None: ...

    def out_of_memory(self) -> bool:
        return False

    def adapt(self, limits: Limits) -> None: ...


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"ended": "exit", "stdout": [], "stderr": []},
        {"ended": "exit", "stdout": ["x", 1, 2], "stderr": [0, 0, 0]},
        {"ended": "soon", "stdout": [0, 0, 0], "stderr": [0, 0, 0]},
        {
            "ended": "exit",
            "stdout": [0, 0, 0],
            "stderr": [0, 0, 0],
            "code": 0,
            "seconds": 10**400,
            "state": "fresh",
        },
        {"ended": "exit", "stdout": [0, 0, 0], "stderr": [0, 0, 0], "code": 0, "seconds": 1, "state": ["x"]},
    ],
)
def test_an_answer_of_the_wrong_shape_is_a_lost_worker(header: dict[str, object]) -> None:
    sandbox = WorkerSandbox(Nonsense(header), backend="test", level=Level.NONE)
    with pytest.raises(WorkerLost):
        sandbox.exec("pass")
