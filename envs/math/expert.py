"""The expert of Math: computes the answer from the kind and the numbers of a generated problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.core.errors import UsageError
from rollgym.envs.math.problems import solve
from rollgym.envs.math.working import working


class MathExpert(SoloAgent):
    """Solves every generated problem."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The answer, after the working where the environment asks for it."""
        if "values" not in info:
            raise UsageError("The expert of Math solves generated problems only, not those of a file.")
        kind, values = info["kind"], info["values"]
        answer = f"Answer: {solve(kind, values)}"
        return f"{working(kind, values)}\n{answer}" if info.get("working") else answer
