"""The two examples about agents do what they say."""

import asyncio
import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup, make_agent

EXAMPLES = Path(__file__).parents[2] / "examples"
LAMP = '''
from rollgym import StepResult, Task, TextEnv

class Lamp(TextEnv):
    """Switch the lamp on."""

    instructions = "Say on."

    def begin(self, task: Task) -> str:
        return "It is dark."

    def respond(self, action: str) -> StepResult:
        lit = action == "on"
        return StepResult("It is light." if lit else "It is dark.", float(lit), terminated=lit, success=lit)
'''


def test_the_chat_example_counts_successes_and_failures(
    endpoint: Any, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "lamp.py").write_text(LAMP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    on, off = answer("<answer>on</answer>"), answer("<answer>off</answer>")
    endpoint.answers = [off, on, on, (404, {}, "gone")]
    options = Namespace(model="m", base_url=endpoint.url, env="lamp:Lamp", episodes=3, turns=5, concurrency=1)
    counts = asyncio.run(importlib.import_module("chat_agent").evaluate(options))
    assert (counts["episodes"], counts["scored"], counts["successes"], counts["requests"]) == (3, 2, 2, 4)
    assert capsys.readouterr().out == "task 2: The endpoint answered 404: gone.\n"
    assert "step by step" in endpoint.bodies[0]["messages"][0]["content"]


def test_the_agents_of_ones_own_play(monkeypatch: pytest.MonkeyPatch, play: Any) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    setup, info = AgentSetup(env_id="test/Env-v0"), {"actions": ["a", "b"]}
    moves = play(make_agent("my_agent:first_action", setup), "o", "o", info=info)
    assert [move.action for move in moves] == ["a", "a"]
    moves = play(make_agent("my_agent:Explorer", setup, reverse=True), "o", "o", "o", "p", info=info)
    assert [move.action for move in moves] == ["b", "a", "b", "b"]
