"""Sandboxes are used again from episode to episode, and nothing of one episode is there in the next."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup
from rollgym.core.types import EpisodeSpec
from rollgym.envs.code.env import CodeEnv
from rollgym.envs.code.expert import CodeExpert, SnippetsExpert
from rollgym.envs.code.snippets import SnippetsEnv
from rollgym.envs.code.tool_env import PythonToolEnv
from rollgym.pool.base import LeaseLost
from rollgym.pool.local import LocalPool
from rollgym.sandbox.types import Sandbox
from rollgym.sandbox.worker_limits import alive, descendants

COUNTED = {"counts": True, "limits": {"seconds": 20}}
TASK: dict[str, Any] = {"task": 3, "split": "test"}

# What one episode tries to leave, and what finds it in the next: it prints nothing but "clean".
LEFTOVERS = {
    "files": (
        "import os\n"
        "for folder in ('.', '/tmp', '/dev/shm', os.path.expanduser('~'), os.environ.get('TMPDIR', '.')):\n"
        "    try:\n"
        "        os.makedirs(f'{folder}/left/below', exist_ok=True)\n"
        "        open(f'{folder}/left/below/note', 'w').write('secret')\n"
        "        open(f'{folder}/.hidden', 'w').write('secret')\n"
        "    except OSError:\n"
        "        pass",
        "import os\n"
        "found = []\n"
        "for folder in ('.', '/tmp', '/dev/shm', os.path.expanduser('~'), os.environ.get('TMPDIR', '.')):\n"
        "    found += [one for one in ('left', '.hidden') if os.path.exists(f'{folder}/{one}')]\n"
        "print(found or 'clean')",
    ),
    "processes": (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork():\n"
        "        while True:\n"
        "            try:\n"
        "                open('/tmp/alive' if os.path.isdir('/tmp') else 'alive', 'w').write('secret')\n"
        "            except OSError:\n"
        "                pass\n"
        "            time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "os.wait()",
        "import os, time\n"
        "time.sleep(0.3)\n"
        "print([one for one in ('/tmp/alive', 'alive') if os.path.exists(one)] or 'clean')",
    ),
    "modules": (
        "import builtins, json, math, os, sys\n"
        "math.pi = 3\n"
        "json.loads = lambda text: 'forged'\n"
        "builtins.sum = lambda *rest: 0\n"
        "sys.modules['rollgym_left'] = math\n"
        "sys.path.insert(0, '/tmp')\n"
        "os.environ['LEFT'] = 'secret'\n"
        "open('random.py', 'w').write('left = 1')",
        "import json, math, os, random, sys\n"
        "bad = [math.pi == 3, json.loads('1') != 1, sum([1]) != 1, 'rollgym_left' in sys.modules,\n"
        "       '/tmp' in sys.path, 'LEFT' in os.environ, hasattr(random, 'left')]\n"
        "print(bad if any(bad) else 'clean')",
    ),
    "names and threads": (
        "import threading, time\n"
        "left = 'secret'\n"
        "def write():\n"
        "    while True:\n"
        "        open('thread', 'w').write('secret')\n"
        "        time.sleep(0.01)\n"
        "threading.Thread(target=write, daemon=True).start()",
        "import os, threading\n"
        "bad = ['left' in globals(), threading.active_count() > 1, os.path.exists('thread')]\n"
        "print(bad if any(bad) else 'clean')",
    ),
    "descriptors": (
        "import os\nos.dup2(os.open('note', os.O_CREAT | os.O_RDWR), 50)",
        "import os\ntry:\n    os.fstat(50)\n    print('left')\nexcept OSError:\n    print('clean')",
    ),
}
WAIT = "\nwhile not any(map(os.path.exists, ('/tmp/alive', 'alive'))):\n    time.sleep(0.01)"


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def solved(info: dict[str, Any]) -> str:
    return CodeExpert(AgentSetup(env_id="x")).choose("", info)


@pytest.fixture
def tool(sandbox: Sandbox) -> Iterator[PythonToolEnv]:
    tool_env = PythonToolEnv(sandbox=COUNTED)
    yield tool_env
    tool_env.close()


@pytest.mark.parametrize("what", LEFTOVERS)
def test_the_next_episode_gets_the_same_sandbox_and_finds_nothing_in_it(
    tool: PythonToolEnv, what: str
) -> None:
    leave, look = LEFTOVERS[what]
    tool.reset(seed=0, options=TASK)
    left = tool.step(block(leave))[0]
    assert "Error" not in left
    _, info = tool.reset(seed=0, options=TASK)
    before = info["sandbox"]["counts"]["reused"]
    observation, *_, info = tool.step(block(look))
    assert observation.startswith("stdout:\nclean\n")
    assert info["sandbox"]["counts"]["reused"] == before + 1


@pytest.mark.parametrize("what", LEFTOVERS)
def test_what_one_leaves_is_there_within_its_own_episode(tool: PythonToolEnv, what: str) -> None:
    leave, look = LEFTOVERS[what]
    tool.reset(seed=0, options=TASK)
    # Processes of a turn end with it; what they wrote lasts.
    tool.step(block(leave + WAIT * (what == "processes")))
    assert not tool.step(block(look))[0].startswith("stdout:\nclean\n")


def test_hidden_tests_run_where_nothing_has_ever_run(sandbox: Sandbox) -> None:
    env = CodeEnv(sandbox=COUNTED)
    for episode in range(6):
        _, info = env.reset(seed=0, options=TASK)
        env.step(solved(info))
        *_, info = env.step("submit")
        assert info["success"]
        # Each episode needed a new one; its session and its public tests took those of episodes before.
        assert info["sandbox"]["counts"]["started"] > episode
        assert info["sandbox"]["counts"]["reused"] >= 2 * episode
        assert info["sandbox"]["counts"]["busy"] == 0
    env.close()


def test_a_puzzle_of_lines_needs_a_sandbox_for_a_moment_only(sandbox: Sandbox) -> None:
    envs = [SnippetsEnv(sandbox=COUNTED) for _ in range(5)]
    for env in envs:
        env.reset(seed=0, options=TASK)
    for env in envs:
        observation, info = env.reset(seed=0, options=TASK)
        choice = SnippetsExpert(AgentSetup(env_id="x")).choose(observation, info)
        *_, info = env.step(choice)
        assert info["success"]
    counts = info["sandbox"]["counts"]
    assert (counts["reused"], counts["busy"]) == (4, 0)
    assert counts["started"] <= 2
    for env in envs:
        env.close()


def test_counts_are_told_only_where_they_are_asked_for(sandbox: Sandbox) -> None:
    env = SnippetsEnv()
    _, info = env.reset(seed=0)
    assert set(info["sandbox"]) == {"backend", "level"}
    env.close()


def test_closing_the_last_environment_leaves_no_process(sandbox: Sandbox) -> None:
    before = set(descendants(os.getpid()))
    envs = [PythonToolEnv(), PythonToolEnv()]
    for env in envs:
        env.reset(seed=0)
        env.step(block("x = 1"))
    assert set(descendants(os.getpid())) > before
    for env in envs:
        env.close()
    assert set(descendants(os.getpid())) <= before


def test_a_forgotten_environment_gives_its_sandbox_back(sandbox: Sandbox) -> None:
    before = set(descendants(os.getpid()))
    env = PythonToolEnv()
    env.reset(seed=0)
    env.step(block("x = 1"))
    del env
    assert set(descendants(os.getpid())) <= before


def test_a_worker_that_is_killed_takes_its_sandboxes_along(sandbox: Sandbox) -> None:
    async def use() -> tuple[LeaseLost, list[int]]:
        pool = LocalPool(1)
        try:
            spec = EpisodeSpec(
                env_id="rollgym/PythonTool-v0",
                env_kwargs={"sandbox": {"limits": {"seconds": 600}}},
                episode_id="a",
                split="test",
                task=0,
            )
            session = await pool.open(spec)
            await session.reset()
            step = asyncio.ensure_future(session.step(block("import time\ntime.sleep(500)")))
            (worker,) = pool.stats().workers
            assert worker.pid is not None
            below: list[int] = []
            while not below:
                below = list(descendants(worker.pid))
                await asyncio.sleep(0.01)
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(LeaseLost) as lost:
                await step
            return lost.value, below
        finally:
            await pool.close()

    lost, below = asyncio.run(use())
    assert lost.reason == "died"
    until = time.monotonic() + 60
    while any(map(alive, below)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [Path(f"/proc/{pid}/cmdline").read_text() for pid in below if alive(pid)]
