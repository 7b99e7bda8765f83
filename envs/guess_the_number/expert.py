"""The expert of GuessTheNumber: binary search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent


class GuessTheNumberExpert(SoloAgent):
    """Binary search: finds one of n numbers with at most floor(log2 n) + 1 guesses."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The middle of the possible range."""
        low, high = info["possible"]
        return str((low + high) // 2)
