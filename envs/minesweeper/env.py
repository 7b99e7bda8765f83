"""The Minesweeper environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.minesweeper.generate import closed_at_start, needs_no_guess, random_field
from rollgym.envs.minesweeper.grid import FLAG, HIDDEN, Field

_ACTION = re.compile(r"(reveal|flag|unflag)[\s:(\[]+([0-9]{1,3})[\s,]+([0-9]{1,3})\s*[)\]]?", re.IGNORECASE)
_MAX_CELLS = 480
_MAX_DRAWS = 20_000

_INSTRUCTIONS = """\
Clear a field of {rows} rows and {columns} columns that hides {mines} mines.
`#` is a closed cell, `F` a closed cell with your flag, a digit tells how many of the up to eight cells
around it hide a mine, `.` means that none does (the cells around it are then opened by themselves).
Answer with one action. Rows count from the top and columns from the left, both from 1:
- `reveal ROW COLUMN` opens a closed cell, for example `reveal 2 3`; opening a mine loses;
- `flag ROW COLUMN` and `unflag ROW COLUMN` set and remove a mark of your own; no flag is needed to win.
You win when every cell without a mine is open. You have {turns} turns; an invalid action uses one up too.
{reward}"""
_PLAIN = "The reward is 1 for winning, otherwise 0."
_SHAPED = "Each cell you open gives an equal share of the reward; all of them together give 1."


class MinesweeperEnv(TextEnv):
    """Open every cell of a field that hides no mine.

    Observation:
        The board with row and column numbers (``#`` closed, ``F`` flagged, ``1`` to ``8`` mines around,
        ``.`` no mine around), then one line: what went wrong, if anything, and the turns left. A region
        without mines around it is open from the start.
    Actions:
        ``reveal ROW COLUMN``, ``flag ROW COLUMN``, ``unflag ROW COLUMN``, counted from 1. To reveal an
        open or flagged cell, to flag a cell that is not closed, and anything else is invalid: it changes
        nothing but uses up a turn.
    Reward:
        1 for winning, otherwise 0. With ``shaped``, instead, the share of the safe cells (those closed
        at the start) that an action opens, so that a win sums to 1.
    Success:
        Every cell without a mine is open.
    Ends:
        Terminated when won, or lost by opening a mine. Truncated after ``turns`` turns.
    Splits:
        Random fields; no two splits share the places of the mines. With ``no_guess`` (the default) every
        field can be cleared by reasoning alone.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "every cell without a mine is open"
    reward_range = (0.0, 1.0)
    palette = {"#": "dim", ".": "dim", "F": "bold yellow", "*": "bold red", "1": "blue", "2": "green"}

    def __init__(
        self,
        *,
        rows: int = 6,
        columns: int = 6,
        mines: int = 5,
        no_guess: bool = True,
        shaped: bool = False,
        turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        _check_arguments(rows, columns, mines, no_guess, turns)
        self._rows, self._columns, self._mines = rows, columns, mines
        self._no_guess, self._shaped = no_guess, shaped
        self._turns = turns or rows * columns
        self.tasks = TaskSet(f"Minesweeper-{rows}x{columns}-{mines}{'-no-guess' if no_guess else ''}")
        self.instructions = _INSTRUCTIONS.format(
            rows=rows, columns=columns, mines=mines, turns=self._turns, reward=_SHAPED if shaped else _PLAIN
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Lay the task's mines and open its start cell."""
        self._field = self._draw(task)
        self._closed = closed_at_start(self._field)
        self._flags: set[int] = set()
        self._left, self._to_open = self._turns, len(self._closed) - self._mines
        return self._show()

    def respond(self, action: str) -> StepResult:
        """Reveal, flag or unflag a cell."""
        self._left -= 1
        parsed = self._parse(action)
        if isinstance(parsed, str):
            return self._reply(parsed, valid=False)
        verb, cell = parsed
        if verb == "reveal":
            return self._reveal(cell)
        (self._flags.add if verb == "flag" else self._flags.discard)(cell)
        return self._reply()

    def facts(self) -> Mapping[str, Any]:
        """The visible board as one string per row, the number of mines, and the turns left."""
        return {
            "board": self._field.view(self._closed, self._flags),
            "mines": self._mines,
            "turns_left": self._left,
        }

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Reveal any closed cell that has no flag; with flags everywhere, remove one."""
        text = "".join(info["board"])
        verb, target = ("reveal", HIDDEN) if HIDDEN in text else ("unflag", FLAG)
        cell = int(rng.choice([cell for cell, symbol in enumerate(text) if symbol == target]))
        return f"{verb} {cell // self._columns + 1} {cell % self._columns + 1}"

    def _draw(self, task: Task) -> Field:
        # Not `tasks.draw`: the split of a field is known long before whether it needs a guess.
        assert self.tasks is not None
        rng = task.rng()
        for _ in range(_MAX_DRAWS):
            field = random_field(rng, self._rows, self._columns, self._mines)
            if self.tasks.home(f"{self._rows}x{self._columns} {sorted(field.mines)}") != task.split:
                continue
            if len(closed_at_start(field)) > self._mines and (not self._no_guess or needs_no_guess(field)):
                return field
        raise RuntimeError(f"{self.tasks.name}: no field for split {task.split!r} in {_MAX_DRAWS:,} draws")

    def _parse(self, action: str) -> tuple[str, int] | str:
        match = _ACTION.fullmatch(bare(action))
        if match is None:
            return "Not an action: answer `reveal ROW COLUMN`, `flag ROW COLUMN` or `unflag ROW COLUMN`."
        verb, row, column = match[1].lower(), int(match[2]), int(match[3])
        if not (1 <= row <= self._rows and 1 <= column <= self._columns):
            return (
                f"There is no cell {row} {column}: rows are 1 to {self._rows}, columns 1 to {self._columns}."
            )
        cell = (row - 1) * self._columns + column - 1
        if cell not in self._closed:
            return f"Cell {row} {column} is open already."
        if verb == "unflag" and cell not in self._flags:
            return f"Cell {row} {column} has no flag."
        if verb != "unflag" and cell in self._flags:
            return f"Cell {row} {column} has a flag: unflag it first."
        return verb, cell

    def _reveal(self, cell: int) -> StepResult:
        if cell in self._field.mines:
            self._closed -= self._field.mines
            self._flags -= self._field.mines
            return StepResult(self._show("You opened a mine and lost."), terminated=True)
        opened = self._field.opened_by(cell, self._closed)
        self._closed.difference_update(opened)
        self._flags.difference_update(opened)
        won = len(self._closed) == self._mines
        reward = len(opened) / self._to_open if self._shaped else float(won)
        if won:
            return StepResult(
                self._show("You won: every safe cell is open."), reward, terminated=True, success=True
            )
        return self._reply(reward=reward)

    def _reply(self, note: str = "", *, reward: float = 0.0, valid: bool = True) -> StepResult:
        return StepResult(self._show(note), reward, truncated=self._left == 0, valid=valid)

    def _show(self, note: str = "") -> str:
        width = len(str(self._columns))
        head = " " * len(str(self._rows)) + "  " + " ".join(f"{c + 1:>{width}}" for c in range(self._columns))
        lines = [
            f"{number:>{len(str(self._rows))}}  " + " ".join(f"{symbol:>{width}}" for symbol in row)
            for number, row in enumerate(self._field.view(self._closed, self._flags), 1)
        ]
        return "\n".join([head, *lines, f"{note} Turns left: {self._left}.".strip()])


def _check_arguments(rows: int, columns: int, mines: int, no_guess: bool, turns: int | None) -> None:
    if min(rows, columns) < 4 or rows * columns > _MAX_CELLS:
        raise UsageError(
            f"A field has at least 4 rows, at least 4 columns and at most {_MAX_CELLS} cells, "
            f"not {rows}x{columns}."
        )
    max_mines = rows * columns // 5 if no_guess else rows * columns - 10
    if not 2 <= mines <= max_mines:
        without = " that can be cleared without guessing" if no_guess else ""
        raise UsageError(f"A {rows}x{columns} field{without} has 2 to {max_mines} mines, not {mines}.")
    check_range("turns", turns, 1)
