"""The base of text environments keeps Gymnasium's contract, whatever an agent says."""

import json
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from rollgym.core.env import MAX_ACTION_CHARS, StepResult, TextEnv, TextInterface, TextSpace, text_interface
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.serialization import clean_text
from rollgym.core.tasks import TaskSet


class Echo(TextEnv):
    """Say the secret word of the task; ``stop`` gives up, ``cut`` truncates, ``odd`` is an odd reply."""

    instructions = "Say the word."
    tasks = TaskSet("Echo", {"train": 20, "test": 3})
    reward_range = (0.0, 1.0)

    def __init__(self, *, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.heard = None

    def begin(self, task):
        self.secret = f"word{int(task.rng().integers(100))}"
        self.luck = int(self.np_random.integers(1000))
        return f"√ Say the word.\n🙂 {self.luck} \ud800"

    def respond(self, action):
        self.heard = action
        if action == "odd":
            odd = {"success": np.bool_(True), "info": {"n": np.int64(3)}}
            return StepResult("odd", np.float32(0.5), np.bool_(True), **odd)
        right = action == self.secret
        flags = {"terminated": right or action == "stop", "truncated": action == "cut"}
        valid, info = action.startswith("word"), {"seen": (1, np.float64(2.0))}
        return StepResult(f"not {action}", int(right), success=right, valid=valid, info=info, **flags)

    def facts(self):
        return {"actions": ["stop", self.secret], "luck": np.int64(self.luck)}


class Silent(TextEnv):
    """An environment that leaves everything to the base class."""


@pytest.mark.parametrize("text", ["", "a\nb\r\n\t", "🙂√漢", "\x00", "x" * 10])
def test_a_text_space_holds_every_text_within_its_length(text):
    assert text in TextSpace(10)


@pytest.mark.parametrize("other", ["x" * 11, b"x", 3, None, ["x"], np.array("x")])
def test_a_text_space_holds_nothing_else(other):
    assert other not in TextSpace(10)


def test_text_spaces_are_equal_by_length():
    assert TextSpace(10) == TextSpace(10) != TextSpace(11)
    assert hash(TextSpace(10)) == hash(TextSpace(10))
    assert repr(TextSpace(10)) == "TextSpace(10)"
    assert TextSpace(10) != gym.spaces.Text(10)


def test_samples_are_seeded_printable_and_in_the_space():
    samples = [TextSpace(3, seed=5).sample() for _ in range(2)]
    assert samples[0] == samples[1]
    space = TextSpace(3, seed=0)
    drawn = [space.sample() for _ in range(200)]
    assert all(text in space and text.isprintable() and text for text in drawn)
    assert {len(text) for text in drawn} == {1, 2, 3}
    with pytest.raises(ValueError, match="cannot be sampled with a mask"):
        space.sample(mask=np.ones(3, dtype=np.int8))


def test_gymnasiums_own_check_passes():
    gym.register("echo/Echo-v0", Echo)
    try:
        check_env(gym.make("echo/Echo-v0").unwrapped)
    finally:
        del gym.registry["echo/Echo-v0"]


def test_reset_starts_the_task_asked_for():
    first = [Echo().reset(seed=1, options={"task": 2, "split": "test"}) for _ in range(2)]
    assert first[0] == first[1]
    observation, info = first[0]
    assert observation.startswith("√ Say the word.\n🙂 ")
    observation.encode()
    assert (info["task"], info["split"], info["success"], info["valid"]) == (2, "test", False, True)
    other = Echo().reset(seed=1, options={"task": np.int64(1), "split": "test"})[1]
    assert other["actions"] != info["actions"]


def test_the_seed_decides_what_the_task_does_not():
    secrets, lucks = set(), set()
    for seed in range(5):
        info = Echo().reset(seed=seed, options={"task": 3})[1]
        secrets.add(info["actions"][1])
        lucks.add(info["luck"])
    assert len(secrets) == 1
    assert len(lucks) > 1


def test_without_options_the_seed_draws_a_task_of_the_first_split():
    infos = [Echo().reset(seed=seed)[1] for seed in range(30)]
    assert {info["split"] for info in infos} == {"train"}
    assert len({info["task"] for info in infos}) > 5
    assert Echo().reset(seed=3)[1]["task"] == infos[3]["task"]
    assert Echo().reset(seed=3, options={"task": None, "split": None})[1]["task"] == infos[3]["task"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tasks": 3}, UsageError, "Unknown reset() option 'tasks': the options are task and split"),
        ({"split": "tset"}, UnknownName, "no split called 'tset'. Did you mean test?"),
        ({"split": "test", "task": 3}, UsageError, "Task 3 is out of range: split 'test' has tasks 0 to 2"),
        ({"task": -1}, UsageError, "Task -1 is out of range: split 'train'"),
        ({"task": "x"}, UsageError, "The reset() option task must be a whole number, not 'x'"),
        ({"task": 1.7}, UsageError, "The reset() option task must be a whole number, not 1.7"),
    ],
)
def test_wrong_reset_options_are_refused_with_a_sentence(options, kind, message):
    with pytest.raises(kind) as caught:
        Echo().reset(options=options)
    assert message in str(caught.value)


def test_stepping_needs_a_running_episode():
    env = Echo()
    with pytest.raises(ResetNeeded, match="call reset\\(\\) before step"):
        env.step("stop")
    for last in ("stop", "cut"):
        env.reset(seed=0)
        env.step("word")
        env.step(last)
        with pytest.raises(ResetNeeded):
            env.step("word")


def test_a_step_returns_plain_python_values_and_json():
    env = Echo()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("odd")
    assert [type(x) for x in (reward, terminated, truncated, info["success"])] == [float, bool, bool, bool]
    assert (reward, terminated, truncated, info["success"], info["n"]) == (0.5, True, False, True, 3)
    env.reset(seed=0)
    info = env.step("nonsense")[4]
    assert json.loads(json.dumps(info)) == info
    assert (info["valid"], info["seen"], info["luck"]) == (False, [1, 2.0], env.luck)


@pytest.mark.parametrize(
    ("action", "heard"),
    [
        (7, "7"),
        (None, "None"),
        (np.str_("hi"), "hi"),
        ("", ""),
        ("a\x00\n🙂", "a\x00\n🙂"),
        ("\ud800", clean_text("\ud800")),
        ("x" * (MAX_ACTION_CHARS + 5), "x" * MAX_ACTION_CHARS),
    ],
)
def test_any_action_reaches_the_environment_as_text_of_bounded_length(action, heard):
    env = Echo()
    env.reset(seed=0)
    assert env.step(action)[0] == f"not {heard}"
    assert env.heard == heard


def test_rendering_shows_the_last_observation_and_only_if_asked_for():
    env = Echo(render_mode="ansi")
    assert env.render() == ""
    assert env.reset(seed=0)[0] == env.render()
    env.step("hello")
    assert env.render() == "not hello"
    quiet = Echo()
    quiet.reset(seed=0)
    assert quiet.render() is None


def test_random_actions_come_from_the_actions_in_info():
    rng = np.random.default_rng(0)
    drawn = {Echo().random_action("", {"actions": ["a", "b", 3]}, rng) for _ in range(50)}
    assert drawn == {"a", "b", "3"}
    message = (
        r"A random agent cannot play Echo: list the valid actions in info\['actions'\] \(see facts\(\)\) "
        r"or define random_action\(\)"
    )
    with pytest.raises(UsageError, match=message):
        Echo().random_action("", {}, rng)


def test_an_environment_must_define_its_two_methods():
    env = Silent()
    with pytest.raises(NotImplementedError, match=r"Silent must define begin\(task\)"):
        env.reset()
    with pytest.raises(NotImplementedError, match=r"Silent must define respond\(action\)"):
        env.respond("x")
    with pytest.raises(ResetNeeded):
        env.step("x")
    assert env.tasks == TaskSet("Silent")
    assert Silent.tasks is None


def test_a_time_limit_truncates():
    env = TimeLimit(Echo(), 2)
    env.reset(seed=0)
    assert env.step("word")[2:4] == (False, False)
    assert env.step("word")[2:4] == (False, True)


def test_the_text_interface_is_found_inside_wrappers():
    env = Echo()
    assert isinstance(env, TextInterface)
    assert text_interface(env) is env
    assert text_interface(TimeLimit(OrderEnforcing(env), 5)) is env


def test_an_environment_without_text_has_no_text_interface():
    with pytest.raises(
        UsageError, match=r"CartPoleEnv is not a text environment: use rollgym.make\(\) or adapt\(\)"
    ):
        text_interface(gym.make("CartPole-v1"))


@pytest.mark.parametrize(
    "vector", [gym.vector.SyncVectorEnv, partial(gym.vector.AsyncVectorEnv, shared_memory=False)]
)
def test_vector_environments_play_text(vector):
    envs = vector([lambda: TimeLimit(Echo(), 5)] * 2)
    try:
        observations, infos = envs.reset(seed=[3, 4], options={"split": "test", "task": 1})
        alone = [Echo().reset(seed=seed, options={"split": "test", "task": 1})[0] for seed in (3, 4)]
        assert list(observations) == alone
        assert infos["task"].tolist() == [1, 1]
        observations, rewards, terminated, _, infos = envs.step(("stop", "word"))
        assert observations == ("not stop", "not word")
        assert (rewards.tolist(), terminated.tolist()) == ([0.0, 0.0], [True, False])
        assert infos["valid"].tolist() == [False, True]
        assert all(isinstance(text, str) for text in envs.action_space.sample())
    finally:
        envs.close()
