"""Program of exported tasks: gives up rights before a program of the agent runs beside the tests.

The program can then neither write the reward nor read or change the tests: as root by becoming another user
who owns only the working folder, otherwise by Landlock, which also covers signals and ``/proc``. Its source
is written beside that of `rollgym.sandbox.worker_confinement`.

    python3 untrusted.py FOLDER COMMAND...
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

from rollgym.sandbox.worker_confinement import landlock_abi, restrict

NOBODY = 65534
LOGS = "/logs"
DEVICES = ("/dev/null", "/dev/zero", "/dev/tty")
WARNING = "warning: neither root nor Landlock: a program of the agent can write the reward\n"


def drop_rights(writable: str, tests: str = os.path.dirname(os.path.abspath(__file__))) -> str:
    """Give up all rights but those to a folder; return how: ``user``, ``landlock``, or empty for not at all.

    Args:
        writable: Folder that the program may change.
        tests: Folder that it may not even read.
    """
    if os.getuid() == 0:
        with contextlib.suppress(PermissionError):
            _become_nobody(writable, tests)
            return "user"
    if not landlock_abi():
        sys.stderr.write(WARNING)
        return ""
    closed = [os.path.realpath(path) for path in (tests, LOGS)]
    tops = [os.path.realpath(os.path.join("/", name)) for name in os.listdir("/")]
    # A folder that holds one of those is left out: Landlock only adds rights further down.
    readable = [top for top in tops if not any(_holds(top, path) or _holds(path, top) for path in closed)]
    temporary = os.path.realpath(tempfile.gettempdir())
    open_ones = [os.path.realpath(writable), *([temporary] if temporary in readable else [])]
    restrict(readable, [*open_ones, *DEVICES])
    return "landlock"


def _become_nobody(writable: str, tests: str) -> None:
    os.setgroups([])
    os.chmod(tests, 0o700)
    for folder in (LOGS, f"{LOGS}/verifier"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(folder, os.stat(folder).st_mode & 0o755)
    for folder, below, names in os.walk(writable):
        for name in ("", *below, *names):
            os.chown(os.path.join(folder, name), NOBODY, NOBODY, follow_symlinks=False)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def main() -> int:
    """Run a command from the command line."""
    folder, *command = sys.argv[1:]
    drop_rights(folder)
    os.execvp(command[0], command)
