"""A demonstrator that errs: some of its turns are random.

An expert that never errs shows nothing of the positions that a beginner gets into. One that errs now and
then, and goes on from there, does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.agent import Agent, Briefing, Move, Player
from rollgym.seeding import derive_rng


class ErringAgent:
    """Plays as ``agent`` does, but a share of the turns as ``other`` does; `erred` says which ones."""

    def __init__(self, agent: Agent, other: Agent, share: float) -> None:
        self._agent, self._other, self._share = agent, other, share
        self._turns: dict[str, list[bool]] = {}

    def player(self, briefing: Briefing) -> _ErringPlayer:
        """A player with two minds."""
        spec = briefing.spec
        turns = self._turns[spec.episode_id] = []
        rng = derive_rng("mistakes", spec.episode_id, spec.sampling_seed)
        minds = (self._agent.player(briefing), self._other.player(briefing))
        return _ErringPlayer(*minds, self._share, rng, turns)

    def erred(self, episode_id: str) -> list[bool]:
        """For each turn of an episode, whether it was a mistake."""
        return self._turns[episode_id]

    async def close(self) -> None:
        """Close both."""
        await self._agent.close()
        await self._other.close()


class _ErringPlayer:
    def __init__(
        self, right: Player, wrong: Player, share: float, rng: np.random.Generator, turns: list[bool]
    ) -> None:
        self._right, self._wrong, self._share = right, wrong, share
        self._rng, self._turns = rng, turns

    async def act(self, observation: str, info: Mapping[str, Any]) -> Move | str:
        """Ask one of the two."""
        errs = bool(self._rng.random() < self._share)
        self._turns.append(errs)
        return await (self._wrong if errs else self._right).act(observation, info)

    async def leave(self) -> None:
        """The episode has ended for both."""
        for mind in (self._right, self._wrong):
            leave = getattr(mind, "leave", None)
            if leave is not None:
                await leave()
