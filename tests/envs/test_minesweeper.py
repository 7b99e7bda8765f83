"""Minesweeper: opening, flags and reasoning on small fields worked out by hand; generator, expert."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.minesweeper import count
from rollgym.envs.minesweeper.count import TooHard, mine_counts
from rollgym.envs.minesweeper.env import MinesweeperEnv
from rollgym.envs.minesweeper.expert import MinesweeperExpert
from rollgym.envs.minesweeper.generate import closed_at_start, needs_no_guess, random_field
from rollgym.envs.minesweeper.grid import Field, neighbors
from rollgym.envs.minesweeper.logic import read_board, risks, safe_cells

ID = "rollgym/Minesweeper-v0"

TWO_MINES = Field(4, 4, frozenset({5, 10}), 3)
TWO_MINES_OPEN = ["111.", "1*21", "12*1", ".111"]
TWO_MINES_START = ["##1.", "##21", "####", "####"]

# After the two safe cells at the right are open, nothing tells which of the two at the left has the mine.
COIN_TOSS = Field(4, 4, frozenset({0, 2, 6}), 15)
COIN_TOSS_START = ["####", "13##", ".111", "...."]


def on_field(field: Field, **kwargs: Any) -> MinesweeperEnv:
    """An environment in the middle of an episode on this field."""
    env = MinesweeperEnv(rows=field.rows, columns=field.columns, mines=len(field.mines), **kwargs)
    env.reset(seed=0)
    env._field, env._closed, env._flags = field, closed_at_start(field), set()
    env._to_open = len(env._closed) - len(field.mines)
    return env


def play_expert(env: MinesweeperEnv, task: int, split: str = "test") -> bool:
    briefing = Briefing(spec=EpisodeSpec(episode_id="e", env_id=ID), instructions="")
    player = MinesweeperExpert(AgentSetup(env_id=ID)).player(briefing)
    observation, info = env.reset(seed=0, options={"task": task, "split": split})
    over = False
    while not over:
        observation, _, terminated, truncated, info = env.step(player.choose(observation, info))
        assert info["valid"]
        over = terminated or truncated
    return bool(info["success"])


def test_gymnasiums_checker_accepts_it() -> None:
    check_env(rollgym.make(ID, render_mode="ansi").unwrapped)


def test_neighbours_of_a_corner_an_edge_and_the_middle() -> None:
    around = neighbors(3, 4)
    assert around[0] == (1, 4, 5)
    assert around[7] == (2, 3, 6, 10, 11)
    assert around[5] == (0, 1, 2, 4, 6, 8, 9, 10)


def test_numbers_and_the_opened_region_by_hand() -> None:
    assert TWO_MINES.view(set()) == TWO_MINES_OPEN
    assert TWO_MINES.view(closed_at_start(TWO_MINES)) == TWO_MINES_START


def test_a_cell_with_no_mine_around_opens_the_cells_around_it() -> None:
    env = on_field(TWO_MINES)
    observation, reward, terminated, truncated, info = env.step("reveal 4 1")
    assert info["board"] == ["##1.", "##21", "12##", ".1##"]
    assert (reward, terminated, truncated, info["success"], info["valid"]) == (0.0, False, False, False, True)
    assert observation == ("   1 2 3 4\n1  # # 1 .\n2  # # 2 1\n3  1 2 # #\n4  . 1 # #\nTurns left: 15.")


def test_winning_needs_every_safe_cell_and_no_flag() -> None:
    env = on_field(TWO_MINES)
    for action in ("reveal 4 1", "reveal 1 1", "reveal 1 2", "reveal 2 1", "reveal 3 4", "reveal 4 3"):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["success"]) == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("reveal 4 4")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert "You won" in observation


def test_opening_a_mine_loses_and_shows_the_mines() -> None:
    env = on_field(TWO_MINES)
    observation, reward, terminated, truncated, info = env.step("reveal 2 2")
    assert (reward, terminated, truncated, info["success"], info["valid"]) == (0.0, True, False, False, True)
    assert info["board"] == ["##1.", "#*21", "##*#", "####"]
    assert "lost" in observation


def test_shaped_rewards_are_shares_of_the_ten_safe_cells_and_sum_to_one() -> None:
    env = on_field(TWO_MINES, shaped=True)
    assert env.step("reveal 4 1")[1] == 0.4
    cells = ("1 1", "1 2", "2 1", "3 4", "4 3", "4 4")
    assert [env.step(f"reveal {cell}")[1] for cell in cells] == [0.1] * 6


def test_flags_mark_and_protect_a_cell() -> None:
    env = on_field(TWO_MINES)
    assert env.step("flag 2 2")[4]["board"] == ["##1.", "#F21", "####", "####"]
    observation, *_, info = env.step("reveal 2 2")
    assert not info["valid"]
    assert "unflag it first" in observation
    assert not env.step("flag 2 2")[4]["valid"]
    assert env.step("unflag 2 2")[4]["board"] == TWO_MINES_START
    assert not env.step("unflag 2 2")[4]["valid"]


@pytest.mark.parametrize(
    "text", ["reveal 4 1", " Reveal 4, 1 ", "`REVEAL(4, 1)`", "reveal: [4,1].", "reveal 04 1"]
)
def test_forgiving_forms_of_an_action(text: str) -> None:
    info = on_field(TWO_MINES).step(text)[4]
    assert info["valid"]
    assert info["board"][3] == ".1##"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Not an action"),
        ("hello", "Not an action"),
        ("4 1", "Not an action"),
        ("reveal 4", "Not an action"),
        ("reveal 4 1 2", "Not an action"),
        ("reveal -1 1", "Not an action"),
        ("reveal 5 1", "no cell 5 1"),
        ("reveal 1 0", "no cell 1 0"),
        ("reveal 1 4", "open already"),
        ("flag 1 4", "open already"),
    ],
)
def test_invalid_actions_use_a_turn_and_change_nothing(text: str, why: str) -> None:
    env = on_field(TWO_MINES)
    observation, reward, terminated, truncated, info = env.step(text)
    assert why in observation
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert info["board"] == TWO_MINES_START
    assert info["turns_left"] == 15


def test_the_episode_is_truncated_when_the_turns_are_used_up() -> None:
    env = MinesweeperEnv(turns=2)
    env.reset(seed=0)
    assert env.step("nonsense")[2:4] == (False, False)
    assert env.step("nonsense")[2:4] == (False, True)


def test_what_follows_from_a_board_by_hand() -> None:
    # One mine is in cells 1 and 5, one in 10 and 11: with two mines in all, every other cell is safe.
    assert safe_cells(TWO_MINES_START, 2) == [0, 4, 8, 9, 12, 13, 14, 15]
    assert risks(TWO_MINES_START, 2) == {
        **dict.fromkeys([0, 4, 8, 9, 12, 13, 14, 15], 0.0),
        **dict.fromkeys([1, 5, 10, 11], 0.5),
    }
    # With a third mine somewhere, cell 9 alone is safe: the 2 has its mines already.
    assert safe_cells(TWO_MINES_START, 3) == [9]


def test_flags_are_no_evidence() -> None:
    board = ["F#1.", "##21", "####", "####"]
    assert safe_cells(board, 2) == safe_cells(TWO_MINES_START, 2)


def test_counting_agrees_with_trying_every_placement() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        field = random_field(rng, 4, 5, int(rng.integers(2, 7)))
        closed = closed_at_start(field)
        safe = sorted(closed - field.mines)
        for cell in rng.permutation(safe)[: int(rng.integers(len(safe) + 1))].tolist():
            closed.difference_update(field.opened_by(cell, closed))
        board = field.view(closed)
        mask, constraints = read_board(board)
        fitting = [
            set(mines)
            for mines in combinations(sorted(closed), len(field.mines))
            if Field(4, 5, frozenset(mines), 0).view(closed) == board
        ]
        expected = {cell: sum(cell in mines for mines in fitting) for cell in sorted(closed)}
        assert mine_counts(mask, constraints, len(field.mines)) == (expected, len(fitting))
        proven = safe_cells(board, len(field.mines))
        assert all(expected[cell] == 0 for cell in proven)
        assert bool(proven) == (0 in expected.values())


def test_where_counting_takes_too_long_the_risk_is_a_rough_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "_MAX_STEPS", 0)
    mask, constraints = read_board(TWO_MINES_START)
    with pytest.raises(TooHard):
        mine_counts(mask, constraints, 2)
    assert safe_cells(TWO_MINES_START, 2) == []
    rough = risks(TWO_MINES_START, 2)
    assert (rough[1], rough[9], rough[0]) == (0.5, 0.4, 2 / 12)


def test_a_coin_toss_is_recognised() -> None:
    assert COIN_TOSS.view(closed_at_start(COIN_TOSS)) == COIN_TOSS_START
    assert risks(COIN_TOSS_START, 3) == {0: 0.5, 1: 0.5, 2: 1.0, 3: 0.0, 6: 1.0, 7: 0.0}
    assert not needs_no_guess(COIN_TOSS)
    assert needs_no_guess(TWO_MINES)


def test_fields_are_never_won_at_the_start_and_need_no_guess() -> None:
    env = MinesweeperEnv()
    for task in range(50):
        _, info = env.reset(seed=0, options={"task": task, "split": "test"})
        assert len(env._closed) > len(env._field.mines) == info["mines"] == 5
        assert needs_no_guess(env._field)
        assert "*" not in "".join(info["board"])


def test_the_splits_share_no_field() -> None:
    env = MinesweeperEnv(rows=4, columns=4, mines=2)
    fields: dict[str, set[frozenset[int]]] = {"train": set(), "dev": set(), "test": set()}
    for split, split_fields in fields.items():
        for task in range(150):
            env.reset(seed=0, options={"task": task, "split": split})
            split_fields.add(env._field.mines)
    assert not fields["train"] & fields["dev"]
    assert not fields["train"] & fields["test"]
    assert not fields["dev"] & fields["test"]
    assert len(fields["train"]) > 20


def test_a_task_is_the_same_whatever_the_seed() -> None:
    env = MinesweeperEnv()
    starts = [env.reset(seed=seed, options={"task": 4, "split": "dev"})[0] for seed in range(3)]
    assert len(set(starts)) == 1


def test_the_expert_clears_every_field() -> None:
    env = MinesweeperEnv()
    assert all(play_expert(env, task) for task in range(60))


def test_the_expert_mostly_clears_fields_that_may_need_a_guess() -> None:
    env = MinesweeperEnv(no_guess=False)
    wins = sum(play_expert(env, task) for task in range(60))
    assert 51 <= wins < 60


def test_the_expert_does_not_stumble_over_flags() -> None:
    env = on_field(TWO_MINES)
    player = MinesweeperExpert(AgentSetup(env_id=ID)).player(
        Briefing(spec=EpisodeSpec(episode_id="e", env_id=ID), instructions="")
    )
    info = env.step("flag 1 1")[4]
    assert player.choose("", info) == "unflag 1 1"


def test_random_actions_are_valid_and_seldom_win() -> None:
    env = MinesweeperEnv()
    wins = 0
    for task in range(100):
        observation, info = env.reset(seed=0, options={"task": task, "split": "test"})
        rng = np.random.default_rng(task)
        over = False
        while not over:
            action = env.random_action(observation, info, rng)
            observation, _, terminated, truncated, info = env.step(action)
            assert info["valid"]
            over = terminated or truncated
        wins += info["success"]
    assert wins <= 10


def test_a_random_player_can_undo_flags() -> None:
    env = MinesweeperEnv()
    action = env.random_action("", {"board": ["F.....", *["......"] * 5]}, np.random.default_rng(0))
    assert action == "unflag 1 1"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"rows": 3}, "at least 4 rows"),
        ({"rows": 30, "columns": 30}, "at most 480 cells"),
        ({"mines": 1}, "2 to 7 mines"),
        ({"mines": 8}, "without guessing has 2 to 7 mines"),
        ({"mines": 27, "no_guess": False}, "2 to 26 mines"),
        ({"turns": 0}, "turns"),
    ],
)
def test_arguments_out_of_range_are_refused_with_a_sentence(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        MinesweeperEnv(**kwargs)
