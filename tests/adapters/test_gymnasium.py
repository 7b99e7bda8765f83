"""Gymnasium environments through the adapter: the same episodes, by text."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import ClipReward, FlattenObservation, RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers import TransformAction as Transform
from hypothesis import given, settings
from hypothesis import strategies as st

import rollgym
from rollgym.adapters.gymnasium import TextAdapter, adapt
from rollgym.adapters.spaces import action_text
from rollgym.core.env import StepResult, TextEnv, TextInterface, text_interface
from rollgym.core.errors import EnvError, UsageError

TAXI = max(name for name in gym.registry if name.startswith("Taxi-v"))
FAMILIAR = ["CliffWalking-v1", "CartPole-v1", TAXI, "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1"]


class Crane(gym.Env):
    """Lift a load with an arm.

    More that need not be told.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    observation_space = spaces.Dict(load=spaces.Box(0, 10, (2,)), hook=spaces.Discrete(3, start=-1))
    action_space = spaces.Dict(arm=spaces.Box(-1, 1, (2,)), grab=spaces.Discrete(2))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.seen = []
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options
        self.load = self.np_random.uniform(0, 10, 2).astype(np.float32)
        return {"load": self.load.copy(), "hook": 0}, {"success": "unknown", "tool": Crane}

    def step(self, action):
        self.seen.append(action)
        done = bool(action["grab"])
        return {"load": self.load.copy(), "hook": 1}, np.float64(0.5), done, False, {"lifted": np.True_}

    def render(self):
        return "a crane"

    def close(self):
        self.closed += 1


def play(env, actions):
    """Rewards and flags of a list of actions, up to the end of the episode."""
    steps = []
    for action in actions:
        _, reward, terminated, truncated, _ = env.step(action)
        steps.append((float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return steps


@pytest.mark.parametrize("name", FAMILIAR)
def test_an_episode_by_text_is_the_episode_by_raw_actions(name):
    raw, text = gym.make(name), rollgym.make(name)
    raw.action_space.seed(3)
    actions = [raw.action_space.sample() for _ in range(60)]
    for seed in (0, 1):
        raw.reset(seed=seed)
        text.reset(seed=seed)
        assert play(raw, actions) == play(text, [action_text(raw.action_space, a) for a in actions])


def test_the_cliff_by_hand():
    env = rollgym.make("CliffWalking-v1")
    assert env.reset(seed=0)[0] == "36"
    assert env.step("up")[:2] == ("24", -1.0)
    for _ in range(11):
        observation, *_ = env.step(" Right ")
    assert observation == "35"
    observation, reward, terminated, truncated, info = env.step("2")
    assert (observation, reward, terminated, truncated) == ("47", -1.0, True, False)
    assert (info["success"], info["valid"]) == (None, True)
    env.reset(seed=0)
    assert env.step("right")[:2] == ("36", -100.0)


@pytest.mark.parametrize("name", FAMILIAR)
def test_the_adapter_passes_gymnasiums_own_check(name):
    with pytest.warns(UserWarning, match="different from the unwrapped version"):
        check_env(rollgym.make(name), skip_render_check=True)


def test_dict_environments_pass_the_check_with_rendering():
    gym.register("tests/Crane-v0", Crane, max_episode_steps=9)
    try:
        env = rollgym.make("tests/Crane-v0", render_mode="ansi")
        with pytest.warns(UserWarning, match="different from the unwrapped version"):
            check_env(env)
        assert env.render() == "a crane"
    finally:
        del gym.registry["tests/Crane-v0"]


def test_a_dict_environment_by_hand():
    crane = Crane()
    env = adapt(crane)
    observation, info = env.reset(seed=1, options={"wind": 3})
    assert crane.options == {"wind": 3}
    first, second = crane.load
    assert observation == f"load: [{first:.4g}, {second:.4g}]\nhook: 0"
    assert info == {"success": None, "valid": True, "inner_success": "unknown", "tool": "<type>"}
    step = env.step('{"grab": 1, "arm": [0.5, -1]}')
    assert step[1:] == (0.5, True, False, {"success": None, "valid": True, "lifted": True})
    assert type(step[1]) is float
    assert crane.seen[0]["arm"].dtype == np.float32
    assert crane.seen[0]["arm"].tolist() == [0.5, -1]
    assert crane.seen[0]["grab"] == 1


def test_an_invalid_action_changes_nothing_but_the_turn():
    crane = Crane()
    env = adapt(crane)
    before, _ = env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step('{"grab": 1}')
    assert crane.seen == []
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    message, _, rest = observation.partition("\n")
    assert message.startswith("Invalid action, nothing happened: The action must be a JSON object")
    assert rest == before


@pytest.mark.parametrize("name", FAMILIAR)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text() | st.sampled_from(["up", "0", "1e999", "[1", "nan", "{}"]), max_size=4))
def test_nonsense_never_raises(name, texts):
    env = rollgym.make(name)
    env.reset(seed=0)
    for text in texts:
        observation, _, terminated, truncated, _ = env.step(text)
        observation.encode()
        if terminated or truncated:
            break


def test_an_agent_that_talks_nonsense_comes_to_an_end():
    env = rollgym.make("CartPole-v1", max_episode_steps=4)
    env.reset(seed=0)
    steps = play(env, ["left", "eh?", "right", "eh?", "left"])
    assert steps == [(1, False, False), (0, False, False), (1, False, False), (0, False, True)]
    with pytest.raises(gym.error.ResetNeeded):
        env.step("left")
    env.reset()
    assert len(play(env, ["left"] * 9)) == 4


def test_a_time_limit_counts_without_a_spec_too():
    env = adapt(TimeLimit(CliffWalkingEnv(), 3))
    env.reset(seed=0)
    assert [flags for _, *flags in play(env, ["?"] * 9)] == [[False, False]] * 2 + [[False, True]]
    assert "at most 3 turns" in env.instructions


def test_the_time_limit_of_the_environment_is_kept():
    env = rollgym.make("Pendulum-v1")
    env.reset(seed=0)
    steps = play(env, ["0"] * 300)
    assert len(steps) == 200
    assert steps[-1][1:] == (False, True)


def test_a_step_before_reset_or_after_the_end_is_refused():
    env = adapt(Crane())
    with pytest.raises(gym.error.ResetNeeded):
        env.step("{}")
    env.reset(seed=0)
    env.step('{"grab": 1, "arm": [0, 0]}')
    with pytest.raises(gym.error.ResetNeeded):
        env.step("{}")


def test_success_is_reaching_the_reward_threshold_by_the_end():
    env = rollgym.make("FrozenLake-v1", is_slippery=False)
    _, info = env.reset(seed=0)
    assert info["success"] is False
    path = ["down", "down", "right", "right", "down", "right"]
    successes = [env.step(move)[4]["success"] for move in path]
    assert successes == [False] * 5 + [True]
    assert "at least 0.7" in env.success_means
    env.reset(seed=0)
    assert [env.step(move)[4]["success"] for move in ("down", "right")] == [False, False]


def test_success_before_the_end_is_not_success_yet():
    raw = gym.make("CartPole-v1", max_episode_steps=3)
    raw.spec.reward_threshold = 1.0
    env = adapt(raw)
    env.reset(seed=0)
    assert [env.step(move)[4]["success"] for move in ("left", "right", "left")] == [False, False, True]


def test_a_success_function_decides_from_return_end_and_inner_info():
    def lifted(total, terminated, info):
        """The load hangs on the hook."""
        calls.append((total, terminated, info))
        return info.get("lifted", False)

    calls = []
    env = adapt(Crane(), success=lifted)
    assert env.reset(seed=0)[1]["success"] is False
    assert env.step("what?")[4]["success"] is False
    assert env.step('{"grab": 0, "arm": [0, 0]}')[4]["success"] is True
    assert calls[0] == (0.0, False, {"success": "unknown", "tool": Crane})
    assert calls[1] == (0.5, False, {"lifted": True})
    assert env.success_means == "The load hangs on the hook."


def test_a_random_action_is_valid_and_depends_on_the_generator_alone():
    for name in FAMILIAR:
        env, other = rollgym.make(name), rollgym.make(name)
        observation, info = env.reset(seed=0)
        own = env.env.action_space.np_random.bit_generator.state
        rng, again = np.random.default_rng(7), np.random.default_rng(7)
        for _ in range(20):
            action = env.random_action(observation, info, rng)
            assert action == other.random_action(observation, info, again)
            observation, _, terminated, truncated, info = env.step(action)
            assert info["valid"]
            if terminated or truncated:
                break
        assert env.env.action_space.np_random.bit_generator.state == own


def test_a_random_action_honours_the_mask():
    env = rollgym.make(TAXI)
    _, info = env.reset(seed=0)
    rng = np.random.default_rng(0)
    mask = [0, 0, 1, 0, 0, 1]
    drawn = {env.random_action("", {**info, "action_mask": mask}, rng) for _ in range(60)}
    assert drawn == {"east", "dropoff"}
    drawn = {env.random_action("", {"action_mask": [0] * 6}, rng) for _ in range(200)}
    assert drawn == {"south", "north", "east", "west", "pickup", "dropoff"}
    names = ["south", "north", "east", "west", "pickup", "dropoff"]
    assert info["actions"] == [n for n, fine in zip(names, info["action_mask"], strict=True) if fine]


def test_info_is_plain_json_and_the_same_twice():
    env = adapt(RecordEpisodeStatistics(gym.make(TAXI, max_episode_steps=2)))
    infos = []
    for _ in range(2):
        env.reset(seed=5)
        infos.append([env.step(action)[4] for action in ("north", "?")] + [env.reset(seed=5)[1]])
        env.step("north")
        infos[-1].append(env.step("north")[4])
    assert infos[0] == infos[1]
    assert infos[0][-1]["episode"] == {"r": -2.0, "l": 2}
    assert json.loads(json.dumps(infos[0])) == infos[0]


def test_own_names_replace_the_known_ones():
    env = adapt(gym.make("CartPole-v1"), names={0: "West", 1: "go east"})
    env.reset(seed=0)
    assert env.step("GO  EAST")[4] == {"success": False, "valid": True, "actions": ["West", "go east"]}
    assert env.step("left")[4]["valid"] is False
    assert "0 West, 1 go east" in env.instructions


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({0: "a", 2: "b"}, "names contains 2"),
        ({0: "a", 1: "A"}, "must be distinct"),
        ({0: "1"}, "must not be empty or start like a number"),
        ({0: " "}, "must not be empty or start like a number"),
    ],
)
def test_names_that_cannot_work_are_refused(names, message):
    with pytest.raises(UsageError, match=message):
        adapt(gym.make("CartPole-v1"), names=names)
    with pytest.raises(UsageError, match="the actions here are a number from -2 to 2"):
        adapt(gym.make("Pendulum-v1"), names=names)


def test_a_namesake_or_a_changed_action_space_keeps_its_numbers():
    class TaxiEnv(gym.Env):
        observation_space = spaces.Discrete(2)
        action_space = spaces.Discrete(6)

    assert "Answer with a whole number from 0 to 5." in adapt(TaxiEnv()).instructions
    shifted = Transform(gym.make("CartPole-v1"), lambda number: number - 1, spaces.Discrete(2, start=1))
    assert "Answer with a whole number from 1 to 2." in adapt(shifted).instructions


def test_the_instructions_say_what_where_and_how():
    text = rollgym.make("CliffWalking-v1", max_episode_steps=30).instructions
    for part in (
        "CliffWalking-v1: Cliff walking",
        "0 to 47",
        "0 up, 1 right",
        "Example: ",
        "at most 30 turns",
    ):
        assert part in text
    text = rollgym.make("Pendulum-v1").instructions
    assert "Answer with a number from -2 to 2. Example: " in text
    text = adapt(Crane()).instructions
    assert text.startswith("Crane: Lift a load with an arm.\nEach observation has these lines:\nload: <2 num")
    assert 'Answer with a JSON object {"arm": <2 numbers, each from -1 to 1>, "grab": ' in text
    assert adapt(Crane(), instructions="Lift.").instructions == "Lift."


@pytest.mark.parametrize("name", FAMILIAR)
def test_the_example_in_the_instructions_is_an_action(name):
    env = rollgym.make(name)
    example = env.instructions.split("Example: ")[1].split("\n")[0]
    env.reset(seed=0)
    assert env.step(example)[4]["valid"]


def test_the_spec_makes_the_same_environment_again():
    env = adapt(gym.make("CartPole-v1", max_episode_steps=7), names={0: "l", 1: "r"})
    for spec in (env.spec, gym.envs.registration.EnvSpec.from_json(env.spec.to_json())):
        again = gym.make(spec)
        assert isinstance(again, TextAdapter)
        assert again.instructions == env.instructions
        assert again.spec.max_episode_steps == 7
        again.reset(seed=0)
        assert again.step("l")[4]["valid"]


def test_wrappers_may_be_inside_and_outside():
    inner = ClipReward(FlattenObservation(gym.make("CliffWalking-v1")), -5, 5)
    env = RecordEpisodeStatistics(TimeLimit(adapt(inner), 2))
    observation, _ = env.reset(seed=0)
    assert observation == str([int(i == 36) for i in range(48)])
    assert "row * 12" not in text_interface(env).instructions
    assert env.step("right")[1] == -5
    *_, truncated, info = env.step("up")
    assert truncated
    assert info["episode"]["r"] == -6
    assert adapt(env) is env


def test_vector_environments_play_it():
    envs = gym.vector.SyncVectorEnv([lambda: rollgym.make("CartPole-v1")] * 2)
    observations, infos = envs.reset(seed=4)
    alone = rollgym.make("CartPole-v1")
    assert observations[1] == alone.reset(seed=5)[0]
    observations, rewards, *_, infos = envs.step(("left", "nonsense"))
    assert rewards.tolist() == [1.0, 0.0]
    assert observations[1].startswith("Invalid action")
    assert infos["valid"].tolist() == [True, False]
    assert infos["actions"][0] == ["left", "right"]
    envs.close()


def test_closing_twice_closes_once():
    crane = Crane()
    env = adapt(crane)
    for _ in range(2):
        env.close()
    assert crane.closed == 1


class Echo(TextEnv):
    instructions = "Say anything."

    def begin(self, task):
        return "Well?"

    def respond(self, action):
        return StepResult(action)


def test_a_text_environment_is_returned_unchanged():
    echo = Echo()
    assert adapt(echo) is echo
    wrapped = TimeLimit(echo, 3)
    assert adapt(wrapped) is wrapped
    with pytest.raises(UsageError, match="Echo is already a text environment"):
        adapt(echo, names={0: "a"})


def test_only_environments_can_be_adapted():
    with pytest.raises(UsageError, match="takes an environment .* not a str"):
        adapt("CartPole-v1")


def test_the_adapter_has_the_interface_of_a_text_environment():
    env = rollgym.make("CartPole-v1")
    assert isinstance(env, TextInterface)
    assert env.tasks is None
    assert env.reward_range == (-float("inf"), float("inf"))


class Careless(gym.Env):
    """Returns what it is given from one of its methods."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self, reset=(0, {}), step=(0, 1.0, True, False, {})):
        self.answers = reset, step

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.answers[0]

    def step(self, action):
        return self.answers[1]


def one_turn(env):
    env.reset(seed=0)
    env.step("0")


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ({"reset": 0}, r"Careless returned from reset\(\) a int; it must be a tuple of 2"),
        ({"reset": (0, [])}, "Careless returned a list as info; it must be a dict"),
        ({"step": None}, r"Careless returned from step\(\) a NoneType; it must be a tuple of 5"),
        ({"step": (0, 1.0, True, {})}, r"from step\(\) a tuple of 4; it must be a tuple of 5"),
        ({"step": (0, "much", True, False, {})}, "returned 'much' as reward; it must be a number"),
        ({"step": (0, float("nan"), True, False, {})}, "returned the reward nan; it must be finite"),
        ({"step": (0, 1.0, "no", False, {})}, "returned a str as end flag; it must be true or false"),
    ],
)
def test_an_environment_that_answers_the_wrong_types_is_named(answers, complaint):
    with pytest.raises(EnvError, match=complaint):
        one_turn(adapt(Careless(**answers)))
