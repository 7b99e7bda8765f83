"""Noisy demonstrations: an expert that plays some of its turns at random.

An expert without mistakes never visits the states that a beginner gets into. One that makes mistakes, and
recovers from them, does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.agent import Agent, AgentAction, Briefing, Player, as_player
from rollgym.core.seeding import derive_rng


class NoisyAgent(Agent):
    """Plays a share of the turns with ``other`` instead of ``agent``; `erred` returns which ones."""

    def __init__(self, agent: Agent, other: Agent, share: float) -> None:
        self._agent, self._other, self._share = agent, other, share
        self._turns: dict[str, list[bool]] = {}

    def player(self, briefing: Briefing) -> _NoisyPlayer:
        """A player that chooses between the two agents."""
        spec = briefing.spec
        turns = self._turns[spec.episode_id] = []
        rng = derive_rng("mistakes", spec.episode_id, spec.sampling_seed)
        players = (as_player(self._agent.player(briefing)), as_player(self._other.player(briefing)))
        return _NoisyPlayer(*players, self._share, rng, turns)

    def erred(self, episode_id: str) -> list[bool]:
        """One flag per turn of an episode: True for a mistake."""
        return self._turns[episode_id]

    async def close(self) -> None:
        """Close both agents."""
        await self._agent.close()
        await self._other.close()


class _NoisyPlayer(Player):
    def __init__(
        self, expert: Player, other: Player, share: float, rng: np.random.Generator, turns: list[bool]
    ) -> None:
        self._expert, self._other, self._share = expert, other, share
        self._rng, self._turns = rng, turns

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction | str:
        """Act with one of the two players."""
        errs = bool(self._rng.random() < self._share)
        self._turns.append(errs)
        return await (self._other if errs else self._expert).act(observation, info)

    async def leave(self) -> None:
        """End the episode for both players."""
        for player in (self._expert, self._other):
            await player.leave()
