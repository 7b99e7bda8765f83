"""Levels made at random: solvable, within their rules, the same every time."""

import numpy as np
import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.sokoban.game import Game
from rollgym.envs.sokoban.generate import Rules, canonical, carve, draw_board, generate
from rollgym.envs.sokoban.levels import normalize
from rollgym.envs.sokoban.maze import flood
from rollgym.envs.sokoban.options import PRESETS
from rollgym.envs.sokoban.solver import solve


@pytest.mark.parametrize(("preset", "count"), [("6x6", 100), ("8x8", 25), ("10x10", 4)])
def test_levels_are_valid_and_keep_to_their_rules(preset: str, count: int) -> None:
    rules = PRESETS[preset]
    rng = np.random.default_rng(1)
    for _ in range(count):
        level = generate(rng, rules)
        assert normalize(level.text) == level.text
        rows = level.text.split("\n")
        assert (len(rows), len(rows[0])) == (rules.height, rules.width)
        assert level.text.count("$") == rules.boxes
        assert level.text.count("*") == 0
        assert level.difficulty is not None
        assert rules.min_moves <= level.difficulty.moves <= rules.max_moves


def test_every_drawn_board_has_a_solution_of_the_stated_length() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        level = generate(rng, Rules(height=6, width=7, boxes=2, min_moves=1, max_moves=60))
        result = solve(level.text)
        assert level.difficulty is not None
        assert level.difficulty.optimal
        assert (level.difficulty.moves, level.difficulty.pushes) == (result.moves, result.pushes)
        game = Game(level.text)
        for letter in result.path:
            game.step(" UDLR".index(letter.upper()))
        assert game.solved


def test_the_same_generator_state_gives_the_same_level() -> None:
    rules = PRESETS["8x8"]
    first = [generate(np.random.default_rng(seed), rules) for seed in range(5)]
    assert [generate(np.random.default_rng(seed), rules) for seed in range(5)] == first
    assert len(set(first)) == 5


def test_levels_are_many_and_various() -> None:
    rng = np.random.default_rng(3)
    levels = [generate(rng, PRESETS["6x6"]) for _ in range(300)]
    assert len({level.text for level in levels}) > 280
    assert len({level.text.translate(str.maketrans("@$.*+", "     ")) for level in levels}) > 100
    assert len({level.difficulty.moves for level in levels if level.difficulty}) == 8


def test_a_range_of_moves_is_kept() -> None:
    rng = np.random.default_rng(4)
    rules = Rules(height=7, width=7, boxes=1, min_moves=12, max_moves=14)
    moves = [
        level.difficulty.moves for level in (generate(rng, rules) for _ in range(10)) if level.difficulty
    ]
    assert all(12 <= count <= 14 for count in moves)


def test_a_refused_board_is_not_made() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        level = generate(rng, PRESETS["6x6"], accept=lambda text: "+" in text)
        assert "+" in level.text


def test_a_range_that_no_level_meets_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgym.envs.sokoban.generate.MAX_ATTEMPTS", 50)
    with pytest.raises(UsageError, match="none needs 90 to 99 moves"):
        generate(np.random.default_rng(0), Rules(height=5, width=5, boxes=1, min_moves=90, max_moves=99))


def test_rooms_are_connected_and_inside_their_walls() -> None:
    rng = np.random.default_rng(6)
    rules = Rules(height=7, width=9, boxes=3, min_moves=1, max_moves=60)
    for _ in range(50):
        floor = carve(rng, rules)
        assert flood(floor & -floor, floor, row=10) == floor
        assert all(
            floor >> cell & 1 == 0 for cell in range(70) if cell % 10 in (0, 8, 9) or cell // 10 in (0, 6)
        )


def test_the_smallest_room_can_be_drawn() -> None:
    rng = np.random.default_rng(7)
    rules = Rules(height=5, width=5, boxes=1, min_moves=1, max_moves=30)
    assert any(draw_board(rng, rules) for _ in range(50))


def test_turned_and_mirrored_boards_have_one_canonical_text() -> None:
    board = "#####\n#@$.#\n#  ##\n#####"
    turned = "####\n#.##\n#$ #\n#@ #\n####"
    mirrored = "#####\n#.$@#\n##  #\n#####"
    assert canonical(board) == canonical(turned) == canonical(mirrored)
    assert canonical(board) != canonical("#####\n#$@.#\n#  ##\n#####")
