"""FrozenLake: maps, moves, slips, ends."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymLake
from gymnasium.utils.env_checker import check_env

from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.core.tasks import TaskSet
from rollgym.core.types import EpisodeSpec
from rollgym.envs.frozen_lake.env import FrozenLakeEnv
from rollgym.envs.frozen_lake.expert import FrozenLakeExpert, SafeRandomAgent, best_moves
from rollgym.envs.frozen_lake.lake import has_path, random_map

ENV_ID = "rollgym/FrozenLake-v0"
ROWS = ("SFF", "FHF", "FFG")


def on(rows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> FrozenLakeEnv:
    monkeypatch.setattr(TaskSet, "draw", lambda *args, **names: rows)
    env = FrozenLakeEnv(size=len(rows), **kwargs)
    env.reset(seed=0)
    return env


def successes(who: str, count: int, limit: int = 20, **kwargs: Any) -> int:
    env = make(ENV_ID, max_episode_steps=limit, **kwargs)
    wins = 0
    for task in range(count):
        spec = EpisodeSpec(episode_id="e", env_id=ENV_ID, sampling_seed=task)
        player = FrozenLakeExpert(AgentSetup(env_id=ENV_ID)).player(Briefing(spec=spec, instructions=""))
        rng = derive_rng("test", task)
        observation, info = env.reset(seed=task, options={"task": task, "split": "test"})
        over = False
        while not over:
            if who == "expert":
                action = player.choose(observation, info)
            else:
                action = env.unwrapped.random_action(observation, info, rng)
            observation, _, terminated, truncated, info = env.step(action)
            assert info["valid"]
            over = terminated or truncated
        wins += info["success"]
    return wins


@pytest.mark.parametrize("kwargs", [{}, {"slippery": True}])
def test_gymnasium_accepts_it(kwargs: dict[str, Any]) -> None:
    check_env(make(ENV_ID, **kwargs).unwrapped)


def test_the_first_observation_is_the_map_with_the_player_in_its_corner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = on(ROWS, monkeypatch)
    observation, info = env.reset()
    assert observation == "P__\n_O_\n__G"
    assert info["map"] == list(ROWS)
    assert info["position"] == [0, 0]
    assert info["actions"] == ["Left", "Down", "Right", "Up"]


def test_the_local_view_says_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    env = on(ROWS, monkeypatch, view="local")
    assert env.reset()[0] == ("The goal is 2 down, 2 right. Left: edge, Down: ice, Right: ice, Up: edge.")
    assert "Symbols" not in env.instructions
    assert env.step("Right")[0] == (
        "The goal is 2 down, 1 right. Left: ice, Down: hole, Right: ice, Up: edge. Last move: Right."
    )
    assert env.step("Up")[0] == (
        "The edge stopped you.\n"
        "The goal is 2 down, 1 right. Left: ice, Down: hole, Right: ice, Up: edge. Last move: Up."
    )
    for move in ("Right", "Down"):
        observation = env.step(move)[0]
    assert "Left: hole, Down: goal, Right: edge, Up: ice." in observation
    assert env.reset()[0].endswith("Up: edge."), "the last move is of this episode"
    assert "\n" in env.render_text()


def test_the_local_view_has_no_cells_to_space() -> None:
    with pytest.raises(UsageError, match="spaced=true requires view=map"):
        FrozenLakeEnv(view="local", spaced=True)


def test_spaced_rows_have_a_space_between_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(ROWS, monkeypatch, spaced=True).reset()[0] == "P _ _\n_ O _\n_ _ G"


def test_the_way_round_the_hole_reaches_the_goal_and_pays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    env = on(ROWS, monkeypatch)
    steps = [env.step(move) for move in ("Right", "Right", "Down", "Down")]
    assert [step[0] for step in steps[:2]] == ["_P_\n_O_\n__G", "__P\n_O_\n__G"]
    assert [step[1] for step in steps] == [0.0, 0.0, 0.0, 1.0]
    assert [step[2] for step in steps] == [False, False, False, True]
    assert steps[-1][0] == "You reached the goal.\n___\n_O_\n__√"
    assert [step[4]["success"] for step in steps] == [False, False, False, True]


def test_a_hole_ends_the_episode_without_success(monkeypatch: pytest.MonkeyPatch) -> None:
    env = on(ROWS, monkeypatch)
    env.step("Down")
    observation, reward, terminated, truncated, info = env.step("Right")
    assert observation == "You fell into a hole.\n___\n_X_\n__G"
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_the_edge_stops_the_player(monkeypatch: pytest.MonkeyPatch) -> None:
    env = on(ROWS, monkeypatch)
    for move in ("Left", "Up"):
        observation, _, terminated, _, info = env.step(move)
        assert observation == "The edge stopped you.\nP__\n_O_\n__G"
        assert info["valid"]
        assert not terminated


@pytest.mark.parametrize("action", ["right", " RIGHT\n", "`Right`", '"right"', "2"])
def test_moves_are_read_in_any_case_quoted_or_as_numbers(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on(ROWS, monkeypatch).step(action)[4]["position"] == [0, 1]


@pytest.mark.parametrize("action", ["", "north", "4", "-1", "Right Right", "I go right", "²", "x" * 50_000])
def test_anything_else_is_refused_and_moves_nobody(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = on(ROWS, monkeypatch)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation == "That is not a move. Answer Left, Down, Right or Up.\nP__\n_O_\n__G"
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert info["position"] == [0, 0]


def test_slippery_ice_moves_exactly_as_gymnasiums_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("SFFF", "FFFF", "FFFF", "FFFG")
    env = on(rows, monkeypatch, slippery=True, success_rate=0.5)
    own = GymLake(desc=list(rows), is_slippery=True, success_rate=0.5)
    slips = 0
    for seed in range(5):
        _, info = env.reset(seed=seed, options={"task": 0})
        state, _ = own.reset(seed=seed)
        for move in [2, 1, 2, 1, 3, 0]:
            observation, reward, over, _, info = env.step(str(move))
            state, own_reward, own_over, _, _ = own.step(move)
            assert info["position"] == list(divmod(state, 4))
            assert (reward, over) == (own_reward, own_over)
            slips += "You slipped." in observation
            if over:
                break
    assert slips > 0


def test_the_turn_limit_truncates() -> None:
    env = make(ENV_ID, max_episode_steps=3)
    env.reset(seed=0)
    flags = [env.step("nonsense")[2:4] for _ in range(3)]
    assert flags == [(False, False), (False, False), (False, True)]


def test_the_same_task_and_seed_give_the_same_episode() -> None:
    def episode() -> list[Any]:
        env = make(ENV_ID, slippery=True)
        first = env.reset(seed=4, options={"task": 3, "split": "dev"})
        steps: list[Any] = [first]
        for move in ("Right", "Down", "Right", "Down"):
            steps.append(env.step(move))
            if steps[-1][2]:
                break
        return steps

    assert episode() == episode()


def test_the_map_comes_from_the_task_and_not_from_the_seed() -> None:
    env = FrozenLakeEnv()
    maps = {env.reset(seed=seed, options={"task": 5})[0] for seed in range(5)}
    assert len(maps) == 1
    assert len({env.reset(seed=0, options={"task": task})[0] for task in range(20)}) > 10


def test_no_map_is_in_two_splits() -> None:
    env = FrozenLakeEnv()
    maps = {
        split: {env.reset(options={"task": task, "split": split})[0] for task in range(200)}
        for split in ("train", "dev", "test")
    }
    assert not maps["train"] & maps["test"]
    assert not maps["train"] & maps["dev"]
    assert not maps["dev"] & maps["test"]


@pytest.mark.parametrize(("size", "frozen"), [(3, 0.95), (4, 0.8), (8, 0.3), (20, 0.5)])
def test_every_map_has_a_way(size: int, frozen: float) -> None:
    for seed in range(10):
        rows = random_map(np.random.default_rng(seed), size, frozen)
        assert [len(row) for row in rows] == [size] * size
        assert rows[0][0] == "S"
        assert rows[-1][-1] == "G"
        assert has_path(np.array([[letter != "H" for letter in row] for row in rows]))


def test_a_map_cut_in_two_has_no_way() -> None:
    assert not has_path(np.array([[True, True, True], [False, False, False], [True, True, True]]))
    assert has_path(np.array([[True, True, True], [False, False, True], [True, True, True]]))


def test_the_expert_takes_the_shortest_way_on_firm_ice() -> None:
    # One way only: right, right, down, down (cells count from 0 in reading order).
    plan = best_moves(("SFF", "HHF", "FFG"), 1.0)
    assert [plan[cell] for cell in (0, 1, 2, 5)] == [2, 2, 1, 1]


def test_the_expert_keeps_away_from_a_hole_on_slippery_ice() -> None:
    # From the middle of the left column, Left can only slip up or down; Down may slip into the hole.
    assert best_moves(("SFF", "FHF", "FFG"), 1 / 3)[3] == 0


def test_the_expert_solves_every_task_and_random_hardly_any() -> None:
    assert successes("expert", 50) == 50
    assert successes("random", 50) <= 8


def test_the_expert_mostly_solves_slippery_tasks_given_time() -> None:
    assert successes("expert", 40, limit=100, slippery=True) >= 30


@pytest.mark.parametrize(
    "kwargs",
    [
        {"size": 2},
        {"size": 33},
        {"frozen_probability": 0.2},
        {"frozen_probability": 1.0},
        {"success_rate": 0.8},
        {"slippery": True, "success_rate": 1.0},
        {"slippery": True, "success_rate": 0.0},
    ],
)
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        FrozenLakeEnv(**kwargs)


def test_the_safe_random_agent_goes_anywhere_but_into_a_hole() -> None:
    agent = SafeRandomAgent(AgentSetup(env_id=ENV_ID))
    env = make(ENV_ID)
    moves: Counter[str] = Counter()
    for task in range(30):
        spec = EpisodeSpec(
            episode_id="0", env_id=ENV_ID, task=task, split="train", env_seed=0, sampling_seed=task
        )
        players = [agent.player(Briefing(spec=spec, instructions="")) for _ in range(2)]
        seen, info = env.reset(seed=0, options={"task": task, "split": "train"})
        over = False
        while not over:
            move, again = (player.choose(seen, info) for player in players)
            assert move == again
            moves[move] += 1
            seen, _, terminated, truncated, info = env.step(move)
            over = terminated or truncated
        assert "hole" not in seen
    assert min(moves.values()) > 0.15 * sum(moves.values())
    assert len(moves) == 4
