"""A Docker engine of the tests' own: installed if need be, started by hand, ended by its process number."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rollgym.sandbox import docker_engine
from rollgym.sandbox.worker_limits import descendants

START_SECONDS = 60
PACKAGES = ("docker.io", "iptables")
# No bridge, no rules of a firewall, no forwarding: the machine's network stays as it is.
QUIET = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--ip-forward=false")


def why_not() -> str | None:
    """Why no engine can be started here."""
    if os.environ.get("ROLLGYM_TEST_DOCKER") != "1":
        return "ROLLGYM_TEST_DOCKER=1 is not set"
    if os.getuid():
        return "a Docker engine needs root"
    return None


def install() -> str:
    """The program dockerd, from Debian where it is missing."""
    words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    said = ""
    for command in (words, ["apt-get", "update", "-qq"], words):
        if found := shutil.which("dockerd"):
            return found
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        said += done.stderr
    if found := shutil.which("dockerd"):
        return found
    raise RuntimeError(f"dockerd cannot be installed: {said[-500:]}")


class Engine:
    """One engine with a folder and a socket of its own."""

    def __init__(self, *more: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollgym-docker-", dir="/var/tmp"))
        self.host = f"unix://{self.folder}/docker.sock"
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                words = (self.folder / "log").read_text()[-1000:]
                self.stop()
                raise RuntimeError(f"dockerd does not start: {words}")
            time.sleep(0.1)

    def _command(self) -> list[str]:
        words = [install(), "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"]
        words += ["--pidfile", f"{self.folder}/pid", "--host", self.host, "--userland-proxy=false"]
        return [*words, *QUIET, *self._more]

    def _answers(self) -> bool:
        import docker

        with contextlib.suppress(docker.errors.DockerException, OSError):
            docker_engine.knock(self.host)
            client = docker.DockerClient(self.host)
            client.close()
            return True
        return False

    def stop(self) -> None:
        """End it and what it started."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process
        self._process.kill()
        self._process.wait()
        self._process = None
        # Where nobody collects orphans, the next engine would take the dead helper for a living one.
        (self.folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def clear(self) -> None:
        """Stop it and delete its folder."""
        self.stop()
        self._end_the_rest()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            place = line.split()[1]
            if place.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", place], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_the_rest(self) -> None:
        """End what outlives an engine that was killed: all that names its folder, and what is below that."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (folder / "cmdline").read_bytes():
                    for pid in (*descendants(int(folder.name)), int(folder.name)):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(*more: str) -> Iterator[Engine]:
    """An engine for the length of a ``with`` block, found by whoever asks for the machine's engine."""
    before = os.environ.get("DOCKER_HOST")
    engine = Engine(*more)
    try:
        engine.start()
        os.environ["DOCKER_HOST"] = engine.host
        yield engine
    finally:
        os.environ.pop("DOCKER_HOST", None)
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        engine.clear()
