"""What runs in a worker: a reward function as an environment of one turn.

The action is an episode as a line of JSON, and what comes of it is the score. So the pool's leases,
deadlines, memory limits, kills and typed failures hold for rewards as they do for environments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rollgym.errors import RewardError, UsageError, one_line
from rollgym.given import held, is_held
from rollgym.records import decode_episode
from rollgym.registry import load_object
from rollgym.rewards.scoring import Score, read_score
from rollgym.tasks import Task
from rollgym.text import TextEnv
from rollgym.types import Episode

ENV_ID = "rollgym.rewards.hosted:FunctionEnv"
LOCAL_ENV_ID = "rollgym.rewards.hosted:LocalFunctionEnv"


def find_function(target: str) -> Callable[[Episode], Any]:
    """The reward function of a target."""
    what = "reward function"
    found = held(target, what) if is_held(target) else load_object(target, what)
    if not callable(found):
        raise UsageError(
            f"{target} is of type {type(found).__name__} and cannot be called: name a function that takes an "
            "Episode, as module:function."
        )
    function: Callable[[Episode], Any] = found
    return function


class FunctionEnv(TextEnv):
    """Calls ``target``, a function ``module:name``, with every episode it is given."""

    pool_thread = "main"
    """Libraries that compare answers set alarms, which only the main thread may."""

    def __init__(self, *, target: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.target = target
        self._function: Callable[[Episode], Any] | None = None

    def begin(self, task: Task) -> str:
        """Import the function, the first time."""
        if self._function is None:
            self._function = find_function(self.target)
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score one episode. Not `respond`: an episode is longer than an action may be."""
        score = self._score(decode_episode(action))
        return "", score.reward, True, False, {"score": msgspec.to_builtins(score)}

    def _score(self, episode: Episode) -> Score:
        assert self._function is not None, "reset() comes first"
        try:
            answer = self._function(episode)
        except BaseException as error:
            raise RewardError(f"{self.target} raised {one_line(error)}") from error
        return read_score(answer)


class LocalFunctionEnv(FunctionEnv):
    """Calls a function that was passed as an object, in this process."""

    pool_thread = "own"
    """The thread of the event loop stays free."""
