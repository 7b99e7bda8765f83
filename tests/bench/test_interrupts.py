"""A suite that is killed or stopped loses nothing."""

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

from rollgym.core.serialization import read_episodes

from .conftest import SUITE, write_suite

Command = Callable[..., Any]
FIXTURES = Path(__file__).parents[1] / "fixtures"
SEARCHED = os.pathsep.join([str(FIXTURES), str(Path(__file__).parents[2])])


def ids(out: Path, entry: str) -> list[str]:
    return [e.spec.episode_id for e in read_episodes(out / "entries" / entry / "episodes.jsonl")]


def test_a_killed_run_can_be_resumed(rollgym_command: Command, tmp_path: Path) -> None:
    text = SUITE.replace('env = "faulty:Counting"\nsplit', 'env = "faulty:Sleeps"\nsplit')
    write_suite(tmp_path, text.replace("tasks = 3", "tasks = 10"))
    words = ["bench", "run", "little.toml", "--out", "r", "--json", "--env-module", "faulty"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rollgym", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SEARCHED},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    file = tmp_path / "r/entries/twice/episodes.jsonl"
    deadline = time.monotonic() + 120
    while (not file.exists() or file.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    lines = file.read_bytes()
    kept = lines[: lines.rfind(b"\n") + 1]
    assert kept.count(b"\n") < 20
    ran = rollgym_command(*words, "--resume")
    assert ran.code == 0, ran.err
    assert file.read_bytes().startswith(kept)
    assert len(set(ids(tmp_path / "r", "twice"))) == len(ids(tmp_path / "r", "twice")) == 20


def test_a_stop_keeps_finished_episodes_and_hints_at_resume(rollgym_command: Command, tmp_path: Path) -> None:
    text = SUITE.replace('env = "faulty:Counting"\nsplit', 'env = "faulty:Sleeps"\nsplit')
    write_suite(tmp_path, text.replace("tasks = 3", "tasks = 200"))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rollgym",
            *["bench", "run", "little.toml", "--out", "r", "--json", "--env-module", "faulty"],
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SEARCHED},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    file = tmp_path / "r/entries/twice/episodes.jsonl"
    deadline = time.monotonic() + 120
    while (not file.exists() or file.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume plays the rest" in " ".join(err.split())
    assert "Traceback" not in err
    summary = json.loads(out.splitlines()[-1])
    assert summary["episodes"] == 6 + len(ids(tmp_path / "r", "twice"))
    assert not summary["complete"]
