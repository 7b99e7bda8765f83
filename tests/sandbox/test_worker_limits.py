"""What an execution may use, and that nothing of it is left."""

import contextlib
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.types import Ended, Limits
from rollgym.sandbox.worker_files import empty, usage
from rollgym.sandbox.worker_limits import alive, descendants
from rollgym.sandbox.worker_watch import Tap

code = textwrap.dedent


def test_output_of_a_killed_program_is_kept(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec("print('before')\nwhile True: pass", limits=Limits(seconds=3))
    assert (ran.stdout, ran.ended, ran.exit_code) == ("before\n", Ended.TIMEOUT, None)


def test_processor_time_is_limited_over_all_processes(sandbox: WorkerSandbox) -> None:
    one = sandbox.exec("while True: pass", limits=Limits(seconds=60, cpu_seconds=1))
    assert (one.ended, one.exit_code) == (Ended.CPU, None)
    hidden = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert sandbox.exec(hidden, limits=Limits(seconds=60, cpu_seconds=1)).ended is Ended.CPU


def test_memory_is_limited_over_all_processes(sandbox: WorkerSandbox) -> None:
    bomb = code("""
        import os, time
        for _ in range(12):
            if not os.fork():
                held = bytearray(40 << 20); held[::4096] = b"x" * len(held[::4096])
                time.sleep(60)
        time.sleep(60)
        """)
    assert sandbox.exec(bomb, limits=Limits(seconds=60, memory_mb=200)).ended is Ended.MEMORY
    assert sandbox.exec("print('alive')").stdout == "alive\n"


def test_one_process_cannot_have_more_memory_than_all(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec("held = bytearray(900 << 20)", limits=Limits(memory_mb=200))
    assert "MemoryError" in ran.stderr


def test_processes_and_files_are_limited(sandbox: WorkerSandbox) -> None:
    forks = code("""
        import os, time
        count = 0
        try:
            while count < 200:
                if not os.fork():
                    time.sleep(20); os._exit(0)
                count += 1
        except OSError:
            print("stopped" if 5 < count < 20 else count)
        """)
    assert sandbox.exec(forks, limits=Limits(processes=10)).stdout == "stopped\n"
    files = (
        "held = []\ntry:\n  while True: held.append(open('/dev/null'))\nexcept OSError: print(len(held) < 50)"
    )
    assert sandbox.exec(files, limits=Limits(open_files=50)).stdout == "True\n"
    ran = sandbox.exec("open('big', 'wb').write(bytes(3 << 20))", limits=Limits(file_mb=2))
    assert "File too large" in ran.stderr


@pytest.mark.parametrize(
    "before", ["pass", "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"], ids=["unwaited", "ignored"]
)
def test_children_that_are_not_waited_for_are_counted(sandbox: WorkerSandbox, before: str) -> None:
    burn = code(f"""
        import os, signal, time
        try: {before}
        except PermissionError: print("refused")
        while True:
            source, sink = os.pipe()
            if not os.fork():
                while time.process_time() < 0.04: pass
                os._exit(0)
            os.close(sink); os.read(source, 1); os.close(source)
        """)
    ran = sandbox.exec(burn, limits=Limits(seconds=20, cpu_seconds=1, processes=200))
    assert ran.ended is Ended.CPU
    assert ran.stdout == ("" if before == "pass" else "refused\n")


def test_the_cpu_time_of_one_turn_is_not_charged_to_the_next(sandbox: WorkerSandbox) -> None:
    limits = Limits(seconds=20, cpu_seconds=1)
    burn = "import os, time\nif not os.fork():\n  while time.process_time() < 0.7: pass\n  os._exit(0)\n"
    for _ in range(3):
        ran = sandbox.run(burn + "time.sleep(0.1)\nwhile time.process_time() < 0.3: pass", limits=limits)
        assert (ran.ended, ran.state) == (Ended.EXIT, "committed")


def test_a_process_without_its_first_thread_is_counted_and_ended(sandbox: WorkerSandbox) -> None:
    sandbox.run("x = 1")
    leave = code("""
        import ctypes, os, platform, threading, time
        def stay():
            time.sleep(0.1); held = b"x" * (90 << 20); time.sleep(20)
        for _ in range(4):
            if not os.fork():
                threading.Thread(target=stay).start()
                ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)
        time.sleep(WAIT)
        """)
    assert sandbox.exec(leave.replace("WAIT", "9"), limits=Limits(memory_mb=200)).ended is Ended.MEMORY
    before = [pid for pid in descendants(os.getpid()) if alive(pid)]
    assert sandbox.exec(leave.replace("WAIT", "0.05"), limits=Limits(memory_mb=200)).ok
    assert [pid for pid in descendants(os.getpid()) if alive(pid)] == before


UNLINKED = {
    "open": "held.append(file)",
    "mapped": "held.append(mmap.mmap(file, 4096, access=1)); os.close(file)",
    "hidden": "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); held.append(file)",
}


@pytest.mark.parametrize("how", UNLINKED)
def test_files_without_a_name_are_counted(open_or_skip: Callable[..., WorkerSandbox], how: str) -> None:
    fill = code(f"""
        import ctypes, mmap, os, time
        held = []
        for number in range(12):
            file = os.open("gone", os.O_CREAT | os.O_RDWR)
            os.unlink("gone")
            os.write(file, bytes(8 << 20))
            {UNLINKED[how]}
            time.sleep(0.05)
        """)
    with contextlib.closing(open_or_skip("landlock")) as sandbox:
        assert sandbox.exec(fill, limits=Limits(disk_mb=32)).ended is Ended.OUTPUT
        assert sandbox.run(fill, limits=Limits(disk_mb=32)).ended is Ended.OUTPUT
        assert sandbox.exec(fill, limits=Limits(disk_mb=400, file_mb=8)).ok is (how != "hidden")


def test_the_disk_is_looked_at_when_a_turn_ends(open_or_skip: Callable[..., WorkerSandbox]) -> None:
    fill = "import os; f = os.open('gone', 66); os.unlink('gone'); os.write(f, bytes(40 << 20))"
    with contextlib.closing(open_or_skip("landlock")) as sandbox:
        for _ in range(3):
            time.sleep(0.1)  # since the last look
            ran = sandbox.run(fill, limits=Limits(disk_mb=32))
            assert (ran.ended, ran.state) == (Ended.OUTPUT, "rolled_back")


def test_input_is_not_counted_as_disk_and_zeros_can_be_written(sandbox: WorkerSandbox) -> None:
    big = "x" * (33 << 20)
    assert sandbox.exec("import time; time.sleep(0.2)", stdin=big, limits=Limits(disk_mb=32)).ok
    allocate = "import os; os.posix_fallocate(os.open('a', 66), 0, 5 << 20); print(os.stat('a').st_size)"
    assert sandbox.exec(allocate).stdout == f"{5 << 20}\n"


def test_signals_in_a_queue_are_limited(sandbox: WorkerSandbox) -> None:
    queue = code("""
        import ctypes, os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [40])
        count = 0
        while count < 5000 and not ctypes.CDLL(None).sigqueue(os.getpid(), 40, None): count += 1
        os.kill(os.getpid(), 0)
        print(count <= 256)
        """)
    assert sandbox.exec(queue).stdout == "True\n"


def test_the_disk_is_limited_and_freed(sandbox: WorkerSandbox) -> None:
    fill = "import itertools\nfor n in itertools.count(): open(str(n), 'wb').write(bytes([1]) * (1 << 20))"
    for _ in range(3):
        ran = sandbox.exec(fill)
        assert "No space left" in ran.stderr or ran.ended is Ended.OUTPUT
    assert sandbox.exec("open('a', 'wb').write(bytes(32 << 20))").ok


@pytest.mark.parametrize("backend", ["namespaces", pytest.param("landlock", marks=pytest.mark.slow)])
def test_a_flood_of_files_is_stopped(open_or_skip: Callable[..., WorkerSandbox], backend: str) -> None:
    sandbox = open_or_skip(backend)
    flood = "import itertools\nfor n in itertools.count(): open(str(n), 'w').close()"
    assert sandbox.exec(flood).ended is Ended.OUTPUT
    assert sandbox.exec("import os; print(os.listdir('.'))").stdout == "[]\n"
    sandbox.close()


def test_folders_nobody_can_enter_or_reach_are_removed(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec(
        code("""
        import os
        os.mkdir("closed", 0)
        for _ in range(1200):
            os.mkdir("d" * 10); os.chdir("d" * 10)
        """)
    )
    assert ran.ok or ran.ended is Ended.OUTPUT, ran.stderr
    ran = sandbox.exec(
        "import os; print(os.listdir('..'))" if sandbox.backend == "namespaces" else "print('run-')"
    )
    assert ran.stdout.count("run-") == 1


def test_leftovers_do_not_survive(sandbox: WorkerSandbox) -> None:
    daemon = code("""
        import os, time
        if os.fork(): os._exit(0)
        os.setsid()
        if os.fork(): os._exit(0)
        time.sleep(60)
        """)
    assert sandbox.exec("pass").ok
    before = {pid for pid in descendants(os.getpid()) if alive(pid)}  # other tests may keep sandboxes open
    for _ in range(3):
        assert sandbox.exec(daemon).ok
    assert {pid for pid in descendants(os.getpid()) if alive(pid)} <= before


@pytest.mark.parametrize("pieces", [[3], [4], [5], [8], [9], [3, 4], [30], [1] * 23, [7, 50, 2]])
def test_a_tap_keeps_both_ends_whatever_the_pieces(pieces: list[int]) -> None:
    source, sink = os.pipe()
    os.set_blocking(source, False)
    tap, data = Tap(source, 4), bytes(range(1, 1 + sum(pieces)))
    at = 0
    for size in pieces:
        os.write(sink, data[at : at + size])
        at += size
        assert tap.drain() == size
    (head, tail, total), parts = tap.parts()
    got = b"".join(parts)
    assert (head, tail, total) == (min(4, total), min(4, max(0, total - 4)), len(data))
    assert got == (data if total <= 8 else data[:4] + data[-4:])
    tap.wipe()
    assert not any(b"".join(tap.parts()[1]))
    os.close(source)
    os.close(sink)


def test_emptying_keeps_what_it_is_told_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "keep").write_text("x")
    (folder / "a" / "link").symlink_to(outside)
    assert usage(str(folder), 100)[1] == 4
    empty(str(folder), ["keep"])
    assert [path.name for path in folder.iterdir()] == ["keep"]
    assert (outside / "precious").exists()
