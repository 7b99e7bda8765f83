"""The image is a Python of this machine, whole: it starts from the tar's files alone. No engine is needed."""

import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from rollgym.cli import main
from rollgym.core.errors import MissingExtra, UsageError, WorkerLost
from rollgym.core.extras import install_command
from rollgym.sandbox import docker_engine
from rollgym.sandbox.docker import Attached, host_config
from rollgym.sandbox.docker_image import write_tar
from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.types import Limits, SandboxSettings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="images are made on Linux")


@pytest.fixture(scope="module")
def tar() -> tarfile.TarFile:
    file = io.BytesIO()
    version, count = write_tar(file, sys.executable)
    assert version == sys.version.split()[0]
    assert count > 500
    file.seek(0)
    return tarfile.open(fileobj=file)


def test_the_image_is_readable_for_all_and_owned_by_root(tar: tarfile.TarFile) -> None:
    for entry in tar:
        assert (entry.uid, entry.gid) == (0, 0)
        assert entry.mode & 0o444 == 0o444, entry.name
        assert not entry.mode & 0o6000, entry.name
    names = tar.getnames()
    assert len(names) == len(set(names))
    assert tar.getmember("usr/local/bin/python3").linkname == os.path.realpath(sys.executable)
    assert not [name for name in names if "site-packages" in name]


@pytest.mark.skipif(os.getuid() != 0, reason="another root folder needs root")
def test_python_runs_from_the_image_alone(tar: tarfile.TarFile, tmp_path: Path) -> None:
    tar.extractall(tmp_path, filter="tar")
    code = "import ssl, json, sqlite3, ctypes, decimal; print(json.dumps([6 * 7]), os.system('exit 3') >> 8)"
    command = ["chroot", "--userspec=65534:65534", str(tmp_path), "/usr/local/bin/python3", "-S", "-c"]
    tmp_path.chmod(0o755)
    done = subprocess.run([*command, f"import os; {code}"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[42] 3\n", "")


def test_a_program_that_is_no_python_is_refused() -> None:
    with pytest.raises(UsageError, match="/bin/false is not a Python"):
        write_tar(io.BytesIO(), "/bin/false")


def test_without_an_engine_it_is_said_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(
        UsageError, match="no Docker engine answers at unix:///nowhere.*apt install docker.io"
    ):
        open_sandbox(SandboxSettings(backend="docker"))


def test_the_command_needs_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SystemExit) as end:
        main(["sandbox", "build-image"])
    assert end.value.code == 1
    assert "no Docker engine answers" in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingExtra, match=re.escape(install_command("docker"))):
        open_sandbox(SandboxSettings(backend="docker"))


def test_volumes_of_an_image_never_open_what_is_ours() -> None:
    config = host_config(Limits(disk_mb=5), volumes=("/work", "/data"))
    assert config["tmpfs"]["/data"].startswith("ro,")
    assert "size=5m" in config["tmpfs"]["/work"]


def test_an_owner_is_not_taken_for_a_later_process() -> None:
    mine = docker_engine.owner_id(os.getpid())
    assert mine == docker_engine.labels()[docker_engine.OWNER_LABEL] == docker_engine.owner_id(os.getpid())
    process = subprocess.Popen(["true"])
    process.wait()
    assert docker_engine.owner_id(process.pid) != mine
    assert docker_engine.owner_id(1 << 30) is None


class FakeEngine:
    """An API whose attach stream is one end of a pair of sockets."""

    def __init__(self) -> None:
        import socket

        self.ours, self.theirs = socket.socketpair()
        self.closed = False

    def attach_socket(self, container: str, params: object) -> object:
        return self.theirs

    def remove_container(self, container: str, **how: object) -> None:
        raise pytest.importorskip("docker").errors.NotFound("gone")

    def close(self) -> None:
        self.closed = True
        self.ours.close()


def piece(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", stream, len(data)) + data


def test_output_is_put_together_from_pieces_and_errors_are_kept_apart() -> None:
    pytest.importorskip("docker")
    engine = FakeEngine()
    channel = Attached(engine, "c", Limits())
    engine.ours.sendall(piece(1, b"ab") + piece(2, b"a warning\n") + piece(1, b"") + piece(1, b"cdef"))
    view = bytearray(5)
    channel.read_into(memoryview(view), time.monotonic() + 60)
    assert view == b"abcde"
    engine.ours.sendall(piece(2, b"it broke\n"))
    engine.ours.shutdown(1)
    rest = bytearray(2)
    with pytest.raises(WorkerLost, match="died.*: it broke"):
        channel.read_into(memoryview(rest), time.monotonic() + 60)
    assert engine.closed
    with pytest.raises(WorkerLost):
        channel.write(b"x", time.monotonic() + 60)


def test_a_worker_that_says_nothing_is_lost_at_the_deadline() -> None:
    pytest.importorskip("docker")
    engine = FakeEngine()
    channel = Attached(engine, "c", Limits())
    with pytest.raises(WorkerLost, match="in time"):
        channel.read_into(memoryview(bytearray(1)), time.monotonic() + 0.05)
    assert engine.closed
