"""Mastermind: pegs worked out by hand, guesses, splits, expert."""

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.mastermind.codes import code_at, count_codes, pegs
from rollgym.envs.mastermind.env import MastermindEnv
from rollgym.envs.mastermind.expert import MastermindExpert

ID = "rollgym/Mastermind-v0"


def secret(env: MastermindEnv) -> str:
    return env._code


def play_expert(env: MastermindEnv, task: int, split: str = "test") -> tuple[bool, int]:
    briefing = Briefing(spec=EpisodeSpec(episode_id="e", env_id=ID), instructions="")
    player = MastermindExpert(AgentSetup(env_id=ID)).player(briefing)
    observation, info = env.reset(seed=0, options={"task": task, "split": split})
    for turn in range(1, 100):
        observation, _, terminated, truncated, info = env.step(player.choose(observation, info))
        if terminated or truncated:
            return info["success"], turn
    raise AssertionError("the episode never ended")


def test_gymnasiums_checker_accepts_it() -> None:
    check_env(rollgym.make(ID, render_mode="ansi").unwrapped)


@pytest.mark.parametrize(
    ("code", "guess", "expected"),
    [
        ("1234", "1234", (4, 0)),
        ("1234", "4321", (0, 4)),
        ("1234", "5666", (0, 0)),
        ("1122", "2211", (0, 4)),
        ("1123", "1111", (2, 0)),  # the code has two 1s, so the other two count for nothing
        ("1213", "1122", (1, 2)),  # 1 in place; another 1 and one 2 elsewhere
        ("6543", "5566", (1, 1)),  # 5 in place; one 6 elsewhere, and neither counts twice
    ],
)
def test_pegs_by_hand(code: str, guess: str, expected: tuple[int, int]) -> None:
    assert pegs(code, guess) == expected


def test_pegs_are_the_same_with_code_and_guess_exchanged() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        code, guess = (code_at(int(rng.integers(1296)), 4, 6, True) for _ in range(2))
        assert pegs(code, guess) == pegs(guess, code)


def test_numbers_name_each_code_once() -> None:
    assert count_codes(4, 6, True) == 1296
    assert count_codes(3, 5, False) == 60
    assert len({code_at(n, 4, 6, True) for n in range(1296)}) == 1296
    distinct = {code_at(n, 3, 5, False) for n in range(60)}
    assert len(distinct) == 60
    assert all(len(set(code)) == 3 for code in distinct)


def test_guesses_are_answered_with_all_pegs_so_far() -> None:
    env = MastermindEnv()
    env.reset(seed=0, options={"task": 0, "split": "test"})
    env._code = "1344"
    observation, reward, terminated, truncated, info = env.step("1122")
    assert observation == "1122: 1 black, 0 white\n9 guesses left."
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    observation, *_, info = env.step("4134")
    assert observation == "1122: 1 black, 0 white\n4134: 1 black, 3 white\n8 guesses left."
    assert info["history"] == [["1122", 1, 0], ["4134", 1, 3]]
    observation, reward, terminated, truncated, info = env.step("1344")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert observation.endswith("1344: 4 black, 0 white\nYou found the code: 1344.")


@pytest.mark.parametrize(
    "text", ["1234", " 1234\n", "`1234`", "1 2 3 4", "1,2,3,4", "Guess 1234", "guess: 1234."]
)
def test_forgiving_forms_of_a_guess(text: str) -> None:
    env = MastermindEnv()
    env.reset(seed=0)
    *_, info = env.step(text)
    assert info["valid"]
    assert info["history"][0][0] == "1234"


@pytest.mark.parametrize(
    "text", ["", "hello", "123", "12345", "1237", "0123", "my guess is 1234", "1234 or 1235"]
)
def test_nonsense_uses_up_a_guess_and_says_what_is_expected(text: str) -> None:
    env = MastermindEnv()
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(text)
    assert observation == "Not a guess: answer 4 digits from 1 to 6. 9 guesses left."
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert not info["valid"]
    assert info["history"] == []


def test_the_last_guess_ends_the_game_and_tells_the_code() -> None:
    env = MastermindEnv(guesses=2)
    env.reset(seed=0)
    wrong = "1111" if secret(env) != "1111" else "2222"
    env.step(wrong)
    observation, reward, terminated, truncated, info = env.step("nonsense")
    assert observation.endswith(f"No guesses left. The code was {secret(env)}.")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_the_splits_share_no_code_and_together_hold_all() -> None:
    env = MastermindEnv()
    codes = {}
    for split, count in (("train", 1038), ("dev", 129), ("test", 129)):
        for task in range(count):
            env.reset(seed=0, options={"task": task, "split": split})
            codes[split, task] = secret(env)
    assert len(codes) == len(set(codes.values())) == 1296


def test_a_split_begins_again_when_its_codes_are_used_up() -> None:
    env = MastermindEnv()
    env.reset(seed=0, options={"task": 3, "split": "test"})
    first = secret(env)
    env.reset(seed=0, options={"task": 3 + 129, "split": "test"})
    assert secret(env) == first


def test_a_task_is_the_same_code_whatever_the_seed() -> None:
    env = MastermindEnv()
    codes = []
    for seed in (0, 1, 2):
        env.reset(seed=seed, options={"task": 5, "split": "dev"})
        codes.append(secret(env))
    assert len(set(codes)) == 1


def test_codes_without_repeats() -> None:
    env = MastermindEnv(duplicates=False)
    for task in range(30):
        env.reset(seed=0, options={"task": task, "split": "test"})
        assert len(set(secret(env))) == 4
    assert "no digit occurs twice" in env.instructions


def test_the_observation_never_tells_the_code_before_the_end() -> None:
    env = MastermindEnv()
    for task in range(20):
        observation, info = env.reset(seed=0, options={"task": task, "split": "test"})
        assert secret(env) not in observation + str(info)


def test_the_expert_needs_at_most_five_guesses() -> None:
    env = MastermindEnv()
    results = [play_expert(env, task) for task in range(129)]
    assert all(success for success, _ in results)
    assert max(turns for _, turns in results) <= 5


@pytest.mark.parametrize(
    "kwargs", [{"length": 5, "digits": 8}, {"length": 4, "digits": 9, "duplicates": False}]
)
def test_the_expert_finds_longer_codes_too(kwargs: dict[str, Any]) -> None:
    env = MastermindEnv(**kwargs)
    assert all(play_expert(env, task)[0] for task in range(8))


def test_random_guesses_are_valid_and_seldom_right() -> None:
    env = MastermindEnv()
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
    assert wins <= 5  # ten guesses out of 1296 codes: 0.8 expected


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"length": 0}, "length"),
        ({"digits": 1}, "digits"),
        ({"digits": 10}, "digits"),
        ({"guesses": 0}, "guesses"),
        ({"length": 9, "digits": 9}, "codes"),
        ({"length": 7, "digits": 6, "duplicates": False}, "codes"),
    ],
)
def test_arguments_out_of_range_are_refused_with_a_sentence(kwargs: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        MastermindEnv(**kwargs)
