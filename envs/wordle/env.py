"""A word game like Wordle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.seeding import derive_rng
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.wordle.words import LENGTH, mark, word_list, word_set

_WORD = re.compile(r"[a-z]{5}|[a-z]( [a-z]){4}")

_INSTRUCTIONS = """\
Find a hidden English word of five letters.
Each turn, answer with one five-letter word and nothing else. Example: crane
Under your guess stands a mark for each letter: G if the letter is right and in the right place, Y if it
is in the word but in another place, - if it is not in the word (or not once more).
You have {guesses} guesses. {rule}
You get a reward of 1 for finding the word, else 0."""
_LISTED = "Only common words are known; an unknown word or anything else uses up a guess and gets no marks."
_ANY = "Anything but five letters uses up a guess and gets no marks."


class WordleEnv(TextEnv):
    """Find a hidden five-letter word.

    Observation: the guess, its letters apart, a line of marks (``G``, ``Y``, ``-``) under it, and the
    guesses left.

    Actions: a five-letter word of the word list; with ``any_word=True`` any five letters a to z.

    Reward: 1 for the hidden word, else 0.

    Success: the word was found.

    Ends: terminated when the word is found or the guesses are used up. A guess that is not a known word uses
    up a turn and gets no marks.

    Splits: each word of the list is hidden in one split only. Tasks 0, 1, 2... hide different words until
    the split's words are used up, then the same words again.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "the hidden word was guessed"
    reward_range = (0.0, 1.0)
    palette = {"G": "bold green", "Y": "yellow"}
    tasks: TaskSet

    def __init__(self, *, guesses: int = 6, any_word: bool = False, render_mode: str | None = None) -> None:
        """Allow this many guesses; with ``any_word`` of any letters."""
        check_range("guesses", guesses, 1, 1_000)
        self._guesses, self._any_word = guesses, any_word
        self.instructions = _INSTRUCTIONS.format(guesses=guesses, rule=_ANY if any_word else _LISTED)
        self._words: dict[str, list[str]] = {}
        self.tasks = TaskSet("Wordle")
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Hide the task's word."""
        words = self._words_of(task.split)
        self._hidden = words[task.index % len(words)]
        self._past: list[tuple[str, str]] = []
        self._left = self._guesses
        return f"The word has {LENGTH} letters. Guesses left: {self._left}."

    def respond(self, action: str) -> StepResult:
        """Mark a guess."""
        self._left -= 1
        text = bare(action).lower()
        guess = text.replace(" ", "") if _WORD.fullmatch(text) else ""
        if not self._is_word(guess):
            note = f"{guess} is not in the word list." if guess else f"Answer one word of {LENGTH} letters."
            return StepResult(f"{note} {self._ending()}", terminated=self._left == 0, valid=False)
        self._past.append((guess, mark(guess, self._hidden)))
        if guess == self._hidden:
            return StepResult(f"{_marked(*self._past[-1])}\nCorrect!", 1.0, terminated=True, success=True)
        return StepResult(f"{_marked(*self._past[-1])}\n{self._ending()}", terminated=self._left == 0)

    def facts(self) -> Mapping[str, Any]:
        """The guesses so far with their marks, and the guesses left."""
        return {"guesses": [list(pair) for pair in self._past], "left": self._left}

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Any word of the list."""
        words = word_list()
        return words[int(rng.integers(len(words)))]

    def render_text(self) -> str:
        """All guesses with their marks."""
        return "\n".join([*(_marked(*pair) for pair in self._past), f"Guesses left: {self._left}."])

    def _words_of(self, split: str) -> list[str]:
        """The words a split may hide, in a fixed random order."""
        if split not in self._words:
            words = [word for word in word_list() if self.tasks.home(word) == split]
            order = derive_rng("words", self.tasks.name, split).permutation(len(words))
            self._words[split] = [words[i] for i in order]
        return self._words[split]

    def _is_word(self, guess: str) -> bool:
        return bool(guess) and (self._any_word or guess in word_set())

    def _ending(self) -> str:
        return f"Guesses left: {self._left}." if self._left else f"No guesses left: it was {self._hidden}."


def _marked(guess: str, marks: str) -> str:
    """A guess over its marks, the letters apart so that a tokenizer keeps them apart."""
    return f"{' '.join(guess.upper())}\n{' '.join(marks)}"
