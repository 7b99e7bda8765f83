"""Where environments run: a pool hands out leases, one round trip per turn.

The scheduler knows these protocols alone; whether an environment lives in this process, in a worker process
or on another machine is the pool's business.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from rollgym.pool.lost import LeaseLost
from rollgym.pool.sharing import shared
from rollgym.types import EpisodeSpec

__all__ = ["EnvPool", "EnvSession", "LeaseLost", "Reset", "Step", "shared"]


class Reset(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """How an episode begins."""

    observation: str
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    instructions: str = ""
    seconds: float = 0.0
    """Time inside the environment, making it included."""


class Step(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What came of one action."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    """Time inside the environment, without the way there and back."""


class EnvSession(Protocol):
    """A lease on one environment for one episode."""

    async def reset(self) -> Reset:
        """Start the episode."""

    async def step(self, action: str) -> Step:
        """Play one action."""

    async def close(self) -> None:
        """Give the environment back. Never raises."""


class EnvPool(Protocol):
    """Hands out environments."""

    async def open(self, spec: EpisodeSpec) -> EnvSession:
        """A lease on an environment of the kind the spec names."""

    async def close(self) -> None:
        """Stop everything the pool started."""
