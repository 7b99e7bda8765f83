"""Selects the Python inside: ours if the sandbox user can read it, otherwise the system's."""

from __future__ import annotations

import glob
import os
import random
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rollgym.core.errors import RunError
from rollgym.sandbox import hidden
from rollgym.sandbox.client import BOOT, PYTHON_FLAGS

NOBODY = 65534


@dataclass(frozen=True)
class Interpreter:
    """A Python to run inside."""

    path: str
    folders: tuple[str, ...]
    """Paths outside /usr that it reads."""
    why: str
    """Description."""
    needed: tuple[str, ...] = ()
    """Paths required for its start."""

    def command(self, preload: tuple[str, ...] = ()) -> list[str]:
        """Return the command that boots a worker; preloaded modules may be in its site-packages."""
        return [self.path, *(flag for flag in PYTHON_FLAGS if not (preload and flag == "-S")), BOOT]

    def hidden(self, roots: Iterable[str], preload: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the hidden paths of these folders (see `rollgym.sandbox.hidden`)."""
        return hidden.hidden(roots, packages=bool(preload), needed=self.needed)


def spare_uid() -> int | None:
    """Return an unused user id for a sandbox started by root; ``None`` without root.

    Each sandbox has its own id, so that processes, signals and limits never overlap. Where few ids are
    mapped (root in a container), all share the user ``nobody``.
    """
    if os.getuid():
        return None
    uid = random.SystemRandom().randrange(1 << 24, 1 << 30)
    return uid if any(first <= uid < first + size for first, size in _map()) else NOBODY


@lru_cache(1)
def _map() -> tuple[tuple[int, int], ...]:
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return ()
    return tuple((int(first), int(size)) for first, _, size in (line.split() for line in lines))


def find_python(preload: tuple[str, ...] = ()) -> Interpreter:
    """Find a Python that the user id inside can read."""
    # With modules to preload, the virtual environment counts, not the Python it was made from.
    own = sys.executable if preload else os.path.realpath(sys.executable)
    prefixes = {sys.base_prefix, *([sys.prefix] if preload else [])}
    folders = tuple(sorted(prefix for prefix in prefixes if not prefix.startswith("/usr")))
    needed = [own, os.path.realpath(own), sysconfig.get_path("stdlib")]
    if all(readable(path) for path in (*needed, *folders)):
        why = f"the Python of this process, {sys.version.split()[0]}"
        return Interpreter(own, folders, why, (*needed, *([sys.prefix] if preload else [])))
    if readable("/usr/bin/python3"):
        reason = f"{own} cannot be read by an unprivileged user"
        why = f"/usr/bin/python3, {_version()}, because {reason}"
        return Interpreter(
            "/usr/bin/python3", (), why, ("/usr/bin/python3", *glob.glob("/usr/lib/python3.*"))
        )
    raise RunError(
        f"No usable Python for the sandbox: {own} cannot be read by an unprivileged user, and there "
        "is no /usr/bin/python3. Install Python for all users (apt install python3), or do not run as root."
    )


@lru_cache(1)
def _version() -> str:
    done = subprocess.run(["/usr/bin/python3", "-IS", "-V"], capture_output=True, text=True, check=False)
    return done.stdout.strip().removeprefix("Python ") or "of unknown version"


def readable(path: str) -> bool:
    """Whether the user id inside can read a file or enter a folder, and all folders above."""
    if os.getuid():
        return os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0))
    real = Path(os.path.realpath(path))
    try:
        modes = [(folder.stat().st_mode, stat.S_IXOTH) for folder in (*real.parents, *Path(path).parents)]
        modes.append((real.stat().st_mode, stat.S_IROTH))
    except OSError:
        return False
    return all(mode & need for mode, need in modes)
