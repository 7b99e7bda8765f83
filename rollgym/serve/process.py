"""A program that runs beside us: what it said last, how it ended, and its end at our wish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollgym.errors import EnvError, one_line

TAIL = 16_384
"""Bytes that are kept of what a program wrote last."""
GRACE_SECONDS = 2.0
"""How long a program may take to end when it is asked to."""

LOOK_SECONDS = 0.02
"""Between two looks whether a program has ended."""


class Process:
    """A program with everything that it starts: they end together."""

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
        cls, command: Sequence[str], told: bytes, env: Mapping[str, str], cwd: Path | None
    ) -> Process:
        """Start it and tell it something on its standard input."""
        pipe = asyncio.subprocess.PIPE
        try:
            inner = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), cwd=cwd, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise EnvError(f"The program {command[0]} cannot be started: {one_line(error)}") from error
        process = cls(inner)
        assert inner.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # one that does not listen
            inner.stdin.write(told)
            inner.stdin.close()
        return process

    async def finished(self) -> int:
        """The exit code, once all that it wrote has been read."""
        code = await asyncio.shield(self.exit)
        await asyncio.wait(self._readers, timeout=GRACE_SECONDS)
        return code

    @property
    def last_line(self) -> str:
        """What it wrote last on its standard output."""
        return _last_line(self._tails["out"])

    @property
    def complaint(self) -> str:
        """The last line of its errors."""
        return _last_line(self._tails["err"])[:300]

    @property
    def errors(self) -> str:
        """The end of what it wrote on its standard error."""
        return self._tails["err"].decode("utf-8", "replace")

    async def stop(self) -> None:
        """End it and all that it started, gently at first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._inner.pid, number)
            if self.exit.done() and number is signal.SIGTERM:
                continue  # only children of it may be left, whom nobody waits for
            await asyncio.wait([self.exit], timeout=GRACE_SECONDS)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        transport = getattr(self._inner, "_transport", None)
        if transport is not None:  # a child that escaped may hold the other end open
            transport.close()

    async def _read(self, name: str, pipe: asyncio.StreamReader) -> None:
        while piece := await pipe.read(65_536):
            self._tails[name] = (self._tails[name] + piece)[-TAIL:]


async def _exit_code(inner: asyncio.subprocess.Process) -> int:
    # Not wait(): that also waits for children of the program that hold its output open.
    while inner.returncode is None:
        await asyncio.sleep(LOOK_SECONDS)
    return inner.returncode


def _last_line(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
