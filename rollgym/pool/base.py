"""Protocols of environment pools: a pool hands out leases, one round trip per turn.

The scheduler depends only on these protocols; environments may run in this process, in worker processes or
on other machines.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from rollgym.core.messages import ToolSpec
from rollgym.core.types import EpisodeSpec, RoleSpec
from rollgym.pool.errors import LeaseLost

__all__ = ["EnvPool", "EnvSession", "LeaseLost", "Reset", "Step"]


class Reset(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Result of a reset."""

    observation: str
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    instructions: str = ""
    seconds: float = 0.0
    """Seconds inside the environment, including its construction."""
    tools: tuple[ToolSpec, ...] = ()
    roles: tuple[RoleSpec, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Result of a step."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    """Seconds inside the environment, excluding transport."""


class EnvSession(Protocol):
    """A lease on one environment for one episode. Implementations inherit from it, for the defaults."""

    healthy: bool = True
    """Set to False before `close` to have the environment closed instead of reused."""

    @property
    def worker(self) -> str:
        """Label of the worker that hosts the environment, for logs."""
        return ""

    async def reset(self) -> Reset:
        """Start the episode."""

    async def step(self, action: str) -> Step:
        """Play one action."""

    async def close(self) -> None:
        """Return the environment to the pool. Never raises."""


class EnvPool(Protocol):
    """Hands out leases on environments."""

    async def open(self, spec: EpisodeSpec) -> EnvSession:
        """Open a lease on an environment for this spec."""

    async def close(self) -> None:
        """Stop everything the pool started."""
