"""Two agents of one's own, a function and a class.

rollgym eval rollgym/FrozenLake-v0 --agent my_agent:first_action      (from the folder of this file)
rollgym eval rollgym/FrozenLake-v0 --agent my_agent:Explorer --agent-arg reverse=true
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollgym import AgentSetup, Briefing, SoloAgent


def first_action(observation: str, info: Mapping[str, Any]) -> str:
    """Always the first valid action. A function of (observation, info) is an agent."""
    return str(info["actions"][0])


class Explorer(SoloAgent):
    """Tries what it tried least in the state it sees; it remembers one episode at a time."""

    def __init__(self, setup: AgentSetup, reverse: bool = False) -> None:
        super().__init__(setup)
        self.reverse = reverse

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode; each episode is played by a copy of its own."""
        self.tried: Counter[tuple[str, str]] = Counter()

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The least tried action; the earlier one where several are."""
        actions = info["actions"][::-1] if self.reverse else info["actions"]
        action: str = min(actions, key=lambda each: self.tried[observation, each])
        self.tried[observation, action] += 1
        return action
