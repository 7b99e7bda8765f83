"""A CLI agent from npm, unchanged but for URL, key and settings that keep it from calling anything else.

Set ROLLGYM_TEST_NPM_CLIENTS to the folder that tests/serve/clients/make_npm.py makes (`make test-clients`).
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_episode import check_episode, environment, run_program, serving_mcp

from rollgym.core.messages import ToolCall
from rollgym.core.types import Episode
from rollgym.serve.env_mcp import EnvMCPServer
from rollgym.serve.env_player import ServedEnv

FOLDER = os.environ.get("ROLLGYM_TEST_NPM_CLIENTS", "")
pytestmark = [
    pytest.mark.skipif(
        not FOLDER, reason="ROLLGYM_TEST_NPM_CLIENTS does not name a folder: run `make test-clients`"
    ),
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is missing"),
]
SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}
# Its minimal mode (--bare) ignores the settings, and with them that it shall not report its use.
OPTIONS = ["--yolo", "--auth-type", "openai", "--model", "policy", "--chat-recording=false"]


def shell(command: str) -> list[ToolCall]:
    arguments = {"command": command, "is_background": False, "description": "Work."}
    return [ToolCall(name="run_shell_command", arguments=arguments)]


def settle(home: Path, **more: Any) -> None:
    """Write the agent's settings."""
    (home / ".qwen").mkdir(parents=True)
    (home / ".qwen" / "settings.json").write_text(json.dumps(SETTINGS | more), encoding="utf-8")


async def ask_agent(url: str, home: Path, work: Path, task: str) -> str:
    """Return the last line that the agent prints."""
    program = str(Path(FOLDER).absolute() / "node_modules" / ".bin" / "qwen")
    env = environment(url, home) | {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}
    printed = await run_program([program, *OPTIONS, task], env, work)
    return printed.strip().splitlines()[-1]


def test_a_tool_using_episode_of_a_cli_agent_is_recorded_exactly(
    serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands that depend on each other, then an answer; the agent streams."""
    home, work = tmp_path / "home", tmp_path / "work"
    settle(home)
    work.mkdir()
    (work / "note.txt").write_text("It rains.\n", encoding="utf-8")

    async def run(url: str) -> None:
        assert await ask_agent(url, home, work, "Add the weather to the log.") == "The log has it now."

    replies = [shell("cat note.txt"), shell("cat note.txt >> log.txt; wc -l log.txt"), "The log has it now."]
    episode = check_episode(serving, monkeypatch, replies, [False, False, False], run)
    assert (work / "log.txt").read_text(encoding="utf-8") == "It rains.\n"
    assert "It rains." in episode.turns[1].observation
    assert "1 log.txt" in episode.turns[2].observation
    assert "run_shell_command" in [tool.name for tool in episode.tools]


def test_a_cli_agent_plays_an_environment_by_mcp(
    serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent knows the tools of our MCP server without sending their schemas; the server records."""
    home, played = tmp_path / "home", list[Episode]()
    served = ServedEnv(env_id="rollgym/FrozenLake-v0", split="test")

    async def run(url: str) -> None:
        async with serving_mcp(EnvMCPServer(served, played.append)) as lake:
            settle(home, mcpServers={"lake": {"httpUrl": f"{lake}/mcp", "trust": True}})
            assert await ask_agent(url, home, tmp_path, "Play.") == "I stop."

    names = {"start": "mcp__lake__start_episode", "act": "mcp__lake__act"}
    moves = [ToolCall(name=names["act"], arguments={"action": way}) for way in ("right", "down")]
    replies = [[ToolCall(name=names["start"])], *([move] for move in moves), "I stop."]
    episode = check_episode(serving, monkeypatch, replies, [False] * 4, run)
    (lake,) = played
    assert [turn.action for turn in lake.turns] == ["right", "down"]
    shown = [turn.observation for turn in episode.turns[1:3]]
    assert all(turn.observation in text for turn, text in zip(lake.turns, shown, strict=True))
