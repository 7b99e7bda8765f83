"""Containers of a real Docker engine, which the tests start themselves: ROLLGYM_TEST_DOCKER=1, as root."""

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attack_table import chosen, tried
from attacks import Verdict
from engine import Engine, running, why_not
from soak import soak

from rollgym.cli import main
from rollgym.core.errors import UsageError, WorkerLost
from rollgym.sandbox import docker_engine
from rollgym.sandbox.client import WorkerSandbox, wire_limits
from rollgym.sandbox.docker import open_docker
from rollgym.sandbox.docker_image import build_image, write_tar
from rollgym.sandbox.factory import examine, open_sandbox
from rollgym.sandbox.types import Ended, Level, Limits, SandboxSettings

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SETTINGS = SandboxSettings(backend="docker", limits=Limits(seconds=20))
STARTED_ELSEWHERE = """
from rollgym.sandbox.docker import open_docker
from rollgym.sandbox.types import SandboxSettings
sandbox = open_docker(SandboxSettings(backend="docker"))
print(sandbox.exec("print(6 * 7)").stdout, end="", flush=True)
input()
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running() as it:
        build_image()
        yield it


@pytest.fixture(scope="module")
def lasting(engine: Engine) -> Iterator[WorkerSandbox]:
    with contextlib.closing(open_docker(SETTINGS)) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(lasting: WorkerSandbox) -> WorkerSandbox:
    lasting.reset()
    return lasting


def containers() -> set[str]:
    """All containers of sandboxes that the engine has."""
    with docker_engine.connected() as api:
        found = api.containers(all=True, filters={"label": docker_engine.LABEL})
        return {container["Id"] for container in found}


def test_a_program_runs_in_a_process_and_a_folder_of_its_own(sandbox: WorkerSandbox) -> None:
    code = "import sys; print(input(), open('a.txt').read()); open('b', 'w'); sys.exit(3)"
    ran = sandbox.exec(code, stdin="hello\n", files={"a.txt": b"file"})
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended) == ("hello file\n", "", 3, Ended.EXIT)
    assert sandbox.exec("import os; print(os.listdir())").stdout == "[]\n"
    assert (sandbox.backend, sandbox.level, sandbox.weaknesses) == ("docker", Level.NAMESPACES, ())


def test_a_session_lasts_until_it_is_reset(sandbox: WorkerSandbox) -> None:
    sandbox.write("data.txt", b"42")
    assert sandbox.run("n = int(open('data.txt').read())").state == "committed"
    assert sandbox.run("open('out.txt', 'w').write(str(n + 1)); print(n)").stdout == "42\n"
    assert sandbox.read("out.txt") == b"43"
    sandbox.reset()
    assert "NameError" in sandbox.run("n").stderr
    with pytest.raises(FileNotFoundError, match="out"):
        sandbox.read("out.txt")


@pytest.mark.parametrize(
    "times", [50, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_many_executions_leave_nothing_in_the_container_nor_here(
    lasting: WorkerSandbox, left_behind: Callable[[], Any], times: int
) -> None:
    before = left_behind(), containers()
    with contextlib.closing(open_docker(SETTINGS)) as sandbox:
        (own,) = containers() - before[1]
        during = processes(own)
        soak(sandbox, times)
        assert len(processes(own)) == len(during)
    assert (left_behind(), containers()) == before


def processes(container: str) -> list[list[str]]:
    """What runs in a container."""
    with docker_engine.connected() as api:
        found: list[list[str]] = api.top(container)["Processes"]
        return found


def test_large_bodies_pass_in_both_directions(sandbox: WorkerSandbox) -> None:
    body = os.urandom(5 << 20)
    sandbox.write("big", body)
    assert sandbox.read("big") == body


def test_limits_hold_and_the_sandbox_goes_on(sandbox: WorkerSandbox) -> None:
    def ended(code: str, **limits: float) -> Ended:
        return sandbox.exec(code, limits=Limits(**{"seconds": 20, **limits})).ended  # type: ignore[arg-type]

    assert ended("while True: pass", seconds=0.5) is Ended.TIMEOUT
    assert ended("while True: print('x' * 1000)", output_mb=1) is Ended.OUTPUT
    several = "import os\nfor _ in range(4): os.fork()\nx = b'x' * (60 << 20)\nimport time; time.sleep(20)"
    assert ended(several, memory_mb=100) is Ended.MEMORY
    forks = (
        "import os, time\nn = 0\ntry:\n    while n < 99:\n        if not os.fork(): time.sleep(20)\n"
        "        n += 1\nexcept OSError: pass\nprint(n)"
    )
    counts = [int(sandbox.exec(forks, limits=Limits(processes=most)).stdout) for most in (5, 50)]
    assert 3 <= counts[0] <= 9
    assert 48 <= counts[1] <= 54
    fill = "open('f', 'wb').write(bytes(90 << 20))"
    assert not sandbox.exec(fill, limits=Limits(file_mb=200)).ok
    assert sandbox.exec("print(6 * 7)").stdout == "42\n"


def test_what_the_kernel_kills_for_memory_is_told_as_such(sandbox: WorkerSandbox) -> None:
    # What the worker is told and what the container may have differ, so that only the kernel can be first.
    channel, limits = sandbox._channel, Limits(memory_mb=20, disk_mb=1)
    code = b"x = [b'x' * (1 << 20) for _ in range(500)]"
    request = {
        "op": "exec",
        "code": len(code),
        "stdin": 0,
        "files": [],
        "limits": wire_limits(SETTINGS.limits),
    }
    channel.out_of_memory()  # Whatever came before.
    channel.adapt(limits)
    header, _ = sandbox._call(request, [code], 20)
    assert header["ended"] == "lost"
    assert channel.out_of_memory()
    assert not channel.out_of_memory()
    assert sandbox.exec("print(6 * 7)").stdout == "42\n"


def test_there_is_no_network_and_nothing_of_the_host(sandbox: WorkerSandbox, engine: Engine) -> None:
    ran = sandbox.exec("import os; print(os.listdir('/sys/class/net'), open('/etc/resolv.conf').read())")
    assert ran.stdout.splitlines()[0].startswith("['lo']")
    assert "nameserver 127.0.0.1" in ran.stdout
    for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_VSOCK"):
        ran = sandbox.exec(f"import socket; socket.socket(socket.{family})")
        assert "Address family not supported" in ran.stderr, family
    assert not sandbox.exec(f"open({engine.host.removeprefix('unix://')!r})").ok
    seen = sandbox.exec("import os; print(sorted(os.environ), os.getuid(), os.getgroups())").stdout
    assert "65534" in seen
    assert "DOCKER" not in seen
    for path in ("/x", "/etc/x", "/usr/x", "/dev/x", "/dev/mqueue/x", "/sys/fs/cgroup/x"):
        assert not sandbox.exec(f"open({path!r}, 'w')").ok, path


def test_the_container_has_every_wall(sandbox: WorkerSandbox) -> None:
    with docker_engine.connected() as api:
        (found,) = [api.inspect_container(name) for name in containers()]
    host, config = found["HostConfig"], found["Config"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["IpcMode"]) == ("none", True, "private")
    assert (host["CapDrop"], host["CapAdd"], host["SecurityOpt"]) == (["ALL"], None, ["no-new-privileges"])
    assert (host["Privileged"], host["Binds"], host["LogConfig"]["Type"]) == (False, None, "none")
    assert host["Memory"] == host["MemorySwap"] > 0
    assert host["PidsLimit"] > 0
    assert host["NanoCpus"] > 0
    assert {limit["Name"] for limit in host["Ulimits"]} == {"nofile", "fsize", "core"}
    assert {*host["Tmpfs"]} == {"/tmp", "/work", "/dev/mqueue"}
    assert (config["User"], found["Mounts"]) == ("65534:65534", [])


def test_closing_removes_the_container(engine: Engine) -> None:
    before = containers()
    sandbox = open_sandbox(SETTINGS)
    (ours,) = containers() - before
    sandbox.exec("print(1)")
    sandbox.close()
    sandbox.close()
    assert ours not in containers()
    with pytest.raises(WorkerLost, match="closed"):
        sandbox.exec("print(1)")


def test_a_container_that_is_killed_is_a_lost_worker(engine: Engine) -> None:
    before = containers()
    sandbox = open_docker(SETTINGS)
    (ours,) = containers() - before
    with docker_engine.connected() as api:
        api.kill(ours)
    with pytest.raises(WorkerLost, match="died"):
        sandbox.exec("print(1)")
    assert ours not in containers()


def test_the_container_of_a_killed_process_goes(engine: Engine) -> None:
    before = containers()
    command = [sys.executable, "-c", STARTED_ELSEWHERE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"42\n"
        (theirs,) = containers() - before
        process.kill()
    end = time.monotonic() + 30
    while theirs in containers() and time.monotonic() < end:
        time.sleep(0.1)
    assert theirs not in containers()


def test_what_a_dead_owner_left_is_reaped_and_nothing_else(engine: Engine) -> None:
    with docker_engine.connected() as api:

        def made(**labels: str) -> str:
            name = docker_engine.DEFAULT_IMAGE
            return str(
                api.create_container(name, "python3", labels={**docker_engine.labels(), **labels})["Id"]
            )

        dead = made(**{docker_engine.OWNER_LABEL: f"{os.getpid()} 1"})
        elsewhere = made(**{docker_engine.OWNER_LABEL: "1 1", docker_engine.HOST_LABEL: "another"})
        ours = made()
        try:
            open_docker(SETTINGS).close()
            assert dead not in containers()
            assert {elsewhere, ours} <= containers()
        finally:
            for name in (elsewhere, ours):
                docker_engine.remove(api, name)


def test_an_image_that_is_missing_or_has_no_python_is_named(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no image nowhere.*docker pull nowhere.*build-image"):
        open_sandbox(SandboxSettings(backend="docker", image="nowhere"))
    with docker_engine.connected() as api:
        api.import_image_from_data(b"\0" * 10240, "empty", "latest")
    before = containers()
    with pytest.raises(UsageError, match="python3.*not found"):
        open_sandbox(SandboxSettings(backend="docker", image="empty"))
    assert containers() == before


def test_folders_that_an_image_wants_to_write_to_are_closed(engine: Engine) -> None:
    with docker_engine.connected() as api:
        source = api.inspect_image(docker_engine.DEFAULT_IMAGE)["Id"]
        container = api.create_container(source, "python3")["Id"]
        changes = ["VOLUME /data", "ENV LD_PRELOAD=/x TOKEN=abc", 'ENTRYPOINT ["/nothing"]']
        api.commit(container, "wide", "latest", changes=changes)
        api.remove_container(container)
    with contextlib.closing(open_docker(SandboxSettings(backend="docker", image="wide"))) as sandbox:
        assert "Read-only" in sandbox.exec("open('/data/x', 'w')").stderr
        assert sandbox.exec("import os; print(os.environ.get('TOKEN'))").stdout == "None\n"


def test_a_runtime_that_is_missing_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGYM_DOCKER_RUNTIME", "nothing")
    with pytest.raises(UsageError, match="no runtime 'nothing'; it has .*runc"):
        open_docker(SETTINGS)


def test_the_doctor_finds_it(engine: Engine) -> None:
    finding = examine("docker")
    assert finding.works, finding
    assert "image rollgym-sandbox" in finding.python


def test_the_command_makes_an_image_of_another_python(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no /usr/bin/python3")
    with pytest.raises(SystemExit) as end:
        main(["sandbox", "build-image", "--tag", "other:1", "--python", "/usr/bin/python3", "--json"])
    built = json.loads(capsys.readouterr().out)
    assert (end.value.code, built["tag"]) == (0, "other:1")
    with contextlib.closing(open_docker(SandboxSettings(backend="docker", image="other:1"))) as sandbox:
        assert sandbox.exec("import sys, ssl; print(sys.version.split()[0])").stdout == f"{built['python']}\n"


def test_quick_attacks_are_blocked(engine: Engine) -> None:
    found = tried("docker", chosen(quick=True))
    assert {name: what for name, what in found.items() if what[0] != Verdict.BLOCKED} == {}
    assert len(found) >= 20


# The docker package leaves a socket open when an engine is gone.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_an_engine_that_dies_is_a_lost_worker(engine: Engine) -> None:
    sandbox = open_docker(SETTINGS)
    engine.kill()
    with pytest.raises(WorkerLost, match="engine"):
        sandbox.exec("print(1)", limits=Limits(memory_mb=100))
    with pytest.raises(UsageError, match="no Docker engine answers at unix://.*dockerd"):
        open_sandbox(SETTINGS)
    engine.start()
    open_docker(SETTINGS).close()
    with docker_engine.connected() as api:
        left = api.containers(filters={"label": docker_engine.OWNER_LABEL})
    assert left == []
    gc.collect()


def test_an_image_in_which_rollgym_can_be_read_is_refused(engine: Engine) -> None:
    """Untrusted code would find the reference solutions of its tasks there."""
    file = io.BytesIO()
    write_tar(file, sys.executable)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="a") as tar:
        entry = tarfile.TarInfo("usr/local/lib/python3.99/site-packages/rollgym/__init__.py")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"pass"))
    file.seek(0)
    with docker_engine.connected() as api:
        api.import_image_from_data(file, "rollgym-visible", "latest", ['CMD ["python3"]'])
    before = containers()
    with pytest.raises(UsageError, match="site-packages/rollgym can be read inside"):
        open_sandbox(SandboxSettings(backend="docker", image="rollgym-visible:latest"))
    assert containers() <= before
