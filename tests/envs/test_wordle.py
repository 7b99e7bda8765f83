"""Wordle: marks, guesses, the word list, the expert."""

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.envs.wordle.env import WordleEnv
from rollgym.envs.wordle.expert import FIRST, WordleExpert, best_guess, fits
from rollgym.envs.wordle.words import mark, word_list

ENV_ID = "rollgym/Wordle-v0"
WORDS = st.text(alphabet="abc", min_size=5, max_size=5)


def hiding(word: str, **kwargs: Any) -> WordleEnv:
    env = WordleEnv(**kwargs)
    env.reset(seed=0)
    env._hidden = word
    return env


def test_gymnasium_accepts_it() -> None:
    check_env(make(ENV_ID).unwrapped)


@pytest.mark.parametrize(
    ("guess", "hidden", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("pilot", "crane", "-----"),
        ("nacre", "crane", "YYYYG"),
        ("eerie", "crane", "--Y-G"),
        ("eerie", "eagle", "G---G"),
        ("allow", "llama", "YGY--"),
        ("llama", "allow", "YGY--"),
        ("speed", "abide", "--Y-Y"),
        ("speed", "erase", "Y-YY-"),
        ("speed", "steal", "G-G--"),
        ("geese", "these", "--GGG"),
        ("aabbb", "ccaac", "YY---"),
    ],
)
def test_marks(guess: str, hidden: str, marks: str) -> None:
    assert mark(guess, hidden) == marks


@settings(deadline=None)
@given(WORDS, WORDS)
def test_a_letter_is_marked_as_often_as_both_words_have_it(guess: str, hidden: str) -> None:
    marks = mark(guess, hidden)
    for letter in "abc":
        marked = sum(m != "-" for m, g in zip(marks, guess, strict=True) if g == letter)
        assert marked == min(guess.count(letter), hidden.count(letter))
    for m, g, h in zip(marks, guess, hidden, strict=True):
        assert (m == "G") == (g == h)


def test_a_guess_is_shown_over_its_marks() -> None:
    env = hiding("light")
    assert env.reset()[0] == "The word has 5 letters. Guesses left: 6."
    env._hidden = "light"
    observation, reward, terminated, _, info = env.step("might")
    assert observation == "M I G H T\n- G G G G\nGuesses left: 5."
    assert (reward, terminated, info["success"]) == (0.0, False, False)
    assert info["guesses"] == [["might", "-GGGG"]]
    observation, reward, terminated, truncated, info = env.step("light")
    assert observation == "L I G H T\nG G G G G\nCorrect!"
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_used_up_guesses_lose() -> None:
    env = hiding("light", guesses=2)
    assert env.step("might")[2] is False
    observation, reward, terminated, truncated, info = env.step("night")
    assert observation == "N I G H T\n- G G G G\nNo guesses left: it was light."
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


@pytest.mark.parametrize("action", ["light", " LIGHT\n", "`light`", '"Light"', "L I G H T"])
def test_guesses_are_read_forgivingly(action: str) -> None:
    assert hiding("light").step(action)[4]["success"]


@pytest.mark.parametrize(
    "action", ["", "lights", "ligh", "li ght", "l1ght", "my guess is light", "l" * 40_000]
)
def test_anything_but_five_letters_uses_a_guess_without_marks(action: str) -> None:
    observation, reward, terminated, _, info = hiding("light").step(action)
    assert observation == "Answer one word of 5 letters. Guesses left: 5."
    assert (reward, terminated, info["valid"], info["guesses"]) == (0.0, False, False, [])


def test_an_unknown_word_uses_a_guess_without_marks() -> None:
    observation, _, _, _, info = hiding("light").step("zzzzz")
    assert observation == "zzzzz is not in the word list. Guesses left: 5."
    assert (info["valid"], info["guesses"], info["left"]) == (False, [], 5)


def test_with_any_word_unknown_words_are_marked() -> None:
    assert hiding("light", any_word=True).step("zzztz")[4]["guesses"] == [["zzztz", "---Y-"]]


def test_nonsense_alone_ends_the_episode_too() -> None:
    env = hiding("light", guesses=2)
    assert [env.step("?")[2] for _ in range(2)] == [False, True]


def test_the_word_list_is_clean() -> None:
    words = word_list()
    assert len(words) > 1_000
    assert list(words) == sorted(set(words))
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in words)


def test_each_word_is_hidden_in_one_split_only() -> None:
    env = WordleEnv()
    hidden = {split: env._words_of(split) for split in ("train", "dev", "test")}
    everything = [word for words in hidden.values() for word in words]
    assert sorted(everything) == list(word_list())
    assert min(len(words) for words in hidden.values()) > 80


def test_tasks_hide_different_words_until_all_are_used() -> None:
    env = WordleEnv()
    count = len(env._words_of("dev"))
    hidden = []
    for task in range(count + 1):
        env.reset(seed=task, options={"task": task, "split": "dev"})
        hidden.append(env._hidden)
    assert len(set(hidden[:count])) == count
    assert hidden[count] == hidden[0]


def test_random_actions_are_words_of_the_list() -> None:
    action = WordleEnv().random_action("", {}, np.random.default_rng(0))
    assert action in word_list()


def test_the_expert_keeps_to_words_that_fit() -> None:
    assert fits("light", [["might", "-GGGG"]])
    assert not fits("might", [["might", "-GGGG"]])
    assert best_guess(("light", "night")) == "light"


def test_a_telling_guess_beats_one_that_may_be_right() -> None:
    # Each of these tells one of five apart; a word with several of f, l, m, n, r tells more.
    assert best_guess(("fight", "light", "might", "night", "right")) not in ("fight", "light")


def test_the_opening_is_a_known_word() -> None:
    assert FIRST in word_list()


def guesses_needed(hidden: str) -> int:
    env = hiding(hidden)
    expert = WordleExpert(AgentSetup(env_id=ENV_ID))
    info: dict[str, Any] = {"guesses": []}
    for count in range(1, 7):
        *_, info = env.step(expert.choose("", info))
        assert info["valid"]
        if info["success"]:
            return count
    return 7


def test_the_expert_finds_words_with_five_guesses_or_fewer() -> None:
    assert max(guesses_needed(word) for word in word_list()[::25]) <= 5


@pytest.mark.slow
def test_the_expert_finds_every_word_with_five_guesses_or_fewer() -> None:
    assert max(guesses_needed(word) for word in word_list()) <= 5


def test_random_guesses_hardly_ever_find_the_word() -> None:
    env = WordleEnv()
    rng = np.random.default_rng(0)
    wins = 0
    for task in range(50):
        observation, info = env.reset(options={"task": task, "split": "test"})
        over = False
        while not over:
            observation, _, over, _, info = env.step(env.random_action(observation, info, rng))
            assert info["valid"]
        wins += info["success"]
    assert wins <= 3


def test_bad_options_are_refused() -> None:
    with pytest.raises(UsageError):
        WordleEnv(guesses=0)
