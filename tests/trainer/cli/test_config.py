"""``rollgym config``: show, explain and schema, on settings made for the test."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgym.config.loader import Closed, Settings
from rollgym.trainer.losses.settings import LossConfig

Command = Callable[..., Any]


class TrainConfig(Settings):
    steps: int = 10
    """How many steps [of all]."""
    loss: Closed[LossConfig] = LossConfig("grpo")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("rollgym.trainer.config")
    module.TrainConfig = TrainConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollgym.trainer.config", module)


def test_show_prints_every_setting_resolved(rollgym_command: Command, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("loss: {name: ppo}\n")
    ran = rollgym_command("config", "show", "c.yaml", "steps=3", "loss.clip_low=1e-1")
    assert (ran.code, ran.err) == (0, "")
    shown = yaml.safe_load(ran.out)
    assert shown["steps"] == 3
    assert shown["loss"]["clip_low"] == 0.1
    assert shown["loss"]["decoupled"] is True
    (tmp_path / "again.yaml").write_text(ran.out)
    assert rollgym_command("config", "show", "again.yaml").out == ran.out
    as_json = rollgym_command("config", "show", "--json", "c.yaml", "steps=3", "loss.clip_low=0.1")
    assert json.loads(as_json.out) == shown


def test_each_mistake_is_one_line_with_exit_code_2(rollgym_command: Command, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("loss: {nam: ppo}\n")
    ran = rollgym_command("config", "show", "c.yaml")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("rollgym: c.yaml:1: loss.nam: unknown setting. Did you mean name?")
    assert len(ran.err.splitlines()) == 1
    ran = rollgym_command("config", "show", "c.yaml", "stpes=3")
    assert (ran.code, len(ran.err.splitlines())) == (2, 3)


def test_an_unknown_config_is_an_error(rollgym_command: Command) -> None:
    ran = rollgym_command("config", "show", "no_such_config")
    assert ran.code == 2
    assert "There is no config called 'no_such_config'" in ran.err
    assert "Config file not found: a.yaml" in rollgym_command("config", "show", "a.yaml").err


def test_explain_lists_settings(rollgym_command: Command) -> None:
    table = rollgym_command("config", "explain")
    assert table.code == 0
    assert "How many steps [of all]." in table.out
    assert "loss.clip_low" in table.out
    rows = json.loads(rollgym_command("config", "explain", "loss.name", "--json").out)
    meaning = "Policy loss: ppo, grpo, gspo, cispo, topr, reinforce, or a registered one."
    assert rows == [{"key": "loss.name", "type": "text", "default": "grpo", "description": meaning}]
    ran = rollgym_command("config", "explain", "los")
    assert (ran.code, ran.err) == (2, "rollgym: los: unknown setting. Did you mean loss?\n")


def test_schema_is_json(rollgym_command: Command) -> None:
    made = json.loads(rollgym_command("config", "schema").out)
    assert set(made["properties"]) == {"steps", "loss", "extends"}


@pytest.mark.parametrize("command", ["list", "show", "explain", "schema"])
def test_each_has_help_with_an_example(rollgym_command: Command, command: str) -> None:
    ran = rollgym_command("config", command, "--help")
    assert ran.code == 0
    assert f"Example: rollgym config {command}" in ran.out


def test_list_names_the_shipped_configs(rollgym_command: Command) -> None:
    ran = rollgym_command("config", "list")
    assert (ran.code, ran.err) == (0, "")
    assert "frozen-lake-gigpo" in ran.out.splitlines()
    assert json.loads(rollgym_command("config", "list", "--json").out) == ran.out.splitlines()
