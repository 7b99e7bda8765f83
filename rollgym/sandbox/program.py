"""Programs that may reach one port of this process and nothing else, each start in fresh namespaces.

    host                              sandbox (bubblewrap: files, no network, none of our variables)
    ProgramSandbox  -- order, pipes ->  launcher, which has imported the program
                    <- listening socket --  fork in its own user, mount, network and process namespaces
                    -- go, once counted ->  the program, without capabilities, behind a seccomp filter

The listening socket belongs to the network namespace of the program, and the host accepts its connections: no
process inside forwards them, and the program has no other way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgym.core.errors import RunError, UsageError, WorkerLost
from rollgym.sandbox import client, launcher_child, seccomp
from rollgym.sandbox.cgroup import Cgroup
from rollgym.sandbox.interpreter import spare_uid
from rollgym.sandbox.launch import launch
from rollgym.sandbox.namespaces import HOW_TO_ALLOW, HOW_TO_GET, confinement, find_bwrap
from rollgym.sandbox.program_layout import SandboxedProgramSpec, make_layout, read_script
from rollgym.sandbox.worker_limits import alive, descendants

__all__ = ["ProgramSandbox", "SandboxedProgram", "SandboxedProgramSpec"]

BOOT_SECONDS = 120.0
"""Seconds for the launcher to start, the import of a Python program included."""
START_SECONDS = 30.0
"""Seconds for one program to start."""
GONE_CHECKS = 500
"""Checks, 10 ms apart, whether a killed sandbox is gone."""
_log = logging.getLogger(__name__)


class SandboxedProgram:
    """One started program."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        work: int,
        channel: socket.socket,
        pidfd: int,
        cgroup: Cgroup | None,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> None:
        self.listener = listener
        """Listens on the loopback interface of the program; close it with `stop`."""
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        """Descriptors of this side of its pipes, which the caller closes."""
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code, negative for a signal."""
        self._work, self._channel, self._pidfd, self._cgroup = work, channel, pidfd, cgroup
        self._stopped = False
        asyncio.get_running_loop().add_reader(channel, self._ended)

    def read_file(self, name: str, limit: int) -> bytes | None:
        """Return a file that the program left in its working folder; ``None`` if it is missing.

        Raises:
            OSError: It is not an ordinary readable file.
            ValueError: It is larger than ``limit``.
        """
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=self._work)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is not an ordinary file")
            if status.st_size > limit:
                raise ValueError(f"it has {status.st_size:,} bytes, more than {limit:,}")
            return file.read(limit)

    def out_of_memory(self) -> bool:
        """Return whether the kernel killed a process of the program because of its memory limit."""
        return self._cgroup is not None and self._cgroup.out_of_memory()

    def kill(self) -> None:
        """End all its processes at once."""
        if not self._stopped:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def stop(self) -> None:
        """End all its processes, and free everything it held."""
        if self._stopped:
            return
        self.kill()
        self._stopped = True
        asyncio.get_running_loop().remove_reader(self._channel)
        if not self.exit.done():
            self.exit.set_result(-int(signal.SIGKILL))
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.close)
        self.listener.close()
        self._channel.close()
        os.close(self._pidfd)
        os.close(self._work)

    def _ended(self) -> None:
        """Read the report of the launcher's fork, which comes when all processes inside are gone."""
        try:
            data = self._channel.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        asyncio.get_running_loop().remove_reader(self._channel)
        if not self.exit.done():
            self.exit.set_result(int(json.loads(data)["exit"]) if data else -int(signal.SIGKILL))


class ProgramSandbox:
    """Starts one program any number of times, each time in fresh namespaces.

    Example:
        >>> sandbox = ProgramSandbox(SandboxedProgramSpec(command=("python3", "agent.py")))
        >>> program = await sandbox.start({"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1"}, port=8000)
        >>> await program.exit
        >>> await program.stop()
        >>> await sandbox.close()

    Raises:
        UsageError: The program cannot be shown inside, or this machine has no bubblewrap; the message says
            what to do.
    """

    def __init__(self, spec: SandboxedProgramSpec) -> None:
        if (bwrap := find_bwrap()) is None:
            raise UsageError(f"A sandbox for programs requires bubblewrap: {HOW_TO_GET}.")
        self._bwrap, self._spec = bwrap, spec
        self._layout = make_layout(spec)
        self._opening = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._cgroup: Cgroup | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The variables of every start, before those that `start` adds."""
        return {**client.ENVIRONMENT, "HOME": "/work", "TMPDIR": "/tmp", **self._spec.environment}

    async def start(self, environment: Mapping[str, str], *, port: int) -> SandboxedProgram:
        """Start the program.

        Args:
            environment: Variables of this start.
            port: The loopback port inside whose connections come to ``SandboxedProgram.listener``.

        Raises:
            UsageError: The program cannot be imported, or namespaces are not available.
            WorkerLost: The launcher is gone; the next start makes another.
        """
        async with self._opening:
            await self._ensure_open()
            control = self._control
            assert control is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.setblocking(False)
            pipes = [os.pipe(), os.pipe(), os.pipe()]
            inside = [pipes[0][0], pipes[1][1], pipes[2][1]]
            outside = [pipes[0][1], pipes[1][0], pipes[2][0]]
            order = json.dumps({"environment": {**self.variables, **environment}, "port": port}).encode()
            try:
                socket.send_fds(control, [order], [*inside, theirs.fileno()])
            except OSError as error:
                for descriptor in outside:
                    os.close(descriptor)
                ours.close()
                await self._close()
                raise WorkerLost(f"The launcher of the sandbox does not answer: {error}") from error
            finally:
                theirs.close()
                for descriptor in inside:
                    os.close(descriptor)
        try:
            return await self._confirm(ours, outside)
        except BaseException:
            for descriptor in outside:
                os.close(descriptor)
            ours.close()
            raise

    async def open(self) -> None:
        """Start the launcher and import a Python program, as the first `start` would do."""
        async with self._opening:
            await self._ensure_open()

    async def _ensure_open(self) -> None:
        if self._control is None or (self._process is not None and self._process.poll() is not None):
            await self._close()
            await self._open()

    async def _confirm(self, channel: socket.socket, pipes: Sequence[int]) -> SandboxedProgram:
        """Take the socket and the folder of a new start, count its process, and let it run."""
        try:
            data, fds, pid = await _receive(channel, START_SECONDS)
        except TimeoutError:
            raise WorkerLost("The sandbox of a program did not start in time.") from None
        if not data:
            raise WorkerLost("The sandbox of a program died at its start.")
        answer = json.loads(data)
        if "error" in answer:
            raise UsageError(
                f"Namespaces for a program could not be made: {answer['error']}. Fix: {HOW_TO_ALLOW}."
            )
        cgroup = None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            for descriptor in fds:
                os.close(descriptor)
            raise WorkerLost(f"The sandbox of a program died at its start: {error}") from error
        try:
            cgroup = Cgroup.make(self._spec.limits)
            if cgroup is not None:
                cgroup.add([pid])
            channel.send(b"g")
        except OSError as error:
            if cgroup is not None:
                await asyncio.to_thread(cgroup.close)
            for descriptor in (pidfd, *fds):
                os.close(descriptor)
            raise WorkerLost(f"The sandbox of a program died at its start: {error}") from error
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(False)
        return SandboxedProgram(
            listener=listener,
            work=fds[1],
            channel=channel,
            pidfd=pidfd,
            cgroup=cgroup,
            stdin=pipes[0],
            stdout=pipes[1],
            stderr=pipes[2],
        )

    async def close(self) -> None:
        """End the launcher, and with it every program that still runs."""
        async with self._opening:
            await self._close()

    async def _close(self) -> None:
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            inside = descendants(process.pid)
            process.kill()
            await asyncio.to_thread(process.wait)
            await _wait_gone(inside)
            assert process.stderr is not None
            process.stderr.close()
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.close)
            self._cgroup = None

    async def _open(self) -> None:
        """Start the launcher, which imports a Python program."""
        layout, limits = self._layout, self._spec.limits
        self._cgroup = Cgroup.make(limits)
        source = Path(str(launcher_child.__file__)).read_bytes()
        contents = [source, *(read_script(path) for path in layout.files)]
        memory = [_memory(content) for content in contents]
        words = confinement(
            limits,
            self.variables,
            mounts=layout.mounts,
            masks=layout.masks,
            data=list(zip(memory, ("/launcher.py", *layout.files), strict=True)),
            counted=self._cgroup is not None,
        )
        # Not --new-session's terminal, nor -I, which would ignore PYTHONHASHSEED.
        argv = [self._bwrap, *words, "--chdir", "/", "--", layout.launcher.path, "-s", "/launcher.py"]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        uid = spare_uid()
        user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        try:
            self._process = await asyncio.to_thread(
                launch,
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=memory,
                env={},
                **user,
            )
        except OSError as error:
            ours.close()
            raise RunError(f"bubblewrap cannot be started: {error}") from error
        finally:
            theirs.close()
            for descriptor in memory:
                os.close(descriptor)
        self._control = ours
        if self._cgroup is not None:
            with contextlib.suppress(OSError):  # gone already: the next lines report it
                self._cgroup.add([self._process.pid])
        try:
            ours.send(json.dumps(self._child_spec()).encode())
            data, _, _ = await _receive(ours, BOOT_SECONDS)
        except (OSError, TimeoutError):
            data = b""
        if self._cgroup is not None and self._process.poll() is None:  # what it forked before it was added
            with contextlib.suppress(OSError):
                self._cgroup.add(descendants(self._process.pid))
        if not data or "error" in json.loads(data):
            await self._explain(json.loads(data)["error"] if data else "")

    def _child_spec(self) -> dict[str, Any]:
        layout, limits = self._layout, self._spec.limits
        rlimits = {
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_FSIZE": limits.file_mb << 20,
            "RLIMIT_CORE": 0,
        }
        if self._cgroup is None:  # counted for each user namespace, since Linux 5.14
            rlimits["RLIMIT_NPROC"] = limits.processes
        return {
            "command": list(layout.command),
            "function": layout.function,
            "path": list(layout.path),
            "kept": layout.kept,
            "disk_mb": limits.disk_mb,
            "filter": seccomp.program(
                seccomp.Profile(no_shared_memory=self._cgroup is None, inet=True)
            ).hex(),
            "rlimits": rlimits,
        }

    async def _explain(self, said: str) -> None:
        """Raise the reason why the launcher did not start."""
        process = self._process
        assert process is not None
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        tail = (process.stderr.read() or b"").decode("utf-8", "replace").strip()[-2000:]
        died = process.poll() is not None
        await self._close()
        if said:
            error = UsageError(f"The program {self._spec.function} cannot be imported in the sandbox: {said}")
            _log.warning("%s\n%s", error, tail)
            raise error
        reason = tail.rpartition("\n")[2] or ("it ended at once" if died else "it did not answer in time")
        raise UsageError(
            f"The sandbox for programs does not work here: {reason}. Fix: {HOW_TO_ALLOW}; or set "
            "program.sandbox=none, which runs the program with all rights of this process. "
            "`rollgym doctor` prints details."
        )


async def _receive(channel: socket.socket, seconds: float) -> tuple[bytes, list[int], int]:
    """Return the next message of a channel, its descriptors, and the sender's process id."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(channel, lambda: None if ready.done() else ready.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await ready
    finally:
        loop.remove_reader(channel)
    try:
        space = socket.CMSG_LEN(4 * 4) + socket.CMSG_LEN(12)
        data, extra, _, _ = channel.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return b"", [], 0
    fds: list[int] = []
    pid = 0
    for level, kind, payload in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid = struct.unpack("3i", payload)[0]
    return data, fds, pid


async def _wait_gone(pids: Sequence[int]) -> None:
    """Wait until the kernel has ended these processes, whose parent was killed."""
    for _ in range(GONE_CHECKS):
        if not any(alive(pid) for pid in pids):
            return
        await asyncio.sleep(0.01)


def _memory(content: bytes) -> int:
    descriptor = os.memfd_create("rollgym")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
