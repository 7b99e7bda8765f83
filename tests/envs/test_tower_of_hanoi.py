"""Tower of Hanoi: moves by hand, distances, splits, expert."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.tower_of_hanoi.env import TowerOfHanoiEnv
from rollgym.envs.tower_of_hanoi.expert import TowerOfHanoiExpert
from rollgym.envs.tower_of_hanoi.pegs import after, distances, legal_moves, starts_of

ID = "rollgym/TowerOfHanoi-v0"


def at_position(position: tuple[int, ...], goal: int, **kwargs: Any) -> gym.Env[str, str]:
    """An environment whose episode starts from this position (peg of each disk, smallest first)."""
    env = rollgym.make(ID, disks=len(position), **kwargs)
    env.reset(seed=0)
    inner: Any = env.unwrapped
    inner._position, inner._goal = position, goal
    return env


def play_expert(env: gym.Env[str, str], task: int, split: str = "test") -> tuple[bool, int]:
    briefing = Briefing(spec=EpisodeSpec(episode_id="e", env_id=ID), instructions="")
    player = TowerOfHanoiExpert(AgentSetup(env_id=ID)).player(briefing)
    observation, info = env.reset(seed=0, options={"task": task, "split": split})
    turns, over = 0, False
    while not over:
        observation, _, terminated, truncated, info = env.step(player.choose(observation, info))
        assert info["valid"]
        turns, over = turns + 1, terminated or truncated
    return info["success"], turns


def test_gymnasiums_checker_accepts_it() -> None:
    check_env(rollgym.make(ID, render_mode="ansi").unwrapped)


def test_the_classic_seven_moves_solve_three_disks() -> None:
    env = at_position((0, 0, 0), goal=2)
    for action in ("move A C", "A B", "C->B", "a to c", "B,A", "`move B C`"):
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info["valid"]
        assert not info["success"]
    assert info["pegs"] == [[1], [], [3, 2]]
    observation, reward, terminated, truncated, info = env.step("Move a C.")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["pegs"] == [[], [], [3, 2, 1]]
    assert "You reached the goal." in observation


def test_the_observation_lists_disks_from_bottom_to_top() -> None:
    env = at_position((0, 1, 0), goal=2)
    observation, *_, info = env.step("move A B")
    assert observation == "Goal: all disks on peg C.\nA: 3\nB: 2 1\nC: -\nTurns left: 15."
    assert info["goal"] == "C"


def test_legal_moves_by_hand() -> None:
    # Disk 1 on B, 2 and 3 on A, C empty: 1 goes anywhere, 2 to the empty peg only.
    env = at_position((1, 0, 0), goal=2)
    *_, info = env.step("nonsense")
    assert info["actions"] == ["move A C", "move B A", "move B C"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Not a move"),
        ("hello", "Not a move"),
        ("move 1 to C", "Not a move"),
        ("move A", "Not a move"),
        ("A B C", "Not a move"),
        ("move A D", "no peg D"),
        ("C A", "peg C is empty"),
        ("A B", "disk 2 cannot go onto the smaller disk 1"),
        ("B B", "must differ"),
    ],
)
def test_illegal_moves_use_a_turn_and_change_nothing(text: str, why: str) -> None:
    env = at_position((1, 0, 0), goal=2)
    observation, reward, terminated, truncated, info = env.step(text)
    assert why in observation
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert info["pegs"] == [[3, 2], [1], []]
    assert info["turns_left"] == 15


def test_sixteen_turns_for_three_disks_then_truncated() -> None:
    env = rollgym.make(ID)
    env.reset(seed=0)
    flags = [env.step("nonsense")[2:4] for _ in range(16)]
    assert flags == [(False, False)] * 15 + [(False, True)]


def test_reaching_the_goal_in_the_last_turn_is_a_success() -> None:
    env = at_position((2, 0), goal=0, turns=1)
    _, reward, terminated, truncated, info = env.step("C A")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_distances_by_hand() -> None:
    far = distances(3, 3, 2)
    assert len(far) == 27
    assert far[2, 2, 2] == 0
    assert far[0, 0, 0] == far[1, 1, 1] == max(far.values()) == 7
    assert far[1, 1, 0] == 4  # the large disk goes home, then three moves for the other two
    assert distances(4, 4, 0)[1, 1, 1, 1] == 9  # Frame and Stewart's number for 4 disks on 4 pegs


def test_every_move_can_be_taken_back() -> None:
    for position in distances(3, 3, 0):
        for start, end in legal_moves(position, 3):
            assert (end, start) in legal_moves(after(position, start, end), 3)
            assert after(after(position, start, end), end, start) == position


def test_the_splits_share_no_start_and_together_hold_all() -> None:
    starts = {split: starts_of(split, 3, 3) for split in ("train", "dev", "test")}
    assert {split: len(split_starts) for split, split_starts in starts.items()} == {
        "train": 34,
        "dev": 10,
        "test": 10,
    }
    assert len({start for split_starts in starts.values() for start in split_starts}) == 54


def test_the_largest_disk_never_starts_on_the_goal_so_half_the_longest_way_is_the_least() -> None:
    lengths = [
        distances(3, 3, goal)[position]
        for split in ("train", "dev", "test")
        for position, goal in starts_of(split, 3, 3)
    ]
    assert min(lengths) == 4
    assert max(lengths) == 7


def test_a_task_is_the_same_whatever_the_seed_and_comes_again_after_all() -> None:
    env = rollgym.make(ID)
    starts = [env.reset(seed=seed, options={"task": 4, "split": "dev"})[0] for seed in range(3)]
    assert len(set(starts)) == 1
    assert env.reset(seed=0, options={"task": 14, "split": "dev"})[0] == starts[0]


@pytest.mark.parametrize("kwargs", [{}, {"disks": 5}, {"disks": 4, "pegs": 4}])
def test_the_expert_always_takes_a_shortest_way(kwargs: dict[str, int]) -> None:
    env = rollgym.make(ID, **kwargs)
    disks, pegs = kwargs.get("disks", 3), kwargs.get("pegs", 3)
    for task, (position, goal) in enumerate(starts_of("train", disks, pegs)[:50]):
        assert play_expert(env, task, "train") == (True, distances(disks, pegs, goal)[position])


def test_random_moves_are_valid_and_seldom_succeed() -> None:
    env = rollgym.make(ID)
    face: Any = env.unwrapped
    wins = 0
    for task in range(100):
        observation, info = env.reset(seed=0, options={"task": task, "split": "test"})
        rng = np.random.default_rng(task)
        over = False
        while not over:
            observation, _, terminated, truncated, info = env.step(face.random_action(observation, info, rng))
            assert info["valid"]
            over = terminated or truncated
        wins += info["success"]
    assert wins <= 20


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"disks": 1}, "disks must be at least 2"),
        ({"disks": 10}, "not 59,049"),
        ({"pegs": 2}, "pegs must be from 3 to 5"),
        ({"pegs": 6}, "pegs must be from 3 to 5"),
        ({"turns": 0}, "turns"),
    ],
)
def test_arguments_out_of_range_are_refused_with_a_sentence(kwargs: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TowerOfHanoiEnv(**kwargs)  # type: ignore[arg-type]
