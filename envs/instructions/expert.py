"""The expert of Instructions: writes a text for generated constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.core.errors import UsageError
from rollgym.envs.instructions.generate import write
from rollgym.envs.instructions.rules import Constraint


class InstructionsExpert(SoloAgent):
    """Does every generated task."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """A text that satisfies all constraints."""
        if "level" not in info:
            raise UsageError("The expert of Instructions does generated tasks only, not those of a file.")
        return write([Constraint(made["name"], made["arguments"]) for made in info["constraints"]])
