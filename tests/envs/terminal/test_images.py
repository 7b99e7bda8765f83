"""Task folders that need an image, in containers of a real Docker engine: ROLLGYM_TEST_DOCKER=1, as root."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal_actions import bash, call, submit

sys.path.insert(0, str(Path(__file__).parents[2] / "sandbox"))

from engine import Engine, running, why_not

from rollgym.core.errors import RunError, UsageError
from rollgym.envs.terminal.env import TerminalEnv
from rollgym.envs.terminal.harbor import TaskFolders
from rollgym.envs.terminal.images import base_images
from rollgym.sandbox import docker_engine
from rollgym.sandbox.docker_image import build_image

needs_docker = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
BASE = "rollgym-test-tools"
PROGRAMS = (
    "bash",
    "sh",
    "cat",
    "ls",
    "mkdir",
    "rm",
    "sleep",
    "touch",
    "chmod",
    "cp",
    "wc",
    "grep",
    "env",
    "id",
)
DOCKERFILE = f"""\
FROM {BASE}
ENV NAME=Robin
WORKDIR /app
COPY data/ data/
RUN echo made by the build > /app/built.txt && mkdir -p /opt/tool && echo 'echo tool' > /opt/tool/run
"""
TEST = """\
set -e
grep -q 'Robin made by the build tool' /app/out.txt
grep -q extra /tests/extra.txt
echo 1 > /logs/verifier/reward.txt
"""
SOLUTION = 'echo "$NAME $(cat built.txt) $(bash /opt/tool/run)" > /app/out.txt\n'
LIMITS = {"limits": {"seconds": 20, "memory_mb": 256, "disk_mb": 32}}
MakeEnv = Callable[..., TerminalEnv]
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running() as it:
        build_image(BASE, programs=[path for name in PROGRAMS if (path := shutil.which(name, path="/bin"))])
        yield it


@pytest.fixture
def write_task(tmp_path: Path) -> Write:
    """Write a task folder; given files replace those of a good one."""

    def write(name: str = "greet", files: dict[str, str] | None = None) -> Path:
        parts = {
            "task.toml": "[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 60.0\n",
            "instruction.md": "Greet in /app/out.txt.\n",
            "environment/Dockerfile": DOCKERFILE,
            "environment/data/three.txt": "1\n2\n3\n",
            "tests/test.sh": TEST,
            "tests/extra.txt": "extra\n",
            "solution/solve.sh": SOLUTION,
            **(files or {}),
        }
        for path, text in parts.items():
            (tmp_path / "tasks" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tasks" / name / path).write_text(text)
        return tmp_path / "tasks"

    return write


@pytest.fixture
def make_docker_env(engine: Engine) -> Iterator[MakeEnv]:
    made: list[TerminalEnv] = []

    def make(folder: Path, **kwargs: Any) -> TerminalEnv:
        made.append(TerminalEnv(folder=str(folder), **{"images": "build", "sandbox": LIMITS, **kwargs}))
        return made[-1]

    yield make
    for env in made:
        env.close()
    assert containers() == []


def containers() -> list[Any]:
    with docker_engine.connected() as api:
        return list(api.containers(all=True))


def images(name: str = "rollgym-task") -> list[str]:
    with docker_engine.connected() as api:
        return [tag for image in api.images() for tag in image["RepoTags"] or () if tag.startswith(name)]


@needs_docker
def test_a_task_is_played_in_its_image_and_judged_in_another_container(
    make_docker_env: MakeEnv, write_task: Write
) -> None:
    env = make_docker_env(write_task(), reveal=True)
    observation, info = env.reset()
    assert observation.startswith("Greet in /app/out.txt.\nThe working folder is /app.")
    assert info["sandbox"] == {"backend": "docker", "level": "namespaces"}
    assert bash(env, "pwd; ls; cat data/three.txt; echo $NAME; ls /tests /logs") == (
        "/app\nbuilt.txt\ndata\n1\n2\n3\nRobin\n/logs:\n\n/tests:\n[exit code 0]"
    )
    bash(env, "cd data; X=5")
    assert bash(env, "pwd; echo $X") == "/app/data\n5\n[exit code 0]"
    assert len(containers()) == 1
    assert submit(env) == 0.0
    assert containers() == []
    # A second episode has nothing of the first, and the image is not built again.
    (image,) = images()
    env.reset()
    assert bash(env, "pwd; ls; echo $X.") == "/app\nbuilt.txt\ndata\n.\n[exit code 0]"
    bash(env, info["solution"][0])
    assert submit(env) == 1.0
    assert images() == [image]


@needs_docker
def test_an_image_that_the_engine_has_is_used_by_its_name(
    make_docker_env: MakeEnv, write_task: Write, engine: Engine
) -> None:
    with docker_engine.connected() as api:
        container = api.create_container(BASE, command=["true"])["Id"]
        api.commit(container, "rollgym-test-made", changes="WORKDIR /srv/job\nENV NAME=Robin\nUSER root")
        api.remove_container(container)
    settings = '[environment]\ndocker_image = "rollgym-test-made"\n'
    test = "[ -f /srv/job/done.txt ] && echo 0.5 > /logs/verifier/reward.txt\n"
    folder = write_task(files={"task.toml": settings, "tests/test.sh": test})
    env = make_docker_env(folder, images="use")
    observation, _ = env.reset()
    assert "The working folder is /srv/job." in observation
    # Never as root, whatever the image says.
    assert bash(env, "id -u; touch done.txt /etc/x /srv/x; ls") == (
        "65534\ntouch: cannot touch '/etc/x': Read-only file system\n"
        "touch: cannot touch '/srv/x': Read-only file system\ndone.txt\n[exit code 0]"
    )
    assert submit(env) == 0.5


REWARD = "/logs/verifier/reward.txt"
ATTACKS = {
    "writes the reward": f"mkdir -p /logs/verifier; echo 1 > {REWARD}; chmod 444 /logs/verifier/*",
    "writes the tests": f"echo 'echo 1 > {REWARD}' > /tests/test.sh; chmod 444 /tests/test.sh",
    "leaves processes": (
        "for i in 1 2 3; do (trap '' HUP TERM INT; while :; do mkdir -p /logs/verifier; "
        f"echo 1 > {REWARD}; sleep 0.01; done &) ; done"
    ),
    "replaces programs": (
        "mkdir bin; for p in grep bash cat env; do printf '#!/bin/sh\\nexit 0\\n' > bin/$p; done; "
        "chmod +x bin/*; export PATH=/app/bin:$PATH BASH_ENV=/app/.profile; "
        f"echo 'echo 1 > {REWARD}' > .profile; cp .profile .bashrc"
    ),
    "links its files": "rm -rf data; cd /; rm -rf /app/*; touch /app/x; cp -r /etc /app/etc 2>/dev/null",
    "kills the worker": "kill -9 -1",
    "fills the disk": "cat /dev/zero > /app/zero; cat /dev/zero > /tmp/zero; cat /dev/zero > /logs/zero",
}


@needs_docker
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_gains_nothing(make_docker_env: MakeEnv, write_task: Write, attack: str) -> None:
    env = make_docker_env(write_task(), sandbox={"limits": {"seconds": 3, "memory_mb": 256, "disk_mb": 32}})
    env.reset()
    bash(env, ATTACKS[attack])
    assert submit(env) == 0.0
    env.reset()
    bash(env, SOLUTION)
    assert submit(env) == 1.0


@needs_docker
def test_time_is_limited(make_docker_env: MakeEnv, write_task: Write) -> None:
    short = "[agent]\ntimeout_sec = 1.0\n[verifier]\ntimeout_sec = 1.0\n"
    slow = f"{TEST}sleep 600\n"
    env = make_docker_env(write_task(files={"task.toml": short, "tests/test.sh": slow}))
    env.reset()
    assert "stopped after 1 seconds" in bash(env, f"{SOLUTION}sleep 600")
    observation, reward, terminated, _, _ = env.step(call("bash", command="true"))
    assert observation.startswith("The time for this task is over.")
    assert (reward, terminated) == (0.0, True)


@needs_docker
def test_a_build_has_no_network_and_a_time_limit(make_docker_env: MakeEnv, write_task: Write) -> None:
    failing = DOCKERFILE + "RUN cat /sys/class/net/eth0/address\n"
    env = make_docker_env(write_task("net", {"environment/Dockerfile": failing}))
    with pytest.raises(RunError, match="eth0"):
        env.reset()
    for name, command in (("silent", "sleep 600"), ("talking", "while sleep 1; do echo $i; done")):
        files = {"environment/Dockerfile": f"{DOCKERFILE}RUN {command}\n"}
        files["task.toml"] = "[environment]\nbuild_timeout_sec = 4.0\n"
        env = make_docker_env(write_task(name, files) / name)
        with pytest.raises(RunError, match="within 4 seconds"):
            env.reset()
        assert containers() == []


@needs_docker
def test_what_is_missing_is_explained(make_docker_env: MakeEnv, write_task: Write) -> None:
    cases: list[tuple[str, dict[str, str], str, str]] = [
        (
            "plain",
            {"environment/other.txt": ""},
            "use",
            r"is not built\. Allow that with images='build' .* docker build -t rollgym-task:",
        ),
        ("base", {"environment/Dockerfile": "FROM nowhere:1\nRUN x\n"}, "build", "has no image nowhere:1"),
        ("named", {"task.toml": '[environment]\ndocker_image = "nowhere:2"\n'}, "use", "no image nowhere:2"),
        (
            "root",
            {"environment/Dockerfile": f"FROM {BASE}\nWORKDIR /\nRUN true\n"},
            "build",
            "working folder is /",
        ),
    ]
    for name, files, allowed, message in cases:
        env = make_docker_env(write_task(name, files) / name, images=allowed)
        with pytest.raises(UsageError, match=message):
            env.reset()


@needs_docker
def test_an_image_without_python_is_explained(
    make_docker_env: MakeEnv, write_task: Write, engine: Engine
) -> None:
    env = make_docker_env(
        write_task(files={"environment/Dockerfile": "FROM scratch\nWORKDIR /app\nCOPY data data\n"})
    )
    with pytest.raises(UsageError, match="needs python3"):
        env.reset()


@needs_docker
def test_without_an_engine_that_is_the_error(
    write_task: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    env = TerminalEnv(folder=str(write_task()), images="build")
    with pytest.raises(RunError, match="no Docker engine answers"):
        env.reset()
    env.close()


def test_opening_a_folder_with_images_asks_no_engine(
    write_task: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    folder = write_task()
    write_task("named", {"task.toml": '[environment]\ndocker_image = "python:3.12"\n'})
    write_task("plain", {"environment/Dockerfile": "FROM python:3.12\nWORKDIR /app\n"})
    source = TaskFolders(str(folder), images="build")
    tasks = [source.load(source.tasks.task("test", index)) for index in range(3)]
    assert [task.image is None for task in tasks] == [False, False, True]
    assert (source.roots, source.has_images) == (("/app",), True)
    with pytest.raises(UsageError, match=r"2 of 3 tasks .*images='use' or images='build'"):
        TaskFolders(str(folder))
    assert TaskFolders(str(folder), "skip").tasks.size("test") == 1
    TerminalEnv(folder=str(folder), images="build").close()


@pytest.mark.parametrize("value", ["3", '""'])
def test_the_name_of_an_image_must_be_one(write_task: Write, value: str) -> None:
    folder = write_task(files={"task.toml": f"[environment]\ndocker_image = {value}\n"})
    with pytest.raises(UsageError, match="docker_image"):
        TaskFolders(str(folder), images="use")


@pytest.mark.parametrize(
    ("text", "bases"),
    [
        ("FROM a:1\nRUN x", ["a:1"]),
        ("from --platform=linux/amd64 a AS build\nFROM b\nCOPY --from=build x .\nFROM build", ["a", "b"]),
        ("FROM scratch\nCOPY a b", []),
        ("FROM \\\n  a\n# FROM c", ["a"]),
    ],
)
def test_the_base_images_of_a_dockerfile(text: str, bases: list[str]) -> None:
    assert base_images(text) == bases


def test_a_base_image_in_a_variable_is_refused() -> None:
    with pytest.raises(UsageError, match="variable"):
        base_images("ARG X\nFROM $X")
