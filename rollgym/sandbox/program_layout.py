"""The view of a program in a sandbox: its interpreter, its files, and the folders that were asked for."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollgym.core.errors import UsageError
from rollgym.sandbox import client, hidden
from rollgym.sandbox.interpreter import Interpreter, find_python, readable
from rollgym.sandbox.namespaces import LIBRARIES
from rollgym.sandbox.types import Limits

__all__ = ["PROGRAM_LIMITS", "Layout", "SandboxedProgramSpec", "make_layout", "read_script"]

PROGRAM_LIMITS = Limits(seconds=600.0, memory_mb=1024, processes=64, open_files=1024)
"""Limits of a program; its time is limited by the one who starts it."""
MAX_SCRIPT = 16 << 20
"""Bytes of a file that a command names."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
_COVERED = ("/tmp", "/work", "/dev/shm")
"""Folders that are empty at every start."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxedProgramSpec:
    """A program to run in a sandbox: exactly one of ``command`` and ``function``.

    Args:
        command: The program and its arguments. A word that names a file of this machine shows that file
            inside, read-only; a Python of a virtual environment is shown with its packages.
        function: A Python function that takes a `ProgramEpisode`, as ``module:name`` or ``file.py:name``.
        python: The Python that runs the function. Default: that of this process.
        mounts: Further folders of this machine that are shown inside, read-only, under their own names.
        environment: Variables beside ``PATH``, ``HOME`` and the locale. Those of this process are not
            passed on.
        limits: Memory, processes, files and disk space of one start.
    """

    command: tuple[str, ...] = ()
    function: str | None = None
    python: str | None = None
    mounts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = PROGRAM_LIMITS

    def __post_init__(self) -> None:
        if bool(self.command) == (self.function is not None):
            raise UsageError("A program is either a command or a function.")
        if self.python is not None and self.function is None:
            raise UsageError("python requires a function: a command names its own interpreter.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the inside of the sandbox looks like."""

    launcher: Interpreter
    """The Python that runs the launcher; with a function also the program."""
    command: tuple[str, ...] = ()
    function: str | None = None
    path: tuple[str, ...] = ()
    """Folders in front of the module path."""
    mounts: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Single files to copy in."""

    @property
    def kept(self) -> list[str]:
        """Paths in folders that are otherwise empty at every start."""
        shown = (*self.mounts, *self.files)
        return [path for path in shown if any(hidden.below(path, folder) for folder in _COVERED)]


def read_script(path: str) -> bytes:
    """Return the content of a file that is copied into the sandbox."""
    try:
        size = os.path.getsize(path)
        if size > MAX_SCRIPT:
            raise UsageError(
                f"{path} has {size:,} bytes, more than {MAX_SCRIPT:,}: add its folder to mounts instead."
            )
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None


def make_layout(spec: SandboxedProgramSpec) -> Layout:
    """Find the program and everything that it needs to see.

    Raises:
        UsageError: Something is missing, or the unprivileged user inside cannot read it.
    """
    mounts = [_folder(mount) for mount in spec.mounts]
    if spec.function is not None:
        return _function_layout(spec, spec.function, mounts)
    words = list(spec.command)
    program, shown = _find_program(words[0], mounts)
    files = [os.path.abspath(word) for word in words[1:] if _is_outside_file(word, [*shown, *mounts])]
    words = [program, *(os.path.abspath(word) if os.path.isfile(word) else word for word in words[1:])]
    if os.path.isfile(program) and _is_outside_file(program, [*shown, *mounts]):
        raise UsageError(
            f"The program {words[0]} is in {os.path.dirname(program)}, which the sandbox does not show: add "
            "the folder to mounts."
        )
    launcher = find_python()
    auto = [*shown, *(folder for folder in launcher.folders if folder not in shown)]
    return Layout(
        launcher=launcher,
        command=tuple(words),
        mounts=tuple(dict.fromkeys([*auto, *mounts])),
        masks=_masks(auto, mounts, (program, launcher.path, *launcher.needed)),
        files=tuple(dict.fromkeys(files)),
    )


def _function_layout(spec: SandboxedProgramSpec, function: str, mounts: list[str]) -> Layout:
    python = os.path.abspath(spec.python) if spec.python is not None else sys.executable
    shown = _prefixes(python)
    for part in (python, *shown):
        if not readable(part):
            raise UsageError(
                f"The sandbox cannot use {python}: {part} cannot be read by an unprivileged user. Install "
                "Python for all users and set program.python to one of its virtual environments."
            )
    module, _, name = function.rpartition(":")
    files: list[str] = []
    path: list[str] = []
    if module.endswith(".py"):
        script = os.path.abspath(module)
        if not os.path.isfile(script):
            raise UsageError(f"The program {function}: there is no file {script}.")
        function = f"{script}:{name}"
        files = [script] if _is_outside_file(script, [*shown, *mounts]) else []
        path = [os.path.dirname(script)]
    else:
        path = [mount for mount in mounts if os.path.isdir(mount)]
        origin = _module_file(module)
        if origin is not None and _is_outside_file(origin, [*shown, *mounts]):
            if "." in module or os.path.basename(origin) == "__init__.py":
                raise UsageError(
                    f"The program {function} is part of a package in {os.path.dirname(origin)}: add the "
                    "folder that contains the package to mounts."
                )
            files, path = [origin], [os.path.dirname(origin), *path]
    return Layout(
        launcher=Interpreter(python, (), f"the Python at {python}"),
        function=function,
        path=tuple(path),
        mounts=tuple(dict.fromkeys([*shown, *mounts])),
        masks=_masks(shown, mounts, (python, os.path.realpath(python))),
        files=tuple(files),
    )


def _module_file(module: str) -> str | None:
    """Return the file of a module on our path or in the current folder, without importing it."""
    name = module.partition(".")[0]
    for folder in (*sys.path, os.getcwd()):
        for file in (os.path.join(folder, name, "__init__.py"), os.path.join(folder, f"{name}.py")):
            if os.path.isfile(file):
                return os.path.abspath(file)
    return None


def _find_program(name: str, mounts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the path of a program inside, and the folders that have to be shown for it."""
    if os.sep in name:
        candidates = [os.path.abspath(name)]
    else:
        folders = os.environ.get("PATH", "").split(os.pathsep) + client.ENVIRONMENT["PATH"].split(os.pathsep)
        places = (shutil.which(name, path=folder) for folder in dict.fromkeys(folders) if folder)
        candidates = [os.path.abspath(path) for path in places if path]
    if not candidates or shutil.which(candidates[0]) is None:
        raise UsageError(f"Program {name!r} not found.")
    for path in candidates:
        shown = [] if any(hidden.below(path, mount) for mount in mounts) else _prefixes(path)
        if all(readable(needed) for needed in (path, *shown)):
            return path, shown
    if os.path.basename(name).startswith("python") and os.sep not in name:
        python = find_python()
        _log.warning(
            "%s cannot be read by the user inside the sandbox: using %s.", candidates[0], python.path
        )
        return python.path, list(python.folders)
    raise UsageError(
        f"The sandbox cannot run {candidates[0]}: it cannot be read by an unprivileged user. Install it for "
        "all users."
    )


def _prefixes(program: str) -> list[str]:
    """Return the folders of a Python interpreter outside the system's: its environment, and its base."""
    bin_folder = os.path.dirname(program)
    prefixes = []
    if os.path.basename(program).startswith("python"):
        if os.path.isfile(os.path.join(os.path.dirname(bin_folder), "pyvenv.cfg")):
            prefixes.append(os.path.dirname(bin_folder))
        prefixes.append(os.path.dirname(os.path.dirname(os.path.realpath(program))))
    return [prefix for prefix in dict.fromkeys(prefixes) if not _in_system(prefix)]


def _in_system(path: str) -> bool:
    return any(hidden.below(path, folder) for folder in _SYSTEM)


def _is_outside_file(word: str, shown: Sequence[str]) -> bool:
    """Return whether a word names a file that is not visible inside."""
    path = os.path.abspath(word)
    visible = _in_system(path) or any(hidden.below(path, folder) for folder in shown)
    return os.path.isfile(path) and not visible


def _folder(mount: str) -> str:
    path = os.path.abspath(os.path.expanduser(mount))
    if not os.path.exists(path):
        raise UsageError(f"Cannot mount {path}: it does not exist.")
    if path == "/":
        raise UsageError("Cannot mount /: name the folders that the program needs.")
    if not readable(path):
        raise UsageError(f"Cannot mount {path}: it cannot be read by an unprivileged user.")
    return path


def _masks(shown: Sequence[str], mounts: Sequence[str], needed: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of rollgym in folders that were not asked for: experts and solutions are there."""
    folders = ("/usr", *(path for path in LIBRARIES if not os.path.islink(path)), *shown)
    paths = hidden.inside(hidden.hidden(folders, packages=True, needed=needed), folders)
    return tuple(path for path in paths if not any(hidden.below(path, mount) for mount in mounts))
