"""The rules of play, by hand and against gym-sokoban's own step()."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollgym.envs.sokoban.game import DOWN, LEFT, MOVE_RIGHT, NOOP, RIGHT, UP, Game
from rollgym.envs.sokoban.views import VOCABULARIES

LANE = "#######\n#@$.$.#\n#######"
TO_XSB = str.maketrans(VOCABULARIES["ragen"], VOCABULARIES["xsb"])


def test_a_push_moves_player_and_box_and_pays_for_the_target() -> None:
    game = Game(LANE)
    assert game.step(RIGHT) == (pytest.approx(0.9, abs=1e-12), False, True, True)
    assert game.text == "#######\n# @*$.#\n#######"
    assert (game.boxes_on_target, game.boxes) == (1, 2)


def test_two_boxes_in_a_row_do_not_move() -> None:
    game = Game("#######\n#@$$..#\n#######")
    assert game.step(RIGHT) == (-0.1, False, False, False)
    assert game.text == "#######\n#@$$..#\n#######"


def test_a_box_does_not_go_into_a_wall_and_the_player_neither() -> None:
    game = Game("#####\n#.@$#\n#####")
    assert game.step(RIGHT) == (-0.1, False, False, False)
    assert game.step(UP) == (-0.1, False, False, False)


def test_move_only_walks_but_never_pushes() -> None:
    game = Game("######\n#@ $.#\n######")
    assert game.step(MOVE_RIGHT) == (-0.1, False, True, False)
    assert game.step(MOVE_RIGHT) == (-0.1, False, False, False)
    assert game.text == "######\n# @$.#\n######"


def test_a_box_pushed_off_its_target_costs_one() -> None:
    game = Game("########\n#@* .$ #\n########")
    assert game.step(RIGHT).reward == pytest.approx(-1.1, abs=1e-12)
    assert game.text == "########\n# +$.$ #\n########"


def test_from_target_to_target_only_the_step_is_paid() -> None:
    game = Game("########\n#@*.$  #\n########")
    assert game.step(RIGHT) == (-0.1, False, True, True)
    assert game.boxes_on_target == 1


def test_the_player_walks_over_targets_and_leaves_them_there() -> None:
    game = Game("######\n#@. $#\n######")
    game.step(RIGHT)
    assert game.text == "######\n# + $#\n######"
    game.step(RIGHT)
    assert game.text == "######\n# .@$#\n######"


def test_the_last_box_pays_ten_and_nine_tenths_and_ends_the_game() -> None:
    game = Game("#####\n#@$.#\n#####")
    step = game.step(RIGHT)
    assert step.reward == pytest.approx(10.9, abs=1e-12)
    assert step.done
    assert game.solved


def test_the_game_is_done_when_its_steps_are_used_up() -> None:
    game = Game("#####\n#@$.#\n#####", max_steps=3)
    assert [game.step(code).done for code in (NOOP, LEFT, DOWN)] == [False, False, True]
    assert not game.solved


def test_the_codes_are_those_of_gym_sokoban() -> None:
    assert Game("#######\n#+$* .#\n#######").codes()[1] == [0, 5, 4, 3, 1, 2, 0]


def golden_episodes() -> list[dict[str, Any]]:
    folder = os.environ.get("ROLLGYM_TEST_DATA")
    if not folder:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no golden episodes to compare with")
    with gzip.open(Path(folder, "sokoban", "golden_episodes.jsonl.gz"), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_golden_episodes_of_gym_sokoban_are_reproduced_step_by_step() -> None:
    episodes = golden_episodes()
    assert len(episodes) == 140
    for episode in episodes:
        replay(episode)


def replay(episode: dict[str, Any]) -> None:
    name = (episode["file"], episode["index"])
    text = "\n".join(episode["level"]) if "level" in episode else episode["level_text"].translate(TO_XSB)
    game = Game(text)
    steps = [game.step(action) for action in episode["actions"]]
    assert [step.reward for step in steps] == pytest.approx(episode["rewards"], rel=0, abs=1e-9), name
    assert [step.done for step in steps] == episode["dones"], name
    for flag in ("moved_player", "moved_box"):
        if flag in episode:
            assert [getattr(step, flag) for step in steps] == episode[flag], name
    assert game.text == episode["final"].translate(TO_XSB), name
    assert game.boxes_on_target == episode.get("final_boxes_on_target", game.boxes_on_target), name
    assert game.solved == episode.get("solved", game.solved), name
