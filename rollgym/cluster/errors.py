"""What is raised when a part of a run on another machine goes away."""

from __future__ import annotations

import re
from typing import Any

from rollgym.errors import MissingExtra, RunError, UsageError, one_line


class ActorLost(RunError):
    """An actor died, or its node did; a new one can take its place."""

    def __init__(self, message: str, role: str = "", rank: int = 0) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank

    @classmethod
    def of(cls, role: str, rank: int, error: BaseException) -> ActorLost:
        """What Ray said about an actor, in one sentence."""
        return cls(f"{role} rank {rank} is gone: {why_lost(error)}", role, rank)


class PlacementError(RunError):
    """The devices of a plan could not be had in the time that was given."""


OLDEST_RAY = (2, 52)
"""The first Ray with token authentication: an older one runs code for any host that reaches its ports."""


def need_ray() -> Any:
    """Ray, or a sentence about how to get it. One without token authentication is refused."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("Running on a cluster", "distributed") from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2])
    if numbers < OLDEST_RAY:
        raise UsageError(
            f"Ray {ray.__version__} has no token authentication: every host that reaches its ports could run "
            f"code here. Install ray>={OLDEST_RAY[0]}.{OLDEST_RAY[1]}."
        )
    return ray


_NAMES = ("The actor ", "class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")


def why_lost(error: BaseException) -> str:
    """Why an actor died, in part of a sentence: the first thing that Ray says, which says much more."""
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
    """A text up to the end of its first sentence, without the full stop."""
    return " ".join(text.split()).split(". ")[0].rstrip(".")
