"""TextArena's own games through the adapter."""

import random

import numpy as np
import pytest

pytest.importorskip("textarena", reason="the extra [adapters] is not installed: no textarena")

import rollgym
from rollgym.core.errors import EnvError, UnknownName, UsageError
from rollgym.evaluation.replay import replay

GAMES = ["TicTacToe-v0", "FrozenLake-v0-random", "GuessTheNumber-v0"]


def trace(env, seed, task):
    """The observations, rewards and ends of an episode of random legal actions."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed, options={"task": task, "split": "test"})
    frames = [(observation, 0.0, False)]
    while not frames[-1][2]:
        action = env.unwrapped.random_action(observation, info, rng)
        observation, reward, terminated, truncated, info = env.step(action)
        assert info["valid"]
        frames.append((observation, reward, terminated or truncated))
    return frames


@pytest.mark.parametrize("episodes", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GAMES)
def test_episodes_through_worker_processes_are_the_same_twice(name, episodes, tmp_path):
    runs = [
        rollgym.evaluate(f"textarena:{name}", "random", episodes=episodes, workers=1, out=tmp_path / folder)
        for folder in ("a", "b")
    ]
    first, second = (
        {e.spec.episode_id: [(t.observation, t.action, t.reward) for t in e.turns] for e in run.episodes}
        for run in runs
    )
    assert first == second
    assert len(first) == episodes
    assert {e.outcome for e in runs[0].episodes} == {"terminated"}
    assert sum(e.success for e in runs[0].episodes) < episodes


@pytest.mark.parametrize("name", ["TicTacToe-v0", "2048-v0-mega-easy", "PigDice-v0"])
def test_the_same_seed_gives_the_same_episode_with_others_played_in_between(name):
    env, other = rollgym.make(f"textarena:{name}"), rollgym.make(f"textarena:{name}")
    first = trace(env, 3, 5)
    trace(other, 4, 6)
    assert trace(env, 3, 5) == first == trace(other, 3, 5)


def test_global_generators_stay_untouched():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    trace(rollgym.make("textarena:2048-v0-mega-easy"), 0, 0)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_splits_share_no_start_where_starts_differ():
    env = rollgym.make("textarena:FrozenLake-v0-random")
    starts = {
        split: {env.reset(seed=0, options={"task": task, "split": split})[0] for task in range(60)}
        for split in ("train", "dev", "test")
    }
    assert not starts["train"] & starts["test"]
    assert not starts["train"] & starts["dev"]


def test_a_random_opponent_plays_legal_actions_and_the_agent_gets_its_own_reward():
    env = rollgym.make("textarena:TicTacToe-v0")
    roles, rewards = set(), set()
    for task in range(12):
        frames = trace(env, task, task)
        roles.add(env.unwrapped.own_role)
        rewards.add(frames[-1][1])
        assert "invalid" not in frames[-1][0].lower()
    assert roles == {"player_0", "player_1"}
    assert rewards <= {-1.0, 0.0, 1.0}
    assert len(rewards) > 1


def test_agents_play_all_roles(tmp_path):
    results = rollgym.evaluate(
        "textarena:ConnectFour-v0", "random", roles={"player_1": "random"}, episodes=4, out=tmp_path / "run"
    )
    episode = next(iter(results.episodes))
    assert {turn.role for turn in episode.turns} == {"player_0", "player_1"}
    assert episode.turns[-1].rewards["player_0"] == -episode.turns[-1].rewards["player_1"]
    assert all(episode.same for episode in replay(list(results.episodes)))


def test_an_invalid_action_is_reported_and_a_second_one_loses():
    env = rollgym.make("textarena:TicTacToe-v0", others=None)
    env.reset(seed=0)
    observation, _, terminated, _, info = env.step("hello")
    assert (terminated, info["valid"]) == (False, False)
    assert "invalid move" in observation
    _, reward, terminated, _, info = env.step("hello")
    assert (reward, terminated, info["valid"]) == (-1.0, True, False)


def test_a_game_that_goes_on_is_truncated_by_the_limit():
    env = rollgym.make("textarena:2048-v0", max_turns=3)
    observation, info = env.reset(seed=0, options={"task": 0, "split": "test"})
    ends = []
    for _ in range(3):
        _, _, terminated, truncated, info = env.step(info["actions"][0])
        ends.append((terminated, truncated))
    assert ends == [(False, False), (False, False), (False, True)]


def test_success_is_a_reward_that_can_be_set(tmp_path):
    rates = [
        rollgym.evaluate(
            "textarena:TicTacToe-v0", "random", episodes=10, env_kwargs=options, out=tmp_path / name
        ).summary["success_rate"]
        for name, options in (("strict", {}), ("lenient", {"success_reward": -1}))
    ]
    assert rates[0] < rates[1] == 1.0


@pytest.mark.parametrize(
    ("name", "options", "error", "sentence"),
    [
        ("TicTacTo-v0", {}, UnknownName, "Did you mean TicTacToe-v0"),
        ("TicTacToe-v0", {"players": 3}, UsageError, "does not start with 3 player"),
        ("TicTacToe-v0", {"colour": "red"}, UsageError, "does not accept these options"),
        ("TicTacToe-v0", {"max_turns": 0}, UsageError, "max_turns must be a whole number"),
        ("TicTacToe-v0", {"others": "genius"}, UnknownName, "player for others"),
        ("FrozenLake-v0", {"others": None}, UsageError, "has no roles"),
        ("TicTacToe-v0", {"success_reward": "win"}, UsageError, "must be a number"),
        ("TicTacToe-v0", {"action_examples": "[1]"}, UsageError, "list of texts"),
    ],
)
def test_wrong_options_are_one_sentence(name, options, error, sentence):
    with pytest.raises(error, match=sentence):
        rollgym.make(f"textarena:{name}", **options)


@pytest.mark.parametrize("answer", [None, "done", (1, {}), (True,)])
def test_a_game_that_answers_the_wrong_types_is_an_environment_error(answer, monkeypatch):
    env = rollgym.make("textarena:GuessTheNumber-v0", list_actions=False)
    env.reset(seed=0)
    monkeypatch.setattr(type(env.unwrapped._table.game._env), "step", lambda self, action: answer)
    with pytest.raises(EnvError, match=r"not \(done, info\)"):
        env.step("[3]")


def test_a_game_without_examples_of_actions_takes_some_from_the_user():
    plain = rollgym.make("textarena:Bandit-v0")
    assert "actions" not in plain.reset(seed=0)[1]
    shown = rollgym.make("textarena:Bandit-v0", action_examples=["[red]", "[blue]", "[no button]"])
    assert shown.reset(seed=0)[1]["actions"] == ["[blue]", "[red]"]


def test_without_listed_actions_a_random_agent_plays_examples_or_what_the_text_shows():
    rng = np.random.default_rng(0)
    plain = rollgym.make("textarena:FrozenLake-v0", list_actions=False)
    observation, info = plain.reset(seed=0)
    assert "actions" not in info
    shown = {plain.unwrapped.random_action(observation, info, rng) for _ in range(100)}
    assert shown == {"[up]", "[down]", "[left]", "[right]", "[w]", "[a]", "[s]", "[d]"}
    some = rollgym.make("textarena:FrozenLake-v0", list_actions=False, action_examples=["[up]", "[left]"])
    assert {some.unwrapped.random_action("", {}, rng) for _ in range(50)} == {"[up]", "[left]"}
    with pytest.raises(UsageError, match="Give some with action_examples"):
        plain.unwrapped.random_action("Your move.", {}, rng)


def test_it_keeps_the_contract():
    rules = [
        "runs",
        "gymnasium",
        "deterministic",
        "global-rng",
        "range",
        "before-reset",
        "after-end",
        "roles",
    ]
    assert rollgym.check("textarena:TicTacToe-v0", quick=True, rules=rules).ok
