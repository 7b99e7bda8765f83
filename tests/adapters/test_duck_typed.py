"""Environments as other packages write them: own step counts, action names, odd spaces, no base class."""

import enum
import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit, TransformAction

import rollgym
from rollgym.adapters.gymnasium import MAX_INVALID_TURNS, adapt
from rollgym.checks import check
from rollgym.core.env import text_interface
from rollgym.core.errors import EnvError, UsageError
from rollgym.evaluation.runner import Request, evaluate


class Moves(enum.IntEnum):
    TURN_LEFT = 0
    TURN_RIGHT = 1
    FORWARD = 2
    TOGGLE = 3


class MissionSpace(spaces.Space[str]):
    """Text made by a function, whose address is in the space's representation."""

    def __init__(self, mission):
        super().__init__(dtype=str)
        self.mission = mission

    def sample(self, mask=None, probability=None):
        return self.mission()

    def contains(self, x):
        return x == self.mission()

    def __repr__(self):
        return f"MissionSpace({self.mission}, None)"


class Room(gym.Env):
    """Walk to the goal in a room, as grid worlds have it: the environment counts its own steps."""

    max_steps = 12

    def __init__(self):
        self.actions = Moves
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Dict(
            place=spaces.Discrete(5), mission=MissionSpace(lambda: "get to the goal")
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.count = 0
        return self._see(), {}

    def step(self, action):
        self.count += 1
        self.place += int(action == Moves.FORWARD)
        return self._see(), float(self.place == 4), self.place == 4, self.count >= self.max_steps, {}

    def _see(self):
        return {"place": self.place, "mission": "get to the goal"}


class Duck:
    """Count to three, without a base class."""

    observation_space = spaces.Discrete(4)
    action_space = spaces.Discrete(2)
    ACTION_NAMES = ("wait", "count")

    def __init__(self, goal=3):
        self.goal = goal
        self.closed = 0

    def reset(self, seed=None):
        self.value = 0
        return 0, {}

    def step(self, action):
        self.value += int(action)
        return self.value, 1.0 * (self.value == self.goal), self.value == self.goal, False, {}

    def close(self):
        self.closed += 1


def make_duck(**kwargs):
    return Duck(**kwargs)


def turns_of(env, action, most=1_000):
    """The number of turns of an episode that repeats one action, and its last step."""
    env.reset(seed=0)
    for turn in range(1, most + 1):
        step = env.step(action)
        if step[2] or step[3]:
            return turn, step
    return None, step


def test_nonsense_counts_towards_the_limit_that_an_environment_counts_itself():
    turns, (_, _, terminated, truncated, info) = turns_of(adapt(Room()), "dance")
    assert (turns, terminated, truncated, info["valid"]) == (12, False, True, False)
    env = adapt(Room())
    env.reset(seed=0)
    ends = [env.step(word)[3] for word in ["left?", *["turn left"] * 10, "turn right"]]
    assert ends == [False] * 11 + [True]  # eleven steps in the room, twelve turns of the agent


def test_a_limit_that_reset_sets_is_the_limit_of_that_episode():
    class Growing(Room):
        max_steps = 0

        def reset(self, **kwargs):
            self.max_steps += 5
            return super().reset(**kwargs)

    env = adapt(Growing())
    assert [turns_of(env, "?")[0] for _ in range(2)] == [5, 10]
    assert "at most" not in env.instructions


def test_a_number_that_is_no_limit_ends_no_episode_of_valid_actions():
    class Endless(Room):
        max_steps = 3  # of something else

        def step(self, action):
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, False, info

    assert turns_of(adapt(Endless()), "turn left", 50)[0] is None


def test_nonsense_ends_where_no_limit_is_known():
    class Unlimited(Duck):
        pass

    assert turns_of(adapt(Unlimited()), "?")[0] == MAX_INVALID_TURNS
    assert turns_of(adapt(Unlimited()), "wait", 2 * MAX_INVALID_TURNS)[0] is None


def test_the_least_of_several_limits_counts():
    assert turns_of(adapt(TimeLimit(Room(), 7)), "?")[0] == 7
    assert turns_of(adapt(TimeLimit(Room(), 70)), "?")[0] == 12


def test_instructions_hold_no_memory_addresses():
    text = adapt(Room()).instructions
    assert "0x" not in text
    assert "mission: <text>" in text
    assert "An episode has at most 12 turns." in text
    odd = gym.Env()
    odd.observation_space, odd.action_space = spaces.Discrete(2), MissionSpace(print)
    odd.action_space._dtype = None
    odd.action_space.dtype = None
    assert "0x" not in adapt(odd, instructions=None).instructions
    assert adapt(Room()).instructions == adapt(Room()).instructions


def test_actions_have_the_names_that_the_environment_gives_them():
    env = adapt(Room())
    assert env.reset(seed=0)[1]["actions"] == ["turn left", "turn right", "forward"]  # Discrete(3) of four
    assert [env.step(word)[4]["valid"] for word in ("Turn Left", "2", "toggle")] == [True, True, False]
    assert "0 turn left, 1 turn right, 2 forward" in env.instructions


@pytest.mark.parametrize(
    ("attribute", "value", "names"),
    [
        ("get_action_meanings", lambda self: ["NOOP", "FIRE"], ["NOOP", "FIRE"]),
        ("action_names", {0: "a", 1: "b"}, ["a", "b"]),
        ("ACTIONS", {"go": 1, "stop": 0}, ["stop", "go"]),
        ("actions", ["up"], ["0", "1"]),  # not a name for each
        ("actions", ["up", "Up"], ["0", "1"]),  # not distinct
        ("actions", ["1", "0"], ["0", "1"]),  # could be taken for numbers
        ("get_action_meanings", lambda self: 1 / 0, ["0", "1"]),
    ],
)
def test_names_are_found_where_environments_keep_them(attribute, value, names):
    kind = type("Named", (Duck,), {"ACTION_NAMES": None, attribute: value})
    env = adapt(kind())
    assert env.reset(seed=0)[1]["actions"] == names


def test_a_wrapper_that_renumbers_actions_takes_the_names_away():
    shifted = TransformAction(Room(), lambda number: number - 1, spaces.Discrete(3, start=1))
    assert adapt(shifted).reset(seed=0)[1]["actions"] == ["1", "2", "3"]


def test_an_environment_needs_no_base_class():
    duck = Duck()
    env = adapt(duck)
    assert env.reset(seed=3)[0] == "0"
    assert [env.step(word)[:3] for word in ("count", "wait", "count", "1")] == [
        ("1", 0.0, False),
        ("1", 0.0, False),
        ("2", 0.0, False),
        ("3", 1.0, True),
    ]
    assert env.instructions.startswith("Duck: Count to three, without a base class.")
    env.close()
    assert duck.closed == 1


@pytest.mark.parametrize("name", ["Duck", "make_duck"])
def test_module_and_class_make_one_without_a_base_class(name, tmp_path):
    env_id = f"{__name__}:{name}"
    env = rollgym.make(env_id, goal=1)
    env.reset(seed=0)
    assert env.step("count")[2] is True
    summary = evaluate(Request(env_id=env_id, agent="random", episodes=3), tmp_path / "run")
    assert (summary["failed"], summary["mean_return"]) == (0, 1.0)


def test_a_registered_one_needs_no_base_class_either():
    rollgym.register("tests/Duck-v0", Duck, max_turns=4)
    try:
        assert turns_of(rollgym.make("tests/Duck-v0"), "wait")[0] == 4
        report = check("tests/Duck-v0", rules=["runs", "nonsense", "ends", "close"], quick=True)
        assert report.ok, report
    finally:
        gym.registry.pop("tests/Duck-v0")


def test_spaces_of_another_library_become_gymnasiums():
    class Discrete:
        def __init__(self, n):
            self.n = n

    class Box:
        low, high, dtype = np.zeros(2), np.ones(2), np.float32

    class Dict:
        spaces = {"a": Discrete(2), "b": Box()}

    class Old(Duck):
        action_space, observation_space = Discrete(2), Dict()

        def reset(self):
            super().reset()
            return {"a": 0, "b": [0.5, 1]}, {}

    env = adapt(Old())
    assert env.reset(seed=0)[0] == "a: 0\nb: [0.5, 1]"
    assert env.env.observation_space == spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (2,)))

    class Strange(Duck):
        action_space = object()

    with pytest.raises(UsageError, match="Strange.action_space is a object, which is not a Gymnasium space"):
        adapt(Strange())


def test_without_spaces_observations_and_actions_are_text():
    class Chat:
        def reset(self, **kwargs):
            return {"said": "hello"}, {}

        def step(self, action):
            return f"You said {json.loads(action)['word']}", 1.0, True, False, {}

    env = adapt(Chat())
    assert env.reset(seed=0)[0] == '{"said": "hello"}'
    assert env.step('{"word": "so"}')[:3] == ("You said so", 1.0, True)


def test_what_is_not_gymnasiums_five_tuple_is_a_sentence():
    class Four(Duck):
        def step(self, action):
            return 0, 0.0, False, {}

    class Bare(Duck):
        def reset(self):
            return 0

    env = adapt(Four())
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"step\(\) of Four must return \(observation, .*not a tuple of 4"):
        env.step("wait")
    with pytest.raises(EnvError, match=r"reset\(\) of Bare must return \(observation, info\)"):
        adapt(Bare()).reset(seed=0)
    with pytest.raises(
        EnvError, match=r"cannot be made: ValueError: not an environment: a int has no reset\(\) and step\(\)"
    ):
        rollgym.make(f"{__name__}:turns_of_nothing")


def turns_of_nothing():
    return 3


def test_minigrid_itself_ends_and_has_names():
    pytest.importorskip("minigrid")
    env = rollgym.make("MiniGrid-Empty-5x5-v0")
    assert "0x" not in text_interface(env).instructions
    assert env.reset(seed=0)[1]["actions"][:3] == ["left", "right", "forward"]
    assert turns_of(env, "nonsense")[0] == 100
    words = ["forward", "forward", "right", "forward", "forward"]
    env.reset(seed=0)
    last = [env.step(word) for word in words][-1]
    assert last[2] is True
    assert last[1] > 0.9
