"""The walls where namespaces are refused: what they hold, and what the backend says they do not."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollgym.core.errors import RunError
from rollgym.sandbox import landlock
from rollgym.sandbox import worker_confinement as worker_walls
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.landlock import NO_SIGNALS, OTHERS_OF_USER, open_landlock
from rollgym.sandbox.types import Level, SandboxSettings

Opener = Callable[..., WorkerSandbox]


@pytest.fixture(scope="module", params=["landlock"])
def lasting(request: pytest.FixtureRequest, open_or_skip: Opener) -> Iterator[WorkerSandbox]:
    sandbox = open_or_skip(request.param)
    yield sandbox
    sandbox.close()


def test_it_says_what_it_is_and_what_it_does_not_hold(sandbox: WorkerSandbox) -> None:
    assert (sandbox.backend, sandbox.level) == ("landlock", Level.LANDLOCK)
    assert len(sandbox.weaknesses) >= 3
    assert (OTHERS_OF_USER in sandbox.weaknesses) == (os.getuid() != 0)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", "/etc", "/proc", "/"]
)
def test_files_of_the_host_cannot_be_read(sandbox: WorkerSandbox, path: str) -> None:
    ran = sandbox.exec(f"import os; os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r})")
    assert "Permission denied" in ran.stderr, ran.stderr


def test_files_of_the_host_cannot_be_changed(sandbox: WorkerSandbox, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("x")
    target.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o005)
    before = target.stat()
    for action in (
        f"open({str(target)!r}, 'a').write('y')",
        f"os.truncate({str(target)!r}, 0)",
        f"os.unlink({str(target)!r})",
        f"os.chmod({str(target)!r}, 0)",
        f"os.utime({str(target)!r})",
        f"os.setxattr({str(target)!r}, 'user.x', b'y')",
        f"os.rename({str(target)!r}, 'mine')",
        f"os.link({str(target)!r}, 'mine')",
    ):
        assert sandbox.exec(f"import os; {action}").exit_code == 1, action
    after = target.stat()
    assert (target.read_text(), after.st_mode, after.st_mtime_ns) == ("x", before.st_mode, before.st_mtime_ns)


def test_sockets_of_the_host_cannot_be_reached(sandbox: WorkerSandbox) -> None:
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK"):
        assert "not supported" in sandbox.exec(f"import socket; socket.socket(socket.{family})").stderr
    assert "not permitted" in sandbox.exec("import socket; socket.socketpair(type=socket.SOCK_DGRAM)").stderr
    assert sandbox.exec("import asyncio; asyncio.run(asyncio.sleep(0))").ok


def test_signals_stay_inside(sandbox: WorkerSandbox) -> None:
    sandbox.run("x = 1")
    refused = sandbox.exec(f"import os; os.kill({os.getpid()}, 0)")
    assert "PermissionError" in refused.stderr
    assert "PermissionError" in sandbox.exec("import os; os.kill(os.getppid(), 0)").stderr
    sandbox.exec("import os; os.kill(-1, 9)")
    assert sandbox.run("print(x)").stdout == "1\n"


def test_an_execution_cannot_see_the_session_s_files(sandbox: WorkerSandbox) -> None:
    sandbox.write("secret", b"x")
    assert "PermissionError" in sandbox.exec("print(open('../session/secret').read())").stderr


def test_its_folder_goes_with_it(open_or_skip: Opener) -> None:
    sandbox = open_or_skip("landlock")
    folder = Path(sandbox.exec("import os; print(os.path.dirname(os.getcwd()))").stdout.strip())
    assert folder.name.startswith("rollgym-sandbox-")
    assert folder.is_dir()
    sandbox.close()
    assert not folder.exists()


@pytest.mark.parametrize("abi", [0, 1, 2])
def test_old_landlock_is_refused(monkeypatch: pytest.MonkeyPatch, abi: int) -> None:
    monkeypatch.setattr(landlock, "landlock_abi", lambda: abi)
    with pytest.raises(RunError, match=r"version 3 or later \(Linux 6.2\)"):
        open_landlock(SandboxSettings())


def test_where_signals_are_not_kept_inside_all_are_refused(
    open_or_skip: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        # As root, each sandbox has a user id of its own, and signals reach nobody.
        monkeypatch.setattr(landlock, "spare_uid", lambda: None)
        monkeypatch.setattr(landlock, "make_folder", lambda uid: _folder(monkeypatch))
    monkeypatch.setattr(landlock, "landlock_abi", lambda: 5)
    sandbox = open_or_skip("landlock")
    assert NO_SIGNALS in sandbox.weaknesses
    assert "PermissionError" in sandbox.exec("import os; os.kill(os.getpid(), 0)").stderr
    sandbox.close()


def _folder(monkeypatch: pytest.MonkeyPatch) -> str:
    from rollgym.sandbox.launch import make_folder

    return make_folder(None)


def test_walls_that_cannot_be_raised_stop_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    if not worker_walls.landlock_abi():
        pytest.skip("no Landlock here")
    monkeypatch.setattr(landlock.seccomp, "program", lambda profile: b"garbage!")
    with pytest.raises(RunError, match="the confinement of an execution cannot be applied"):
        open_landlock(SandboxSettings())
