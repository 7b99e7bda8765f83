"""Tasks of reasoning-gym as environments: ``reasoning_gym:DATASET``.

A task is one question and an episode one answer. Questions are generated, so the splits are made here: a
question belongs to the split that a hash of its text names, and no two splits share one.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from rollgym.adapters.global_random import PrivateRandom
from rollgym.adapters.prefixes import REASONING_GYM
from rollgym.adapters.random_text import random_word
from rollgym.adapters.task_sets import draw, make_task_set
from rollgym.core.env import StepResult, TextEnv, check_number
from rollgym.core.env_answers import checked_reward
from rollgym.core.errors import EnvError, UnknownName, UsageError, one_line
from rollgym.core.seeding import MAX_SEED
from rollgym.core.tasks import Task

_INSTRUCTIONS = """\
Answer the question. Reply with the final answer only, in the form that the question asks for.
Text between <answer> and </answer>, if you write these tags, is taken as the answer.
The reward is the score of the answer, from 0 to 1."""


class ReasoningGymEnv(TextEnv):
    """One question of a reasoning-gym dataset.

    Observation: the question.

    Actions: the answer as text; with ``<answer>`` tags, the text in the last pair of them.

    Reward: the score of the answer by the dataset's own function. An answer on which that function raises
    scores 0 and is invalid.

    Success: a score of at least ``success_score``.

    Ends: terminated by the first answer.

    Splits: generated questions, none in two splits.
    """

    success_means = "the dataset scores the answer with at least success_score (1 by default)"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        *,
        inner_id: str,
        success_score: float = 1.0,
        splits: Mapping[str, int] | None = None,
        render_mode: str | None = None,
        **config: Any,
    ) -> None:
        """Open the dataset ``inner_id``; ``config`` has its own settings, such as ``max_animals=5``."""
        self._library: Any = REASONING_GYM.load()
        self._success_score = check_number("success_score", success_score)
        self._name, self._config = inner_id, dict(config)
        self._check_config()
        self.instructions = _INSTRUCTIONS
        self.tasks = make_task_set(
            f"reasoning_gym:{inner_id}", version(REASONING_GYM.package), self._config, splits
        )
        super().__init__(render_mode=render_mode)
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}

    def begin(self, task: Task) -> str:
        """Generate the task's question."""
        assert self.tasks is not None
        self._dataset, self._entry = draw(self.tasks, task, self._generate, lambda pair: pair[1]["question"])
        return str(self._entry["question"])

    def respond(self, action: str) -> StepResult:
        """Score the answer; the episode is over."""
        answer, valid = _answer_of(action), True
        with PrivateRandom(0):
            try:
                given = self._dataset.score_answer(answer=answer, entry=self._entry)
            except Exception:  # score functions parse the answer, and some raise on nonsense
                given, valid = 0.0, False
        score = checked_reward(given, f"reasoning_gym:{self._name}")
        if not 0.0 <= score <= 1.0:
            raise EnvError(f"reasoning_gym:{self._name} scored an answer with {score}, outside 0 to 1.")
        success = score >= self._success_score
        return StepResult(
            "Right." if success else "Not right.", score, terminated=True, success=success, valid=valid
        )

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A word of the question, or a number from 0 to 9."""
        return random_word(observation, rng)

    def _check_config(self) -> None:
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if self._name not in known:
            raise UnknownName("dataset of reasoning-gym", self._name, known)
        settings = [field.name for field in dataclasses.fields(known[self._name][1])]
        for name in self._config:
            if name not in settings or name in ("seed", "size"):
                known = [setting for setting in settings if setting not in ("seed", "size")]
                raise UnknownName(
                    f"setting of reasoning_gym:{self._name}", name, known, f"Settings: {', '.join(known)}."
                )
        try:
            self._create(0)
        except Exception as error:  # datasets check their settings with assertions and other errors
            raise UsageError(
                f"reasoning_gym:{self._name} does not accept the settings {self._config}: {one_line(error)}."
            ) from error

    def _create(self, seed: int) -> Any:
        with PrivateRandom(seed):
            return self._library.create_dataset(self._name, seed=seed, size=1, **self._config)

    def _generate(self, rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
        seed = int(rng.integers(MAX_SEED))
        dataset = self._create(seed)
        with PrivateRandom(seed):
            entry = dataset[0]
        if not isinstance(entry, dict) or not isinstance(entry.get("question"), str):
            raise EnvError(
                f"reasoning_gym:{self._name} gave an entry without a question: {type(entry).__name__}."
            )
        return dataset, entry


def _answer_of(action: str) -> str:
    start = action.rfind("<answer>")
    if start < 0:
        return action.strip()
    return action[start + len("<answer>") :].partition("</answer>")[0].strip()
