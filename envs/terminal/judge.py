"""Judges the files that an agent leaves: checks on files outside every sandbox, programs in a new one.

What a check expects is in no sandbox. A command of a check runs over a copy of the files in a sandbox that the
agent has not used, with the programs of the machine; what it prints is compared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollgym.core.errors import RunError
from rollgym.envs.code.sandbox_handle import SandboxHandle
from rollgym.envs.terminal import harness
from rollgym.envs.terminal.shell import run_command, start_shell
from rollgym.envs.terminal.types import Check, Tree
from rollgym.sandbox.types import Limits, Sandbox

OUTPUT_CHARS = 64_000
ATTEMPTS = 2
"""Sandboxes tried for the commands of the checks; what breaks both has failed."""


def judge(handle: SandboxHandle, checks: Sequence[Check], tree: Tree) -> list[bool]:
    """Return for each check whether it holds."""
    results = [check.kind != "run" and harness.holds(check.to_json(), tree) for check in checks]
    commands = [(number, check) for number, check in enumerate(checks) if check.kind == "run"]
    if not commands:
        return results
    for _ in range(ATTEMPTS):
        ran = handle.once(
            lambda sandbox: [command_holds(sandbox, check, tree, handle.limits()) for _, check in commands],
            unused=True,
        )
        if ran is not None:
            for (number, _), held in zip(commands, ran, strict=True):
                results[number] = held
            break
    return results


def command_holds(sandbox: Sandbox, check: Check, tree: Tree, limits: Limits) -> bool:
    """Whether a command prints what is expected, in a fresh session with a copy of the files."""
    sandbox.reset()
    try:
        start_shell(sandbox, {**tree, **harness.text_files(dict(check.files))})
    except RunError:
        # The agent's files cannot be written again, for example below a folder that is closed.
        return False
    ran = run_command(sandbox, check.command, replace(limits, output_chars=OUTPUT_CHARS), merged=False)
    return ran.ok and not ran.truncated and harness.same_text(ran.stdout, check.expected)
