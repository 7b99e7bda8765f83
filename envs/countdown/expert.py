"""The expert of Countdown: try everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.envs.countdown.puzzle import solve


class CountdownExpert(SoloAgent):
    """Searches all ways to join the numbers; every task has a way."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """An expression for the target."""
        numbers = tuple(info["numbers"])
        return solve(numbers, info["target"]) or str(numbers[0])
