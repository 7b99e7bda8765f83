"""An expert for the Tower of Hanoi: a shortest way, from a search over all positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.envs.tower_of_hanoi.pegs import LETTERS, after, distances, legal_moves


class TowerOfHanoiExpert(SoloAgent):
    """Always moves one step nearer to the goal."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The first move of a shortest way."""
        peg_of = {disk: peg for peg, disks in enumerate(info["pegs"]) for disk in disks}
        position = tuple(peg_of[disk] for disk in sorted(peg_of))
        pegs = len(info["pegs"])
        distance_of = distances(len(position), pegs, LETTERS.index(info["goal"]))
        start, end = min(legal_moves(position, pegs), key=lambda move: distance_of[after(position, *move)])
        return f"move {LETTERS[start]} {LETTERS[end]}"
