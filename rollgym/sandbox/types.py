"""Sandbox protocol, settings, limits, results and isolation levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, Protocol

from rollgym.core.errors import UsageError


class Level(IntEnum):
    """Isolation level of a sandbox."""

    NONE = 0
    """A plain process without isolation."""
    LANDLOCK = 1
    """Files, sockets and dangerous system calls are denied; the host's namespaces are shared."""
    NAMESPACES = 2
    """Separate namespaces: files, processes, network, users."""


class Ended(StrEnum):
    """How an execution ended."""

    EXIT = "exit"
    """Normally; see the exit code."""
    TIMEOUT = "timeout"
    CPU = "cpu_limit"
    OUTPUT = "output_limit"
    MEMORY = "memory_limit"
    LOST = "lost"
    """The process vanished: killed, or exited without a report."""


State = Literal["fresh", "committed", "rolled_back", "lost"]
"""Session state after a turn: none existed; turn applied; rolled back to before the turn; lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one execution."""

    seconds: float = 10.0
    """Wall-clock seconds."""
    cpu_seconds: float | None = None
    """CPU seconds; default: the wall-clock limit rounded up plus one second."""
    memory_mb: int = 512
    """Memory of all processes together in MB."""
    processes: int = 32
    open_files: int = 256
    file_mb: int = 64
    """Maximum size of a written file in MB."""
    disk_mb: int = 64
    """Maximum total size of the working folder in MB."""
    output_chars: int = 16_000
    """Characters of stdout and stderr that are kept (head and tail with a note between)."""
    output_mb: int = 16
    """Maximum output in MB; an execution that writes more is killed."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"The limit {name} must be above 0, got {value!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Result of an execution."""

    stdout: str
    stderr: str
    exit_code: int | None
    """``None`` if it was killed or lost."""
    ended: Ended
    seconds: float
    truncated: bool = False
    """Whether output was truncated."""
    state: State = "fresh"

    @property
    def ok(self) -> bool:
        """Whether it exited normally with code 0."""
        return self.ended is Ended.EXIT and self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Settings of a sandbox."""

    backend: Literal["auto", "namespaces", "landlock", "docker", "none"] = "auto"
    """``auto``: the strongest that works here without a daemon: namespaces, else landlock."""
    minimum: Level = Level.NAMESPACES
    """Minimum isolation level."""
    allow_unsafe: bool = False
    """Whether ``none`` may be used: code then runs with the rights of this process."""
    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    """Modules imported once in the worker, available to each execution at no cost."""
    image: str | None = None
    """Image of the ``docker`` backend; default: the one built by `rollgym sandbox build-image`."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links outside the working folder: path and target, both absolute. ``namespaces`` only."""
    folders: tuple[str, ...] = ()
    """Further writable folders, of at most ``disk_mb`` each, emptied with the session. ``namespaces`` and
    ``docker`` only."""


class Sandbox(Protocol):
    """A sandbox: fresh executions, one at a time, and one persistent session.

    Not thread-safe. Every method may raise `rollgym.core.errors.WorkerLost` when the sandbox has died; then
    only `close` is allowed.
    """

    @property
    def backend(self) -> str:
        """Name of the backend."""

    @property
    def level(self) -> Level:
        """Isolation level."""

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """Limitations on this machine, one sentence each."""

    def exec(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Ran:
        """Run a program in a fresh process and working folder."""

    def run(self, code: str, *, limits: Limits | None = None) -> Ran:
        """Run code in the session: names and files persist until `reset`."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file to the session's working folder."""

    def read(self, name: str) -> bytes:
        """Read a file of the session's working folder; `FileNotFoundError` if missing."""

    def reset(self) -> None:
        """Discard the session: processes, state and files."""

    def close(self) -> None:
        """End all processes. Idempotent."""
