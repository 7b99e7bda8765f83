"""Installed packages add environments and agents by entry points; a broken one is a warning.

Each test lays out an installed distribution in a folder and starts a fresh Python with that on its path.
"""

import os
import subprocess
import sys

import pytest

ENV = """
import rollgym
from rollgym import StepResult, TextEnv

class Hello(TextEnv):
    def begin(self, task):
        return "hello"

    def respond(self, action):
        return StepResult("bye", 1.0, terminated=True, success=True)

def register():
    rollgym.register("acme/Hello-v0", "acme_envs:Hello", summary="Say hello", max_turns=5)

def greet(observation, info):
    return "greetings"

def register_agents():
    rollgym.register_agent("greeter", "acme_envs:greet", summary="Greets")
"""


def install(folder, name, code, entry_points):
    """What pip leaves behind for a package of one module."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "RECORD").write_text(f"{name}.py,,\n")


def python(code, path, *flags):
    env = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True)


@pytest.fixture
def acme(tmp_path):
    points = "[rollgym.envs]\nacme = acme_envs:register\n[rollgym.agents]\nacme = acme_envs:register_agents\n"
    install(tmp_path, "acme_envs", ENV, points)
    return tmp_path


@pytest.mark.parametrize("maker", ["rollgym", "gymnasium"])
def test_an_installed_environment_is_there_after_import_rollgym(acme, maker):
    code = f"import gymnasium, rollgym\nprint({maker}.make('acme/Hello-v0').reset(seed=0)[0])"
    done = python(code, acme, "-W", "error")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_an_installed_environment_is_listed_with_its_package_and_version(acme):
    code = """
import rollgym
from rollgym.utils.env_info import package_versions
print([c.summary for c in rollgym.list_envs() if c.env_id == "acme/Hello-v0"])
print(package_versions("acme/Hello-v0")["acme_envs"])
"""
    done = python(code, acme)
    assert done.stdout == "['Say hello']\n1.0\n", done.stderr


def test_an_installed_agent_is_found_by_its_short_name(acme):
    code = """
import asyncio
from rollgym import AgentSetup, Briefing, EpisodeSpec, make_agent
agent = make_agent("greeter", AgentSetup(env_id="acme/Hello-v0"))
spec = EpisodeSpec(episode_id="e", env_id="acme/Hello-v0")
print(asyncio.run(agent.player(Briefing(spec=spec, instructions="")).act("", {})))
"""
    done = python(code, acme)
    assert done.stdout == "greetings\n", done.stderr


@pytest.mark.parametrize(
    ("code", "point", "reason"),
    [
        ("import not_installed_here", "bad_envs:register", "No module named 'not_installed_here'"),
        ("def register():\n    raise KeyError('torn')", "bad_envs:register", "KeyError: 'torn'"),
        ("", "bad_envs:register", "has no attribute 'register'"),
    ],
)
def test_a_broken_plugin_warns_and_breaks_nothing_else(acme, code, point, reason):
    install(acme, "bad_envs", code, f"[rollgym.envs]\nbad = {point}\n")
    done = python("import rollgym\nprint(rollgym.make('acme/Hello-v0').reset(seed=0)[0])", acme)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert f"the plugin 'bad' ({point}) could not register its environments" in done.stderr
    assert reason in done.stderr


def test_gymnasium_finds_our_environments_without_importing_rollgym_by_name(tmp_path):
    code = """
import gymnasium
env = gymnasium.make("rollgym.envs:rollgym/GuessTheNumber-v0")
print(env.reset(seed=0)[0])
"""
    done = python(code, tmp_path, "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Guess a number from 1 to 100. Guesses left: 10.\n"
