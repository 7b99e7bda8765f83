"""What goes wrong in a first week: full disks, missing CUDA, noisy environments, unlike folders."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from training import SMALL

Command = Callable[..., Any]

NOISY = """
import ctypes, os
from rollgym.core.env import StepResult, TextEnv

print("imported")

class Noisy(TextEnv):
    instructions = "Say anything."
    reward_range = (0.0, 1.0)

    def begin(self, task):
        print('{"python": 1}')
        return "?"

    def respond(self, action):
        os.write(1, b'{"descriptor": 1}')
        ctypes.CDLL(None).printf(b'{"library": 1}')
        return StepResult("", 1.0, terminated=True, success=True)

    def facts(self):
        return {"actions": ["yes"]}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_what_an_environment_prints_never_gets_into_the_json(tmp_path: Path, workers: int) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    rollgym = Path(sys.executable).with_name("rollgym")
    words = f"eval noisy:Noisy --env-module noisy --episodes 3 --workers {workers} --out run --json"
    ran = subprocess.run([rollgym, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["episodes"] == 3
    assert ran.stderr.count('{"python": 1}') == ran.stderr.count('{"library": 1}') == 3
    assert "imported" in ran.stderr


def test_standard_output_is_given_back_after_the_json(
    rollgym_command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(rollgym_command("agents", "--json").out)
    print("to the stream", flush=True)
    os.write(1, b"to the descriptor")
    assert capfd.readouterr().out == "to the stream\nto the descriptor"


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture(params=["full", "read-only"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A file system that is full, or that cannot be written to, and what it is called."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        if request.param == "full":
            fill(folder / "ballast")
            yield folder, "the disk is full"
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            yield folder, "the file system is read-only"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "words",
    [
        "eval rollgym/Bandit-v0 --episodes 3 --out {disk}/run",
        "train small.yaml --out {disk}/run",
        "new my_env --in {disk}",
        "view run --export {disk}/report.html",
        "trace run --out {disk}/trace.json",
        "plan small.yaml --svg {disk}/plan.svg",
        "model new rollgym/Bandit-v0 --out {disk}/model --size tiny",
    ],
    ids=lambda words: words.split()[0],
)
def test_a_full_disk_and_a_read_only_one_are_named(
    rollgym_command: Command, tmp_path: Path, place: tuple[Path, str], words: str
) -> None:
    disk, told = place
    (tmp_path / "small.yaml").write_text(json.dumps({**SMALL, "envs": [{"id": "rollgym/Bandit-v0"}]}))
    assert rollgym_command("eval", "rollgym/Bandit-v0", "--episodes", 2, "--out", "run").code == 0
    ran = rollgym_command(*words.format(disk=disk).split())
    assert ran.code in (1, 2)
    last = ran.err.strip().splitlines()[-1]
    assert told in last, ran.err
    assert str(disk) in last
    assert not (disk / "run").exists()


def test_missing_cuda_is_named_before_anything_is_written(rollgym_command: Command, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    (tmp_path / "small.yaml").write_text(json.dumps({**SMALL, "envs": [{"id": "rollgym/Bandit-v0"}]}))
    ran = rollgym_command("train", "small.yaml", "learner.device=cuda")
    assert ran.code == 2
    assert "learner.device 'cuda' needs CUDA, but this torch " in ran.err
    assert not (tmp_path / "runs").exists()
    ran = rollgym_command("train", "small.yaml", "learner.device=gpu")
    assert "learner.device 'gpu' is not a device: write cpu, cuda or cuda:N." in ran.err
    assert rollgym_command("model", "new", "rollgym/Bandit-v0", "--out", "m", "--size", "tiny").code == 0
    words = ("eval", "rollgym/Bandit-v0", "--agent", "lm", "--model", "m", "--episodes", 1)
    ran = rollgym_command(*words, "--agent-arg", "device=cuda")
    assert "device 'cuda' needs CUDA" in ran.err


def test_folders_that_compare_cannot_compare_are_a_sentence(rollgym_command: Command, tmp_path: Path) -> None:
    assert rollgym_command("eval", "rollgym/Bandit-v0", "--episodes", 2, "--out", "a").code == 0
    for kind, told in {
        "train": "b holds a training run, but compare takes two folders of `rollgym eval`: evaluate its",
        "bench": "`rollgym bench compare` compares those",
        "serve": "b holds recorded conversations",
        "odd": "b holds results of the kind 'odd'",
    }.items():
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "manifest.json").write_text(json.dumps({"schema": 1, "kind": kind}))
        for pair in (("a", "b"), ("b", "a")):
            ran = rollgym_command("compare", *pair)
            assert ran.code == 2
            assert told in ran.err
            assert len(ran.err.strip().splitlines()) == 1
    (tmp_path / "b" / "manifest.json").write_text(json.dumps({"schema": 1, "kind": "eval"}))
    ran = rollgym_command("compare", "a", "b")
    assert "does not name an environment and an agent" in ran.err


@pytest.mark.parametrize("word", ["quit", "exit", "QUIT", "/quit"])
def test_play_is_left_by_the_words_that_people_try(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    answers = iter(["help", word])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(answers))
    ran = rollgym_command("play", "rollgym/Sokoban-v0", "--task", 0)
    assert ran.code == 0
    assert ran.out.count("/hint the expert's action") == 2
    assert "turn 1" not in ran.out


def test_play_lets_an_environment_have_an_action_of_that_name(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = NOISY.replace('["yes"]', '["quit", "stay"]').replace("print(", "(lambda *a: None)(")
    (tmp_path / "quits.py").write_text(
        text.replace("os.write(1, ", "len(").replace("ctypes.CDLL(None).printf(", "len(")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    answers = iter(["quit", "n"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(answers))
    assert "turn 1" in rollgym_command("play", "quits:Noisy").out
    answers = iter(["/say help", "n"])
    assert "turn 1" in rollgym_command("play", "quits:Noisy").out


def test_a_run_knows_the_command_that_made_it_without_secrets(
    rollgym_command: Command, tmp_path: Path
) -> None:
    words = ["eval", "rollgym/Bandit-v0", "--episodes", 1, "--out", "my run"]
    assert rollgym_command(*words).code == 0
    manifest = json.loads((tmp_path / "my run" / "manifest.json").read_text())
    assert manifest["command"] == "rollgym eval rollgym/Bandit-v0 --episodes 1 --out 'my run'"

    from rollgym.utils.command_line import command_line, note_command

    note_command(["eval", "--agent-arg", "api_key=abc", "--base-url", "http://me:pw@host/v1", "max_tokens=3"])
    said = command_line()
    assert said is not None
    assert "abc" not in said
    assert "pw" not in said
    assert "max_tokens=3" in said
