"""A subprocess: its last output, its exit code, and how to stop it with its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollgym.core.errors import EnvError, one_line

TAIL = 16_384
"""Bytes kept of the end of stdout and of stderr."""
GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""

POLL_SECONDS = 0.02
"""Interval at which the exit of a program is polled."""


class Process:
    """A program in its own process group; stopping it stops its children too."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self._inner = inner
        self.exit = asyncio.create_task(_exit_code(inner))
        self._tails = {"out": b"", "err": b""}
        streams = {"out": inner.stdout, "err": inner.stderr}
        self._readers = [
            asyncio.create_task(self._read(name, pipe)) for name, pipe in streams.items() if pipe
        ]

    @classmethod
    async def start(
        cls, command: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: Path | None
    ) -> Process:
        """Start the program and write ``stdin`` to its standard input."""
        pipe = asyncio.subprocess.PIPE
        try:
            inner = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), cwd=cwd, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise EnvError(f"The program {command[0]} cannot be started: {one_line(error)}") from error
        process = cls(inner)
        assert inner.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program does not read it
            inner.stdin.write(stdin)
            inner.stdin.close()
        return process

    async def finished(self) -> int:
        """Wait for the exit and the rest of the output; return the exit code."""
        code = await asyncio.shield(self.exit)
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

    async def stop(self) -> None:
        """Stop the program and its children: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._inner.pid, number)
            if self.exit.done() and number is signal.SIGTERM:
                continue  # only children can be left, which need not be awaited
            await asyncio.wait([self.exit], timeout=GRACE_SECONDS)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        transport = getattr(self._inner, "_transport", None)
        if transport is not None:  # a child that escaped may hold the other end open
            transport.close()

    async def _read(self, name: str, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(65_536):
            self._tails[name] = (self._tails[name] + chunk)[-TAIL:]


async def _exit_code(inner: asyncio.subprocess.Process) -> int:
    # Not wait(): that also waits for children of the program that hold its output open.
    while inner.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return inner.returncode


def _last_line(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
