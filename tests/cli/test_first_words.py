"""What a new user types first: versions, completion, modules, names of configurations, addresses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_in_one_line(rollgym_command: Command, flag: str) -> None:
    from rollgym import __version__

    ran = rollgym_command(flag)
    assert (ran.code, ran.out) == (0, f"rollgym {__version__}\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rollgym ev", "eval"),
        ("rollgym eval rollgym/Frozen", "rollgym/FrozenLake-v0"),
        ("rollgym eval rollgym/FrozenLake-v0 --agent exp", "expert"),
        ("rollgym train frozen-lake-pp", "frozen-lake-ppo"),
        ("rollgym config show bandit", "bandit-grpo"),
    ],
)
def test_the_shell_completes_commands_environments_agents_and_configurations(line: str, found: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    ran = subprocess.run(
        [Path(sys.executable).with_name("rollgym")],
        env={**os.environ, **words, "_ROLLGYM_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
    )
    assert found in ran.stdout.split(), ran.stderr


MODULE = """
import rollgym
from rollgym.core.env import StepResult, TextEnv

class Yes(TextEnv):
    instructions = "Say yes."
    reward_range = (0.0, 1.0)

    def begin(self, task):
        return "?"

    def respond(self, action):
        right = action.strip() == "yes"
        return StepResult("", float(right), terminated=True, success=right)

    def facts(self):
        return {"actions": ["yes", "no"]}

rollgym.register("%s/Yes-v0", Yes, max_turns=2)
"""

TAKES_AN_ENVIRONMENT = {
    "play": "play {env}",
    "eval": "eval {env} --episodes 2 --out run",
    "check": "check {env} --rule runs",
    "model new": "model new {env} --out model --size tiny",
    "config show": "config show small.yaml",
    "plan": "plan small.yaml --cluster cpu:1",
    "train": "train small.yaml --out run",
    "imitate": "imitate small.yaml --out run",
}


@pytest.mark.parametrize("command", TAKES_AN_ENVIRONMENT)
def test_env_module_goes_with_every_command_that_takes_an_environment(
    rollgym_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    name = f"first_{command.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE % name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.input", lambda prompt="": "/quit")
    small = {
        "envs": [{"id": f"{name}/Yes-v0"}],
        "model": {"size": "tiny", "context": 128},
        "warm_start": {"agent": "random", "only_successful": False, "episodes": 2, "epochs": 1},
        "rollout": {"groups": 2, "group_size": 2},
        "evaluation": {"episodes": 2, "every": 0},
        "stop": {"steps": 0},
        "tracking": {"tensorboard": False},
    }
    if command != "imitate":
        del small["warm_start"]
    (tmp_path / "small.yaml").write_text(json.dumps(small))
    words = TAKES_AN_ENVIRONMENT[command].format(env=f"{name}/Yes-v0").split()
    ran = rollgym_command(*words, "--env-module", name)
    assert ran.code == 0, ran.err
    if command in ("train", "imitate"):
        import rollgym.config.loader as config

        written = config.parse((tmp_path / "run" / "config.yaml").read_text())
        assert written["imports"] == [name]  # workers, ranks and --resume import it too


def test_a_configuration_extends_a_shipped_one_by_name(rollgym_command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: frozen-lake-ppo\nstop: {steps: 7}\n")
    mine = json.loads(rollgym_command("config", "show", "mine.yaml", "--json").out)
    theirs = json.loads(rollgym_command("config", "show", "frozen-lake-ppo", "stop.steps=7", "--json").out)
    assert mine == theirs
    # A file beside it comes before a shipped one of the same name.
    (tmp_path / "frozen-lake-ppo").write_text("envs: [{id: rollgym/Bandit-v0}]\n")
    mine = json.loads(rollgym_command("config", "show", "mine.yaml", "--json").out)
    assert mine["envs"][0]["id"] == "rollgym/Bandit-v0"
    (tmp_path / "mine.yaml").write_text("extends: frozen-lake-pppo\n")
    ran = rollgym_command("config", "show", "mine.yaml")
    assert ran.code == 2
    told = "extends: no file frozen-lake-pppo and no shipped config 'frozen-lake-pppo'. "
    assert f"{told}Did you mean frozen-lake-ppo" in ran.err


def test_eval_takes_the_address_of_an_endpoint(rollgym_command: Command) -> None:
    words = ("eval", "rollgym/Bandit-v0", "--agent", "chat", "--model", "m", "--episodes", 1)
    ran = rollgym_command(*words, "--base-url", "not an address")
    assert ran.code == 2
    assert "base_url must be an address" in ran.err
    ran = rollgym_command("eval", "rollgym/Bandit-v0", "--base-url", "http://127.0.0.1:1/v1")
    assert ran.code == 2
    assert "base_url" in ran.err
