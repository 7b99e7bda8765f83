"""Judges the files that an agent leaves: checks on files outside every sandbox, programs in a new one.

What a check expects is in no sandbox. A command of a check runs over a copy of the files in a sandbox that
the agent has not used, with the programs of the machine; what it prints is compared here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from rollgym.core.errors import RunError
from rollgym.envs.code.sandbox_handle import SandboxHandle
from rollgym.envs.terminal import harness
from rollgym.envs.terminal.shell import LOGS, TESTS, encode, run_command, start_shell
from rollgym.envs.terminal.types import Check, FolderTask, TerminalTask, Tree, Verdict
from rollgym.sandbox.types import Ended, Limits, Sandbox

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


def judge_task(handle: SandboxHandle, task: TerminalTask | FolderTask, tree: Tree | None) -> Verdict:
    """Judge the files that an agent left; without any, all checks fail."""
    if isinstance(task, FolderTask):
        reward = run_tests(handle, task, tree) if tree is not None else 0.0
        return Verdict(reward=reward, success=reward >= 1.0, passed=int(reward >= 1.0), of=1)
    results = judge(handle, task.checks, tree) if tree is not None else [False] * len(task.checks)
    passed, of = sum(results), len(results)
    return Verdict(reward=passed / of, success=passed == of, passed=passed, of=of)


REWARD = """
import os
for name in ("reward.txt", "reward.json"):
    try:
        file = os.open(f"{LOGS}/verifier/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        continue
    print(name, os.read(file, 4000).decode("utf-8", "replace"))
    break
"""


def run_tests(handle: SandboxHandle, task: FolderTask, tree: Tree) -> float:
    """Run the tests of a task folder over a copy of the files; return the reward that they wrote."""

    def work(sandbox: Sandbox) -> str:
        limits = handle.limits()
        seconds = min(task.verifier_seconds, handle.seconds() or task.verifier_seconds)
        start_shell(sandbox, tree, root=task.root, env={**task.env, **task.tests_env})
        packed = encode(task.tests)
        prepare = f"write_tree({TESTS!r}, unpack(base64.b64decode({packed!r})))\n"
        prepare += "".join(f"os.makedirs('{LOGS}/{name}', exist_ok=True)\n" for name in ("verifier", "agent"))
        if not sandbox.run(prepare, limits=limits).ok:
            raise RunError("The tests of a task folder could not be written.")
        ran = run_command(sandbox, "bash /tests/test.sh", replace(limits, seconds=seconds, cpu_seconds=None))
        if ran.ended is not Ended.EXIT:
            return ""  # Tests that were stopped or killed give no reward.
        # Another process reads it: those of the tests have ended.
        return sandbox.exec(f"LOGS = {LOGS!r}\n{REWARD}", limits=limits).stdout

    for _ in range(ATTEMPTS):
        written = handle.once(work, unused=True)
        if written is not None:
            return read_reward(written)
    return 0.0


def read_reward(written: str) -> float:
    """Return the reward of ``reward.txt`` or ``reward.json``, from 0 to 1; 0 where it is none."""
    name, _, text = written.strip().partition(" ")
    try:
        value = json.loads(text) if name == "reward.json" else float(text)
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
        reward = float(value)
    except (ValueError, TypeError, LookupError, RecursionError):
        return 0.0
    return min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0


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
