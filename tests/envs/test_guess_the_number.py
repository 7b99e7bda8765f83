"""GuessTheNumber: answers, limits, binary search."""

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng
from rollgym.envs.guess_the_number.env import GuessTheNumberEnv
from rollgym.envs.guess_the_number.expert import GuessTheNumberExpert

ENV_ID = "rollgym/GuessTheNumber-v0"


def hiding(number: int, **kwargs: Any) -> GuessTheNumberEnv:
    env = GuessTheNumberEnv(**kwargs)
    env.reset(seed=0)
    env._hidden = number
    return env


def test_gymnasium_accepts_it() -> None:
    check_env(make(ENV_ID).unwrapped)


def test_an_observation_can_repeat_all_answers() -> None:
    env = hiding(42, answers="all")
    seen = [env.step(guess)[0] for guess in ("many", "10", "60", "none", "30")]
    assert seen == [
        "That is not a whole number from 1 to 100. Guesses left: 9.",
        "The number is higher than 10. Guesses left: 8.",
        "The number is higher than 10, lower than 60. Guesses left: 7.",
        "That is not a whole number from 1 to 100. The number is higher than 10, lower than 60. "
        "Guesses left: 6.",
        "The number is higher than 10, lower than 60, higher than 30. Guesses left: 5.",
    ]
    assert env.reset(seed=1)[0] == "Guess a number from 1 to 100. Guesses left: 10."
    env._hidden = 3
    assert env.step("2")[0] == "The number is higher than 2. Guesses left: 9."


def test_an_observation_can_show_the_range() -> None:
    """Guesses outside the range change nothing."""
    env = hiding(42, answers="range")
    seen = [env.step(guess)[0] for guess in ("many", "10", "60", "70", "none", "41")]
    assert seen == [
        "That is not a whole number from 1 to 100. Guesses left: 9.",
        "The number is from 11 to 100. Guesses left: 8.",
        "The number is from 11 to 59. Guesses left: 7.",
        "The number is from 11 to 59. Guesses left: 6.",
        "That is not a whole number from 1 to 100. The number is from 11 to 59. Guesses left: 5.",
        "The number is from 42 to 59. Guesses left: 4.",
    ]
    assert env.reset(seed=1)[0] == "Guess a number from 1 to 100. Guesses left: 10."


def test_answers_say_higher_lower_and_correct() -> None:
    env = hiding(42)
    assert env.step("10")[0] == "The number is higher than 10. Guesses left: 9."
    assert env.step("60")[0] == "The number is lower than 60. Guesses left: 8."
    assert env.step("42") == (
        "Correct! The number is 42.",
        1.0,
        True,
        False,
        {"success": True, "valid": True, "possible": [42, 42], "left": 7},
    )


def test_info_holds_what_the_answers_leave_possible() -> None:
    env = hiding(42)
    assert env.step("10")[4]["possible"] == [11, 100]
    assert env.step("60")[4]["possible"] == [11, 59]
    assert env.step("5")[4]["possible"] == [11, 59]
    assert env.step("90")[4]["possible"] == [11, 59]


def test_used_up_guesses_lose() -> None:
    env = hiding(3, guesses=2)
    assert env.step("1")[2] is False
    observation, reward, terminated, truncated, info = env.step("2")
    assert observation == "The number is higher than 2. No guesses left: the number was 3."
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_the_last_guess_may_still_win() -> None:
    env = hiding(3, guesses=1)
    _, reward, terminated, _, info = env.step("3")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.parametrize(
    "action", ["", "fifty", "0", "101", "-5", "5.0", "1e1", "40 or 50", "٤٢", "4²", "9" * 30_000]
)
def test_anything_else_uses_a_guess_and_says_nothing_of_the_number(action: str) -> None:
    observation, reward, terminated, truncated, info = hiding(42).step(action)
    assert observation == "That is not a whole number from 1 to 100. Guesses left: 9."
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
    assert info["possible"] == [1, 100]


def test_nonsense_alone_ends_the_episode_too() -> None:
    env = hiding(42, guesses=2)
    assert [env.step("?")[2] for _ in range(2)] == [False, True]


@pytest.mark.parametrize("action", ["42", " 42\n", "`42`", '"42"', "+42", "042"])
def test_numbers_are_read_forgivingly(action: str) -> None:
    assert hiding(42).step(action)[4]["success"]


def test_the_number_comes_from_the_task_and_not_from_the_seed() -> None:
    env = GuessTheNumberEnv()
    hidden = set()
    for seed in range(5):
        env.reset(seed=seed, options={"task": 9, "split": "dev"})
        hidden.add(env._hidden)
    assert len(hidden) == 1


def test_numbers_cover_the_whole_range() -> None:
    env = GuessTheNumberEnv(highest=3)
    hidden = []
    for task in range(60):
        env.reset(options={"task": task})
        hidden.append(env._hidden)
    assert set(hidden) == {1, 2, 3}


@pytest.mark.parametrize(("highest", "guesses"), [(100, 7), (2, 2), (1000, 10)])
def test_halving_finds_every_number(highest: int, guesses: int) -> None:
    expert = GuessTheNumberExpert(AgentSetup(env_id=ENV_ID))
    env = GuessTheNumberEnv(highest=highest, guesses=guesses)
    for hidden in range(1, highest + 1):
        observation, info = env.reset(options={"task": 0})
        env._hidden = hidden
        over = False
        while not over:
            observation, _, over, _, info = env.step(expert.choose(observation, info))
        assert info["success"], hidden


def test_random_guesses_find_about_a_tenth() -> None:
    env = GuessTheNumberEnv()
    wins = 0
    for task in range(200):
        rng = derive_rng("test", task)
        observation, info = env.reset(options={"task": task, "split": "test"})
        over = False
        while not over:
            action = env.random_action(observation, info, rng)
            observation, _, over, _, info = env.step(action)
            assert info["valid"]
        wins += info["success"]
    # 1 - 0.99**10 = 0.096, so 19 of 200 are expected.
    assert 8 <= wins <= 34


def test_random_actions_depend_on_their_arguments_alone() -> None:
    fresh, played = GuessTheNumberEnv(), hiding(42)
    actions = [env.random_action("", {}, np.random.default_rng(1)) for env in (fresh, played)]
    assert actions[0] == actions[1]


@pytest.mark.parametrize("kwargs", [{"highest": 1}, {"highest": 10**7}, {"guesses": 0}, {"answers": "some"}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GuessTheNumberEnv(**kwargs)
