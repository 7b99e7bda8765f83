"""That nothing is left of many executions, nor of a process that did not close its sandboxes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from soak import soak

from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.worker_limits import alive


def test_real_sandboxes_forget_and_end_with_the_process(open_or_skip: Callable[..., WorkerSandbox]) -> None:
    open_or_skip("namespaces").close()
    code = (
        "from rollgym.sandbox.pool import SandboxPool\n"
        "from rollgym.sandbox.worker_limits import descendants\n"
        "import os\n"
        "pool = SandboxPool(size=1)\n"
        "with pool.borrow() as one: one.run('x = 1')\n"
        "with pool.borrow() as one: assert 'NameError' in one.run('x').stderr\n"
        "pool.take()\n"
        "print(*descendants(os.getpid()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert pids
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
@pytest.mark.parametrize(
    "times", [100, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_many_executions_leave_nothing_behind(
    open_or_skip: Callable[..., WorkerSandbox], left_behind: Callable[[], Any], backend: str, times: int
) -> None:
    before = left_behind()
    sandbox = open_or_skip(backend)
    during = left_behind()
    descriptors = len(os.listdir("/proc/self/fd"))
    soak(sandbox, times)
    assert left_behind() == during
    assert len(os.listdir("/proc/self/fd")) == descriptors
    sandbox.close()
    assert left_behind() == before
