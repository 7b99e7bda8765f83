"""The tools of an MCP server as an environment: a real client, a real process, in a real sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollgym
from rollgym.core.errors import EnvError, UsageError, WorkerLost
from rollgym.core.types import Outcome
from rollgym.envs.mcp import env as module
from rollgym.envs.mcp.env import MCPEnv
from rollgym.envs.mcp.session import Session
from rollgym.sandbox.command import SandboxedCommand
from rollgym.sandbox.namespaces import find_bwrap

pytest.importorskip("mcp")
SERVER = Path(__file__).parents[2] / "fixtures" / "mcp_server.py"
TASKS = [
    {"prompt": "What is 2 + 3?", "answer": "5"},
    {
        "prompt": "Which word is in word.txt?",
        "answer": ["walrus", "Walross"],
        "files": {"word.txt": "walrus"},
    },
]


def namespaces_work() -> bool:
    if find_bwrap() is None:
        return False
    confined = SandboxedCommand.make(["true"])
    try:
        return subprocess.run(confined.argv, capture_output=True, timeout=30).returncode == 0
    finally:
        confined.close()


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="no bubblewrap, or no user namespaces")


@pytest.fixture(scope="module")
def shown() -> Iterator[str]:
    """A folder that the user inside a sandbox can read, with the server."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy(SERVER, folder)
        yield folder


def make(shown: str, fault: str = "", **options: Any) -> MCPEnv:
    command = ["python3", f"{shown}/mcp_server.py", *([fault] if fault else [])]
    return MCPEnv(**{"command": command, "mounts": [shown], "tasks": TASKS, "timeout": 20.0, **options})


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@needs_namespaces
def test_an_episode_with_a_servers_tools(shown: str) -> None:
    env = make(shown)
    assert [spec.name for spec in env.tools] == ["add", "read", "count", "fail", "submit"]
    observation, info = env.reset(seed=0, options={"task": 0})
    assert observation == "What is 2 + 3?"
    observation, reward, *_, info = env.step(call("add", a=2, b=3))
    assert (observation, reward, info["valid"]) == ("5", 0.0, True)
    assert info["messages"][0]["role"] == "tool"
    observation, reward, terminated, _, info = env.step(call("submit", answer=" 5. "))
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.close()


@needs_namespaces
def test_every_episode_has_a_session_and_files_of_its_own(shown: str) -> None:
    env = make(shown)
    for _ in range(2):
        env.reset(seed=0, options={"task": 1})
        assert env.step(call("count"))[0] == "1"
        assert env.step(call("read", path="/work/word.txt"))[0] == "walrus"
        assert env.step(call("submit", answer="WALROSS"))[1] == 1.0
    env.reset(seed=0, options={"task": 0})
    observation, *_, info = env.step(call("read", path="/work/word.txt"))
    assert "No such file" in observation
    assert info["valid"] is False
    env.close()


@needs_namespaces
def test_the_session_that_lists_the_tools_serves_the_first_episode(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Session] = []

    class Counted(Session):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            opened.append(self)

    monkeypatch.setattr(module, "Session", Counted)
    env = make(shown, env={"NAME": "counted"})
    env.reset(seed=0, options={"task": 0})
    assert len(opened) == 1
    assert env.step(call("count"))[0] == "1"
    env.reset(seed=0, options={"task": 0})
    assert len(opened) == 2
    assert env.step(call("count"))[0] == "1"
    env.close()
    # A task with files needs a server of its own, and an environment that is never reset closes its session.
    make(shown, env={"NAME": "closed"}).close()
    env = make(shown, env={"NAME": "files"})
    env.reset(seed=0, options={"task": 1})
    assert env.step(call("read", path="/work/word.txt"))[0] == "walrus"
    env.close()
    assert len(opened) == 5
    assert all(session._closed for session in opened)


@needs_namespaces
def test_the_server_sees_no_files_and_variables_of_this_machine(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    env = make(shown, env={"GIVEN": "yes"})
    env.reset(seed=0)
    variables = env.step(call("read", path="/proc/self/environ"))[0]
    assert "GIVEN=yes" in variables
    assert "hush" not in variables
    for path in (str(Path(__file__)), "/root", "/etc/passwd", str(Path.home())):
        assert "Errno" in env.step(call("read", path=path))[0]
    env.close()


@needs_namespaces
def test_a_refused_call_is_an_invalid_action(shown: str) -> None:
    env = make(shown)
    env.reset(seed=0)
    for action in (call("add", a="x"), call("nothing"), call("submit", reply=3), "hello"):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False), observation
    assert env.step(call("count"))[0] == "2"  # the session goes on
    env.close()


@needs_namespaces
@pytest.mark.parametrize(("fault", "error"), [("hang", "did not answer fail within 2 s"), ("die", "ended")])
def test_a_server_that_hangs_or_dies_is_a_lost_worker(shown: str, fault: str, error: str) -> None:
    env = make(shown, fault, timeout=2.0 if fault == "hang" else 20.0)
    env.reset(seed=0)
    with pytest.raises(WorkerLost, match=error):
        env.step(call("fail"))
    env.reset(seed=0)  # with a new server
    assert env.step(call("add", a=1, b=1))[0] == "2"
    env.close()


@needs_namespaces
def test_other_output_of_a_server_is_ignored(shown: str) -> None:
    env = make(shown, "garbage")
    env.reset(seed=0)
    assert env.step(call("fail"))[0] == "failed"
    env.close()


@needs_namespaces
def test_a_server_that_never_answers_is_an_error_of_the_environment(shown: str) -> None:
    with pytest.raises(EnvError, match="within 2 s"):
        make(shown, "silent", timeout=2.0)


@needs_namespaces
def test_episodes_through_workers_leave_no_process(shown: str, tmp_path: Path) -> None:
    kwargs = {"command": f"python3 {shown}/mcp_server.py", "mounts": [shown], "tasks": TASKS}
    result = rollgym.evaluate(
        "rollgym.envs.mcp.env:MCPEnv",
        agent=lambda observation, info: call("submit", answer="5"),
        env_kwargs=kwargs,
        episodes=6,
        per_task=3,
        split="train",
        workers=2,
        out=tmp_path / "run",
    )
    assert [episode.outcome for episode in result.episodes] == [Outcome.TERMINATED] * 6
    assert {episode.spec.task: episode.success for episode in result.episodes} == {0: True, 1: False}
    left = subprocess.run(["pgrep", "-f", f"{shown}/mcp_server.py"], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "either command or url"),
        ({"command": "x", "url": "http://127.0.0.1:1"}, "either command or url"),
        ({"command": "x", "sandbox": "docker"}, "namespaces or none"),
        ({"command": "x", "timeout": 0}, "above 0 seconds"),
        ({"command": "x", "tasks": []}, "needs tasks"),
        ({"command": "x", "tasks": [{"prompt": "a"}]}, "task 0 needs a prompt"),
        ({"command": "x", "tasks": [{"prompt": "a", "answer": "b", "files": 3}]}, "files must be"),
        ({"command": "x", "tasks": "missing.jsonl"}, "Data file not found: missing.jsonl"),
        ({"command": "no-such-program"}, "no-such-program was not found"),
        ({"command": "python3", "mounts": ["/no/such"]}, "Cannot mount /no/such"),
        ({"url": "http://127.0.0.1:1/mcp", "tasks": TASKS[:1]}, "No session with the MCP server"),
        ({"url": "http://127.0.0.1:1/mcp", "tasks": TASKS}, "has files, which need a command in a sandbox"),
        ({"command": "x", "sandbox": "none", "tasks": TASKS}, "has files, which need a command in a sandbox"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], error: str) -> None:
    with pytest.raises((UsageError, EnvError), match=error):
        MCPEnv(**{"tasks": TASKS, **options})


def test_a_broken_line_of_tasks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt"\n')
    with pytest.raises(UsageError, match=r"tasks.jsonl:3: not valid JSON"):
        MCPEnv(command="x", tasks=str(path))


@contextlib.contextmanager
def http_server(fault: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server that speaks streamable HTTP: its address and process."""
    words = [sys.executable, str(SERVER), "http", *([fault] if fault else [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp", process
        finally:
            process.kill()


def test_every_episode_over_http_has_its_own_session() -> None:
    with http_server() as (url, process):
        env = MCPEnv(url=url, tasks=TASKS[:1], timeout=20.0)
        assert [spec.name for spec in env.tools] == ["add", "read", "count", "fail", "submit"]
        for _ in range(3):
            assert env.reset(seed=0)[0] == "What is 2 + 3?"
            assert env.step(call("count"))[0] == "1"
            assert env.step(call("count"))[0] == "2"
            assert env.step(call("add", a=2, b=3))[0] == "5"
            observation, reward, terminated, _, info = env.step(call("submit", answer="5"))
            assert (reward, terminated, info["success"]) == (1.0, True, True)
        env.close()
        process.kill()
        assert process.stdout is not None
        lines = process.stdout.read().split()
    begun = [name for word, name in zip(lines[::2], lines[1::2], strict=True) if word == "begin"]
    ended = [name for word, name in zip(lines[::2], lines[1::2], strict=True) if word == "end"]
    assert len(begun) == 3
    assert sorted(begun) == sorted(ended)


@pytest.mark.parametrize("fault", ["hang", "die"])
def test_a_server_over_http_that_hangs_or_dies_is_a_lost_worker(fault: str) -> None:
    with http_server(fault) as (url, _):
        env = MCPEnv(url=url, tasks=TASKS[:1], timeout=3.0)
        env.reset(seed=0)
        with pytest.raises(WorkerLost):
            env.step(call("fail"))
        if fault == "hang":  # the next episode has a new session
            env.reset(seed=0)
            assert env.step(call("count"))[0] == "1"
        else:
            with pytest.raises(EnvError, match="No session with the MCP server"):
                env.reset(seed=0)
        env.close()


def test_a_server_over_http_that_never_answers_is_an_error_of_the_environment() -> None:
    with (
        http_server("silent") as (url, _),
        pytest.raises(EnvError, match="did not open a session within 1 s"),
    ):
        MCPEnv(url=url, tasks=TASKS[:1], timeout=1.0)


def test_episodes_over_http_through_workers() -> None:
    def agent(observation: str, info: dict[str, Any]) -> str:
        return call("add", a=2, b=3) if "2 + 3" in observation else call("submit", answer=observation)

    with http_server() as (url, _):
        result = rollgym.evaluate(
            "rollgym.envs.mcp.env:MCPEnv",
            agent=agent,
            env_kwargs={"url": url, "tasks": TASKS[:1]},
            episodes=8,
            per_task=8,
            split="train",
            workers=2,
        )
    assert [episode.success for episode in result.episodes] == [True] * 8


@pytest.mark.slow
@needs_namespaces
def test_an_unmodified_reference_server_for_a_hundred_episodes(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        install = ["npm", "install", "--no-audit", "--no-fund", "@modelcontextprotocol/server-filesystem"]
        if subprocess.run(install, cwd=folder, capture_output=True, timeout=300).returncode:
            pytest.skip("the server cannot be installed")
        script = f"{folder}/node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"
        tasks = [
            {"prompt": f"Read file {n}.", "answer": f"word-{n}", "files": {"note.txt": f"word-{n}"}}
            for n in range(10)
        ]

        def agent(observation: str, info: dict[str, Any]) -> str:
            if observation.startswith("Read file"):
                return call("read_text_file", path="/work/note.txt")
            return call("submit", answer=observation)

        result = rollgym.evaluate(
            "rollgym.envs.mcp.env:MCPEnv",
            agent=agent,
            env_kwargs={"command": ["node", script, "/work"], "mounts": [folder], "tasks": tasks},
            episodes=100,
            per_task=10,
            split="train",
            workers=2,
            out=tmp_path / "run",
        )
        assert [episode.success for episode in result.episodes] == [True] * 100
        assert subprocess.run(["pgrep", "-f", script], capture_output=True, text=True).stdout == ""
