"""The shell of an episode: commands in the session of a sandbox, and a copy of the files afterwards."""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rollgym.core.errors import RunError
from rollgym.core.seeding import stable_digest
from rollgym.envs.terminal import harness
from rollgym.envs.terminal.types import Tree
from rollgym.sandbox.types import Ended, Limits, Ran, Sandbox

ROOT = "/app"
"""The working folder inside, as task folders of Harbor expect it."""
SESSION = "/work/session"
LINKS = ((ROOT, SESSION),)
"""Link of the sandbox, so that this path exists although its root is read-only."""
TESTS, LOGS = "/tests", "/logs"
FOLDERS = (TESTS, LOGS)
"""Writable folders of the sandbox besides the working folder."""
PACKED_CHARS = (64_000, 8_000_000)
"""Characters of packed files; room for more costs time, so it is tried only when needed."""
MAX_COMMAND_BYTES = 100_000
"""The kernel's limit for one argument is 128 KB."""
PACK_SECONDS = 20.0


@functools.cache
def harness_source() -> str:
    """Return the program that runs inside."""
    return Path(harness.__file__).read_text(encoding="utf-8")


def command_hash(command: str) -> str:
    """Return a short name of a command, for ``info``."""
    return stable_digest(command).hex()[:12]


def encode(tree: Tree) -> str:
    """Return a tree as text."""
    return base64.b64encode(harness.pack(tree)).decode()


def start_shell(
    sandbox: Sandbox, tree: Tree, *, root: str = ROOT, env: Mapping[str, str] | None = None
) -> None:
    """Put the files of a task into the session of a sandbox and start its shell there."""
    program = f"{harness_source()}\nstart({root!r}, {encode(tree)!r}, {dict(env or {})!r})\n"
    ran = sandbox.run(program, limits=Limits(seconds=PACK_SECONDS, processes=8))
    if not ran.ok:
        why = (ran.stderr.strip() or str(ran.ended)).splitlines()[-1]
        raise RunError(f"The shell of a terminal task did not start: {why}")


def run_command(sandbox: Sandbox, command: str, limits: Limits, *, merged: bool = True) -> Ran:
    """Run a command in the shell; ``merged``: its stderr is part of stdout."""
    return sandbox.run(f"execute({command!r}, {merged})", limits=limits)


def copy_files(sandbox: Sandbox, limits: Limits, root: str = SESSION) -> Tree:
    """Return the files of the session. Its processes are stopped or ended, and only read by another one.

    Raises:
        ValueError: They are too many, or cannot be read.
    """
    for chars in PACKED_CHARS:
        room = replace(limits, output_chars=chars, seconds=min(limits.seconds, PACK_SECONDS))
        ran = sandbox.exec(f"{harness_source()}\npack_to_stdout({root!r})\n", limits=room)
        if not ran.truncated:
            break
    if not ran.ok or ran.truncated:
        why = "they are too large" if ran.truncated else (ran.stderr.strip() or ran.ended).splitlines()[-1]
        raise ValueError(f"the files cannot be copied: {why}")
    return harness.unpack(base64.b64decode(ran.stdout))


_ENDINGS = {
    Ended.TIMEOUT: "stopped after {seconds:g} seconds",
    Ended.CPU: "stopped: too much CPU time",
    Ended.OUTPUT: "stopped: more than {output_mb} MB of output, or too many files",
    Ended.MEMORY: "stopped: more than {memory_mb} MB of memory",
    Ended.LOST: "the shell was killed",
}
_STATES = {
    "rolled_back": "; folder and variables of the shell are as before the command",
    "lost": "; a new shell starts in the working folder",
}


def format_ran(ran: Ran, limits: Limits) -> str:
    """Format the output and the exit code of a command for the agent."""
    output = ran.stdout.rstrip("\n")
    if ran.ended is Ended.EXIT:
        ending = f"[exit code {ran.exit_code}]"
    else:
        reason = _ENDINGS[ran.ended].format(
            seconds=limits.seconds, output_mb=limits.output_mb, memory_mb=limits.memory_mb
        )
        ending = f"[{reason}{_STATES.get(ran.state, '')}]"
    return f"{output}\n{ending}" if output else ending
