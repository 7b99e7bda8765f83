"""Starts a worker as a local process and connects pipes to it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollgym.core.errors import RunError, WorkerLost
from rollgym.sandbox import client, protocol
from rollgym.sandbox.cgroup import Cgroup
from rollgym.sandbox.types import Limits
from rollgym.sandbox.worker_limits import descendants

_launchers: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _launcher() -> ThreadPoolExecutor:
    """Return a thread of this process that lives as long as the process.

    PDEATHSIG follows the thread that started the child: a sandbox started in a caller's thread would die
    with that thread. Keyed by pid because a fork does not inherit the thread.
    """
    with _lock:
        me = os.getpid()
        if me not in _launchers:
            _launchers.clear()
            _launchers[me] = ThreadPoolExecutor(1, "rollgym-sandbox-launcher")
        return _launchers[me]


def _popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", start_new_session=True, bufsize=0, **options
    )


def launch(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that dies with this process, not with the calling thread."""
    return (
        _launcher()
        .submit(lambda: subprocess.Popen(command, cwd="/", start_new_session=True, bufsize=0, **options))
        .result()
    )


def boot(channel: Pipes, config: dict[str, Any], python: str) -> None:
    """Start the worker behind a channel; on failure close it and raise."""
    try:
        client.hello(channel)
        channel.confine()
        client.start(channel, config)
    except (RunError, protocol.FrameError) as error:
        channel.close()
        raise RunError(f"{error} (Python inside: {python})" if config["preload"] else str(error)) from error
    except BaseException:
        channel.close()
        raise


class Pipes:
    """Channel to a worker that is a local process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        uid: int | None,
        environment: Mapping[str, str],
        cgroup: Cgroup | None = None,
    ) -> None:
        user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        self._cgroup = cgroup
        started = _launcher().submit(_popen, command, env=dict(environment), **user)
        try:
            self._process = started.result()
        except OSError as error:
            if cgroup:
                cgroup.close()
            raise RunError(f"{command[0]} cannot be started: {error}") from error
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        self._sink, self._source, self._errors = (stream.fileno() for stream in streams if stream)
        for descriptor in (self._sink, self._source, self._errors):
            os.set_blocking(descriptor, False)
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def confine(self) -> None:
        """Move its processes into the cgroup, if any. Called before untrusted code runs."""
        if self._cgroup:
            self._cgroup.add([self.pid, *descendants(self.pid)])

    def write(self, data: bytes | memoryview, deadline: float) -> None:
        """Send all data before the deadline."""
        rest = memoryview(data)
        while rest:
            self._wait(self._sink, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._sink, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._lost("died") from None

    def read_into(self, view: memoryview, deadline: float) -> None:
        """Fill a buffer before the deadline."""
        while view:
            self._wait(self._source, select.POLLIN, deadline)
            size = os.readv(self._source, [view])
            if not size:
                raise self._lost("died")
            view = view[size:]

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise self._lost("did not answer in time")

    def _lost(self, why: str) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        words = self.complaint()
        self.close()
        return WorkerLost(f"The worker of a sandbox {why}{': ' + words if words else ''}.")

    def complaint(self) -> str:
        """Return the end of its standard error."""
        text = b""
        with contextlib.suppress(OSError):
            while part := os.read(self._errors, 1 << 16):
                text = (text + part)[-2000:]
        return text.decode("utf-8", "replace").strip().rpartition("\n")[2]

    def out_of_memory(self) -> bool:
        """Whether the kernel OOM-killed since the last call."""
        return bool(self._cgroup and self._cgroup.out_of_memory())

    def adapt(self, limits: Limits) -> None:
        """Apply the limits of the next execution to the cgroup."""
        if self._cgroup:
            self._cgroup.adapt(limits)

    def close(self) -> None:
        """End the worker and its descendants."""
        if self._closed:
            return
        self._closed = True
        # A healthy worker ends its children when stdin closes; the end of pid 1 kills them anyway.
        with contextlib.suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._kill()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream
            stream.close()
        if self._cgroup:
            self._cgroup.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)
        for pid in [*descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def make_folder(uid: int | None) -> str:
    """Create a folder that only the user id inside can enter."""
    folder = tempfile.mkdtemp(prefix=f"rollgym-sandbox-{os.getpid()}-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


MARK = "ROLLGYM_SANDBOX_FOLDER"
"""Environment variable of the worker and its forks; removed for programs they start."""


class PipesWithFolder(Pipes):
    """Channel to a worker that deletes its folder on close."""

    def __init__(
        self, folder: str, command: Sequence[str], *, environment: Mapping[str, str], **options: Any
    ) -> None:
        self.folder = folder
        try:
            super().__init__(command, environment={**environment, MARK: folder}, **options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def close(self) -> None:
        """End the worker and its descendants and delete its folder."""
        super().close()
        if self._process.returncode:
            _kill_marked(f"{MARK}={self.folder}".encode())
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_marked(mark: bytes) -> None:
    """End forks of a killed worker; a stopped session does not notice its death."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
