"""A reward function as an environment of one turn, to run in a pool's worker.

The action is an episode as a line of JSON, and the info holds the score. So the pool's leases, deadlines,
memory limits, kills and typed failures apply to rewards as they do to environments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rollgym.core.env import TextEnv
from rollgym.core.errors import RewardError, UsageError, one_line
from rollgym.core.local_objects import get_local, is_local
from rollgym.core.registry import load_object
from rollgym.core.serialization import decode_episode
from rollgym.core.tasks import Task
from rollgym.core.types import Episode
from rollgym.rewards.scoring import Score, read_score

ENV_ID = "rollgym.rewards.reward_env:RewardFunctionEnv"
LOCAL_ENV_ID = "rollgym.rewards.reward_env:LocalFunctionEnv"


def find_function(target: str) -> Callable[[Episode], Any]:
    """Return the reward function of a target."""
    kind = "reward function"
    function: Any = get_local(target, kind) if is_local(target) else load_object(target, kind)
    if not callable(function):
        raise UsageError(
            f"{target} is not callable (type {type(function).__name__}): name a function that takes an "
            "Episode, as module:function."
        )
    result: Callable[[Episode], Any] = function
    return result


class RewardFunctionEnv(TextEnv):
    """Calls ``target``, a function ``module:name``, with each episode."""

    pool_thread = "main"
    """Libraries that compare answers set alarms, which work only in the main thread."""

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
        """Score one episode. Not `respond`: an episode may be longer than an action."""
        score = self._score(decode_episode(action))
        return "", score.reward, True, False, {"score": msgspec.to_builtins(score)}

    def _score(self, episode: Episode) -> Score:
        assert self._function is not None, "reset() comes first"
        try:
            answer = self._function(episode)
        except BaseException as error:
            raise RewardError(f"{self.target} raised {one_line(error)}") from error
        return read_score(answer)


class LocalFunctionEnv(RewardFunctionEnv):
    """Calls a function that was passed as an object, in this process."""

    pool_thread = "own"
    """A separate thread, so that the event loop is not blocked."""
