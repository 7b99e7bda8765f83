"""A trained policy carries its settings: the printed command gives the number that training reported."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions, lines, write

from rollgym.core.errors import UsageError
from rollgym.core.types import Limits
from rollgym.models.policy_settings import MODEL_SETTINGS, as_word, eval_command, read_model_settings

Command = Callable[..., Any]
COMPARED = ("success_rate", "success_ci", "mean_return", "return_ci", "length", "outcomes")


@pytest.fixture
def trained(rollgym_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    fast_versions(monkeypatch)
    text = "{instructions}\nSay one word. {format}\n"
    (tmp_path / "ask.txt").write_text(text)
    agent = {"template": str(tmp_path / "ask.txt"), "instructions": True, "parser": "last_line|raw"}
    write(tmp_path, agent=agent, stop={"steps": 2}, evaluation={"episodes": 12})
    ran = rollgym_command("train", "small.yaml", "--plain", "--out", "runs/x")
    assert ran.code == 0, ran.err
    (tmp_path / "ask.txt").unlink()
    (tmp_path / "printed.txt").write_text(ran.out)
    return tmp_path


def printed_command(folder: Path) -> list[str]:
    found = [line for line in (folder / "printed.txt").read_text().splitlines() if "rollgym eval" in line]
    assert len(found) == 1, found
    return shlex.split(found[0])[1:]


def test_the_printed_command_gives_the_reported_number(rollgym_command: Command, trained: Path) -> None:
    reported = lines(trained / "runs/x/evaluations.jsonl")[-1]
    ran = rollgym_command(*printed_command(trained), "--json")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert {name: summary[name] for name in COMPARED} == {name: reported[name] for name in COMPARED}
    assert summary["episodes"] == 12
    assert "settings from runs/x/final/rollgym_model.json" in ran.err
    assert "max_tokens=3" in ran.err
    assert "history=none" in ran.err
    about = json.loads((trained / "runs/x/final" / MODEL_SETTINGS).read_text())
    assert about["kind"] == "policy"
    asked = summary["agent_notes"]["describe"]
    assert asked["template_text"] == "{instructions}\nSay one word. {format}"

    other = rollgym_command(*printed_command(trained), "--json", "--agent-arg", "max_tokens=1")
    assert other.code == 0, other.err
    assert json.loads(other.out)["agent_notes"]["describe"]["max_tokens"] == 1
    assert "max_tokens" not in other.err

    wrong = trained / "runs/x/final" / MODEL_SETTINGS
    wrong.write_text('{"trained": {"options": {"template": "/etc/hostname"}}}')
    ran = rollgym_command(*printed_command(trained))
    assert ran.code == 2
    assert "template must be plain or reason" in ran.err
    assert len(ran.err.strip().splitlines()) == 1


WRONG = {
    "not JSON": ("{", "does not hold the settings"),
    "a list": ("[]", "does not hold the settings"),
    "an unknown field": ('{"modules": ["os"]}', "unknown field `modules`"),
    "a newer version": ('{"version": 9}', "has version 9"),
    "another agent": ('{"agent": "subprocess:Popen"}', "is for the agent 'subprocess:Popen'"),
    "deep nesting": ('{"options": {"chat_kwargs": ' + "[" * 20000, "does not hold the settings"),
    "a huge file": ('{"template_text": "' + "x" * (1 << 20) + '"}', "larger than 1 MiB"),
    "an unknown option": ('{"options": {"engine": "os:system"}}', "names the option 'engine'"),
    "an option of the wrong kind": ('{"options": {"max_tokens": "8"}}', "max_tokens must be a whole number"),
    "an unusable number": ('{"options": {"temperature": -1}}', "Agent 'lm': sampling needs temperature >= 0"),
    "a long pattern": (json.dumps({"options": {"parser": "regex:" + "a" * 2000}}), "2006 characters"),
    "a bad pattern": ('{"options": {"parser": "regex:("}}', "not a regular expression"),
    "a template that is a path": ('{"options": {"template": "ask.txt"}}', "template must be plain or reason"),
    "a template that is a list": ('{"options": {"template": ["plain"]}}', "template must be"),
    "a template without rules": ('{"template_text": "Play."}', "no {instructions} mark"),
    "chat_kwargs of the wrong kind": ('{"options": {"chat_kwargs": 3}}', "chat_kwargs must be"),
}


@pytest.mark.parametrize(("content", "told"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_one_sentence(tmp_path: Path, content: str, told: str) -> None:
    from rollgym.agents.policy.saved_options import saved_options

    inside = (
        content if content[:1] != "{" or content == "{" else f'{{"kind": "policy", "trained": {content}}}'
    )
    (tmp_path / MODEL_SETTINGS).write_text(inside)
    with pytest.raises(UsageError) as caught:
        saved_options(tmp_path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_folder_without_settings_has_none(tmp_path: Path) -> None:
    assert read_model_settings(tmp_path) is None
    (tmp_path / MODEL_SETTINGS).write_text('{"kind": "policy", "seed": 3}')
    assert read_model_settings(tmp_path) is None


@pytest.mark.parametrize("value", ["text", "3", "true", "", "a b", 3, 2.5, True, None, {"a": [1, "x y"]}])
def test_a_value_survives_the_command_line(value: Any) -> None:
    from rollgym.utils.cli_options import parse_pairs

    command = eval_command(
        "m:E", "runs/a b/final", env_kwargs={"key": value}, modules=["mine"],
        episodes=4, seed=1, split="test", limits=Limits(turns=3, tokens=50, seconds=1.5),
    )  # fmt: skip
    words = shlex.split(command)
    assert parse_pairs([words[words.index("--env-arg") + 1]], "--env-arg") == {"key": value}
    assert words[words.index("--model") + 1] == "runs/a b/final"
    assert words[-6:] == ["--max-turns", "3", "--max-tokens", "50", "--max-seconds", "1.5"]
    assert as_word("plain") == "plain"
