"""A program that plays episodes: what it is, what it may reach, and where its reward comes from."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollgym.core.errors import UsageError
from rollgym.sandbox.namespaces import HOW_TO_GET, find_bwrap
from rollgym.sandbox.program_layout import PROGRAM_LIMITS, SandboxedProgramSpec, make_layout
from rollgym.sandbox.types import Limits

__all__ = ["Program", "as_program", "check_program", "program_settings"]

SOURCES = ("output", "http", "file", "environment")
"""Sources of the reward, besides a function."""
REWARD_FILES = ("reward.json", "reward.txt")
"""Names of the file that a program with reward=file leaves in its working folder."""
_FUNCTION = re.compile(r"[\w./\-]+:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent program that is started once per episode: a command, or a Python function.

    It starts in an empty working folder, with the endpoint in its environment variables and its task as one
    line of JSON on standard input.

    Example:
        >>> Program(command="python3 my_agent.py", reward="file")
        >>> Program(function="my_agent.py:play", python="agents-venv/bin/python", reward="environment")
    """

    command: str | None = None
    """The command, split as a shell does. A word that names a file shows the program that file."""
    function: str | None = None
    """A Python function in place of a command, ``module:name`` or ``file.py:name``, sync or async. It takes a
    `rollgym.serve.ProgramEpisode` and may return a reward, or an object with reward and success. In a sandbox
    its module is imported once for all episodes."""
    python: str | None = None
    """Python interpreter that runs ``function``, such as that of a virtual environment with its packages.
    Default: this one."""
    sandbox: Literal["namespaces", "none"] = "namespaces"
    """``namespaces``: own files, processes and network, in which only the endpoint can be reached. ``none``:
    the program runs unsandboxed, with all rights of this process."""
    reward: str = "output"
    """The one source of the reward. ``output``: the last line of output, as in
    ``{"reward": 1.0, "success": true}``, or what the function returns. ``http``: the program posts it to
    ``/rl/reward``. ``file``: it leaves reward.json or reward.txt in its working folder. ``environment``: it
    plays the episode's environment, which the endpoint offers as an MCP server and over HTTP, and never sees
    the reward. ``module:function``: a function of the recorded episode."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the program, besides those of the endpoint. It does not get ours."""
    mounts: list[str] = field(default_factory=list)
    """Folders that the sandbox shows, read-only, besides the program's file and its Python."""
    memory_mb: int = PROGRAM_LIMITS.memory_mb
    """Memory of all its processes together, in MB, where cgroups are available."""
    processes: int = PROGRAM_LIMITS.processes
    """Maximum number of its processes and threads."""
    disk_mb: int = PROGRAM_LIMITS.disk_mb
    """Size of its working folder, in MB."""
    auxiliary: str | None = None
    """Requests whose last user message or system message matches this regular expression are answered and
    neither recorded nor trained on: titles, summaries and the like."""
    auxiliary_max_tokens: int = 0
    """Requests whose ``max_tokens`` is below this are answered and neither recorded nor trained on."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.function is None):
            raise UsageError("A program needs either command or function, and not both.")
        if self.command is not None and not self.words:
            raise UsageError("command is empty: expected a program and its arguments.")
        if self.function is not None and not _FUNCTION.fullmatch(self.function):
            raise UsageError(f"function must be module:name or file.py:name, not {self.function!r}.")
        if self.python is not None and self.function is None:
            raise UsageError("python requires function: a command names its own interpreter.")
        if self.reward not in SOURCES and not self.reward_function:
            raise UsageError(
                f"reward must be one of {', '.join(SOURCES)}, or module:function, not {self.reward!r}."
            )
        if self.sandbox == "none" and self.mounts:
            raise UsageError("mounts requires sandbox=namespaces: without a sandbox all files are visible.")
        if self.auxiliary is not None:
            try:
                re.compile(self.auxiliary)
            except re.error as error:
                raise UsageError(f"auxiliary is not a regular expression: {error}.") from None
        if self.auxiliary_max_tokens < 0:
            raise UsageError(f"auxiliary_max_tokens must be at least 0, not {self.auxiliary_max_tokens}.")
        _ = self.limits

    @property
    def words(self) -> list[str]:
        """The command as words; those that name files are absolute, since the program starts elsewhere."""
        if self.command is None:
            return []
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"command cannot be split into words: {error}.") from None
        first = [os.path.abspath(word) if os.sep in word else word for word in words[:1]]
        return first + [os.path.abspath(word) if os.path.isfile(word) else word for word in words[1:]]

    @property
    def reward_function(self) -> str | None:
        """The function that scores episodes, if that is the source of the reward."""
        return self.reward if ":" in self.reward else None

    @property
    def limits(self) -> Limits:
        """Limits of one start in a sandbox."""
        return Limits(
            seconds=PROGRAM_LIMITS.seconds,
            memory_mb=self.memory_mb,
            processes=self.processes,
            open_files=PROGRAM_LIMITS.open_files,
            disk_mb=self.disk_mb,
        )

    @property
    def sandboxed(self) -> SandboxedProgramSpec:
        """The program as a sandbox starts it."""
        return SandboxedProgramSpec(
            command=tuple(self.words),
            function=self.function,
            python=self.python,
            mounts=tuple(self.mounts),
            environment=dict(self.env),
            limits=self.limits,
        )


def check_program(program: Program) -> None:
    """Check that a program can be found and that its sandbox is installed, without starting anything.

    Raises:
        UsageError: The message says what to install or set.
    """
    if program.sandbox == "namespaces":
        if find_bwrap() is None:
            raise UsageError(
                f"The sandbox for programs requires bubblewrap: {HOW_TO_GET}. sandbox=none runs the program "
                "unsandboxed, with all rights of this process."
            )
        make_layout(program.sandboxed)
    elif program.words and shutil.which(program.words[0]) is None:
        raise UsageError(f"Program {program.words[0]!r} not found.")


def program_settings(value: Any) -> Any:
    """Return the settings of a program from those of a config, where a text is a command or a function."""
    if not isinstance(value, str):
        return value
    is_function = _FUNCTION.fullmatch(value.strip())
    return {"function": value.strip()} if is_function else {"command": value}


def as_program(program: Program | str | Sequence[str]) -> Program:
    """Return a program: itself, ``module:function``, or a command.

    Example:
        >>> as_program("my_agent.py:play").function
        'my_agent.py:play'
    """
    if isinstance(program, Program):
        return program
    if isinstance(program, str):
        return Program(**program_settings(program))
    return Program(command=shlex.join(program))
