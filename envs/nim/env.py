"""Nim: two players take objects from heaps, and the one who takes the last object wins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, bare
from rollgym.core.role_env import RoleEnv, ScriptedRole
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.nim.strategy import best_move, nim_sum

LETTERS = "ABCDEFGH"
_MOVE = re.compile(r"([A-H]) ?([0-9]{1,3})", re.IGNORECASE)

_INSTRUCTIONS = """\
Two players take turns with {heaps} heaps of objects. The one who takes the last object of all wins.
Each turn, take one or more objects from one heap. Answer with the heap's letter and the number of objects you
take, and nothing else. Example: B 2
Your {faults} answer that is not such a move loses the game.
You get a reward of 1 for a win and -1 for a loss."""


class NimEnv(RoleEnv):
    """A game of Nim for two players, each a role; or for one agent against a scripted player.

    Observation: the heaps and the other player's last move, in one line.

    Actions: a heap's letter and a number of objects, such as ``B 2``.

    Reward: 1 to the winner and -1 to the loser at the end, else 0.

    Success: the role took the last object.

    Ends: terminated by the last object, or by a player's third invalid action, which loses.

    Splits: starting positions, none in two splits. With one agent, the agent makes the first move if the
    first player can force a win from the position, else the second.
    """

    pool_thread = "any"  # its calls are quick
    role_names = ("player_1", "player_2")
    others_known = ("expert", "random")
    success_means = "the player took the last object"
    reward_range = (-1.0, 1.0)
    palette = dict.fromkeys(LETTERS, "bold cyan")
    tasks: TaskSet

    def __init__(
        self,
        *,
        heaps: int = 3,
        largest: int = 7,
        faults: int = 3,
        others: str | None = "expert",
        render_mode: str | None = None,
    ) -> None:
        """Start from ``heaps`` heaps of 1 to ``largest`` objects; ``faults`` invalid actions lose."""
        check_range("heaps", heaps, 2, len(LETTERS))
        check_range("largest", largest, 2, 99)
        check_range("faults", faults, 1, 100)
        self._count, self._largest, self._faults = heaps, largest, faults
        last = {1: "first", 2: "second", 3: "third"}.get(faults, f"{faults}th")
        self.instructions = _INSTRUCTIONS.format(heaps=heaps, faults=last)
        self.tasks = TaskSet(f"Nim-{heaps}-{largest}")
        super().__init__(others=others, render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Lay out the task's heaps."""
        self._heaps = self.tasks.draw(task, self._random_heaps, key=str)
        self._left = dict.fromkeys(self.role_names, self._faults)
        if not nim_sum(self._heaps):
            self.own_role = self.role_names[1]
        return self._shown()

    def respond(self, action: str) -> StepResult:
        """Take objects from a heap, and pass the turn."""
        match = _MOVE.fullmatch(bare(action))
        heap = LETTERS.index(match[1].upper()) if match else -1
        number = int(match[2]) if match else 0
        if not 0 <= heap < len(self._heaps) or not 1 <= number <= self._heaps[heap]:
            return self._fault()
        self._heaps[heap] -= number
        mover, move = self.to_move, f"{LETTERS[heap]} {number}"
        if not any(self._heaps):
            return self._over(mover, f"{{mover}} took {move}, the last.", mover)
        self.to_move = self.next_role()
        return StepResult(f"{self._shown()} The other player took {move}.")

    def facts(self) -> Mapping[str, Any]:
        """The heaps and the moves."""
        moves = [
            f"{LETTERS[heap]} {number}"
            for heap, size in enumerate(self._heaps)
            for number in range(1, size + 1)
        ]
        return {"heaps": list(self._heaps), "actions": moves}

    def scripted(self, role: str, name: str, rng: np.random.Generator) -> ScriptedRole:
        """Perfect play, or random moves."""
        if name == "random":
            return lambda observation, info: self.random_action(observation, info, rng)
        return lambda observation, info: best_move(info["heaps"])

    def render_text(self) -> str:
        """The heaps as rows of objects."""
        return "\n".join(f"{LETTERS[heap]} {'o' * size}" for heap, size in enumerate(self._heaps))

    def _random_heaps(self, rng: np.random.Generator) -> list[int]:
        return [int(size) for size in rng.integers(1, self._largest + 1, self._count)]

    def _shown(self) -> str:
        heaps = ", ".join(f"{LETTERS[heap]} {size}" for heap, size in enumerate(self._heaps))
        return f"Heaps: {heaps}."

    def _fault(self) -> StepResult:
        role = self.to_move
        self._left[role] -= 1
        if not self._left[role]:
            winner = self.next_role()
            return self._over(winner, "{mover} made too many invalid moves.", role, valid=False)
        note = "That is not a move: give the letter of a heap and a number of objects in it."
        return StepResult(f"{self._shown()} {note}", valid=False)

    def _over(self, winner: str, note: str, mover: str, *, valid: bool = True) -> StepResult:
        """The end, addressed to the one agent or to the role that acted last."""
        reader = mover if self.roles else self.own_role
        told = note.format(mover="You" if reader == mover else "The other player")
        return StepResult(
            f"{told} You {'win' if reader == winner else 'lose'}.",
            terminated=True,
            valid=valid,
            rewards={role: 1.0 if role == winner else -1.0 for role in self.role_names},
            successes={role: role == winner for role in self.role_names},
        )
