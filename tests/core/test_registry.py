"""Environments are found by every kind of name, here and by Gymnasium, and bad names get sentences."""

import sys

import gymnasium as gym
import pytest
from gymnasium.wrappers import TimeLimit

import rollgym
from rollgym.core import registry
from rollgym.core.env import StepResult, TextEnv, text_interface
from rollgym.core.errors import EnvError, MissingExtra, UnknownName, UsageError
from rollgym.core.registry import env_info, find_spec, list_envs, make, register
from rollgym.utils.env_info import package_versions

MODULE = """
import rollgym
from rollgym import StepResult, TextEnv

class Hello(TextEnv):
    def __init__(self, *, size=1, render_mode=None):
        if size < 0:
            raise ArithmeticError(f"size\\n{size}")
        super().__init__(render_mode=render_mode)
        self.size = size

    def begin(self, task):
        return f"hello {self.size}"

    def respond(self, action):
        return StepResult("bye", terminated=action == "end")

class Shelf:
    Hello = Hello

class Plain:
    def __init__(self, render_mode=None):
        pass
"""


class Local(TextEnv):
    """A registered class."""

    def __init__(self, *, size=1, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.size = size

    def begin(self, task):
        return f"size {self.size}"

    def respond(self, action):
        return StepResult("ok")


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch):
    monkeypatch.setattr(registry, "_infos", dict(registry._infos))
    before = dict(gym.registry)
    yield
    gym.registry.clear()
    gym.registry.update(before)


@pytest.fixture
def hello(tmp_path, monkeypatch):
    """The name of a module on the path that is not imported yet."""
    (tmp_path / "hello_envs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "hello_envs"
    sys.modules.pop("hello_envs", None)


def test_a_registered_environment_is_made_by_us_and_by_gymnasium():
    register("local/Local-v0", Local, max_turns=3, kwargs={"size": 4})
    for maker in (rollgym.make, gym.make):
        env = maker("local/Local-v0")
        assert env.reset(seed=0)[0] == "size 4"
        assert [env.step("x")[3] for _ in range(3)] == [False, False, True]
        assert maker("local/Local-v0", size=9).reset(seed=0)[0] == "size 9"
    assert [layer for layer in layers(make("local/Local-v0", max_episode_steps=7)) if is_limit(layer, 7)]


def layers(env):
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env


def is_limit(layer, steps):
    return isinstance(layer, TimeLimit) and layer._max_episode_steps == steps


def test_env_info_is_available_without_importing():
    register(
        "local/Far-v2", "no_such_module:Env", summary="Far", expert="m:E", expert_is="baseline", needs=["x"]
    )
    known = env_info("local/Far-v2")
    assert (known.summary, known.expert, known.expert_is, known.needs) == ("Far", "m:E", "baseline", ("x",))
    assert known in list_envs()
    assert [c.env_id for c in list_envs()] == sorted(c.env_id for c in list_envs())
    assert env_info("CartPole-v1") == registry.EnvInfo(env_id="CartPole-v1")


def test_an_expert_is_an_expert_or_a_baseline():
    with pytest.raises(ValueError, match="expert_is must be 'expert' or 'baseline', not 'guru'"):
        register("local/Local-v0", Local, expert_is="guru")


def test_registering_the_same_again_is_silent_and_a_change_is_taken_over_with_a_warning():
    register("local/Local-v0", Local, max_turns=3)
    register("local/Local-v0", Local, max_turns=3, summary="new words")
    assert env_info("local/Local-v0").summary == "new words"
    for change in ({"max_turns": 5}, {"max_turns": 5, "kwargs": {"size": 2}}):
        with pytest.warns(UserWarning, match="Overriding environment local/Local-v0"):
            register("local/Local-v0", Local, **change)
    spec = gym.spec("local/Local-v0")
    assert (spec.max_episode_steps, spec.kwargs) == (5, {"size": 2})


def test_an_unregistered_class_is_made_by_its_path(hello):
    env = make(f"{hello}:Hello", size=3)
    assert env.reset(seed=0)[0] == "hello 3"
    assert text_interface(env) is env.unwrapped
    assert find_spec(f"{hello}:Hello").id == "Hello-v0"
    assert env_info(f"{hello}:Hello").env_id == f"{hello}:Hello"
    assert make(f"{hello}:Shelf.Hello").reset(seed=0)[0] == "hello 1"


def test_a_module_before_an_id_is_imported_first(hello, tmp_path):
    with open(tmp_path / f"{hello}.py", "a") as file:
        file.write("rollgym.register('late/Hello-v0', 'hello_envs:Hello')")
    with pytest.raises(UnknownName):
        make("late/Hello-v0")
    assert make(f"{hello}:late/Hello-v0").reset(seed=0)[0] == "hello 1"
    assert env_info(f"{hello}:late/Hello-v0").env_id == "late/Hello-v0"
    with pytest.raises(UnknownName, match="no environment called 'late/Helo-v0'. Did you mean late/Hello-v0"):
        make(f"{hello}:late/Helo-v0")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("rollgym/GuesTheNumber-v0", "rollgym/GuessTheNumber-v0"),
        ("guessthenumber-v0", "rollgym/GuessTheNumber-v0"),
        ("rollgym/GuessTheNumber-v9", "rollgym/GuessTheNumber-v0"),
        ("CartPol-v1", "CartPole-v1"),
    ],
)
def test_an_unknown_environment_gets_a_suggestion(name, suggestion):
    with pytest.raises(UnknownName) as caught:
        make(name)
    assert str(caught.value).startswith(f"There is no environment called {name!r}. Did you mean {suggestion}")
    assert "`rollgym envs`" in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "//", "zzzzzz", "a/b:c"])
def test_nonsense_is_an_unknown_name_and_no_crash(name):
    with pytest.raises(UnknownName, match="There is no environment called"):
        make(name)


def test_a_wrong_path_says_which_part_is_wrong(hello, tmp_path):
    with pytest.raises(UsageError, match="no such module on the Python path, and no such prefix"):
        make("no_such_thing:Env")
    with pytest.raises(UnknownName, match="no object in hello_envs called 'Helo'. Did you mean Hello"):
        make(f"{hello}:Helo")
    (tmp_path / "needs_more.py").write_text("import not_installed_here")
    with pytest.raises(
        UsageError, match="needs_more: it imports 'not_installed_here', which is not installed"
    ):
        make("needs_more:Env")
    (tmp_path / "breaks.py").write_text("1 / 0")
    with pytest.raises(UsageError, match="breaks: importing it failed with ZeroDivisionError: division by"):
        make("breaks:Env")


def test_a_wrong_argument_is_a_usage_error(hello):
    with pytest.raises(UsageError, match=r"hello_envs:Hello: .*unexpected keyword argument 'sise'"):
        make(f"{hello}:Hello", sise=3)
    with pytest.raises(UsageError, match=r"guesses must be from 1 to"):
        make("rollgym/GuessTheNumber-v0", guesses=0)


def test_a_constructor_that_raises_is_an_environments_error_on_one_line(hello):
    with pytest.raises(EnvError, match=r"^hello_envs:Hello cannot be made: ArithmeticError: size -1$"):
        make(f"{hello}:Hello", size=-1)
    with pytest.raises(
        EnvError,
        match=r"^hello_envs:Plain cannot be made: ValueError: not an environment: a Plain has no reset",
    ):
        make(f"{hello}:Plain")


def test_a_registered_entry_point_that_does_not_exist_is_a_sentence():
    register("local/Gone-v0", "no_such_module:Env")
    with pytest.raises(EnvError, match="local/Gone-v0 cannot be made: ModuleNotFoundError: No module named"):
        make("local/Gone-v0")


def test_a_missing_extra_is_reported_before_anything_is_imported():
    register("local/Web-v0", "no_such_module:Env", needs=["json", "no_such_extra"])
    with pytest.raises(MissingExtra, match=r"local/Web-v0 needs .*: pip install .*\[no_such_extra\]'"):
        make("local/Web-v0")


def test_a_retired_version_warns_once_and_gives_the_newest():
    with pytest.warns(
        UserWarning, match="CliffWalking-v0 is retired in this Gymnasium version: using CliffWalking-v1"
    ) as seen:
        env = make("CliffWalking-v0")
    assert env.spec.id == "CliffWalking-v1"
    assert len(seen) == 1


def test_a_plain_gymnasium_environment_becomes_a_text_environment():
    env = make("CliffWalking-v1")
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, str)
    assert text_interface(env).tasks is None


def test_versions_name_the_package_an_environment_comes_from():
    found = package_versions("rollgym/GuessTheNumber-v0")
    assert found["rollgym"] == rollgym.__version__
    assert found["gymnasium"] == gym.__version__
    assert {"python", "platform", "numpy"} <= set(found)
    assert "pytest" in package_versions("pytest:Item")  # any class of another package will do
