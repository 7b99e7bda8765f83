"""The expert of Judge: writes a text for the points of a generated rubric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.core.errors import UsageError
from rollgym.envs.instructions.generate import write
from rollgym.envs.instructions.rules import Constraint


class JudgeExpert(SoloAgent):
    """Satisfies every point of a generated rubric."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """A text for all points."""
        if "constraints" not in info:
            raise UsageError("The expert of Judge does generated tasks only, not those of a file.")
        return write([Constraint(made["name"], made["arguments"]) for made in info["constraints"]])
