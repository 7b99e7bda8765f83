"""The expert of Nim: perfect play, in either role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.envs.nim.strategy import best_move


class NimExpert(SoloAgent):
    """Wins from every position from which the player to move can force a win."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """A move to a nim-sum of 0."""
        return best_move(info["heaps"])
