"""Sokoban as an environment: the contract, the actions of a turn, levels from files, the expert."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.sokoban.actions import parse_actions
from rollgym.envs.sokoban.deadlock import is_lost
from rollgym.envs.sokoban.env import SokobanEnv
from rollgym.envs.sokoban.expert import SokobanExpert
from rollgym.envs.sokoban.generate import canonical
from rollgym.envs.sokoban.solver import plan

LANE = "######\n#@$ .#\n######\n"
CORNER = "#####\n#@  #\n# $ #\n#  .#\n#####\n"

Choose = Callable[[str, Mapping[str, Any]], str]


@pytest.fixture
def level_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "levels.txt"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def lane(level_file: Callable[[str], Path]) -> Callable[..., SokobanEnv]:
    """An environment whose only level is a lane: two pushes to the right solve it."""

    def make(**options: Any) -> SokobanEnv:
        env = SokobanEnv(levels=level_file(LANE), **options)
        env.reset(seed=0)
        return env

    return make


def expert() -> Choose:
    spec = EpisodeSpec(episode_id="e", env_id="rollgym/Sokoban-v0")
    agent = SokobanExpert(AgentSetup(env_id="rollgym/Sokoban-v0"))
    player = agent.player(Briefing(spec=spec, instructions=""))
    assert isinstance(player, SokobanExpert)
    return player.choose


def play(env: SokobanEnv, choose: Choose, task: int, split: str) -> tuple[bool, int]:
    """Whether the episode succeeded, and in how many turns."""
    observation, info = env.reset(seed=task, options={"task": task, "split": split})
    turns, over = 0, False
    while not over:
        observation, _, terminated, truncated, info = env.step(choose(observation, info))
        turns, over = turns + 1, terminated or truncated
    return info["success"], turns


@pytest.mark.parametrize("name", ["Sokoban", "Sokoban8x8", "Sokoban10x10"])
def test_gymnasiums_checker_has_no_complaint(name: str) -> None:
    check_env(rollgym.make(f"rollgym/{name}-v0").unwrapped)


def test_the_same_task_and_actions_give_the_same_episode() -> None:
    def episode() -> list[Any]:
        env = SokobanEnv()
        rng = np.random.default_rng(1)
        observation, info = env.reset(seed=7)
        seen: list[Any] = [(observation, info)]
        for _ in range(10):
            seen.append(env.step(env.random_action("", {}, rng)))
            if seen[-1][2]:
                break
        return seen

    assert episode() == episode()


def test_the_first_observation_is_the_bare_grid_in_the_ragen_vocabulary(
    lane: Callable[..., SokobanEnv],
) -> None:
    observation, info = lane().reset(seed=0)
    assert observation == "######\n#PX_O#\n######"
    assert info["board"] == LANE.strip()
    assert info["actions"] == ["Up", "Down", "Left", "Right"]
    assert (info["boxes"], info["boxes_on_target"], info["steps_left"]) == (1, 0, 120)
    assert "difficulty" not in info


def test_two_pushes_solve_the_lane(lane: Callable[..., SokobanEnv]) -> None:
    env = lane()
    observation, reward, terminated, truncated, info = env.step("Right")
    assert (observation, reward, terminated, truncated) == ("######\n#_PXO#\n######", -0.1, False, False)
    assert (info["moved_player"], info["moved_box"], info["success"]) == (True, True, False)
    observation, reward, terminated, truncated, info = env.step(" `RIGHT` ")
    assert observation == "######\n#__P√#\n######"
    assert reward == pytest.approx(10.9)
    assert (terminated, truncated, info["success"], info["boxes_on_target"]) == (True, False, True, 1)


@pytest.mark.parametrize(
    ("vocabulary", "row"), [("ragen", "#S√X_O#"), ("letters", "W@CB.GW"), ("xsb", "#+*$ .#")]
)
def test_vocabularies(vocabulary: str, row: str, level_file: Callable[[str], Path]) -> None:
    path = level_file("#######\n#+*$ .#\n#   $ #\n#######\n")
    env = SokobanEnv(levels=path, vocabulary=vocabulary)
    assert env.reset(seed=0)[0].split("\n")[1] == row
    assert set(env.palette) >= set(row)


def test_coordinates_say_where_everything_is(level_file: Callable[[str], Path]) -> None:
    path = level_file("######\n#@#  #\n# $ .#\n######\n")
    assert SokobanEnv(levels=path, view="coords").reset(seed=0)[0] == (
        "Room: 4 rows, 6 columns\nPlayer: (1, 1)\nBoxes: (2, 2)\nTargets: (2, 4)\nWalls inside: (1, 2)"
    )
    assert SokobanEnv(levels=path, view="grid_coords").reset(seed=0)[0] == (
        "######\n#P#__#\n#_X_O#\n######\nPlayer: (1, 1)\nBoxes: (2, 2)\nTargets: (2, 4)"
    )


def test_the_relative_view_says_how_far_off_things_are(level_file: Callable[[str], Path]) -> None:
    """Next to the player and to the box: above, below, left, right; the target is seen from the box."""
    path = level_file("#####\n#.  #\n#  $#\n#@  #\n#####\n")
    env = SokobanEnv(levels=path, view="relative")
    observation, _ = env.reset(seed=0, options={"split": "all", "task": 0})
    assert observation == "you free wall wall free box up1 right2 free free free wall target up1 left2"


def test_the_view_around_tells_the_corners_too(level_file: Callable[[str], Path]) -> None:
    """Row by row: three above, two beside, three below."""
    path = level_file("#####\n#.  #\n# #$#\n#@  #\n#####\n")
    env = SokobanEnv(levels=path, view="around")
    observation, _ = env.reset(seed=0, options={"split": "all", "task": 0})
    you = "you wall free wall wall free wall wall wall"
    box = "box up1 right2 free free wall wall wall free free wall target up1 left2"
    assert observation == f"{you} {box}"


def test_the_view_in_words_has_sentences(level_file: Callable[[str], Path]) -> None:
    """The content of the relative view and the corners of the box; distances of zero are left out."""
    path = level_file("#####\n#.  #\n#  $#\n#@  #\n#####\n")
    env = SokobanEnv(levels=path, view="words")
    observation, _ = env.reset(seed=0, options={"split": "all", "task": 0})
    assert observation == (
        "Next to you: up free, down wall, left wall, right free. Box: 1 up, 2 right. "
        "Next to it: up free, down free, left free, right wall. Blocked corners of it: up right, down right. "
        "Target from it: 1 up, 2 left."
    )
    for move in ("Right", "Right"):
        observation = env.step(move)[0]
    assert observation.startswith("Next to you: up blocked, down wall, left free, right wall. Box: 1 up. ")


def test_the_view_in_words_numbers_several_boxes(level_file: Callable[[str], Path]) -> None:
    """A box on a target is 0 from it, which reads "here"."""
    path = level_file("######\n#.   #\n#@$* #\n#    #\n######\n")
    observation, _ = SokobanEnv(levels=path, view="words").reset(seed=0, options={"split": "all", "task": 0})
    assert observation == (
        "Next to you: up free, down free, left wall, right blocked. "
        "Box 1: 1 right. Next to it: up free, down free, left free, right blocked. "
        "Blocked corners of it: none. "
        "Target from it: 1 up, 1 left. Target from it: 1 right. "
        "Box 2: 2 right. Next to it: up free, down free, left blocked, right free. "
        "Blocked corners of it: none. "
        "Target from it: 1 up, 2 left. Target from it: here."
    )


def test_it_can_tell_that_nothing_moved(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(tell_bumps=True)
    assert env.step("Up")[0].endswith("\nNothing moved: Up")
    assert env.step("move left")[0].endswith("\nNothing moved: Left")
    assert "Nothing" not in env.step("noop")[0]
    assert "Nothing" not in env.step("Right")[0]
    assert "Nothing" not in lane().step("Up")[0]


def test_it_can_end_when_a_box_is_lost(level_file: Callable[[str], Path]) -> None:
    path = level_file("#####\n#.  #\n#@$ #\n#   #\n#####\n")
    ends = {}
    for end_when_lost in (False, True):
        env = SokobanEnv(levels=path, end_when_lost=end_when_lost)
        env.reset(seed=0, options={"split": "all", "task": 0})
        _, reward, terminated, truncated, info = env.step("Right")
        assert (reward, truncated, info["success"]) == (-0.1, False, False)
        ends[end_when_lost] = terminated
    assert ends == {False: False, True: True}, "beside the right wall the box can never come back left"


def test_what_counts_as_lost_has_no_solution() -> None:
    """Every position that random play gets to: never lost where the solver finds a way."""
    env = SokobanEnv()
    rng = np.random.default_rng(0)
    lost = 0
    for task in range(40):
        env.reset(seed=0, options={"split": "train", "task": task})
        for _ in range(12):
            *_, terminated, truncated, info = env.step(str(rng.choice(["Up", "Down", "Left", "Right"])))
            if terminated or truncated:
                break
            if is_lost(info["board"]):
                lost += 1
                assert not plan(info["board"]).path
                break
    assert lost > 5


def test_cells_have_names_as_in_chess(level_file: Callable[[str], Path]) -> None:
    path = level_file("######\n#@#  #\n# * .#\n#  $ #\n######\n")
    env = SokobanEnv(levels=path, view="cells")
    assert env.reset(seed=0)[0] == "player b2 box c3 d4 target c3 e3 wall c2"
    assert "Cells are named by column" in env.instructions


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("Up", [1]),
        (" down\n", [2]),
        ("'Left'", [3]),
        ("`RIGHT`", [4]),
        ("push  up", [1]),
        ("move right", [8]),
        ("noop", [0]),
        ("7", [7]),
        ("Right || Up", [4, 1]),
        ("Right, Up,", [4, 1]),
        ("`Right` || `Up`", [4, 1]),
        ("9", None),
        ("", None),
        ("||", None),
        ("Right Up", None),
        ("Right || sideways", None),
        ("go up", None),
    ],
)
def test_actions_are_read_forgivingly_but_not_guessed(text: str, codes: list[int] | None) -> None:
    assert parse_actions(text, limit=2) == (codes, 0)


def test_actions_beyond_the_limit_are_counted_and_left_out() -> None:
    assert parse_actions("Up, Down, Left, nonsense", limit=2) == ([1, 2], 2)


def test_an_invalid_action_costs_a_step_and_moves_nothing(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(invalid_penalty=0.5)
    observation, reward, terminated, truncated, info = env.step("fly")
    assert observation.startswith("######\n#PX_O#\n######\nNot understood")
    assert reward == pytest.approx(-0.6)
    assert (terminated, truncated, info["valid"], info["steps_left"]) == (False, False, False, 119)
    assert info["board"] == LANE.strip()


def test_several_actions_in_a_turn_add_up_and_stop_at_the_end(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(actions_per_turn=3)
    _, reward, terminated, _, info = env.step("Right || Right || Left")
    assert reward == pytest.approx(-0.1 + 10.9)
    assert terminated
    assert info["steps_left"] == 118


def test_too_many_actions_are_left_out_and_the_observation_says_so(lane: Callable[..., SokobanEnv]) -> None:
    observation, _, _, _, info = lane().step("Right || Right")
    assert observation.startswith("######\n#_PXO#\n######\nOnly 1 per turn")
    assert info["valid"]


def test_one_bad_action_in_a_turn_makes_the_whole_turn_one_noop(lane: Callable[..., SokobanEnv]) -> None:
    _, reward, _, _, info = lane(actions_per_turn=2).step("Right || fly")
    assert (reward, info["valid"], info["board"], info["steps_left"]) == (-0.1, False, LANE.strip(), 119)


def test_the_step_limit_truncates(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(max_steps=2)
    assert env.step("Up")[2:4] == (False, False)
    assert env.step("Up")[2:4] == (False, True)


def test_solved_with_the_last_step_is_terminated_only(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(max_steps=2)
    env.step("Right")
    _, _, terminated, truncated, info = env.step("Right")
    assert (terminated, truncated, info["success"], info["steps_left"]) == (True, False, True, 0)


def test_the_limit_counts_actions_not_turns(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(max_steps=3, actions_per_turn=2)
    assert env.step("Up, Up")[3] is False
    _, reward, _, truncated, _ = env.step("Right, Right")
    assert (reward, truncated) == (-0.1, True)


def test_rewards_stay_within_the_stated_range(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(actions_per_turn=2, invalid_penalty=5)
    least, most = env.reward_range
    assert (least, most) == (pytest.approx(-5.1), pytest.approx(11.8))
    assert SokobanEnv().reward_range == (pytest.approx(-1.1), pytest.approx(10.9))
    assert least <= env.step("fly")[1]
    assert env.step("Right, Right")[1] <= most


def test_progress_earns_what_a_solver_thinks_of_it(lane: Callable[..., SokobanEnv]) -> None:
    """The lane is solved by two pushes to the right; walking on its spot brings nothing."""
    env = lane(progress_reward=3)
    assert env.step("Up")[1] == pytest.approx(-0.1)
    assert env.step("Right")[1] == pytest.approx(-0.1 + 3)
    assert env.step("Left")[1] == pytest.approx(-0.1 - 3)
    assert env.step("Right || Right")[1] == pytest.approx(-0.1 + 3)
    assert env.step("Right")[1] == pytest.approx(10.9 + 3)


def test_what_moves_nothing_costs_what_is_asked_for_it(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(bump_penalty=2, invalid_penalty=3)
    assert env.step("Up")[1] == pytest.approx(-0.1 - 2)
    assert env.step("noop")[1] == pytest.approx(-0.1 - 2)
    assert env.step("fly")[1] == pytest.approx(-0.1 - 3), "one of the two, not both"
    assert env.step("Right")[1] == pytest.approx(-0.1)
    assert env.reward_range[0] == pytest.approx(-3.1)
    assert lane(bump_penalty=2, actions_per_turn=3).reward_range[0] == pytest.approx(-3.3)
    assert lane(bump_penalty=9, actions_per_turn=3).reward_range[0] == pytest.approx(-9.3)


def test_a_lost_position_counts_as_the_most_steps_there_are(tmp_path: Path) -> None:
    (tmp_path / "levels.txt").write_text("#####\n#@  #\n# $.#\n#   #\n#####\n")
    env = SokobanEnv(levels=tmp_path / "levels.txt", progress_reward=1, max_steps=15)
    env.reset(options={"split": "all", "task": 0})
    assert env.step("Right")[1] == pytest.approx(-0.1 + 2 - 3)
    assert env.step("Down")[1] == pytest.approx(-0.1 + 3 - 15)
    assert env.step("Down")[1] == pytest.approx(-0.1)


def test_progress_is_within_the_stated_range() -> None:
    env = SokobanEnv(progress_reward=0.5)
    least, most = env.reward_range
    for seed in range(20):
        env.reset(seed=seed)
        rng = np.random.default_rng(seed)
        for _ in range(20):
            _, reward, terminated, truncated, info = env.step(env.random_action("", {}, rng))
            assert least <= reward <= most
            if terminated or truncated:
                break


def test_difficulty_is_told_at_the_start_only() -> None:
    env = SokobanEnv()
    _, info = env.reset(seed=0, options={"task": 3})
    assert set(info["difficulty"]) == {"moves", "pushes", "nodes", "optimal"}
    assert 3 <= info["difficulty"]["moves"] <= 10
    assert "difficulty" not in env.step("Up")[4]


def test_a_person_sees_the_grid_and_the_counts(lane: Callable[..., SokobanEnv]) -> None:
    env = lane(render_mode="ansi", view="coords")
    env.step("Right")
    assert env.render() == "######\n#_PXO#\n######\nstep 1 of 120, 0 of 1 on target"


def test_splits_share_no_level_nor_a_turned_copy_of_one() -> None:
    env = SokobanEnv(size=5, boxes=1)
    texts = {}
    for split in ("train", "dev", "test"):
        boards = [env.reset(options={"task": i, "split": split})[1]["board"] for i in range(60)]
        texts[split] = {canonical(board) for board in boards}
    assert len(texts["train"]) > 20
    assert texts["train"].isdisjoint(texts["dev"])
    assert texts["train"].isdisjoint(texts["test"])
    assert texts["dev"].isdisjoint(texts["test"])


def test_every_argument_that_changes_levels_changes_the_task_sets_name() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"preset": "8x8"},
        {"size": "6x7"},
        {"boxes": 2},
        {"min_moves": 4},
        {"max_moves": 9},
        {"max_steps": 8},
    ]
    names = {SokobanEnv(**kind).tasks.name for kind in kinds}  # type: ignore[union-attr]
    assert len(names) == len(kinds)
    same = SokobanEnv(max_steps=50, actions_per_turn=2, vocabulary="xsb", view="coords")
    assert same.tasks == SokobanEnv().tasks


def test_levels_of_a_file_are_split_by_their_number(level_file: Callable[[str], Path]) -> None:
    lanes = ["\n".join(["#" * (5 + i), "#@$" + " " * i + ".#", "#" * (5 + i)]) for i in range(12)]
    env = SokobanEnv(levels=level_file("\n\n".join(lanes)))
    assert env.tasks is not None
    assert env.tasks.splits == {"train": 10, "dev": 1, "test": 1, "all": 12}

    def board(split: str, task: int) -> str:
        return str(env.reset(options={"split": split, "task": task})[1]["board"])

    assert [board("all", i) for i in range(12)] == lanes
    assert [board("train", i) for i in range(10)] == lanes[:8] + lanes[10:]
    assert (board("dev", 0), board("test", 0)) == (lanes[8], lanes[9])


def test_a_file_of_one_level_has_train_and_all(lane: Callable[..., SokobanEnv]) -> None:
    tasks = lane().tasks
    assert tasks is not None
    assert tasks.splits == {"train": 1, "all": 1}
    assert tasks.name.startswith("sokoban-levels-")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"preset": "7x7"}, "no preset of Sokoban called '7x7'"),
        ({"vocabulary": "emoji"}, "no vocabulary of Sokoban called 'emoji'"),
        ({"view": "pixels"}, "Choose from: grid, coords, grid_coords, cells, relative, around"),
        ({"size": 3}, "size must be from 4 to 30"),
        ({"size": "big"}, "or rows and columns like '7x9', not 'big'"),
        ({"size": 6, "boxes": 9}, "16 cells inside its walls, too few for boxes=9: it takes 21"),
        ({"boxes": 0}, "boxes must be a whole number, 1 or more, not 0"),
        ({"max_steps": 2.5}, "max_steps must be a whole number"),
        ({"actions_per_turn": True}, "actions_per_turn must be a whole number"),
        ({"min_moves": 12}, "min_moves=12 is too much: max_moves or max_steps allows 10"),
        ({"invalid_penalty": -1}, "invalid_penalty must be a number, 0 or more, not -1"),
        ({"bump_penalty": True}, "bump_penalty must be a number, 0 or more, not True"),
        ({"progress_reward": "much"}, "progress_reward must be a number, 0 or more, not 'much'"),
        ({"levels": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"levels": "nowhere.txt", "boxes": 2}, "boxes is for levels made at random"),
    ],
)
def test_wrong_arguments_are_refused_in_words(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        SokobanEnv(**options)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("size", ["7x9", "7 X 9", (7, 9), [7, 9]])
def test_a_size_may_be_written_in_several_ways(size: Any) -> None:
    board = SokobanEnv(size=size, boxes=1).reset(seed=0)[0].split("\n")
    assert (len(board), len(board[0])) == (7, 9)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({}, 60),
        ({"preset": "8x8"}, 20),
        ({"preset": "10x10"}, 4),
        ({"max_steps": 6}, 20),
        ({"actions_per_turn": 3}, 20),
        ({"size": "5x8", "boxes": 2}, 10),
        ({"min_moves": 10, "max_moves": 14}, 10),
    ],
)
def test_the_expert_solves_every_level(options: dict[str, Any], tasks: int) -> None:
    env = SokobanEnv(**options)
    assert all(play(env, expert(), task, "test")[0] for task in range(tasks))


def test_the_expert_takes_as_many_turns_as_the_difficulty_says() -> None:
    env = SokobanEnv()
    for task in range(10):
        moves = env.reset(options={"task": task, "split": "dev"})[1]["difficulty"]["moves"]
        assert play(env, expert(), task, "dev") == (True, moves)


def test_the_expert_plans_anew_when_the_board_is_not_what_it_expected(
    lane: Callable[..., SokobanEnv],
) -> None:
    choose = expert()
    env = lane()
    assert choose(*env.reset(seed=0)) == "Right"
    assert choose("", {"board": "######\n#. $@#\n######"}) == "Left"
    assert choose("", {"board": "######\n#.$@ #\n######"}) == "Left"


def test_the_expert_goes_on_from_wherever_somebody_else_left_the_board(
    level_file: Callable[[str], Path],
) -> None:
    env = SokobanEnv(levels=level_file(CORNER))
    choose = expert()
    env.step(choose(*env.reset(seed=0)))
    env.step("Right")
    observation, _, terminated, _, info = env.step("Left")
    while not terminated:
        observation, _, terminated, truncated, info = env.step(choose(observation, info))
        assert not truncated
    assert info["success"]


def test_the_expert_waits_where_nothing_can_be_done(level_file: Callable[[str], Path]) -> None:
    env = SokobanEnv(levels=level_file("#####\n#$@.#\n#####\n"))
    choose = expert()
    observation, info = env.reset(seed=0)
    assert choose(observation, info) == "noop"
    assert choose(observation, info) == "noop"


def test_random_play_seldom_succeeds_but_does() -> None:
    env = SokobanEnv()
    rng = np.random.default_rng(0)
    wins = sum(play(env, lambda o, i: env.random_action(o, i, rng), task, "train")[0] for task in range(200))
    assert 2 <= wins <= 30


def test_random_actions_are_valid_and_fill_the_turn() -> None:
    env = SokobanEnv(actions_per_turn=3)
    rng = np.random.default_rng(0)
    assert {len(parse_actions(env.random_action("", {}, rng), 3)[0] or []) for _ in range(20)} == {3}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "tasks"), [("6x6", 1000), ("8x8", 500), ("10x10", 200)])
def test_the_expert_solves_hundreds_of_levels(preset: str, tasks: int) -> None:
    env = SokobanEnv(preset)
    assert all(play(env, expert(), task, "test")[0] for task in range(tasks))
