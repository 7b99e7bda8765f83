"""Sudoku: rules by hand on a 4x4 grid, generator, splits, expert."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.sudoku.env import SudokuEnv
from rollgym.envs.sudoku.expert import SudokuExpert
from rollgym.envs.sudoku.grid import Solver, digits_of, full_grid, puzzle_from, solution, units_of

ID = "rollgym/Sudoku-v0"

FULL = [1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]
GIVEN = [0, 2, 3, 4, 3, 0, 1, 2, 2, 1, 0, 3, 4, 3, 2, 0]  # the blanks are on the diagonal
SPARSE = [0, 2, 0, 4, 3, 4, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1]  # ten blanks, one solution


def on_grid(given: list[int] = GIVEN, **kwargs: Any) -> gym.Env[str, str]:
    """An environment whose episode starts from this grid, which has the solution FULL."""
    env = rollgym.make(ID, blanks=given.count(0), **kwargs)
    env.reset(seed=0)
    inner: Any = env.unwrapped
    inner._full, inner._given, inner._grid = FULL, given, list(given)
    return env


def play(env: gym.Env[str, str], task: int, split: str = "test") -> tuple[bool, int]:
    briefing = Briefing(spec=EpisodeSpec(episode_id="e", env_id=ID), instructions="")
    player = SudokuExpert(AgentSetup(env_id=ID)).player(briefing)
    observation, info = env.reset(seed=0, options={"task": task, "split": split})
    turns, over = 0, False
    while not over:
        observation, _, terminated, truncated, info = env.step(player.choose(observation, info))
        assert info["valid"]
        turns, over = turns + 1, terminated or truncated
    return info["success"], turns


def count_solutions(grid: list[int]) -> int:
    """By plain trial of every digit in the first blank."""
    if 0 not in grid:
        return 1
    cell = grid.index(0)
    return sum(
        count_solutions([*grid[:cell], digit, *grid[cell + 1 :]])
        for digit in digits_of(Solver(grid).options(cell))
    )


def is_right(grid: list[int], size: int) -> bool:
    units: dict[int, set[int]] = {}
    for cell, numbers in enumerate(units_of(size)):
        for unit in numbers:
            units.setdefault(unit, set()).add(grid[cell])
    return len(units) == 3 * size and all(digits == set(range(1, size + 1)) for digits in units.values())


def test_gymnasiums_checker_accepts_it() -> None:
    check_env(rollgym.make(ID, render_mode="ansi").unwrapped)


def test_units_of_a_cell_by_hand() -> None:
    assert units_of(4)[6] == (1, 4 + 2, 8 + 1)  # row 2, column 3, upper right block
    assert units_of(9)[80] == (8, 9 + 8, 18 + 8)
    assert units_of(9)[30] == (3, 9 + 3, 18 + 4)  # the middle block


def test_the_observation_shows_blocks_and_blanks() -> None:
    observation, *_ = on_grid().step("nonsense")
    assert observation.splitlines()[:6] == [
        "   1 2 | 3 4",
        "1  . 2 | 3 4",
        "2  3 . | 1 2",
        "   ----+-----",
        "3  2 1 | . 3",
        "4  4 3 | 2 .",
    ]


def test_filling_all_blanks_solves_it() -> None:
    env = on_grid()
    for action in ("fill 1 1 1", "`Fill(2, 2, 4)`", " fill 3,3,4. "):
        _, reward, terminated, truncated, info = env.step(action)
        assert info["valid"]
        assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    observation, reward, terminated, truncated, info = env.step("FILL 4 4 1")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert "complete and right" in observation
    assert info["board"] == ["1234", "3412", "2143", "4321"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Not an action"),
        ("hello", "Not an action"),
        ("1 1 1", "Not an action"),
        ("fill 1 1", "Not an action"),
        ("clear 1 1 1", "Not an action"),
        ("fill 1 1 12", "Not an action"),
        ("fill 5 1 1", "no row 5"),
        ("fill 1 0 1", "no column 0"),
        ("fill 1 1 5", "no digit 5"),
        ("fill 1 2 1", "was given"),
        ("clear 1 2", "was given"),
        ("clear 1 1", "is blank"),
        ("fill 1 1 4", "the row holds a 4"),
        ("fill 3 3 2", "the row holds a 2"),
    ],
)
def test_invalid_actions_use_a_turn_and_change_nothing(text: str, why: str) -> None:
    env = on_grid()
    observation, reward, terminated, truncated, info = env.step(text)
    assert why in observation
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert info["board"] == info["given"] == [".234", "3.12", "21.3", "432."]
    assert info["turns_left"] == 5


@pytest.mark.parametrize(("action", "unit"), [("1 1 4", "row"), ("3 2 4", "column"), ("3 3 1", "block")])
def test_a_digit_is_refused_for_its_row_column_or_block(action: str, unit: str) -> None:
    observation, *_, info = on_grid(SPARSE).step(f"fill {action}")
    assert f"Refused: the {unit} holds a {action[-1]} already." in observation
    assert not info["valid"]


def test_a_wrong_digit_without_conflict_is_accepted_and_can_be_replaced_or_cleared() -> None:
    env = on_grid(SPARSE)
    assert env.step("fill 1 3 1")[4]["board"][0] == ".214"
    assert env.step("fill 1 3 3")[4]["board"][0] == ".234"
    assert not env.step("fill 1 3 3")[4]["valid"]
    assert env.step("clear 1 3")[4]["board"][0] == ".2.4"


def test_shaped_rewards_follow_the_number_of_right_digits() -> None:
    env = on_grid(SPARSE, shaped=True)
    actions = ("fill 1 3 1", "fill 1 3 3", "fill 1 3 1", "clear 1 3")
    assert [env.step(action)[1] for action in actions] == [0.0, 0.1, -0.1, 0.0]
    env = on_grid(GIVEN, shaped=True)
    assert [env.step(action)[1] for action in ("fill 1 1 1", "fill 2 2 4")] == [0.25, 0.25]


def test_the_episode_is_truncated_when_the_turns_are_used_up() -> None:
    env = on_grid()  # four blanks, six turns
    flags = [env.step("nonsense")[2:4] for _ in range(6)]
    assert flags == [(False, False)] * 5 + [(False, True)]


def test_the_solver_finds_the_solution_or_none() -> None:
    assert solution(GIVEN) == solution(SPARSE) == FULL
    assert solution([1, 2, 3, 0, 0, 0, 0, 4, *[0] * 8]) is None  # no digit is left for row 1, column 4
    assert solution([0] * 16) is not None


@pytest.mark.parametrize(("size", "blanks"), [(4, 11), (4, 12), (9, 45)])
def test_puzzles_have_exactly_one_solution_and_as_many_blanks_as_asked(size: int, blanks: int) -> None:
    rng = np.random.default_rng(3)
    num_puzzles = 0
    for _ in range(12):
        full = full_grid(rng, size)
        assert is_right(full, size)
        puzzle = puzzle_from(full, blanks, rng)
        if puzzle is not None:
            num_puzzles += 1
            assert puzzle.count(0) == blanks
            assert all(digit in (0, right) for digit, right in zip(puzzle, full, strict=True))
            assert size == 9 or count_solutions(puzzle) == 1
            assert solution(puzzle) == full
    assert num_puzzles >= 3


def test_a_nine_by_nine_puzzle_has_no_second_solution() -> None:
    rng = np.random.default_rng(5)
    full = full_grid(rng, 9)
    puzzle = puzzle_from(full, 45, rng)
    assert puzzle is not None
    for cell, digit in enumerate(puzzle):
        for other in digits_of(Solver(puzzle).options(cell)) if not digit else []:
            if other != full[cell]:
                assert solution([*puzzle[:cell], other, *puzzle[cell + 1 :]]) is None


def test_all_288_small_grids_are_made() -> None:
    rng = np.random.default_rng(0)
    assert len({tuple(full_grid(rng, 4)) for _ in range(4000)}) == 288


def test_the_splits_share_no_completed_grid() -> None:
    env = rollgym.make(ID)
    inner: Any = env.unwrapped
    grids: dict[str, set[str]] = {"train": set(), "dev": set(), "test": set()}
    for split, split_grids in grids.items():
        for task in range(150):
            env.reset(seed=0, options={"task": task, "split": split})
            split_grids.add(str(inner._full))
    assert not grids["train"] & (grids["dev"] | grids["test"])
    assert not grids["dev"] & grids["test"]
    assert len(grids["test"]) > 10


def test_a_task_is_the_same_whatever_the_seed() -> None:
    env = rollgym.make(ID)
    starts = [env.reset(seed=seed, options={"task": 4, "split": "dev"})[0] for seed in range(3)]
    assert len(set(starts)) == 1


@pytest.mark.parametrize(("kwargs", "tasks", "blanks"), [({}, 60, 11), ({"size": 9}, 20, 45)])
def test_the_expert_needs_one_turn_for_each_blank(kwargs: dict[str, int], tasks: int, blanks: int) -> None:
    env = rollgym.make(ID, **kwargs)
    assert all(play(env, task) == (True, blanks) for task in range(tasks))


def test_the_expert_first_removes_what_is_wrong() -> None:
    env = on_grid(SPARSE)
    *_, info = env.step("fill 1 3 1")
    expert = SudokuExpert(AgentSetup(env_id=ID))
    assert expert.choose("", info) == "clear 1 3"
    *_, info = env.step("clear 1 3")
    assert expert.choose("", info) == "fill 1 1 1"


def test_random_actions_are_valid_and_seldom_solve_it() -> None:
    env = rollgym.make(ID)
    face: Any = env.unwrapped
    wins = clears = 0
    for task in range(100):
        observation, info = env.reset(seed=0, options={"task": task, "split": "test"})
        rng = np.random.default_rng(task)
        over = False
        while not over:
            action = face.random_action(observation, info, rng)
            clears += action.startswith("clear")
            observation, _, terminated, truncated, info = env.step(action)
            assert info["valid"]
            over = terminated or truncated
        wins += info["success"]
    assert clears > 0
    assert wins <= 30


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"size": 6}, "size must be 4 or 9"),
        ({"blanks": 0}, "blanks must be from 1 to 12"),
        ({"size": 9, "blanks": 56}, "blanks must be from 1 to 55"),
        ({"turns": 0}, "turns"),
    ],
)
def test_arguments_out_of_range_are_refused_with_a_sentence(kwargs: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SudokuEnv(**kwargs)  # type: ignore[arg-type]
