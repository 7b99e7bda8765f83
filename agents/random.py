"""A random valid action each turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import Agent, AgentSetup, Briefing, Player
from rollgym.core.env import TextInterface, text_interface
from rollgym.core.registry import make
from rollgym.core.seeding import derive_rng


class RandomAgent(Agent):
    """Plays a random valid action each turn, from the episode's sampling seed."""

    def __init__(self, setup: AgentSetup) -> None:
        # A copy that is never reset: `random_action` depends only on what the player sees.
        self._env = make(setup.env_id, **setup.env_kwargs)
        self._interface = text_interface(self._env)

    def player(self, briefing: Briefing) -> RandomPlayer:
        """Return a player with its own random generator."""
        return RandomPlayer(self._interface, briefing.spec.sampling_seed)

    async def close(self) -> None:
        """Close the copy of the environment."""
        self._env.close()


class RandomPlayer(Player):
    """One episode's random choices."""

    def __init__(self, interface: TextInterface, seed: int) -> None:
        self._interface = interface
        self._rng = derive_rng("random agent", seed)

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """Return a random valid action."""
        return self._interface.random_action(observation, info, self._rng)
