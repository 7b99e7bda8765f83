"""Runs any command in new namespaces, with its stdin and stdout: servers that speak over pipes.

`open_sandbox` runs Python programs and keeps hold of each of them. A server that another library starts and
talks to needs less: a command line that confines it. There is no watchdog here: memory and processes are
limited by a cgroup where there is one, else processes alone, by rlimits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollgym.core.errors import RunError, UsageError
from rollgym.sandbox import client, command_child, seccomp
from rollgym.sandbox.cgroup import Cgroup
from rollgym.sandbox.interpreter import spare_uid
from rollgym.sandbox.namespaces import HOW_TO_GET, confinement, find_bwrap
from rollgym.sandbox.types import Limits

__all__ = ["SandboxedCommand"]

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxedCommand:
    """A command line that runs a command in a sandbox. `close` frees what it holds.

    Example:
        >>> confined = SandboxedCommand.make(["python3", "server.py"], files={"server.py": "..."})
        >>> subprocess.run(confined.argv)
        >>> confined.close()
    """

    argv: list[str]
    cgroup: Cgroup | None = None

    @classmethod
    def make(
        cls,
        command: Sequence[str],
        *,
        mounts: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> SandboxedCommand:
        """Return the command line.

        Args:
            command: The program and its arguments, as seen inside. It starts in ``/work``, which is empty
                but for ``files``, and which is gone with it.
            mounts: Folders of this machine that are shown inside, read-only, under their own names.
            files: Files in ``/work``, by relative path.
            environment: Variables beside ``PATH`` and the locale. Those of this process are not passed on.
            limits: ``disk_mb``, ``processes``, ``open_files``, ``file_mb``, and with a cgroup ``memory_mb``.

        Raises:
            UsageError: The command or a mount does not exist, or a file is not below ``/work``.
            RunError: This machine has no bubblewrap.
        """
        limits = limits or Limits()
        if (bwrap := find_bwrap()) is None:
            raise RunError(f"bubblewrap is not installed; {HOW_TO_GET}")
        mounted = [str(Path(mount).absolute()) for mount in mounts]
        for mount in mounted:
            if not os.path.exists(mount):
                raise UsageError(f"Cannot mount {mount}: it does not exist.")
        variables = {**client.ENVIRONMENT, "HOME": "/work", **(environment or {})}
        program = _find(command, variables["PATH"], mounted)
        cgroup = Cgroup.make(limits)
        spec = {
            "command": [program, *command[1:]],
            "bwrap": [
                bwrap,
                *confinement(limits, variables, mounts=mounted, counted=cgroup is not None),
            ],
            "filter": seccomp.program(seccomp.Profile(no_shared_memory=False)).hex(),
            "files": {_inside(name): text for name, text in (files or {}).items()},
            "cgroup": [] if cgroup is None else cgroup.members,
            "uid": spare_uid(),
            "rlimits": {
                "RLIMIT_NOFILE": limits.open_files,
                "RLIMIT_FSIZE": limits.file_mb << 20,
                "RLIMIT_CORE": 0,
            },
        }
        return cls(argv=[sys.executable, "-I", str(command_child.__file__), json.dumps(spec)], cgroup=cgroup)

    def close(self) -> None:
        """Kill what is left of the command, and remove its cgroup."""
        if self.cgroup is not None:
            self.cgroup.close()


def _find(command: Sequence[str], path: str, mounts: Sequence[str]) -> str:
    """Return the path of a program that exists inside."""
    if not command or not command[0]:
        raise UsageError("The command is empty: expected a program and its arguments.")
    found = shutil.which(command[0], path=path)
    if found is None:
        raise UsageError(f"The program {command[0]} was not found in {path}.")
    real = os.path.realpath(found)
    folders = [os.path.realpath(folder) for folder in (*_SYSTEM, *mounts)]
    if not any(Path(real).is_relative_to(folder) for folder in folders):
        raise UsageError(
            f"The program {command[0]} is in {os.path.dirname(real)}, which a sandbox does not show: add the "
            "folder to mounts."
        )
    return found


def _inside(name: str) -> str:
    path = os.path.normpath(os.path.join("/work", name))
    if not path.startswith("/work/"):
        raise UsageError(f"The file {name} is not below the working folder: give a relative path.")
    return path
