"""The expert of FrozenLake: value iteration on the map, which on firm ice gives the shortest path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rollgym.core.agent import Briefing, SoloAgent
from rollgym.core.messages import ToolCall
from rollgym.core.seeding import derive_rng
from rollgym.envs.frozen_lake.env import MOVES, move_call
from rollgym.envs.frozen_lake.lake import make_lake

_DISCOUNT = 0.97
"""Low enough to prefer a quick path near the turn limit, high enough to avoid a risk."""
_SWEEPS = 10_000
_CLOSE = 1e-9


class _MovingAgent(SoloAgent):
    """Chooses moves, which it makes by calls in the tool form."""

    def calls(self, action: str) -> list[ToolCall]:
        """Return a move as a call."""
        return [move_call(action)]


class FrozenLakeExpert(_MovingAgent):
    """Takes the move that leads to the goal most surely, and among equals soonest."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The best move from where the player stands."""
        row, column = info["position"]
        plan = best_moves(tuple(info["map"]), float(info["success_rate"]))
        return MOVES[plan[row * len(info["map"][0]) + column]]


class SafeRandomAgent(_MovingAgent):
    """Takes random moves that lead into no hole, if there are any.

    As ``warm_start.mistakes_agent`` it takes an expert's demonstrations to all parts of a lake. Shortest
    paths alone go down and right, and show no way out of a dead end.
    """

    def start(self, briefing: Briefing) -> None:
        """Start the random moves of an episode."""
        self._rng = derive_rng("safe random agent", briefing.spec.sampling_seed)

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """A random safe move."""
        row, column = info["position"]
        lake = make_lake(tuple(info["map"]), float(info["success_rate"]))
        cells = "".join(info["map"])
        outcomes = lake.P[row * len(info["map"][0]) + column]
        safe = [move for move in range(4) if all(cells[state] != "H" for _, state, *_ in outcomes[move])]
        return MOVES[int(self._rng.choice(safe or range(4)))]


@lru_cache(maxsize=256)
def best_moves(rows: tuple[str, ...], success_rate: float) -> tuple[int, ...]:
    """The best move in every cell of a map."""
    chances, following, rewards = _tables(make_lake(rows, success_rate).P)
    value = np.zeros(len(chances))
    for _ in range(_SWEEPS):
        action_values = (chances * (rewards + _DISCOUNT * value[following])).sum(axis=2)
        change = np.abs(action_values.max(axis=1) - value).max()
        value = action_values.max(axis=1)
        if change < _CLOSE:
            break
    # Rounded, so that ties are broken by order and not by float noise.
    return tuple(int(move) for move in action_values.round(7).argmax(axis=1))


def _tables(dynamics: Any) -> tuple[Any, Any, Any]:
    """Gymnasium's transitions as arrays by (state, move, outcome).

    In Gymnasium's table goals and holes lead to themselves and pay nothing, so they need no special case.
    """
    blank = (0.0, 0, 0.0, True)
    table = np.array(
        [[[*dynamics[s][a], blank, blank][:3] for a in range(4)] for s in range(len(dynamics))], dtype=float
    )
    return table[..., 0], table[..., 1].astype(int), table[..., 2]
