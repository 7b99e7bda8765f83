"""The 2048 environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.twenty_forty_eight.board import (
    DIRECTIONS,
    Board,
    largest,
    legal_moves,
    shift,
    with_new_tile,
)

_MOVE = re.compile(r"(?:move\s+)?(up|down|left|right)", re.IGNORECASE)
_REWARDS = {
    "score": "The reward of a move is the sum of the tiles it makes by merging, divided by {goal}.",
    "goal": "The reward is 1 for reaching the goal, otherwise 0.",
}

_INSTRUCTIONS = """\
Play 2048 on a board of {size} rows and {size} columns. `.` is an empty cell.
A move slides all tiles in one direction. Two equal tiles that meet merge into one tile of twice the value; a
tile merges at most once in a move. After each move a new tile, 2 or rarely 4, appears in an empty cell.
Reach a tile of {goal}. The game is lost when no move changes the board.
Answer with one direction: `Up`, `Down`, `Left` or `Right`. A direction that changes nothing is refused.
You have {turns} turns; a refused move uses one up too.
{reward}"""


class TwentyFortyEightEnv(TextEnv):
    """Slide and merge tiles until one reaches the goal.

    Observation:
        The board, one line for each row with ``.`` for an empty cell, and one line with the score so far
        and the turns left. After a refused move that line says why.
    Actions:
        ``Up``, ``Down``, ``Left``, ``Right``. A direction that changes nothing, and anything else, is
        invalid: the board stays as it is, no tile appears, and a turn is used up.
    Reward:
        With ``reward="score"`` (the default) the sum of the tiles made by merging, divided by the goal;
        with ``reward="goal"`` 1 on reaching the goal, otherwise 0.
    Success:
        A tile has reached the goal.
    Ends:
        Terminated at the goal (won) or when no move changes the board (lost). Truncated after ``turns``
        turns (five eighths of the goal by default, at least 20).
    Splits:
        A task is a start board with two tiles; no two splits share one. There are only 480 of them on the
        4x4 board. Where new tiles appear is up to the seed of the episode, not to the task.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "a tile has reached the goal"
    palette = {".": "dim"}

    def __init__(
        self,
        *,
        goal: int = 128,
        size: int = 4,
        reward: str = "score",
        turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        _check_arguments(goal, size, reward, turns)
        self._goal, self._size, self._reward_kind = goal, size, reward
        # A move adds 2.2 to the sum of all tiles on average, so the goal takes at least goal / 2.2 moves.
        self._turns = turns or max(20, goal * 5 // 8)
        self.reward_range = (0.0, float(size * (size // 2)) if reward == "score" else 1.0)
        self.tasks = TaskSet(f"TwentyFortyEight-{size}")
        self.instructions = _INSTRUCTIONS.format(
            size=size, goal=goal, turns=self._turns, reward=_REWARDS[reward].format(goal=goal)
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Place the task's first two tiles."""
        assert self.tasks is not None
        empty: Board = ((0,) * self._size,) * self._size
        self._board = self.tasks.draw(
            task, lambda rng: with_new_tile(with_new_tile(empty, rng), rng), key=str
        )
        self._score, self._left = 0, self._turns
        return self._show()

    def respond(self, action: str) -> StepResult:
        """Play one move."""
        self._left -= 1
        match = _MOVE.fullmatch(bare(action))
        if match is None:
            return self._refuse(f"Not a move: answer {', '.join(DIRECTIONS[:-1])} or {DIRECTIONS[-1]}.")
        direction = match[1].capitalize()
        board, gained = shift(self._board, direction)
        if board == self._board:
            return self._refuse(f"{direction} changes nothing.")
        self._score += gained
        won = largest(board) >= self._goal
        self._board = with_new_tile(board, self.np_random)
        return self._after_move(gained, won)

    def facts(self) -> Mapping[str, Any]:
        """The board as rows of numbers (0 is empty), the score, goal, legal moves and turns left."""
        return {
            "board": self._board,
            "score": self._score,
            "goal": self._goal,
            "actions": legal_moves(self._board),
            "turns_left": self._left,
        }

    def _after_move(self, gained: int, won: bool) -> StepResult:
        stuck = not legal_moves(self._board)
        note = f"You reached {self._goal}." if won else "No move is left: lost." if stuck else ""
        return StepResult(
            self._show(note),
            gained / self._goal if self._reward_kind == "score" else float(won),
            terminated=won or stuck,
            truncated=self._left == 0 and not (won or stuck),
            success=won,
        )

    def _refuse(self, reason: str) -> StepResult:
        return StepResult(self._show(reason), truncated=self._left == 0, valid=False)

    def _show(self, note: str = "") -> str:
        width = max(4, len(str(largest(self._board))))
        rows = [" ".join(f"{tile or '.':>{width}}" for tile in row) for row in self._board]
        return "\n".join([*rows, f"{note} Score: {self._score}. Turns left: {self._left}.".strip()])


def _check_arguments(goal: int, size: int, reward: str, turns: int | None) -> None:
    check_range("size", size, 3, 6)
    if not 8 <= goal <= 2 ** (size * size) or goal & (goal - 1):
        raise UsageError(f"goal must be a power of two from 8 to {2 ** (size * size)}, not {goal}.")
    if reward not in _REWARDS:
        raise UsageError(f"reward must be 'score' or 'goal', not {reward!r}.")
    check_range("turns", turns, 1)
