"""A Python function as a reward, called in worker processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rollgym.errors import RewardError, UsageError, boundary
from rollgym.given import held, is_held
from rollgym.pool import EnvPool, EnvSession, LeaseLost
from rollgym.pool.inline import InlinePool
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.local import LocalPool
from rollgym.pool.wire import MAX_MESSAGE
from rollgym.records import encode_episode
from rollgym.rewards.given import function_name, reward_target
from rollgym.rewards.hosted import ENV_ID, LOCAL_ENV_ID
from rollgym.rewards.scoring import Score, read_score
from rollgym.trust import find_origin
from rollgym.types import Episode, EpisodeSpec

_IMPORT_SECONDS = 120.0
_SILENT_SECONDS = 30.0
_ATTEMPTS = 3
"""How often an episode is scored anew when its worker was lost through no fault of its own."""


class FunctionScorer:
    """Scores with ``f(episode) -> float | dict``, where ``target`` is ``module:f``.

    Each call has a worker process to itself; one that takes longer than ``timeout`` is killed with it. Calls
    that wait for a worker do not count as taking long.

    Args:
        target: The function, which gets an `Episode` and gives what `read_score` reads. A function that no
            other process can import (a lambda, one of a notebook) is called in a thread of this process: one
            that takes longer than ``timeout`` is a failure, but may still run on.
        workers: How many processes (1 where nothing is said).
        timeout: Seconds for one call, the import of the module not included.
        memory_mb: Resident memory beyond which a worker is killed.
        pool: Call it in the workers of this pool instead, which stays open. There the pool's own limits say
            when a worker is killed; what takes longer than ``timeout`` is a failure, but may still run on.
        name: What the reward is called in records; the function's name where nothing is said.
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
        local = is_held(target)
        if not 0 < timeout < math.inf:
            raise UsageError(f"The timeout of a reward must be positive and finite, not {timeout}.")
        if pool is not None and (workers is not None or memory_mb is not None):
            raise UsageError("A pool that is given has its own workers and limits: give one or the other.")
        if local and (workers, memory_mb, pool) != (None, None, None):
            raise UsageError(
                f"The reward function {target} is not defined at the top of a module that worker processes "
                "can import: put it into a module, or leave out workers, memory_mb and pool."
            )
        self.target = target
        self.name = name or function_name(target)
        self.timeout = timeout
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
        """Call the function; a `RewardError` says what went wrong in its worker."""
        line = encode_episode(episode)
        if len(line) > MAX_MESSAGE // 2:
            raise RewardError(f"the episode has {len(line)} bytes, more than a worker is sent")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._call(episode.spec.episode_id, line.decode())
            except LeaseLost as lost:
                if lost.guilty or attempt == _ATTEMPTS:
                    raise self._explained(lost) from lost
        raise AssertionError("the last attempt raises")

    async def close(self) -> None:
        """Stop the workers, unless the pool was given."""
        await self._own.close()
        if is_held(self.target) and self._given is not None:
            await self._given.close()

    async def _call(self, episode_id: str, line: str) -> Score:
        spec = EpisodeSpec(
            episode_id=episode_id, env_id=self._env_id, env_kwargs={"target": self.target}, task=0
        )
        session = await (self._given or self._own).open(spec)
        try:
            await session.reset()
            return await self._ask(session, line)
        finally:
            await session.close()

    async def _ask(self, session: EnvSession, line: str) -> Score:
        # Our own pool kills what is late; here time is taken only where that is somebody else's business.
        try:
            async with asyncio.timeout(None if self._given is None else self.timeout):
                step = await session.step(line)
        except TimeoutError:
            raise RewardError(f"{self.target} took longer than {self.timeout:g} s") from None
        with boundary(RewardError, f"{self.target} gave a bad score"):
            return read_score(step.info["score"])

    def _explained(self, lost: LeaseLost) -> RewardError:
        text = str(lost).replace("step()", self.target).replace("reset()", f"the import of {self.target}")
        error = RewardError(text)
        error.failure = lost.failure
        return error


def check_target(target: object) -> None:
    """Refuse a target that workers could not import; the module itself is not imported here."""
    if isinstance(target, str) and is_held(target):
        held(target, "reward function")
        return
    module, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not module or not name:
        raise UsageError(f"A reward function is named as module:function, not {target!r}.")
    if module == "__main__":
        raise UsageError(
            f"The reward function {target} cannot be imported by a worker: put it into a module of its own."
        )
    try:
        find_origin(module, f"The reward function {target}:")
        found = find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise UsageError(f"The reward function {target}: there is no module {module!r} on the Python path.")
