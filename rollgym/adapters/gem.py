"""Environments of GEM: ``gem:ID``, such as ``gem:game:GuessTheNumber-v0-easy``.

GEM has Gymnasium's five values, but no spaces, splits or success, and it seeds the global generators.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from rollgym.adapters.global_random import PrivateRandom
from rollgym.adapters.prefixes import GEM
from rollgym.adapters.task_sets import content_key, draw, make_task_set
from rollgym.core.env import StepResult, TextEnv, check_number, check_whole
from rollgym.core.env_answers import answer_parts, checked_flag, checked_info, checked_reward
from rollgym.core.errors import EnvError, UnknownName, UsageError, one_line
from rollgym.core.seeding import MAX_SEED, derive_seed
from rollgym.core.tasks import Task, TaskSet

MAX_TURNS = 200
"""Default number of actions after which an episode is truncated."""
PROBES = 16
"""Seeds that show in how many ways an environment starts."""
_BOXED = re.compile(r"\\boxed\{([^{}]{1,60})\}")

_INSTRUCTIONS = """\
The first message explains the task and how an action is written, for example \\boxed{4}.
Reply with one action in that form."""


class GemEnv(TextEnv):
    r"""An environment of GEM.

    Observation: GEM's text, with the suffix of its info in the last line.

    Actions: text in the form that the first observation states; most games read the last ``\\boxed{...}``.

    Reward: GEM's.

    Success: the last reward is at least ``success_reward``.

    Ends: by GEM's flags; truncated after ``max_turns`` actions.

    Splits: seeds; no two splits share a start, unless the environment has few starts.
    """

    tasks: TaskSet

    def __init__(
        self,
        *,
        inner_id: str,
        success_reward: float = 1.0,
        max_turns: int = MAX_TURNS,
        splits: Mapping[str, int] | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        """Make the environment ``inner_id``; ``options`` are its own."""
        library: Any = GEM.load()
        self._limit = check_whole("max_turns", max_turns)
        self._name, self._success_reward = inner_id, check_number("success_reward", success_reward)
        self._fresh = self._make(library, options)
        self._env = self._fresh
        self._random = PrivateRandom(0)
        self._turns = 0
        self.instructions = _INSTRUCTIONS
        self.success_means = f"the last reward is at least {success_reward:g}"
        self.tasks = make_task_set(f"gem:{inner_id}", version(GEM.package), options, splits)
        super().__init__(render_mode=render_mode)
        keys = {self._start(derive_seed("gem probe", probe))[1] for probe in range(PROBES)}
        # Too few starts to keep splits apart: the seed alone then names the task.
        self._few_starts = len(keys) < PROBES // 2

    def begin(self, task: Task) -> str:
        """Start the task's episode."""
        self._turns = 0
        text, _, _ = draw(
            self.tasks, task, self._draw, key=lambda start: start[2] if self._few_starts else start[1]
        )
        self._random = PrivateRandom(int(self.np_random.integers(MAX_SEED)))
        return text

    def respond(self, action: str) -> StepResult:
        """Play one action."""
        with self._random:
            answer = self._env.step(action)
        name = f"gem:{self._name}"
        observation, reward, *flags, info = answer_parts(answer, 5, f"{name} returned from step()")
        reward, info = checked_reward(reward, name), checked_info(info, name)
        terminated, truncated = (checked_flag(flag, name) for flag in flags)
        self._turns += 1
        over = terminated or truncated
        return StepResult(
            self._text(observation, {} if over else info),
            reward,
            terminated=terminated,
            truncated=truncated or (not over and self._turns >= self._limit),
            success=over and reward >= self._success_reward,
        )

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """An example of the observation with other numbers, or a number."""
        examples = _BOXED.findall(observation) or ["1"]
        example = examples[int(rng.integers(len(examples)))]
        return f"\\boxed{{{re.sub(r'[0-9]+', lambda match: str(rng.integers(10)), example)}}}"

    def _make(self, library: Any, options: Mapping[str, Any]) -> Any:
        known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        importlib.import_module("gem.envs")  # registers GEM's environments
        if self._name not in known:
            raise UnknownName("environment of GEM", self._name, known)
        try:
            with PrivateRandom(0):
                return library.make(self._name, **options)
        except Exception as error:  # a missing data set, wrong options
            raise UsageError(f"gem:{self._name} cannot be made: {one_line(error)}.") from error

    def _draw(self, rng: np.random.Generator) -> tuple[str, str, str]:
        seed = int(rng.integers(MAX_SEED))
        return *self._start(seed), str(seed)

    def _start(self, seed: int) -> tuple[str, str]:
        """Start an episode; return the first observation, and a key of the whole state."""
        self._env = copy.deepcopy(self._fresh)
        with PrivateRandom(seed):
            answer = self._env.reset(seed=seed)
        observation, info = answer_parts(answer, 2, f"gem:{self._name} returned from reset()")
        text = self._text(observation, checked_info(info, f"gem:{self._name}"))
        return text, content_key(vars(self._env.unwrapped))

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        if not isinstance(observation, str):
            raise EnvError(
                f"gem:{self._name} returned a {type(observation).__name__} as observation; it must be a str"
            )
        suffix = info.get("suffix")
        return f"{observation.rstrip()}\n{suffix}" if isinstance(suffix, str) and suffix else observation
