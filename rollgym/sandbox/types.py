"""What a sandbox is: how it is asked, what it answers, and how strong its walls are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, Protocol

from rollgym.errors import UsageError


class Level(IntEnum):
    """How strong the walls around untrusted code are."""

    NONE = 0
    """A plain process: no walls at all."""
    LANDLOCK = 1
    """Files, sockets and dangerous system calls are refused, but processes share the host's namespaces."""
    NAMESPACES = 2
    """The code sees a world of its own: files, processes, network, users."""


class Ended(StrEnum):
    """How an execution ended."""

    EXIT = "exit"
    """By itself; the exit code says how."""
    TIMEOUT = "timeout"
    CPU = "cpu_limit"
    OUTPUT = "output_limit"
    MEMORY = "memory_limit"
    LOST = "lost"
    """The process vanished: something killed it, or it left without a word."""


State = Literal["fresh", "committed", "rolled_back", "lost"]
"""What became of a session's state: there was none; the turn counts; it is as before the turn; it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use."""

    seconds: float = 10.0
    """Wall-clock time."""
    cpu_seconds: float | None = None
    """Processor time; by default the wall-clock limit, rounded up, and one second."""
    memory_mb: int = 512
    """All processes together."""
    processes: int = 32
    open_files: int = 256
    file_mb: int = 64
    """The largest file that may be written."""
    disk_mb: int = 64
    """All that may be written to the working folder."""
    output_chars: int = 16_000
    """Characters of stdout and of stderr that are kept: the head and the tail, a note between them."""
    output_mb: int = 16
    """An execution that writes more is killed."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"The limit {name} must be above 0, not {value!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What an execution did."""

    stdout: str
    stderr: str
    exit_code: int | None
    """``None`` where it was killed or lost."""
    ended: Ended
    seconds: float
    truncated: bool = False
    """Whether any output was cut out."""
    state: State = "fresh"

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ended is Ended.EXIT and self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Which sandbox to open, and how."""

    backend: Literal["auto", "namespaces", "landlock", "docker", "none"] = "auto"
    """``auto``: the strongest that works here without a daemon: namespaces, else landlock."""
    minimum: Level = Level.NAMESPACES
    """Weaker walls are refused."""
    allow_unsafe: bool = False
    """Whether ``none`` may be used: code then runs with the rights of this process."""
    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    """Modules imported once in the worker, so that each execution has them at no cost."""
    image: str | None = None
    """For ``docker``: the image; by default the one that `rollgym sandbox build-image` makes."""


class Sandbox(Protocol):
    """One sandbox: a fresh execution at a time, and one session whose state lasts.

    Not for several threads at once. Every method may raise `rollgym.errors.WorkerLost` where the sandbox
    itself died; it can only be closed then.
    """

    @property
    def backend(self) -> str:
        """Its name."""

    @property
    def level(self) -> Level:
        """Its walls."""

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What these walls do not hold here, one sentence each."""

    def exec(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Ran:
        """Run a program in a process and a working folder of its own, and forget both."""

    def run(self, code: str, *, limits: Limits | None = None) -> Ran:
        """Run code in the session: names and files last until `reset`."""

    def write(self, name: str, content: bytes) -> None:
        """Put a file into the session's working folder."""

    def read(self, name: str) -> bytes:
        """A file from the session's working folder; `FileNotFoundError` where there is none."""

    def reset(self) -> None:
        """Forget the session: processes, state and files."""

    def close(self) -> None:
        """End everything that is left of it. May be called twice."""
