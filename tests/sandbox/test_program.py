"""Programs in a sandbox that reach one port and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.sandbox import program as program_module
from rollgym.sandbox.interpreter import find_python
from rollgym.sandbox.namespaces import find_bwrap
from rollgym.sandbox.program import ProgramSandbox, SandboxedProgramSpec
from rollgym.sandbox.types import Limits
from rollgym.sandbox.worker_limits import alive, descendants

pytestmark = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed")
PYTHON = find_python().path
PORT = 41234
SLEEP = f"{86_400 + os.getpid()}"
"""Seconds that no other test sleeps."""
LOOK = """
import json, os, socket, sys, urllib.request
def attempt(work):
    try:
        return work()
    except Exception as error:
        return type(error).__name__
def connect(address):
    socket.create_connection(address, timeout=1).close()
    return "connected"
def escape():
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", b"/work", b"tmpfs", 0, None)
    return [libc.unshare(0x10000000), mounted, libc.ptrace(16, 1, 0, 0)]
print(json.dumps({
    "endpoint": attempt(lambda: urllib.request.urlopen("http://127.0.0.1:41234/").read().decode()),
    "other port": attempt(lambda: connect(("127.0.0.1", 22))),
    "internet": attempt(lambda: connect(("1.1.1.1", 80))),
    "ipv6": attempt(lambda: socket.socket(socket.AF_INET6)),
    "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    "netlink": attempt(lambda: socket.socket(socket.AF_NETLINK)),
    "variables": dict(os.environ),
    "work": os.listdir("."),
    "folder": os.getcwd(),
    "passwd": attempt(lambda: open("/etc/shadow").read()),
    "write": attempt(lambda: open("/usr/x", "w")),
    "escape": attempt(escape),
    "ids": [os.getuid(), os.getpid()],
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")][0],
    "ours": attempt(lambda: __import__("rollgym").__name__),
}))
"""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


@contextlib.asynccontextmanager
async def sandbox(**options: Any) -> AsyncIterator[ProgramSandbox]:
    opened = ProgramSandbox(SandboxedProgramSpec(**options))
    try:
        yield opened
    finally:
        await opened.close()


async def output(opened: ProgramSandbox, stdin: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """The exit code, output and errors of one start; every connection is answered with `fine`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nfine")
        await writer.drain()
        writer.close()

    program = await opened.start(environment, port=PORT)
    server = await asyncio.start_server(serve, sock=program.listener)
    try:
        os.write(program.stdin, stdin)
        os.close(program.stdin)
        code = await program.exit
        out = await asyncio.to_thread(_read_all, program.stdout)
        err = await asyncio.to_thread(_read_all, program.stderr)
        return code, out, err
    finally:
        server.close()
        await program.stop()
        for descriptor in (program.stdout, program.stderr):
            os.close(descriptor)


def _read_all(descriptor: int) -> str:
    data = b""
    while part := os.read(descriptor, 1 << 16):
        data += part
    return data.decode()


def test_a_program_reaches_the_endpoint_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    script = tmp_path / "look.py"
    script.write_text(LOOK)

    async def main() -> None:
        async with sandbox(command=(PYTHON, str(script)), environment={"MINE": "1"}) as opened:
            code, out, err = await output(opened, OPENAI_API_KEY="session/x")
            assert code == 0, err
            seen = json.loads(out)
            assert seen["endpoint"] == "fine"
            assert (seen["other port"], seen["internet"]) == ("ConnectionRefusedError", "OSError")
            assert [seen[name] for name in ("ipv6", "netlink", "raw")] == [
                "OSError",
                "OSError",
                "PermissionError",
            ]
            assert seen["variables"]["MINE"] == "1"
            assert seen["variables"]["OPENAI_API_KEY"] == "session/x"
            assert "hush" not in out
            assert (seen["work"], seen["folder"]) == ([], "/work")
            assert (seen["passwd"], seen["write"]) == ("FileNotFoundError", "OSError")
            assert seen["escape"] == [-1, -1, -1]
            assert seen["ids"] == [1000, 2]
            assert int(seen["capabilities"], 16) == 0
            assert seen["ours"] == "ModuleNotFoundError"

    run(main())


def test_starts_share_neither_files_nor_processes_nor_ports(tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text(
        "import os, socket, subprocess, sys\n"
        "print(os.listdir('/work'), [n for n in os.listdir('/tmp') if n != 'pytest-of-root'], os.getpid())\n"
        "open('/work/left', 'w'); open('/tmp/left', 'w')\n"
        "socket.create_server(('127.0.0.1', 5000))\n"
        "subprocess.Popen(['sleep', '300'])\n"
    )

    async def main() -> None:
        async with sandbox(command=(PYTHON, str(script))) as opened:
            first, second = await asyncio.gather(output(opened), output(opened))
            assert first == second == await output(opened)
            assert first[0] == 0, first
            assert first[1].startswith("[] [")

    run(main())


def test_a_function_is_imported_once_and_called_in_every_start(tmp_path: Path) -> None:
    module = tmp_path / "walker.py"
    module.write_text(
        "import os\n"
        "imported = os.urandom(4).hex()\n"
        "calls = []\n"
        "async def play(episode):\n"
        "    calls.append(episode.task['task'])\n"
        "    print(imported, calls, episode.model, episode.base_url)\n"
        "    return {'reward': 0.5, 'success': True}\n"
        "def fail(episode):\n"
        "    raise KeyError('lost')\n"
    )
    variables = {
        "OPENAI_BASE_URL": "http://x/v1",
        "OPENAI_API_KEY": "k",
        "OPENAI_MODEL": "m",
        "ROLLGYM_SESSION": "s",
    }

    async def main() -> None:
        async with sandbox(function=f"{module}:play", python=PYTHON) as opened:
            starts = [await output(opened, b'{"task": %d}\n' % number, **variables) for number in range(3)]
        lines = [out.splitlines() for _, out, _ in starts]
        assert {words[0].split()[0] for words in lines} == {lines[0][0].split()[0]}
        for number, words in enumerate(lines):
            assert words[0].split()[1:] == [f"[{number}]", "m", "http://x/v1"]
            assert json.loads(words[-1]) == {"reward": 0.5, "success": True}
        async with sandbox(function=f"{module}:fail", python=PYTHON) as opened:
            code, _, err = await output(opened, b'{"task": 0}\n', **variables)
        assert (code, "KeyError: 'lost'" in err) == (1, True)

    run(main())


def test_a_function_that_cannot_be_imported_is_a_user_s_mistake(tmp_path: Path) -> None:
    module = tmp_path / "broken.py"
    module.write_text("import no_such_package\n")

    async def main() -> None:
        for name, said in (("play", "No module named 'no_such_package'"),):
            async with sandbox(function=f"{module}:{name}", python=PYTHON) as opened:
                with pytest.raises(UsageError, match=said):
                    await opened.open()
        module.write_text("play = 3\n")
        async with sandbox(function=f"{module}:play", python=PYTHON) as opened:
            with pytest.raises(UsageError, match="is not a function"):
                await opened.open()

    run(main())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ("no-such-program",)}, "not found"),
        ({"command": ("true",), "mounts": ("/no/such/folder",)}, "does not exist"),
        ({"command": ("true",), "mounts": ("/",)}, "Cannot mount /:"),
        ({"function": "no_file.py:play"}, "there is no file|cannot be read by an unprivileged user"),
        ({"command": ("true",), "function": "a:b"}, "either a command or a function"),
        ({"command": ("true",), "python": "python3"}, "python requires a function"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ProgramSandbox(SandboxedProgramSpec(**options))


def test_without_bubblewrap_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "find_bwrap", lambda: None)
    with pytest.raises(UsageError, match="apt install bubblewrap"):
        ProgramSandbox(SandboxedProgramSpec(command=("true",)))


def test_without_namespaces_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):  # an unprivileged user must reach it
        if folder.stat().st_uid == os.getuid() and folder.is_relative_to(tempfile.gettempdir()):
            os.chmod(folder, folder.stat().st_mode | 0o055)
    monkeypatch.setattr(program_module, "find_bwrap", lambda: str(broken))

    async def main() -> None:
        opened = ProgramSandbox(SandboxedProgramSpec(command=("true",)))
        with pytest.raises(UsageError, match="No permissions.*sysctl user.max_user_namespaces.*sandbox=none"):
            await opened.open()

    run(main())


BOMB = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
        made += 1
except OSError as error:
    print(made, error)
"""


def test_limits_hold(tmp_path: Path) -> None:
    bomb, hungry, full = (tmp_path / name for name in ("bomb.py", "hungry.py", "full.py"))
    bomb.write_text(BOMB)
    hungry.write_text("data = []\nwhile True: data.append(bytearray(b'x' * 10_000_000))\n")
    full.write_text("with open('big', 'wb') as f:\n    for _ in range(40): f.write(bytes(1 << 20))\n")
    limits = Limits(memory_mb=128, processes=20, disk_mb=16, seconds=60)

    async def main() -> None:
        async with sandbox(command=(PYTHON, str(bomb)), limits=limits) as opened:
            code, out, err = await output(opened)
            assert code == 0, err
            assert int(out.split()[0]) < 40
        async with sandbox(command=(PYTHON, str(full)), limits=limits) as opened:
            code, _, err = await output(opened)
            assert (code, "No space left" in err) == (1, True)
        async with sandbox(command=(PYTHON, str(hungry)), limits=limits) as opened:
            if opened_cgroup():
                code, _, err = await output(opened)
                assert code == -9 or "MemoryError" in err

    run(main())


def opened_cgroup() -> bool:
    from rollgym.sandbox.cgroup import Cgroup

    made = Cgroup.make(Limits())
    if made is not None:
        made.close()
    return made is not None


def test_a_file_is_read_from_the_working_folder_and_from_nowhere_else(tmp_path: Path) -> None:
    script = tmp_path / "files.py"
    script.write_text(
        "import os\n"
        "open('good', 'w').write('0.25'); open('big', 'w').write('x' * 1000)\n"
        "os.symlink('/etc/passwd', 'link'); os.mkfifo('fifo'); os.mkdir('folder')\n"
    )

    async def main() -> None:
        async with sandbox(command=(PYTHON, str(script))) as opened:
            program = await opened.start({}, port=PORT)
            try:
                assert await program.exit == 0
                assert program.read_file("good", 100) == b"0.25"
                assert program.read_file("missing", 100) is None
                for name, said in (("link", "symbolic links"), ("fifo", "ordinary"), ("folder", "irector")):
                    with pytest.raises(OSError, match=said):
                        program.read_file(name, 100)
                with pytest.raises(ValueError, match="more than 100"):
                    program.read_file("big", 100)
            finally:
                await program.stop()
                for descriptor in (program.stdin, program.stdout, program.stderr):
                    os.close(descriptor)

    run(main())


def leftovers() -> tuple[int, int, int, int]:
    """Sandboxed processes, mounts, cgroups and descriptors of this process."""
    me = os.getpid()
    processes = len([pid for pid in descendants(me) if alive(pid)])
    kinds = [line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    mounts = kinds.count("tmpfs")  # other tests mount overlays meanwhile
    cgroups = len(list(Path("/sys/fs/cgroup").rglob(f"rollgym-{me}-*")))
    return processes, mounts, cgroups, len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_nothing_is_left_after_fifty_starts(tmp_path: Path) -> None:
    script = tmp_path / "messy.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "for _ in range(5): subprocess.Popen(['sleep', '" + SLEEP + "'], start_new_session=True)\n"
        "if int(os.environ['N']) % 3 == 0: os.kill(os.getpid(), 9)\n"
        "if int(os.environ['N']) % 3 == 1: subprocess.Popen(['sleep', '" + SLEEP + "']).wait()\n"
    )

    async def start(opened: ProgramSandbox, number: int) -> None:
        program = await opened.start({"N": str(number)}, port=PORT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(program.exit), 0.3)
        await program.stop()
        for descriptor in (program.stdin, program.stdout, program.stderr):
            os.close(descriptor)

    async def main() -> None:
        async with sandbox(command=(PYTHON, str(script))) as opened:
            await start(opened, 0)
            for first in range(0, 50, 5):
                await asyncio.gather(*(start(opened, first + number) for number in range(5)))
            listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
            assert f"sleep {SLEEP}" not in listed, "a program was left while its sandbox is open"

    run(asyncio.sleep(0))
    before = leftovers()
    run(main())
    after = leftovers()
    assert after[:3] == before[:3]
    assert after[3] <= before[3] + 2
