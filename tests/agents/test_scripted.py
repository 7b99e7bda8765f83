from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.agent import Agent, AgentSetup, make_agent
from rollgym.core.errors import AgentError, UsageError

SETUP = AgentSetup(env_id="test/Env-v0")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Agent]:
    def make(text: str, name: str = "script.txt", **options: Any) -> Agent:
        path = tmp_path / name
        path.write_text(text)
        return make_agent("scripted", SETUP, path=str(path), **options)

    return make


def actions(moves: list[Any]) -> list[str]:
    return [move.action for move in moves]


def test_lines_are_actions(script: Any, play: Any) -> None:
    agent = script("# a comment\nUp\n\n  \n#3\n#\nLeft \n")
    assert actions(play(agent, *"abcd")) == ["Up", "#3", "#", "Left "]


def test_a_script_ends_with_an_error(script: Any, play: Any) -> None:
    with pytest.raises(AgentError, match="^the script ended after 2 actions$"):
        play(script("Up\nDown"), *"abc")


def test_a_script_can_go_on(script: Any, play: Any) -> None:
    assert actions(play(script("Up\nDown", repeat="cycle"), *"abcde")) == ["Up", "Down", "Up", "Down", "Up"]
    assert actions(play(script("Up\nDown", repeat="last"), *"abcd")) == ["Up", "Down", "Down", "Down"]


def test_episodes_do_not_share_their_place(script: Any, play: Any) -> None:
    agent = script("Up\nDown")
    assert actions(play(agent, "a")) == actions(play(agent, "a")) == ["Up"]


def test_json_gives_each_task_its_script(script: Any, play: Any) -> None:
    agent = script('{"0": ["Up"], "3": ["Down"], "e9": ["Left"]}', "s.json")
    assert actions(play(agent, "a", task=3)) == ["Down"]
    assert actions(play(agent, "a", task=3, episode_id="e9")) == ["Left"]
    with pytest.raises(AgentError, match=r"no actions for task 1 \(episode e1\)"):
        play(agent, "a", task=1)


def test_a_json_list_is_for_all_episodes(script: Any, play: Any) -> None:
    assert actions(play(script('["Up"]', "s.json"), "a", task=7)) == ["Up"]


def test_jsonl_gives_each_task_its_script(script: Any, play: Any) -> None:
    lines = '{"task": 3, "actions": ["Down"]}\n\n{"episode_id": "e9", "actions": ["Left"]}\n'
    agent = script(lines, "s.jsonl")
    assert actions(play(agent, "a", task=3)) == ["Down"]
    assert actions(play(agent, "a", episode_id="e9")) == ["Left"]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("s.txt", "\n# only a comment\n", "holds no actions"),
        ("s.json", "{", "is not JSON"),
        ("s.json", "3", "must hold a list"),
        ("s.json", '{"0": "Up"}', "'0': the actions must be a list of texts"),
        ("s.json", "[1]", "list of texts"),
        ("s.json", '{"0": []}', "holds no actions"),
        ("s.jsonl", '{"task": 0, "actions": ["a"]}\n{"task": true, "actions": []}', "line 2 must be"),
        ("s.jsonl", '{"task": 0}', "line 1 must be"),
        ("s.jsonl", '{"task": 0, "actions": ["a"]}\n{"task": 0, "actions": ["b"]}', "second script for 0"),
    ],
)
def test_a_broken_file_is_named(script: Any, name: str, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        script(text, name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt cannot be read: No such file"):
        make_agent("scripted", SETUP, path=str(tmp_path / "none.txt"))
    with pytest.raises(UsageError, match="cannot be read"):
        make_agent("scripted", SETUP, path=str(tmp_path))
    with pytest.raises(UsageError, match="path=FILE"):
        make_agent("scripted", SETUP)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        make_agent("scripted", SETUP, path=str(tmp_path / "bytes.txt"))


def test_an_unknown_repeat_is_refused(script: Any) -> None:
    with pytest.raises(UsageError, match="repeat must be stop, cycle or last, not 'forever'"):
        script("Up", repeat="forever")
