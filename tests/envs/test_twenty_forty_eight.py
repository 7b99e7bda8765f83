"""2048: slides and merges by hand, new tiles, ends, splits, baseline."""

from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.twenty_forty_eight.board import Board, legal_moves, shift, slide, with_new_tile
from rollgym.envs.twenty_forty_eight.env import TwentyFortyEightEnv
from rollgym.envs.twenty_forty_eight.expert import TwentyFortyEightExpert

ID = "rollgym/TwentyFortyEight-v0"
EMPTY: Board = ((0, 0, 0, 0),) * 4
BOARD: Board = ((2, 2, 4, 0), (0, 0, 0, 0), (2, 0, 0, 8), (0, 0, 0, 8))
STUCK: Board = ((2, 4, 2, 4), (4, 2, 4, 2), (2, 4, 2, 4), (4, 2, 4, 2))


def on_board(board: Board, **kwargs: Any) -> gym.Env[str, str]:
    """An environment in the middle of an episode on this board."""
    env = rollgym.make(ID, **kwargs)
    env.reset(seed=0)
    inner: Any = env.unwrapped
    inner._board = board
    return env


def play(env: gym.Env[str, str], task: int, expert: bool) -> bool:
    briefing = Briefing(spec=EpisodeSpec(episode_id="e", env_id=ID), instructions="")
    player = TwentyFortyEightExpert(AgentSetup(env_id=ID)).player(briefing)
    rng, face = np.random.default_rng(task), env.unwrapped
    assert isinstance(face, TwentyFortyEightEnv)
    observation, info = env.reset(seed=task, options={"task": task, "split": "test"})
    over = False
    while not over:
        action = player.choose(observation, info) if expert else face.random_action(observation, info, rng)
        observation, _, terminated, truncated, info = env.step(action)
        assert info["valid"]
        over = terminated or truncated
    return bool(info["success"])


def test_gymnasiums_checker_accepts_it() -> None:
    check_env(rollgym.make(ID, render_mode="ansi").unwrapped)


@pytest.mark.parametrize(
    ("row", "expected", "points"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),
        ((0, 2, 0, 4), (2, 4, 0, 0), 0),
        ((2, 0, 0, 2), (4, 0, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),  # the pair nearer to the wall merges
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),  # new tiles do not merge again
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((8, 0, 8, 16), (16, 16, 0, 0), 16),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
    ],
)
def test_a_row_slides_and_merges_once(row: tuple[int, ...], expected: tuple[int, ...], points: int) -> None:
    assert slide(row) == (expected, points)


def test_all_four_directions_by_hand() -> None:
    assert shift(BOARD, "Left") == (((4, 4, 0, 0), (0, 0, 0, 0), (2, 8, 0, 0), (8, 0, 0, 0)), 4)
    assert shift(BOARD, "Right") == (((0, 0, 4, 4), (0, 0, 0, 0), (0, 0, 2, 8), (0, 0, 0, 8)), 4)
    assert shift(BOARD, "Up") == (((4, 2, 4, 16), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)), 20)
    assert shift(BOARD, "Down") == (((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (4, 2, 4, 16)), 20)


def test_three_in_a_row_merge_at_the_wall_they_slide_to() -> None:
    board: Board = ((2, 2, 2, 0), *EMPTY[1:])
    assert shift(board, "Right")[0][0] == (0, 0, 2, 4)
    assert shift(board, "Left")[0][0] == (4, 2, 0, 0)


def test_a_move_slides_then_adds_one_tile() -> None:
    env = on_board(BOARD)
    observation, reward, terminated, truncated, info = env.step("Up")
    assert info["valid"]
    assert info["score"] == 20
    assert (reward, terminated, truncated, info["success"]) == (20 / 128, False, False, False)
    assert info["board"][0] == [4, 2, 4, 16]
    new = [tile for row in info["board"][1:] for tile in row if tile]
    assert new in ([2], [4])
    assert observation.splitlines()[0] == "   4    2    4   16"
    assert observation.splitlines()[-1] == "Score: 20. Turns left: 79."


def test_new_tiles_are_twos_nine_times_in_ten_and_fall_anywhere() -> None:
    rng = np.random.default_rng(0)
    boards = [with_new_tile(EMPTY, rng) for _ in range(4000)]
    tiles = Counter(tile for board in boards for row in board for tile in row if tile)
    cells = Counter((r, c) for board in boards for r, row in enumerate(board) for c, t in enumerate(row) if t)
    assert set(tiles) == {2, 4}
    assert 320 <= tiles[4] <= 480  # 400 expected, standard deviation 19
    assert len(cells) == 16
    assert min(cells.values()) > 170  # 250 expected, standard deviation 15


def test_a_move_that_changes_nothing_is_refused() -> None:
    board: Board = ((2, 0, 0, 0), (4, 0, 0, 0), (2, 0, 0, 0), (4, 0, 0, 0))
    assert legal_moves(board) == ["Right"]
    env = on_board(board)
    for action in ("Left", "Up", "Down"):
        observation, reward, terminated, truncated, info = env.step(action)
        assert f"{action} changes nothing." in observation
        assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
        assert info["board"] == [list(row) for row in board]
        assert info["actions"] == ["Right"]
    assert info["turns_left"] == 77


@pytest.mark.parametrize("text", ["Up", " up\n", "`UP`", "move up", "'Up.'"])
def test_forgiving_forms_of_a_move(text: str) -> None:
    assert on_board(BOARD).step(text)[4]["score"] == 20


@pytest.mark.parametrize("text", ["", "hello", "U", "Up Up", "go up", "upwards", "1"])
def test_nonsense_uses_a_turn_and_changes_nothing(text: str) -> None:
    observation, reward, terminated, truncated, info = on_board(BOARD).step(text)
    assert "Not a move: answer Up, Down, Left or Right." in observation
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert info["board"] == [list(row) for row in BOARD]
    assert info["turns_left"] == 79


@pytest.mark.parametrize(("kind", "reward"), [("score", 1.0), ("goal", 1.0)])
def test_reaching_the_goal_wins(kind: str, reward: float) -> None:
    env = on_board(((64, 64, 0, 0), *EMPTY[1:]), reward=kind)
    observation, got, terminated, truncated, info = env.step("Left")
    assert (got, terminated, truncated, info["success"]) == (reward, True, False, True)
    assert "You reached 128." in observation


def test_with_the_goal_reward_merging_alone_gives_nothing() -> None:
    assert on_board(BOARD, reward="goal").step("Up")[1] == 0.0


def test_the_game_is_lost_when_no_move_is_left() -> None:
    assert legal_moves(STUCK) == []
    # Left closes the one gap; whatever tile comes into the corner, 8 and 16 around it do not match.
    board: Board = ((2, 4, 2, 4), (4, 2, 4, 2), (2, 4, 2, 8), (0, 4, 2, 16))
    observation, reward, terminated, truncated, info = on_board(board).step("Left")
    assert info["board"][3][:3] == [4, 2, 16]
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    assert "No move is left: lost." in observation


def test_the_episode_is_truncated_when_the_turns_are_used_up() -> None:
    env = rollgym.make(ID, turns=2)
    env.reset(seed=0)
    assert env.step("nonsense")[2:4] == (False, False)
    assert env.step("nonsense")[2:4] == (False, True)


def test_the_start_is_the_tasks_and_the_new_tiles_are_the_seeds() -> None:
    env = rollgym.make(ID)

    def boards(seed: int) -> list[Any]:
        _, info = env.reset(seed=seed, options={"task": 3, "split": "dev"})
        seen_boards = [info["board"]]
        for _ in range(10):
            seen_boards.append(env.step(info["actions"][0])[4]["board"])
            info = {"actions": legal_moves(tuple(map(tuple, seen_boards[-1])))}
        return seen_boards

    assert boards(1) == boards(1)
    assert boards(1)[0] == boards(2)[0]
    assert boards(1) != boards(2)


def test_a_start_has_two_tiles() -> None:
    env = rollgym.make(ID)
    for task in range(20):
        _, info = env.reset(seed=0, options={"task": task, "split": "train"})
        tiles = [tile for row in info["board"] for tile in row if tile]
        assert len(tiles) == 2
        assert set(tiles) <= {2, 4}


def test_the_splits_share_no_start() -> None:
    env = rollgym.make(ID)
    starts: dict[str, set[str]] = {"train": set(), "dev": set(), "test": set()}
    for split, split_starts in starts.items():
        for task in range(200):
            split_starts.add(env.reset(seed=0, options={"task": task, "split": split})[0])
    assert not starts["train"] & (starts["dev"] | starts["test"])
    assert not starts["dev"] & starts["test"]


def test_the_baseline_takes_the_goal_when_it_can() -> None:
    board = [[64, 64, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0], [8, 0, 0, 0]]
    expert = TwentyFortyEightExpert(AgentSetup(env_id=ID))
    assert expert.choose("", {"board": board, "goal": 128}) in ("Left", "Right")


def test_the_baseline_wins_mostly_and_random_moves_seldom() -> None:
    env = rollgym.make(ID)
    assert sum(play(env, task, expert=True) for task in range(15)) >= 10
    assert sum(play(env, task, expert=False) for task in range(40)) <= 12


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"size": 2}, "size must be from 3 to 6"),
        ({"goal": 100}, "power of two"),
        ({"goal": 4}, "power of two from 8"),
        ({"reward": "points"}, "'score' or 'goal'"),
        ({"turns": 0}, "turns"),
    ],
)
def test_arguments_out_of_range_are_refused_with_a_sentence(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TwentyFortyEightEnv(**kwargs)
