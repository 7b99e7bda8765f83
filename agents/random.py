"""A random valid action each turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.agent import AgentSetup, Briefing
from rollgym.registry import make
from rollgym.seeding import derive_rng
from rollgym.text import TextFace, text_face


class RandomAgent:
    """Plays a random valid action each turn, from the episode's sampling seed."""

    def __init__(self, setup: AgentSetup) -> None:
        # A copy that is never reset: `random_action` depends on what the player sees alone.
        self._env = make(setup.env_id, **setup.env_kwargs)
        self._face = text_face(self._env)

    def player(self, briefing: Briefing) -> RandomPlayer:
        """A player with a generator of its own."""
        return RandomPlayer(self._face, briefing.spec.sampling_seed)

    async def close(self) -> None:
        """Close the copy of the environment."""
        self._env.close()


class RandomPlayer:
    """One episode's random choices."""

    def __init__(self, face: TextFace, seed: int) -> None:
        self._face = face
        self._rng = derive_rng("random agent", seed)

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """A random valid action."""
        return self._face.random_action(observation, info, self._rng)
