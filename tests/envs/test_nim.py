"""Nim: moves, ends, faults, perfect play, and both forms."""

from itertools import product
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.envs.nim.env import NimEnv
from rollgym.envs.nim.expert import NimExpert
from rollgym.envs.nim.strategy import best_move, nim_sum
from rollgym.evaluation.replay import replay

ENV_ID = "rollgym/Nim-v0"


def laid_out(*heaps: int, **kwargs: Any) -> NimEnv:
    """A game for two roles that starts from these heaps."""
    env = NimEnv(**{"others": None, "heaps": len(heaps), **kwargs})
    env.reset(seed=0)
    env._heaps = list(heaps)
    return env


def test_gymnasium_accepts_both_forms() -> None:
    check_env(make(ENV_ID).unwrapped)
    check_env(make(ENV_ID, others=None).unwrapped)
    env = gym.make(ENV_ID)
    assert "role" not in env.reset(seed=0)[1]


def test_a_game_of_two_roles() -> None:
    env = laid_out(2, 1)
    observation, reward, over, _, info = env.step("A 1")
    assert observation == "Heaps: A 1, B 1. The other player took A 1."
    assert (reward, over, info["role"], info["actions"]) == (0.0, False, "player_2", ["A 1", "B 1"])
    assert env.step("B 1")[4]["role"] == "player_1"
    observation, reward, over, _, info = env.step("a1.")
    assert observation == "You took A 1, the last. You win."
    assert (reward, over, info["success"]) == (1.0, True, True)
    assert info["role_rewards"] == {"player_1": 1.0, "player_2": -1.0}
    assert info["role_success"] == {"player_1": True, "player_2": False}


def test_the_second_player_can_win() -> None:
    env = laid_out(1, 1)
    env.step("A 1")
    observation, reward, over, _, info = env.step("B 1")
    assert observation == "You took B 1, the last. You win."
    assert (reward, over, info["success"]) == (-1.0, True, False)
    assert info["role_rewards"] == {"player_1": -1.0, "player_2": 1.0}


@pytest.mark.parametrize("action", ["", "C 1", "A 0", "A 3", "A -1", "take one", "A 1 B 1", "٣", "A" * 9999])
def test_an_invalid_move_changes_nothing_but_the_count(action: str) -> None:
    env = laid_out(2, 1)
    observation, reward, over, _, info = env.step(action)
    assert observation.startswith("Heaps: A 2, B 1. That is not a move")
    assert (reward, over, info["valid"], info["role"]) == (0.0, False, False, "player_1")


def test_the_third_invalid_move_of_a_player_loses() -> None:
    env = laid_out(5, 5)
    for action in ("?", "?", "A 1", "?", "?", "B 1"):  # two of each player
        assert not env.step(action)[2]
    observation, reward, over, _, info = env.step("?")
    assert observation == "You made too many invalid moves. You lose."
    assert (reward, over, info["valid"], info["role_success"]["player_2"]) == (-1.0, True, False, True)


def test_perfect_play_wins_every_position_that_can_be_won() -> None:
    """Against every reply: checked by going through all games with up to 3 heaps of 3."""
    wins: dict[tuple[int, ...], bool] = {}

    def moves(heaps: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*heaps[:i], left, *heaps[i + 1 :]) for i, size in enumerate(heaps) for left in range(size)]

    for heaps in sorted(product(range(4), repeat=3), key=sum):
        wins[heaps] = any(not wins[after] for after in moves(heaps))
        assert wins[heaps] == bool(nim_sum(heaps))
        if any(heaps):
            letter, number = best_move(heaps).split()
            after = list(heaps)
            after["ABC".index(letter)] -= int(number)
            assert min(after) >= 0
            if wins[heaps]:
                assert not wins[tuple(after)], heaps


def test_with_one_agent_the_agent_can_always_win() -> None:
    expert = NimExpert(AgentSetup(env_id=ENV_ID))
    env = NimEnv(largest=3)
    first_moves = set()
    for task in range(60):
        observation, info = env.reset(options={"task": task})
        first_moves.add("The other player" in observation)
        over = False
        while not over:
            observation, reward, over, _, info = env.step(expert.choose(observation, info))
        assert (info["success"], reward) == (True, 1.0)
        assert observation.endswith("You win.")
    assert first_moves == {True, False}


def test_a_loss_against_the_expert_is_addressed_to_the_agent() -> None:
    env = NimEnv(heaps=2, faults=1)
    env.reset(seed=0)
    env._heaps, env.to_move, env.own_role = [1, 1], "player_1", "player_1"
    observation, reward, over, _, info = env.step("A 1")
    assert observation == "The other player took B 1, the last. You lose."
    assert (reward, over, info["success"]) == (-1.0, True, False)
    assert "role_rewards" not in info


def test_no_position_is_in_two_splits() -> None:
    env = NimEnv(others=None, largest=4)
    starts = {
        split: {env.reset(options={"task": task, "split": split})[0] for task in range(200)}
        for split in ("train", "test")
    }
    assert not starts["train"] & starts["test"]
    assert len(starts["train"]) > 40


def test_random_and_expert_scores() -> None:
    random = rollgym.evaluate(ENV_ID, "random", episodes=200).summary
    assert random["success_rate"] <= 0.05
    weak = rollgym.evaluate(ENV_ID, "random", episodes=200, env_kwargs={"others": "random"}).summary
    assert 0.35 <= weak["success_rate"] <= 0.65


@pytest.mark.parametrize("roles", [{}, {"player_1": "expert"}, {"player_2": "random"}])
def test_games_replay_exactly(roles: dict[str, str], tmp_path: Any) -> None:
    kwargs = {} if roles else {"others": None}
    results = rollgym.evaluate(
        ENV_ID, "random", episodes=30, roles=roles, env_kwargs=kwargs, out=tmp_path / "r", workers=2
    )
    episodes = list(results.episodes)
    assert all(e.outcome == "terminated" and len(e.roles) == 2 for e in episodes)
    assert [done.difference for done in replay(episodes)] == [None] * 30


@pytest.mark.parametrize("kwargs", [{"heaps": 1}, {"largest": 1}, {"faults": 0}, {"others": "someone"}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        NimEnv(**kwargs)
