"""Errors of actors and placement."""

from __future__ import annotations

import re
from typing import Any

from rollgym.core.errors import MissingExtra, RunError, UsageError, one_line


class ActorLost(RunError):
    """An actor or its node died; the actor can be replaced."""

    def __init__(self, message: str, role: str = "", rank: int = 0) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank

    @classmethod
    def of(cls, role: str, rank: int, error: BaseException) -> ActorLost:
        """Create the error of a rank from Ray's error."""
        return cls(f"{role} rank {rank} is lost: {why_lost(error)}", role, rank)


class PlacementError(RunError):
    """The devices of a plan were not available within the timeout."""


OLDEST_RAY = (2, 52)
"""The first version with token authentication: older ones run code of any host that reaches their ports."""


def need_ray() -> Any:
    """Import and return Ray; raises if it is missing or has no token authentication."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("Running on a cluster", "distributed") from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2])
    if numbers < OLDEST_RAY:
        raise UsageError(
            f"Ray {ray.__version__} has no token authentication, so any host that reaches its ports could "
            f"run code here. Install ray>={OLDEST_RAY[0]}.{OLDEST_RAY[1]}."
        )
    return ray


_NAMES = ("The actor ", "class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")


def why_lost(error: BaseException) -> str:
    """Return why an actor died: the first sentence of Ray's long message."""
    for line in str(error).splitlines():
        text = line.strip()
        if " because " in text:
            return first_sentence(text.partition(" because ")[2])
        if " is unavailable: " in text:
            return "it cannot be reached"
        if text and not text.startswith(_NAMES):
            return first_sentence(text)
    return one_line(error)


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, without the full stop."""
    return " ".join(text.split()).split(". ")[0].rstrip(".")
