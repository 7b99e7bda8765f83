"""A Python function as a reward, called in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rollgym.core.errors import RewardError, UsageError, boundary
from rollgym.core.local_objects import get_local, is_local
from rollgym.core.serialization import encode_episode
from rollgym.core.trust import find_origin
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.pool.base import EnvPool, EnvSession, LeaseLost
from rollgym.pool.inline import InlinePool
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.local import LocalPool
from rollgym.pool.protocol import MAX_MESSAGE
from rollgym.rewards.function_ref import function_name, reward_target
from rollgym.rewards.reward_env import ENV_ID, LOCAL_ENV_ID
from rollgym.rewards.scoring import Score, check_timeout, read_score

_IMPORT_SECONDS = 120.0
_SILENT_SECONDS = 30.0
_ATTEMPTS = 3
"""Attempts to score an episode whose worker was lost without its fault."""


class FunctionScorer:
    """Scores with ``f(episode) -> float | dict``, where ``target`` is ``module:f``.

    Each call runs alone in a worker process, which is killed when the call exceeds ``timeout``. Time spent
    waiting for a worker does not count.

    Args:
        target: The function, which takes an `Episode` and returns what `read_score` accepts. A function that
            other processes cannot import (a lambda, one from a notebook) is called in a thread of this
            process: exceeding ``timeout`` is a failure, but the call may keep running.
        workers: Number of processes (default 1).
        timeout: Seconds for one call, the import of the module not included.
        memory_mb: Resident memory beyond which a worker is killed.
        pool: Use the workers of this pool, which stays open. Its limits decide when a worker is killed;
            exceeding ``timeout`` is a failure, but the call may keep running.
        name: Name of the reward in records (default: the function's name).
    """

    def __init__(
        self,
        target: str | Callable[[Episode], Any],
        *,
        workers: int | None = None,
        timeout: float = 60.0,
        memory_mb: float | None = None,
        pool: EnvPool | None = None,
        name: str = "",
    ) -> None:
        target = reward_target(target)
        check_target(target)
        local = is_local(target)
        if pool is not None and (workers is not None or memory_mb is not None):
            raise UsageError("pool excludes workers and memory_mb: a given pool has its own.")
        if local and (workers, memory_mb, pool) != (None, None, None):
            raise UsageError(
                f"The reward function {target} is not defined at the top of a module that worker processes "
                "can import: put it into a module, or leave out workers, memory_mb and pool."
            )
        self.target = target
        self.name = name or function_name(target)
        self.timeout = check_timeout(timeout)
        self._env_id = LOCAL_ENV_ID if local else ENV_ID
        self._given = InlinePool() if local else pool
        # Its processes start with the first call.
        self._own = LocalPool(
            1 if workers is None else workers,
            limits=WorkerLimits(
                step_seconds=timeout,
                reset_seconds=max(timeout, _IMPORT_SECONDS),
                silent_seconds=max(timeout, _SILENT_SECONDS),
                hard_memory_mb=memory_mb,
                leases=1,
            ),
        )

    async def score(self, episode: Episode) -> Score:
        """Call the function in a worker; raise a `RewardError` where that fails."""
        line = encode_episode(episode)
        if len(line) > MAX_MESSAGE // 2:
            raise RewardError(f"the episode has {len(line)} bytes, more than a worker accepts")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._call(episode.spec.episode_id, line.decode())
            except LeaseLost as lost:
                if lost.guilty or attempt == _ATTEMPTS:
                    raise self._explained(lost) from lost
        raise AssertionError("the last attempt raises")

    async def close(self) -> None:
        """Stop the workers, unless they belong to a given pool."""
        await self._own.close()
        if is_local(self.target) and self._given is not None:
            await self._given.close()

    async def _call(self, episode_id: str, line: str) -> Score:
        spec = EpisodeSpec(
            episode_id=episode_id, env_id=self._env_id, env_kwargs={"target": self.target}, task=0
        )
        session = await (self._given or self._own).open(spec)
        try:
            await session.reset()
            return await self._step(session, line)
        finally:
            await session.close()

    async def _step(self, session: EnvSession, line: str) -> Score:
        # The scorer's own pool enforces the timeout; only for another pool it must be enforced here.
        try:
            async with asyncio.timeout(None if self._given is None else self.timeout):
                step = await session.step(line)
        except TimeoutError:
            raise RewardError(f"{self.target} took longer than {self.timeout:g} s") from None
        with boundary(RewardError, f"{self.target} returned an invalid score"):
            return read_score(step.info["score"])

    def _explained(self, lost: LeaseLost) -> RewardError:
        text = str(lost).replace("step()", self.target).replace("reset()", f"the import of {self.target}")
        error = RewardError(text)
        error.failure = lost.failure
        return error


def check_target(target: object) -> None:
    """Raise a `UsageError` for a target that workers cannot import, without importing its module."""
    if isinstance(target, str) and is_local(target):
        get_local(target, "reward function")
        return
    module, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not module or not name:
        raise UsageError(f"A reward function is named as module:function, not {target!r}.")
    if module == "__main__":
        raise UsageError(
            f"The reward function {target} cannot be imported by a worker: move it to a separate module."
        )
    try:
        find_origin(module, f"The reward function {target}:")
        exists = find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise UsageError(f"The reward function {target}: module {module!r} was not found on the Python path.")
