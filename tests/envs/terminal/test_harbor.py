"""Task folders: read without running anything, judged by their own tests, written and read back."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminal_actions import bash, call, submit

from rollgym.core.errors import UsageError
from rollgym.envs.terminal.env import FORGEABLE, TerminalEnv
from rollgym.envs.terminal.export import export_tasks
from rollgym.envs.terminal.harbor import NeedsImage, TaskFolders, read_dockerfile
from rollgym.envs.terminal.judge import read_reward
from rollgym.envs.terminal.types import file
from rollgym.sandbox.worker_confinement import landlock_abi

MakeEnv = Callable[..., TerminalEnv]
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY data/ ./data/\nENV NAME=Robin GREETING='good day'\n"
TEST = """\
mkdir -p /logs/verifier
pwd > /logs/agent/pwd.txt
if [ "$(cat /app/out.txt)" = "Robin good day 3" ] && [ -f /tests/extra.txt ]; then
  echo 1.0 > /logs/verifier/reward.txt
elif [ -f /app/half.txt ]; then
  echo '{"reward": 0.5}' > /logs/verifier/reward.json
fi
"""
SOLUTION = 'echo "$NAME $GREETING $(wc -l < /app/data/three.txt)" > /app/out.txt\n'


@pytest.fixture
def write_task(tmp_path: Path) -> Callable[..., Path]:
    """Write a task folder; named parts replace those of a good one."""

    def write(name: str = "greet", **parts: str) -> Path:
        files = {
            "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 30.0\n',
            "instruction.md": "Greet in /app/out.txt.\n",
            "environment/Dockerfile": DOCKERFILE,
            "environment/data/three.txt": "1\n2\n3\n",
            "tests/test.sh": TEST,
            "tests/extra.txt": "",
            "solution/solve.sh": SOLUTION,
            **{path.replace("__", "/").replace("_DOT_", "."): text for path, text in parts.items()},
        }
        for path, text in files.items():
            (tmp_path / "tasks" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tasks" / name / path).write_text(text)
        return tmp_path / "tasks"

    return write


def test_a_task_folder_is_played_and_judged_by_its_tests(
    make_env: MakeEnv, write_task: Callable[..., Path]
) -> None:
    env = make_env(folder=str(write_task()), reveal=True)
    observation, info = env.reset()
    assert observation.startswith("Greet in /app/out.txt.\nThe working folder is /app.")
    assert (info["name"], info["solution"], info["split"]) == ("greet", [SOLUTION], "test")
    assert bash(env, 'pwd; ls; echo "$NAME $GREETING"; ls /tests /logs') == (
        "/app\ndata\nRobin good day\n/logs:\n\n/tests:\n[exit code 0]"
    )
    assert submit(env) == 0.0
    env.reset()
    bash(env, "touch half.txt")
    assert submit(env) == 0.5
    env.reset()
    bash(env, SOLUTION)
    assert submit(env) == 1.0


def test_a_reward_that_the_agent_wrote_does_not_count(
    make_env: MakeEnv, write_task: Callable[..., Path]
) -> None:
    env = make_env(folder=str(write_task()))
    env.reset()
    bash(
        env,
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/*; ls /logs",
    )
    bash(env, "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh")
    bash(
        env,
        "printf 'echo 1 > /logs/verifier/reward.txt' > .bashrc; export BASH_ENV=/app/.bashrc PATH=/app:$PATH",
    )
    bash(
        env,
        "cp .bashrc cat; cp .bashrc mkdir; chmod +x cat mkdir; (sleep 1; cp .bashrc /tests/test.sh) &",
    )
    assert submit(env) == 0.0


def test_the_time_of_a_task_is_limited(make_env: MakeEnv, write_task: Callable[..., Path]) -> None:
    short = "[agent]\ntimeout_sec = 0.5\n[verifier]\ntimeout_sec = 0.5\n"
    env = make_env(folder=str(write_task(task_DOT_toml=short, tests__test_DOT_sh=f"{TEST}sleep 60\n")))
    env.reset()
    assert "stopped after 0.5 seconds" in bash(env, "sleep 60")
    observation, reward, terminated, _, _ = env.step(call("bash", command=SOLUTION))
    assert observation.startswith("The time for this task is over.")
    assert (reward, terminated) == (0.0, True)


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("reward.txt 1\n", 1.0),
        ("reward.txt 0.25", 0.25),
        ("reward.txt 7", 1.0),
        ("reward.txt -1", 0.0),
        ("reward.txt nan", 0.0),
        ("reward.txt one", 0.0),
        ('reward.json {"reward": 0.5, "style": 1}', 0.5),
        ('reward.json {"accuracy": 0.5}', 0.5),
        ('reward.json {"a": 1, "b": 1}', 0.0),
        ("reward.json [1]", 0.0),
        ("", 0.0),
    ],
)
def test_rewards_are_numbers_from_0_to_1(written: str, reward: float) -> None:
    assert read_reward(written) == reward


def _archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, kind in (
            ("in/a.txt", None),
            ("../out.txt", None),
            ("/etc/out", None),
            ("l", tarfile.SYMTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = (0 if kind else 2), 0o640
            if kind:
                member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member, io.BytesIO(b"a\n"))
    return buffer.getvalue()


CONTEXT = {
    "Dockerfile": file(""),
    "a.txt": file("a"),
    "b/c.txt": file("c"),
    "b/d/e.txt": file("e"),
    "x.tar.gz": file(_archive()),
}


@pytest.mark.parametrize(
    ("lines", "root", "paths"),
    [
        ("WORKDIR /app", "/app", []),
        ("", "/app", []),
        ("COPY a.txt /app/", "/app", ["a.txt"]),
        ("WORKDIR /srv/job\nCOPY a.txt n.txt", "/srv/job", ["n.txt"]),
        ("WORKDIR /root\nCOPY b b/", "/root", ["b/c.txt", "b/d/e.txt"]),
        ("WORKDIR /w\nCOPY a.txt b/c.txt ./in/", "/w", ["in/a.txt", "in/c.txt"]),
        ("WORKDIR /w\n# note\nCOPY . \\\n  .", "/w", sorted(CONTEXT)),
        ("ENV D=/data\nWORKDIR ${D}\nCOPY a.txt $D/x/a", "/data", ["x/a"]),
        ("WORKDIR /app\nADD x.tar.gz .", "/app", ["in/a.txt", "l"]),
        ("WORKDIR /app\nCOPY x.tar.gz .", "/app", ["x.tar.gz"]),
        ('WORKDIR /app\nCMD ["bash"]\nLABEL a=b', "/app", []),
    ],
)
def test_a_dockerfile_that_only_copies_needs_no_image(lines: str, root: str, paths: list[str]) -> None:
    found = read_dockerfile(f"FROM python:3.12-slim\n{lines}\n", CONTEXT)
    assert (found[0], sorted(found[1])) == (root, paths)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "WORKDIR /app",
        "FROM node:20",
        "FROM example.org/python:3",
        "FROM python:3 AS build\nFROM python:3",
        "FROM python:3\nRUN touch /canary",
        "FROM python:3\nUSER root",
        "FROM python:3\nARG X=1",
        'FROM python:3\nSHELL ["bash"]',
        "FROM python:3\nCOPY --from=build a b",
        "FROM python:3\nCOPY missing .",
        "FROM python:3\nCOPY ../secret .",
        "FROM python:3\nCOPY a.txt /etc/passwd",
        "FROM python:3\nCOPY a.txt /app/../etc/passwd",
        "FROM python:3\nADD https://example.org/x .",
        "FROM python:3\nWORKDIR /",
        "FROM python:3\nWORKDIR /usr/bin",
        "FROM python:3\nWORKDIR /tests",
        "FROM python:3\nWORKDIR /app/../usr",
        "FROM python:3\nENV PATH=/x:$PATH",
        "FROM python:3\nENV A='x",
        "FROM python:3\nCOPY <<EOF /app/x\nEOF",
        "# escape=`\nFROM python:3",
    ],
)
def test_a_dockerfile_that_does_more_needs_an_image(text: str) -> None:
    with pytest.raises(NeedsImage):
        read_dockerfile(text, CONTEXT)


def test_tasks_that_need_an_image_are_an_error_or_left_out(write_task: Callable[..., Path]) -> None:
    write_task("plain")
    folder = write_task("image", environment__Dockerfile="FROM python:3\nRUN apt-get install -y jq\n")
    with pytest.raises(
        UsageError, match=r"1 of 2 tasks .*\(image: its Dockerfile has the instruction RUN apt-get"
    ):
        TaskFolders(str(folder))
    assert TaskFolders(str(folder), "skip").tasks.size("test") == 1


@pytest.mark.parametrize("name", ["docker-compose.yaml", "docker-compose.yml", ".dockerignore"])
@pytest.mark.parametrize("images", ["none", "build"])
def test_tasks_that_cannot_be_played_are_an_error_that_does_not_offer_docker(
    write_task: Callable[..., Path], name: str, images: str
) -> None:
    write_task("plain")
    folder = write_task("several")
    (folder / "several" / "environment" / name).write_text("services: {main: {}, database: {image: db}}\n")
    with pytest.raises(UsageError) as error:
        TaskFolders(str(folder), images=images)
    assert re.fullmatch(
        rf"1 of 2 tasks in \S+ cannot be played, with or without Docker \(several: environment/{name} .*\)\. "
        r"Leave them out with unsupported='skip', or run them with Harbor\.",
        str(error.value),
    )
    if "compose" in name:
        assert "Docker Compose, and a task has one sandbox" in str(error.value)
    assert TaskFolders(str(folder), "skip", images).tasks.size("test") == 1
    (folder / "plain" / "task.toml").unlink()
    with pytest.raises(UsageError, match=rf"no usable task folder .* 1 were left out \(several: .*{name}"):
        TaskFolders(str(folder), "skip", images)


def test_several_steps_are_an_error(write_task: Callable[..., Path]) -> None:
    folder = write_task()
    (folder / "greet" / "steps").mkdir()
    with pytest.raises(UsageError, match=r"1 of 1 tasks .* cannot be played.*greet: it has several steps"):
        TaskFolders(str(folder))


def test_a_reward_that_tests_may_let_the_agent_forge_is_named(
    make_env: MakeEnv, write_task: Callable[..., Path], tmp_path: Path
) -> None:
    env = make_env(folder=str(write_task()))
    _, info = env.reset()
    assert (info["forgeable"], info["weaknesses"][-1]) == (True, FORGEABLE)
    *_, info = env.step(call("bash", command="ls"))
    assert not {"forgeable", "weaknesses"} & set(info)
    _, info = make_env().reset()
    assert "forgeable" not in info
    assert FORGEABLE not in info["weaknesses"]


@pytest.mark.skipif(not landlock_abi(), reason="Without Landlock exported tests do not protect the reward.")
@pytest.mark.parametrize("env_id", ["rollgym/Terminal-v0", "rollgym/Code-v0"])
def test_exported_tests_count_as_protected_until_they_are_changed(
    make_env: MakeEnv, tmp_path: Path, env_id: str
) -> None:
    (folder,) = export_tasks(env_id, tmp_path / "out", count=1)

    def forgeable() -> bool:
        _, info = make_env(folder=str(tmp_path / "out")).reset()
        assert (FORGEABLE in info["weaknesses"]) == info["forgeable"]
        return bool(info["forgeable"])

    assert not forgeable()
    for name in ("untrusted.py", "check.py", "test.sh"):
        path = folder / "tests" / name
        text = path.read_text()
        path.write_text(f"{text}# changed\n")
        assert forgeable(), name
        path.write_text(text)
    (folder / "tests" / "sitecustomize.py").write_text("")
    assert forgeable()


def test_check_and_eval_name_a_reward_that_may_be_forged(
    rollgym_command: Callable[..., Any], write_task: Callable[..., Path], tmp_path: Path, need_sandbox: None
) -> None:
    argument = ("--env-arg", f"folder={write_task()}")
    done = rollgym_command(
        "check", "rollgym/Terminal-v0", "--quick", "--rule", "forgeable", "--json", *argument
    )
    (result,) = json.loads(done.out)["results"]
    assert (done.code, result["status"]) == (0, "warning")
    assert result["detail"].endswith(FORGEABLE)
    words = ("eval", "rollgym/Terminal-v0", "--agent", "random", "--episodes", 2, "--out", tmp_path / "run")
    done = rollgym_command(*words, "--per-task", 2, *argument)
    assert "In 2 of 2 episodes the agent may be able to forge the reward" in " ".join(done.err.split())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [warning["name"] for warning in summary["warnings"]] == ["forgeable_reward"]


def test_opening_a_folder_runs_and_follows_nothing(write_task: Callable[..., Path], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    touch = f"touch {canary}\n"
    folder = write_task(
        "evil",
        environment__Dockerfile=f"{DOCKERFILE}CMD {touch}",
        tests__test_DOT_sh=touch,
        solution__solve_DOT_sh=touch,
    )
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", folder / "evil" / "environment" / "data" / "link.txt")
    os.symlink(tmp_path, folder / "evil" / "tests" / "more")
    os.symlink(folder / "evil", folder / "again")
    source = TaskFolders(str(folder))
    task = source.load(source.tasks.task("test", 0))
    assert source.tasks.size("test") == 1
    assert sorted(task.tree) == ["data/three.txt"]
    assert sorted(task.tests) == ["extra.txt", "test.sh"]
    assert not canary.exists()


def test_hostile_tests_run_inside_only(
    make_env: MakeEnv, write_task: Callable[..., Path], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    canary.write_text("alive")
    hostile = f"rm -rf {tmp_path} /usr/bin 2>/dev/null; echo dead > {canary}; kill -9 {os.getpid()}\n"
    hostile += "echo 1 > /logs/verifier/reward.txt; kill -9 -1\n"
    env = make_env(folder=str(write_task(tests__test_DOT_sh=hostile)))
    env.reset()
    assert submit(env) == 0.0
    assert canary.read_text() == "alive"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"task_DOT_toml": "version = "}, "is not TOML"),
        ({"task_DOT_toml": "[verifier]\ntimeout_sec = -1"}, "timeout_sec"),
        ({"task_DOT_toml": "verifier = 3"}, "must be a table"),
    ],
)
def test_broken_settings_are_explained(
    write_task: Callable[..., Path], parts: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        TaskFolders(str(write_task(**parts)))


def test_missing_parts_are_explained(write_task: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_task()
    (folder / "greet" / "tests" / "test.sh").unlink()
    with pytest.raises(UsageError, match=r"no tests/test\.sh"):
        TaskFolders(str(folder))
    (folder / "greet" / "instruction.md").unlink()
    with pytest.raises(UsageError, match=r"no file instruction\.md"):
        TaskFolders(str(folder))
    with pytest.raises(UsageError, match="no usable task folder"):
        TaskFolders(str(tmp_path / "tasks" / "greet" / "tests"))


def test_exported_terminal_tasks_are_solved_after_reading_them_back(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    folders = export_tasks("rollgym/Terminal-v0", tmp_path / "out", count=4)
    settings = tomllib.loads((folders[3] / "task.toml").read_text())
    assert settings["task"]["name"] == "rollgym/terminal-test-00003"
    assert settings["metadata"]["index"] == 3
    env = make_env(folder=str(tmp_path / "out"), reveal=True)
    for task in range(4):
        _, info = env.reset(options={"task": task})
        if task == 0:
            assert submit(env) == 0.0
            env.reset(options={"task": task})
        bash(env, info["solution"][0])
        assert submit(env) == 1.0, info["name"]


def test_exported_code_tasks_are_judged_as_in_the_environment(make_env: MakeEnv, tmp_path: Path) -> None:
    export_tasks("rollgym/Code-v0", tmp_path / "out", count=2, start=5, env_kwargs={"difficulty": 2})
    env = make_env(folder=str(tmp_path / "out"), reveal=True)
    for task in range(2):
        _, info = env.reset(options={"task": task})
        bash(env, info["solution"][0])
        assert submit(env) == 1.0, info["name"]
        env.reset(options={"task": task})
        bash(env, info["solution"][0] + "sed -i 's/return/return 1 if True else/' /app/solution.py")
        assert submit(env) == 0.0


def test_exported_code_tests_with_asserts(tmp_path: Path) -> None:
    """Problems of a file have tests that are programs."""
    problem = {
        "task_id": "demo/0",
        "prompt": "def add(a, b):\n    '''Add.'''\n",
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    }
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    (folder,) = export_tasks(
        "rollgym/Code-v0",
        tmp_path / "out",
        count=1,
        split="test",
        env_kwargs={"problems": str(tmp_path / "problems.jsonl")},
    )
    solution = tmp_path / "solution.py"

    def passes(text: str) -> bool:
        solution.write_text(text)
        words = [
            sys.executable,
            str(folder / "tests" / "check.py"),
            str(solution),
            str(folder / "tests/tests.json"),
        ]
        return subprocess.run(words, capture_output=True, timeout=60).returncode == 0

    assert passes("def add(a, b):\n    return a + b\n")
    assert not passes("def add(a, b):\n    return 3\n")
    assert not passes("raise SystemExit(0)\n")


def test_the_command_exports_and_explains(rollgym_command: Callable[..., Any], tmp_path: Path) -> None:
    words = ("export", "harbor", "rollgym/Terminal-v0", "--out", tmp_path / "out", "--count", 2)
    done = rollgym_command(*words, "--env-arg", 'families=["logs"]', "--env-arg", "level=1")
    assert (done.code, done.out) == (0, f"2 task folders in {tmp_path / 'out'}\n")
    assert (
        tomllib.loads((tmp_path / "out/terminal-test-00001/task.toml").read_text())["metadata"]["category"]
        == "logs"
    )
    for wrong, message in [
        (words, "is not an empty folder"),
        (("export", "harbor", "rollgym/Sudoku-v0", "--out", tmp_path / "new"), "rollgym/Code-v0"),
        ((*words[:4], tmp_path / "new", "--split", "nosuch"), "nosuch"),
        ((*words[:4], tmp_path / "new", "--env-arg", "max_turns=3"), "max_turns"),
        ((*words[:4], tmp_path / "new", "--count", 0), "count"),
    ]:
        failed = rollgym_command(*wrong)
        assert failed.code
        assert message in failed.err
    assert not (tmp_path / "new").exists()
