"""An agent that cheats gains nothing: each attack runs as an agent would, and the reward must be 0."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal_actions import bash, submit
from terminal_attacks import ATTACKS, HONEST, LIMITS, SECRET, begin

from rollgym.envs.terminal.env import TerminalEnv


@pytest.fixture(scope="module")
def env(need_sandbox: None) -> Iterator[TerminalEnv]:
    """One environment with short limits for all attacks: none may spoil it for the next."""
    made = TerminalEnv(sandbox=LIMITS)
    yield made
    made.close()


QUIET = list(ATTACKS)[:7]
"""Attacks that break nothing: together in one episode, and each alone in the slow tests."""


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, marks=pytest.mark.slow) if attack in QUIET else attack
        for attack in ("quiet ones together", *ATTACKS)
    ],
)
def test_an_attack_gains_nothing(env: TerminalEnv, attack: str) -> None:
    begin(env)
    for command in [ATTACKS[attack]] if attack in ATTACKS else [ATTACKS[name] for name in QUIET]:
        bash(env, command)
    assert submit(env) == 0.0
    begin(env)
    seen = bash(env, "ls -A; cat double.sh; ls /tmp; jobs; bash --version | head -c 8")
    assert seen == "data\ndouble.sh\necho $(($1 + $1 + 1))\nGNU bash\n[exit code 0]"


def test_an_honest_agent_is_rewarded_after_all_attacks(env: TerminalEnv) -> None:
    begin(env)
    bash(env, HONEST)
    assert submit(env) == 1.0


def test_what_a_check_expects_is_never_shown(env: TerminalEnv) -> None:
    begin(env)
    seen = bash(env, ATTACKS["searches for the hidden checks"] + "; bash double.sh 3")
    observation = env.step('{"name": "submit", "arguments": {}}')[0]
    assert SECRET not in seen + observation
    assert observation == "Hidden checks: 2 of 3 hold."


def test_an_attack_changes_nothing_outside(env: TerminalEnv, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("canary")
    begin(env)
    for attack in ("writes to the machine", "writes to the worker's memory and channel", "kills everything"):
        bash(env, ATTACKS[attack])
    bash(env, f"echo dead > {canary}; rm -rf {tmp_path}; kill -9 {os.getpid()}")
    assert submit(env) == 0.0
    assert canary.read_text() == "canary"
    assert not Path("/usr/evil").exists()
