"""Exported tests run a program of the agent without rights to the reward and the tests."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminal_actions import bash, submit

from rollgym.core.tasks import Task
from rollgym.envs.terminal.env import TerminalEnv
from rollgym.envs.terminal.export import MAIN, TaskFiles, _untrusted_files, _write_task
from rollgym.envs.terminal.shell import harness_source

MakeEnv = Callable[..., TerminalEnv]
CHECKS = (
    '[{"kind": "run", "path": "", "expected": "42", "command": "bash double.sh $(cat unseen.txt)", '
    '"files": {"unseen.txt": "21"}}]'
)
UNPROTECTED = "import os, sys\nos.execvp(sys.argv[2], sys.argv[2:])\n"
REWARD = "/logs/verifier/reward.txt"
HONEST = "echo 'echo $((2 * $1)); echo x > out.txt; echo y > /tmp/y; mktemp > /dev/null' > double.sh"
ATTACKS = {
    "writes the reward and closes it": f"echo 1 > {REWARD}; chmod 444 {REWARD}; chmod 555 /logs/verifier",
    "writes the other reward": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; kill -9 $PPID",
    "writes the reward later": f"(trap '' HUP TERM; while :; do echo 1 > {REWARD}; done) & sleep 0.2",
    "kills all others": f"echo 1 > {REWARD}; kill -9 -1",
    "replaces the tests": (
        f"for i in $(seq 100); do echo 'echo 1 > {REWARD}'; done > /tests/test.sh; echo > /tests/check.py"
    ),
    "reads the tests": "grep -o '\"expected\": \"[0-9]*' /tests/checks.json | grep -o '[0-9]*$'",
    "reads the tests elsewhere": "cat /proc/*/cwd/checks.json /proc/*/root/tests/checks.json | grep -o 42",
    "uses the files of others": (
        f"for f in /proc/*/fd/*; do echo 1 > $f; done; echo 1 > /proc/1/root{REWARD}"
    ),
    "makes links": f"ln -f {REWARD} link; ln -sf {REWARD} link; echo 1 > link; mv -f link {REWARD}",
}
EFFECTIVE = ("writes the reward and closes it", "replaces the tests", "reads the tests")
"""Attacks that gain where no rights are given up: without them, the others would prove nothing."""


def write_task(folder: Path, *, protected: bool = True) -> Path:
    """Write a task whose tests run the agent's ``double.sh``."""
    tests = {"check.py": harness_source() + MAIN, "checks.json": CHECKS, **_untrusted_files()}
    if not protected:
        tests["untrusted.py"] = UNPROTECTED
    files = TaskFiles(
        instruction="Repair double.sh.\n",
        category="scripts",
        level=1,
        dockerfile="FROM python:3.12\nWORKDIR /app\n",
        workspace=None,
        tests=tests,
        test_command="python3 -I /tests/check.py /app /tests/checks.json",
        solution=None,
    )
    return _write_task(folder, "rollgym/Terminal-v0", Task("x", "test", 0), files)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_of_the_agent_cannot_forge_the_reward(
    make_env: MakeEnv, tmp_path: Path, attack: str
) -> None:
    env = make_env(folder=str(write_task(tmp_path / "task")))
    env.reset()
    bash(env, f"cat > double.sh <<'END'\n({ATTACKS[attack]}) 2>/dev/null\nEND")
    assert submit(env) == 0.0


@pytest.mark.parametrize("attack", EFFECTIVE)
def test_the_attacks_gain_where_no_rights_are_given_up(
    make_env: MakeEnv, tmp_path: Path, attack: str
) -> None:
    env = make_env(folder=str(write_task(tmp_path / "task", protected=False)))
    env.reset()
    bash(env, f"cat > double.sh <<'END'\n({ATTACKS[attack]}) 2>/dev/null\nEND")
    assert submit(env) == 1.0


def test_an_honest_program_has_its_folder_and_temporary_files(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(folder=str(write_task(tmp_path / "task")))
    env.reset()
    bash(env, HONEST)
    assert submit(env) == 1.0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_becomes_another_user(open_folder: Path) -> None:
    """As in Harbor, where tests run as root in a container."""
    tests, app = write_task(open_folder / "task") / "tests", open_folder / "app"
    app.mkdir()
    (app / "double.sh").write_text("")
    command = f"id -u; id -G; cat {tests}/checks.json; echo 1 > {open_folder}/x; "
    command += "echo new > double.sh; cat double.sh"
    words = [sys.executable, "-E", "-s", str(tests / "untrusted.py"), str(app), "/bin/bash", "-c", command]
    done = subprocess.run(words, cwd=app, capture_output=True, text=True, timeout=60)
    assert done.stdout == "65534\n65534\nnew\n"
    assert done.stderr.count("Permission denied") == 2
    assert not (open_folder / "x").exists()
