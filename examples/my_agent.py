"""Two custom agents: a function and a class.

rollgym eval rollgym/FrozenLake-v0 --agent my_agent:first_action      (from the folder of this file)
rollgym eval rollgym/FrozenLake-v0 --agent my_agent:Explorer --agent-arg reverse=true
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollgym import AgentSetup, Briefing, SoloAgent


def first_action(observation: str, info: Mapping[str, Any]) -> str:
    """Choose the first valid action. A function of (observation, info) is an agent."""
    return str(info["actions"][0])


class Explorer(SoloAgent):
    """Chooses the action it has tried least in the current state; forgets between episodes."""

    def __init__(self, setup: AgentSetup, reverse: bool = False) -> None:
        super().__init__(setup)
        self.reverse = reverse

    def start(self, briefing: Briefing) -> None:
        """Reset the counts; each episode is played by a separate copy."""
        self.tried: Counter[tuple[str, str]] = Counter()

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Choose the least tried action; the first of several."""
        actions = info["actions"][::-1] if self.reverse else info["actions"]
        action: str = min(actions, key=lambda each: self.tried[observation, each])
        self.tried[observation, action] += 1
        return action
