"""The Sudoku environment."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.sudoku.grid import Solver, coordinates, digits_of, full_grid, puzzle_from, units_of

_ACTION = re.compile(
    r"(?:(fill)[\s:(\[]+([0-9])[\s,]+([0-9])[\s,=]+([0-9])|(clear)[\s:(\[]+([0-9])[\s,]+([0-9]))\s*[)\]]?",
    re.IGNORECASE,
)
_BLANKS = {4: 11, 9: 45}
_MOST_BLANKS = {4: 12, 9: 55}
_UNITS = ("row", "column", "block")

_INSTRUCTIONS = """\
Fill a Sudoku grid of {size} rows and {size} columns: every row, every column and every {box}x{box} block
(marked by the lines) must contain each digit from 1 to {size} once. `.` is a blank. There is one solution.
Answer with one action. Rows count from the top and columns from the left, both from 1:
- `fill ROW COLUMN DIGIT` writes a digit into a blank or over one of yours, for example `fill 2 3 1`;
- `clear ROW COLUMN` removes a digit of yours. Digits given at the start cannot be changed.
A digit that is in the same row, column or block already is refused. A digit that is not refused may still be
wrong. You have {turns} turns; an invalid action uses one up too.
{reward}"""
_PLAIN = "The reward is 1 for completing the grid, otherwise 0."
_SHAPED = "Each right digit gives an equal share of the reward and takes it back if removed; all give 1."


class SudokuEnv(TextEnv):
    """Complete a Sudoku grid that has exactly one solution.

    Observation:
        The grid with row and column numbers, ``.`` for a blank and lines between the blocks; then one
        line: what went wrong, if anything, and the turns left.
    Actions:
        ``fill ROW COLUMN DIGIT`` and ``clear ROW COLUMN``, counted from 1. A digit that the row, column
        or block holds already is refused, like changing a given digit, clearing a blank, writing what is
        there already, and anything else: invalid actions change nothing but use up a turn.
    Reward:
        1 for completing the grid, otherwise 0. With ``shaped``, instead, 1 / blanks for each digit that
        becomes right and minus that for each that is right no longer, so that a solution sums to 1.
    Success:
        The grid is complete. It is then right: conflicts are refused, and only one solution exists.
    Ends:
        Terminated when the grid is complete. Truncated after ``turns`` turns (one and a half per blank by
        default). A wrong digit does not lose, but it must be removed in time.
    Splits:
        Random puzzles; no two splits share a completed grid. There are only 288 completed 4x4 grids, so
        that tasks of one split share them; the blanks differ.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "the grid is complete and right"
    palette = {".": "dim", "|": "dim", "-": "dim", "+": "dim"}

    def __init__(
        self,
        *,
        size: int = 4,
        blanks: int | None = None,
        shaped: bool = False,
        turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        _check_arguments(size, blanks, turns)
        self._size, self._box = size, math.isqrt(size)
        self._blanks = blanks or _BLANKS[size]
        self._turns = turns or self._blanks + (self._blanks + 1) // 2
        self._shaped = shaped
        self.reward_range = (-1 / self._blanks, 1 / self._blanks) if shaped else (0.0, 1.0)
        self.tasks = TaskSet(f"Sudoku-{size}-{self._blanks}")
        self.instructions = _INSTRUCTIONS.format(
            size=size, box=self._box, turns=self._turns, reward=_SHAPED if shaped else _PLAIN
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Make the task's puzzle."""
        assert self.tasks is not None
        self._full, rng = self.tasks.draw(
            task, lambda rng: (full_grid(rng, self._size), rng), lambda drawn: _rows_text(drawn[0])
        )
        puzzle = None
        while puzzle is None:
            puzzle = puzzle_from(self._full, self._blanks, rng)
        self._given, self._grid = puzzle, list(puzzle)
        self._left = self._turns
        return self._show()

    def respond(self, action: str) -> StepResult:
        """Write or remove one digit."""
        self._left -= 1
        parsed = self._parse(action)
        if isinstance(parsed, str):
            return StepResult(self._show(parsed), truncated=self._left == 0, valid=False)
        cell, digit = parsed
        gain = (digit == self._full[cell]) - (self._grid[cell] == self._full[cell])
        self._grid[cell] = digit
        done = 0 not in self._grid
        reward = gain / self._blanks if self._shaped else float(done)
        note = "The grid is complete and right." if done else ""
        return StepResult(
            self._show(note), reward, terminated=done, truncated=not done and self._left == 0, success=done
        )

    def facts(self) -> Mapping[str, Any]:
        """The grid now and as it was given, one string per row with ``.`` for blanks; the turns left."""
        return {"board": self._rows(self._grid), "given": self._rows(self._given), "turns_left": self._left}

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Any digit without a conflict in any blank; if none is left, clear a digit."""
        grid = [int(symbol) for symbol in "".join(info["board"]).replace(".", "0")]
        solver = Solver(grid)
        blanks = [cell for cell, digit in enumerate(grid) if not digit]
        moves = [
            f"fill {coordinates(cell, self._size)} {digit}"
            for cell in blanks
            for digit in digits_of(solver.options(cell))
        ]
        if not moves:
            given = "".join(info["given"])
            filled = [cell for cell, digit in enumerate(grid) if digit and given[cell] == "."]
            moves = [f"clear {coordinates(cell, self._size)}" for cell in filled]
        return moves[int(rng.integers(len(moves)))]

    def _parse(self, action: str) -> tuple[int, int] | str:
        """The cell and its new digit (0 for none), or the error of the action."""
        match = _ACTION.fullmatch(bare(action))
        if match is None:
            return "Not an action: answer `fill ROW COLUMN DIGIT` or `clear ROW COLUMN`."
        row, column, digit = int(match[2] or match[6]), int(match[3] or match[7]), int(match[4] or 0)
        for name, number in (("row", row), ("column", column), *([("digit", digit)] if match[1] else [])):
            if not 1 <= number <= self._size:
                return f"There is no {name} {number}: it must be 1 to {self._size}."
        cell = (row - 1) * self._size + column - 1
        if self._given[cell]:
            return f"The digit at {row} {column} was given and cannot be changed."
        if self._grid[cell] == digit:
            return (
                f"Cell {row} {column} holds {digit} already." if digit else f"Cell {row} {column} is blank."
            )
        return self._conflict(cell, digit) or (cell, digit)

    def _conflict(self, cell: int, digit: int) -> str:
        """Name the unit that already holds the digit; empty if none."""
        units = units_of(self._size)
        for kind, unit in enumerate(units[cell] if digit else ()):
            if any(units[c][kind] == unit and self._grid[c] == digit for c in range(len(units)) if c != cell):
                return f"Refused: the {_UNITS[kind]} holds a {digit} already."
        return ""

    def _rows(self, grid: Sequence[int]) -> list[str]:
        text = _rows_text(grid)
        return [text[start : start + self._size] for start in range(0, len(text), self._size)]

    def _show(self, note: str = "") -> str:
        lines = [f"   {self._spaced('123456789'[: self._size])}"]
        rule = "   " + "+".join(["-" * (2 * self._box)] + ["-" * (2 * self._box + 1)] * (self._box - 1))
        for number, row in enumerate(self._rows(self._grid)):
            lines += [rule.rstrip()] if number and number % self._box == 0 else []
            lines.append(f"{number + 1}  {self._spaced(row)}")
        return "\n".join([*lines, f"{note} Turns left: {self._left}.".strip()])

    def _spaced(self, row: str) -> str:
        return " | ".join(" ".join(row[i : i + self._box]) for i in range(0, self._size, self._box))


def _rows_text(grid: Sequence[int]) -> str:
    return "".join(map(str, grid)).replace("0", ".")


def _check_arguments(size: int, blanks: int | None, turns: int | None) -> None:
    if size not in _BLANKS:
        raise UsageError(f"size must be 4 or 9, not {size}.")
    if blanks is not None and not 1 <= blanks <= _MOST_BLANKS[size]:
        raise UsageError(f"blanks must be from 1 to {_MOST_BLANKS[size]} for size {size}, not {blanks}.")
    check_range("turns", turns, 1)
