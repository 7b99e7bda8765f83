"""Nothing is left of many episodes, honest ones and attacks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal_actions import bash, submit
from terminal_attacks import ATTACKS, HONEST, LIMITS, begin

from rollgym.envs.terminal.env import TerminalEnv
from rollgym.sandbox.worker_limits import descendants

MakeEnv = Callable[..., TerminalEnv]


@pytest.mark.parametrize("times", [6, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_episodes_leave_no_process_mount_cgroup_or_file(make_env: MakeEnv, times: int) -> None:
    names = list(ATTACKS)
    before = _left_behind()
    env = make_env(sandbox=LIMITS)
    for number in range(times):
        begin(env)
        attack = names[number % len(names)] if number % 3 == 0 else ""
        bash(env, ATTACKS.get(attack, "sleep 500 & echo x > /tmp/left; " + HONEST))
        assert submit(env) == float(not attack)
    env.close()
    assert _left_behind() == before


def _left_behind() -> tuple[list[int], list[str], list[str], list[str]]:
    # Others on this machine may run containers meanwhile.
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "docker" not in line]
    groups = [str(path) for path in Path("/sys/fs/cgroup").rglob(f"rollgym-{os.getpid()}-*")]
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    files = [str(path) for path in folder.glob(f"rollgym-sandbox-{os.getpid()}-*")]
    return sorted(descendants(os.getpid())), mounts, sorted(groups), sorted(files)
