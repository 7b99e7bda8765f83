"""The rules of play: gym-sokoban's moves and rewards on a flat board.

A board is its XSB text, kept as bytes with the newlines in place, so that a step up or down is a step of
one row's length and the text of a position costs one decode. Rewards are those of gym-sokoban: every
action costs 0.1, a box that reaches a target earns 1, one that leaves a target costs 1, and an action
after which every box stands on a target earns 10 more.
"""

from __future__ import annotations

from typing import NamedTuple

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = b"# .$*@+"

GYM_CODES = {WALL: 0, FLOOR: 1, TARGET: 2, BOX_ON_TARGET: 3, BOX: 4, PLAYER: 5, PLAYER_ON_TARGET: 5}
"""gym-sokoban's number for each cell."""

NOOP, UP, DOWN, LEFT, RIGHT, MOVE_UP, MOVE_DOWN, MOVE_LEFT, MOVE_RIGHT = range(9)
"""gym-sokoban's actions: 1 to 4 push, or walk where there is nothing to push; 5 to 8 only walk."""

DEFAULT_MAX_STEPS = 120
STEP_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0

_BOXES = frozenset({BOX, BOX_ON_TARGET})
_PLAYER_LEAVES = {PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}
_PLAYER_ENTERS = {FLOOR: PLAYER, TARGET: PLAYER_ON_TARGET, BOX: PLAYER, BOX_ON_TARGET: PLAYER_ON_TARGET}
_BOX_ENTERS = {FLOOR: BOX, TARGET: BOX_ON_TARGET}


class Step(NamedTuple):
    """Result of one action."""

    reward: float
    done: bool
    moved_player: bool
    moved_box: bool


class Game:
    """A game in progress. The text must be a closed rectangular room (see `levels.normalize`)."""

    __slots__ = ("_cells", "_deltas", "_player", "boxes", "boxes_on_target", "max_steps", "steps")

    def __init__(self, text: str, max_steps: int = DEFAULT_MAX_STEPS) -> None:
        cells = bytearray(text, "ascii")
        row = text.index("\n") + 1
        self._cells = cells
        self._deltas = (0, -row, row, -1, 1, -row, row, -1, 1)
        self._player = max(cells.find(PLAYER), cells.find(PLAYER_ON_TARGET))
        self.boxes_on_target = cells.count(BOX_ON_TARGET)
        self.boxes = cells.count(BOX) + self.boxes_on_target
        self.max_steps = max_steps
        self.steps = 0

    @property
    def text(self) -> str:
        """The position in XSB."""
        return self._cells.decode("ascii")

    @property
    def solved(self) -> bool:
        """True while every box stands on a target."""
        return self.boxes_on_target == self.boxes

    def codes(self) -> list[list[int]]:
        """The position in gym-sokoban's numbers, row by row."""
        return [[GYM_CODES[cell] for cell in line] for line in self._cells.splitlines()]

    def step(self, action: int) -> Step:
        """Play an action, 0 to 8. The game is done when it is solved or its steps are used up."""
        before = self.boxes_on_target
        moved_player, moved_box = self._act(action)
        self.steps += 1
        reward = STEP_REWARD
        if self.boxes_on_target > before:
            reward += BOX_REWARD
        elif self.boxes_on_target < before:
            reward -= BOX_REWARD
        solved = self.boxes_on_target == self.boxes
        if solved:
            reward += SOLVED_REWARD
        return Step(reward, solved or self.steps >= self.max_steps, moved_player, moved_box)

    def _act(self, action: int) -> tuple[bool, bool]:
        delta = self._deltas[action]
        ahead = self._player + delta
        cell = self._cells[ahead]
        if cell == WALL or not delta:
            return False, False
        if cell in _BOXES:
            if action > RIGHT or not self._push(ahead, delta):
                return False, False
            self._walk(ahead)
            return True, True
        self._walk(ahead)
        return True, False

    def _walk(self, ahead: int) -> None:
        cells = self._cells
        cells[self._player] = _PLAYER_LEAVES[cells[self._player]]
        cells[ahead] = _PLAYER_ENTERS[cells[ahead]]
        self._player = ahead

    def _push(self, box: int, delta: int) -> bool:
        cells = self._cells
        beyond = _BOX_ENTERS.get(cells[box + delta])
        if beyond is None:
            return False
        cells[box + delta] = beyond
        self.boxes_on_target += (beyond == BOX_ON_TARGET) - (cells[box] == BOX_ON_TARGET)
        return True
