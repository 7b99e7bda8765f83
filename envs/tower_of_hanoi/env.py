"""The Tower of Hanoi environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.tower_of_hanoi.pegs import LETTERS, after, legal_moves, starts_of, tops

_MOVE = re.compile(r"(?:move\s+)?([a-z])(?:\s*(?:->|,)\s*|\s+to\s+|\s+)([a-z])", re.IGNORECASE)
_MAX_POSITIONS = 20_000

_INSTRUCTIONS = """\
There are {disks} disks, 1 (the smallest) to {disks} (the largest), on {pegs} pegs: {letters}.
Each line shows a peg and its disks from the bottom to the top: the last number is the top disk, `-` means
that the peg is empty.
Bring all disks onto the goal peg. A move takes the top disk of one peg onto another peg, which must be empty
or have a larger top disk.
Answer with one move, from peg and to peg, for example `move A C`.
You have {turns} turns; an illegal move changes nothing but uses one up too.
The reward is 1 for reaching the goal, otherwise 0."""


class TowerOfHanoiEnv(TextEnv):
    """Bring all disks onto the goal peg.

    Observation:
        The goal peg, one line for each peg with its disks from bottom to top (``A: 3 1``; ``-`` where
        there are none), and the turns left. After an illegal move the last line says why.
    Actions:
        ``move A C``; ``A C``, ``A->C``, ``A,C`` and ``A to C`` mean the same. Taking from an empty
        peg, putting a disk onto a smaller one or back onto its own peg, and anything else is invalid: it
        changes nothing but uses up a turn.
    Reward:
        1 on reaching the goal, otherwise 0.
    Success:
        All disks are on the goal peg.
    Ends:
        Terminated at the goal. Truncated after ``turns`` turns (2 to the power of disks + 1 by default,
        a little more than twice what the farthest start on three pegs needs).
    Splits:
        A start is a position and a goal peg; the largest disk never begins on the goal peg. There are few
        (54 with 3 disks, 162 with 4). In a fixed shuffled order a fifth belongs to ``dev``, a fifth to
        ``test``, the rest to ``train``. Tasks 0, 1, 2... of a split are different starts until all are
        used, then the same again. Many starts differ from others by the names of the pegs alone.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "all disks are on the goal peg"
    reward_range = (0.0, 1.0)

    def __init__(
        self, *, disks: int = 3, pegs: int = 3, turns: int | None = None, render_mode: str | None = None
    ) -> None:
        _check_arguments(disks, pegs, turns)
        self._disks, self._pegs = disks, pegs
        self._turns = turns or 2 ** (disks + 1)
        self.tasks = TaskSet(f"TowerOfHanoi-{disks}-{pegs}")
        self.instructions = _INSTRUCTIONS.format(
            disks=disks, pegs=pegs, letters=", ".join(LETTERS[:pegs]), turns=self._turns
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set up the task's position and goal."""
        starts = starts_of(task.split, self._disks, self._pegs)
        self._position, self._goal = starts[task.index % len(starts)]
        self._left = self._turns
        return self._show()

    def respond(self, action: str) -> StepResult:
        """Play one move."""
        self._left -= 1
        move = self._parse(action)
        if isinstance(move, str):
            return StepResult(self._show(move), truncated=self._left == 0, valid=False)
        self._position = after(self._position, *move)
        if set(self._position) == {self._goal}:
            return StepResult(self._show("You reached the goal."), 1.0, terminated=True, success=True)
        return StepResult(self._show(), truncated=self._left == 0)

    def facts(self) -> Mapping[str, Any]:
        """The pegs with their disks from bottom to top, the goal peg, the legal moves, the turns left."""
        return {
            "pegs": [self._disks_on(peg) for peg in range(self._pegs)],
            "goal": LETTERS[self._goal],
            "actions": [
                f"move {LETTERS[start]} {LETTERS[end]}"
                for start, end in legal_moves(self._position, self._pegs)
            ],
            "turns_left": self._left,
        }

    def _parse(self, action: str) -> tuple[int, int] | str:
        match = _MOVE.fullmatch(bare(action))
        if match is None:
            return "Not a move: answer two pegs, for example `move A C`."
        names = match[1].upper(), match[2].upper()
        for name in names:
            if name not in LETTERS[: self._pegs]:
                return f"There is no peg {name}; the pegs are {', '.join(LETTERS[: self._pegs])}."
        start, end = LETTERS.index(names[0]), LETTERS.index(names[1])
        return self._objection(start, end) or (start, end)

    def _objection(self, start: int, end: int) -> str:
        """Why a move between two pegs is illegal; empty where it is legal."""
        top = tops(self._position, self._pegs)
        disk, other = top[start], top[end]
        if disk is None:
            return f"Illegal: peg {LETTERS[start]} is empty."
        if start == end:
            return "Illegal: the two pegs of a move must differ."
        if other is not None and other < disk:
            return f"Illegal: disk {disk + 1} cannot go onto the smaller disk {other + 1}."
        return ""

    def _disks_on(self, peg: int) -> list[int]:
        return [disk + 1 for disk in reversed(range(len(self._position))) if self._position[disk] == peg]

    def _show(self, note: str = "") -> str:
        head = f"Goal: all disks on peg {LETTERS[self._goal]}."
        stacks = [" ".join(map(str, self._disks_on(peg))) or "-" for peg in range(self._pegs)]
        lines = [f"{letter}: {stack}" for letter, stack in zip(LETTERS, stacks, strict=False)]
        return "\n".join([head, *lines, f"{note} Turns left: {self._left}.".strip()])


def _check_arguments(disks: int, pegs: int, turns: int | None) -> None:
    check_range("pegs", pegs, 3, len(LETTERS))
    if disks < 2 or pegs**disks > _MAX_POSITIONS:
        raise UsageError(
            f"disks must be at least 2, and {pegs} pegs with {disks} disks may have at most "
            f"{_MAX_POSITIONS:,} positions, not {pegs**disks:,}."
        )
    check_range("turns", turns, 1)
