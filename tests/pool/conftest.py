"""What the tests of the pool share: specs, players, and a look at processes."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollgym.core.types import EpisodeSpec
from rollgym.pool import linux
from rollgym.pool.base import EnvPool
from rollgym.pool.local import LocalPool

T = TypeVar("T")


class Kit:
    """Helpers, as one fixture."""

    @staticmethod
    def spec(env: str = "Counting", task: int = 5, name: str = "", **kwargs: object) -> EpisodeSpec:
        """An episode of an environment in ``faulty``."""
        return EpisodeSpec(
            episode_id=name or f"{env}-{task}",
            env_id=f"faulty:{env}",
            env_kwargs=dict(kwargs),
            task=task,
            split="test",
            env_seed=11,
        )

    @staticmethod
    async def play(pool: EnvPool, spec: EpisodeSpec, *actions: str) -> list[str]:
        """Play the actions (three times yes if none are given) and return the observations."""
        session = await pool.open(spec)
        try:
            start = await session.reset()
            steps = [await session.step(action) for action in actions or ("yes", "yes", "yes")]
            return [start.observation, *(step.observation for step in steps)]
        finally:
            await session.close()

    @staticmethod
    def run(use: Callable[[LocalPool], Awaitable[T]], workers: int = 1, **options: Any) -> T:
        """Use a pool, close it, and see to it that no process of it is left."""

        async def go() -> T:
            pool = LocalPool(workers, **options)
            try:
                return await use(pool)
            finally:
                await pool.close()

        before = set(linux.children())
        result = asyncio.run(go())
        assert set(linux.children()) <= before
        return result

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether a process runs; a zombie does not."""
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (ProcessLookupError, FileNotFoundError):
            return False

    @staticmethod
    def memory_mb(pid: int) -> float:
        """Resident memory of a process."""
        gauge = linux.open_memory_gauge(pid)
        assert gauge is not None
        try:
            return linux.resident_mb(gauge)
        finally:
            os.close(gauge)

    @staticmethod
    def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
        """Wait for something that takes a moment."""
        deadline = time.monotonic() + seconds
        while not true() and time.monotonic() < deadline:
            time.sleep(0.02)
        return true()

    @staticmethod
    async def until_async(true: Callable[[], bool], seconds: float = 20.0) -> bool:
        """The same, while the event loop goes on."""
        deadline = time.monotonic() + seconds
        while not true() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return true()


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
