"""A started program: its output, its exit, its files, and its end; in a sandbox or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rollgym.core.errors import EnvError, UsageError, one_line
from rollgym.sandbox import launcher_child
from rollgym.sandbox.program import ProgramSandbox, SandboxedProgram
from rollgym.serve.program import Program
from rollgym.serve.relay import Relay

__all__ = ["Launcher", "Process", "make_launcher"]

TAIL = 16_384
"""Bytes kept of the end of stdout and of stderr."""
MAX_OUTPUT = 16 << 20
"""Bytes of output after which a program is ended."""
GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL, and for the rest of the output after the exit."""
POLL_SECONDS = 0.02
"""Interval at which the exit of an unsandboxed program is polled."""
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER")
"""Our variables that an unsandboxed program gets; keys and tokens are not among them."""


class Process(ABC):
    """A started program, with the end of its output.

    Args:
        exit_code: Its exit code, negative for a signal.
    """

    def __init__(self, exit_code: asyncio.Future[int]) -> None:
        self.exit = exit_code
        self.too_much_output = False
        self._tails = {"out": b"", "err": b""}
        self._readers: list[asyncio.Task[None]] = []
        self._written = 0

    async def finished(self) -> int:
        """Wait for the exit and the rest of the output; return the exit code."""
        code = await asyncio.shield(self.exit)
        if self._readers:
            await asyncio.wait(self._readers, timeout=GRACE_SECONDS)
        return code

    @property
    def last_line(self) -> str:
        """The last line of its standard output."""
        return _last_line(self._tails["out"])

    @property
    def last_error_line(self) -> str:
        """The last line of its standard error, shortened."""
        return _last_line(self._tails["err"])[:300]

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error."""
        return self._tails["err"].decode("utf-8", "replace")

    @abstractmethod
    def read_file(self, name: str, limit: int) -> bytes | None:
        """Return a file of its working folder; ``None`` if it is missing."""

    def out_of_memory(self) -> bool:
        """Return whether its memory limit ended it."""
        return False

    @abstractmethod
    def kill(self) -> None:
        """End it at once; `exit` follows."""

    @abstractmethod
    async def stop(self) -> None:
        """End it and its children, and free what it held."""

    def _start_reading(self, out: asyncio.StreamReader, err: asyncio.StreamReader) -> None:
        for name, pipe in (("out", out), ("err", err)):
            self._readers.append(asyncio.create_task(self._read(name, pipe)))

    async def _read(self, name: str, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(65_536):
            self._tails[name] = (self._tails[name] + chunk)[-TAIL:]
            self._written += len(chunk)
            if self._written > MAX_OUTPUT and not self.too_much_output:
                self.too_much_output = True
                self.kill()

    async def _stop_reading(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


class Launcher(Protocol):
    """Starts a program, once per episode."""

    async def prepare(self) -> None:
        """Do what is needed before the first start; raise a `UsageError` where the program cannot run."""

    async def start(self, stdin: bytes, environment: Mapping[str, str]) -> Process:
        """Start the program with this standard input and these variables."""

    async def close(self) -> None:
        """End everything that was started."""


def make_launcher(program: Program, endpoint: str) -> Launcher:
    """Return the launcher of a program that may reach this endpoint.

    Raises:
        UsageError: The program was not found, or its sandbox is not available here.
    """
    if program.sandbox == "none":
        return PlainLauncher(program)
    return SandboxLauncher(program, endpoint)


class SandboxLauncher(Launcher):
    """Starts a program in a sandbox."""

    def __init__(self, program: Program, endpoint: str) -> None:
        url = urlsplit(endpoint)
        assert url.hostname is not None
        assert url.port is not None
        self._host, self._port = url.hostname, url.port
        self._sandbox = ProgramSandbox(program.sandboxed)

    async def prepare(self) -> None:
        """Start the sandbox, which imports a Python function."""
        await self._sandbox.open()

    async def start(self, stdin: bytes, environment: Mapping[str, str]) -> Process:
        """Start the program in fresh namespaces, with a connection to the endpoint."""
        started = await self._sandbox.start(environment, port=self._port)
        relay = await Relay.start(started.listener, self._host, self._port)
        return await SandboxedProcess.make(started, relay, stdin)

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()


class SandboxedProcess(Process):
    """A program in a sandbox."""

    def __init__(self, program: SandboxedProgram, relay: Relay) -> None:
        super().__init__(program.exit)
        self._program, self._relay = program, relay
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def make(cls, program: SandboxedProgram, relay: Relay, stdin: bytes) -> SandboxedProcess:
        """Connect its pipes and write its standard input."""
        process = cls(program, relay)
        loop = asyncio.get_running_loop()
        readers = []
        for descriptor in (program.stdout, program.stderr):
            reader = asyncio.StreamReader()
            pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - its transport closes it
            transport, _ = await loop.connect_read_pipe(_reading(reader), pipe)
            process._transports.append(transport)
            readers.append(reader)
        process._start_reading(*readers)
        sink = open(program.stdin, "wb", buffering=0)  # noqa: SIM115 - as above
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sink)
        process._transports.append(writer)
        writer.write(stdin)
        writer.write_eof()
        return process

    def read_file(self, name: str, limit: int) -> bytes | None:
        """Return a file of its working folder; ``None`` if it is missing."""
        return self._program.read_file(name, limit)

    def out_of_memory(self) -> bool:
        """Return whether its memory limit ended it."""
        return self._program.out_of_memory()

    def kill(self) -> None:
        """End it at once; `exit` follows."""
        self._program.kill()

    async def stop(self) -> None:
        """End all its processes, and close its connections."""
        await self._relay.close()
        await self._program.stop()
        await self._stop_reading()
        for transport in self._transports:
            transport.close()


def _reading(reader: asyncio.StreamReader) -> Callable[[], asyncio.BaseProtocol]:
    return lambda: asyncio.StreamReaderProtocol(reader)


class PlainLauncher(Launcher):
    """Starts a program unsandboxed, in a new empty folder."""

    def __init__(self, program: Program) -> None:
        self._environment = {
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            **program.env,
        }
        self._words = program.words
        if program.function is not None:
            module, _, name = program.function.rpartition(":")
            target = f"{os.path.abspath(module)}:{name}" if module.endswith(".py") else program.function
            folder = os.path.dirname(os.path.abspath(module)) if module.endswith(".py") else os.getcwd()
            python = os.path.abspath(program.python) if program.python else sys.executable
            self._words = [python, str(launcher_child.__file__), "--call", target, folder]
        if shutil.which(self._words[0], path=self._environment.get("PATH")) is None:
            raise UsageError(f"Program {self._words[0]!r} not found.")

    async def prepare(self) -> None:
        """Do nothing: every start is a new process."""

    async def start(self, stdin: bytes, environment: Mapping[str, str]) -> Process:
        """Start the program in its own process group."""
        folder = Path(tempfile.mkdtemp(prefix="rollgym-program-"))
        pipe = asyncio.subprocess.PIPE
        try:
            inner = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env={**self._environment, **environment},
                cwd=folder,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EnvError(f"The program {self._words[0]} cannot be started: {one_line(error)}") from error
        process = PlainProcess(inner, folder)
        assert inner.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program does not read it
            inner.stdin.write(stdin)
            inner.stdin.close()
        return process

    async def close(self) -> None:
        """Do nothing: episodes stop their processes."""


class PlainProcess(Process):
    """An unsandboxed program in its own process group; stopping it stops the group."""

    def __init__(self, inner: asyncio.subprocess.Process, folder: Path) -> None:
        super().__init__(asyncio.ensure_future(_exit_code(inner)))
        self._inner, self._folder = inner, folder
        assert inner.stdout is not None
        assert inner.stderr is not None
        self._start_reading(inner.stdout, inner.stderr)

    def read_file(self, name: str, limit: int) -> bytes | None:
        """Return a file of its working folder; ``None`` if it is missing."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is not an ordinary file")
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
        return data

    def kill(self) -> None:
        """End its process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._inner.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the program and its children: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._inner.pid, number)
            if self.exit.done() and number is signal.SIGTERM:
                continue  # only children can be left, which need not be awaited
            await asyncio.wait([self.exit], timeout=GRACE_SECONDS)
        await self._stop_reading()
        transport = getattr(self._inner, "_transport", None)
        if transport is not None:  # a child that escaped may hold the other end open
            transport.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


async def _exit_code(inner: asyncio.subprocess.Process) -> int:
    # Not wait(): that also waits for children of the program that hold its output open.
    while inner.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return inner.returncode


def _last_line(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
