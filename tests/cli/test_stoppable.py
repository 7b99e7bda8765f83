"""Limits, Ctrl-C and SIGTERM are heard while an environment blocks, without worker processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
FIXTURES = Path(__file__).parents[1] / "fixtures"
SEARCHED = os.pathsep.join([str(FIXTURES), str(Path(__file__).parents[2])])
WAYS = [("step", "sleep"), ("reset", "busy"), ("step", "lock")]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command in a separate process, once its environment blocks."""
    mark = folder / "mark"
    process = subprocess.Popen(
        [sys.executable, "-m", "rollgym", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SEARCHED, "MARK": str(mark)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not mark.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    return process


def children(pid: int) -> list[str]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.split()


@pytest.mark.parametrize(("where", "how"), WAYS)
def test_a_time_limit_ends_a_blocked_episode(rollgym_command: Command, where: str, how: str) -> None:
    ran = rollgym_command(
        "eval", "stuck:Stuck", "--env-arg", f"where={where}", "--env-arg", f"how={how}",
        "--max-seconds", "0.3", "--episodes", 2, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["outcomes"] == {"time_limit": 2}


@pytest.mark.parametrize(
    ("env", "number", "where", "how"),
    [
        ("stuck:Stuck", signal.SIGINT, "step", "sleep"),
        ("stuck:Stuck", signal.SIGTERM, "reset", "busy"),
        ("stuck:Hasty", signal.SIGINT, "step", "lock"),
    ],
)
def test_eval_ends_on_the_first_signal(
    tmp_path: Path, env: str, number: signal.Signals, where: str, how: str
) -> None:
    words = ("--env-arg", f"where={where}", "--env-arg", f"how={how}", "--episodes", "4", "--out", "r")
    process = start(tmp_path, "eval", env, *words)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "--out r --resume" in err
    assert "Traceback" not in err


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(
        "import os, pathlib, time\n"
        "def play(observation, info):\n"
        "    pathlib.Path(os.environ['MARK']).touch()\n"
        "    time.sleep(1000)\n"
    )
    process = start(
        tmp_path, "eval", "stuck:Stuck", "--agent", "sleepy:play", "--episodes", "1", "--workers", "1"
    )
    below = children(process.pid)
    assert below, "a keeper of worker processes"
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "an agent that blocks the loop keeps the first signal from being heard"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def test_train_ends_on_the_first_signal(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from training import write

    # The first evaluation blocks: no step has finished yet, and nothing is lost.
    write(tmp_path, envs=[{"id": "stuck:Stuck", "kwargs": {"where": "step"}}], model={"path": None})
    process = start(tmp_path, "train", "small.yaml", "--plain", "--out", "r")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 143, err
    assert "Traceback" not in err
