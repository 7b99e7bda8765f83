"""New levels, each with a solution: a room is carved, boxes stand on targets and are pulled away backwards.

Every pull can be undone by a push, so every level has a solution. The solver then measures the difficulty,
and levels outside the requested range are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rollgym.core.errors import UsageError
from rollgym.envs.sokoban.levels import Difficulty, Level
from rollgym.envs.sokoban.maze import flood, split
from rollgym.envs.sokoban.solver import plan

T = TypeVar("T")

VERSION = 1
"""Part of every task set's name: raise it whenever the same seed gives another level."""

MAX_ATTEMPTS = 20_000
PATIENCE = 500
"""Search positions for a shortest solution; more positions may find a shorter one."""
NODE_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Rules:
    """Requested levels: room size with outer walls, boxes and difficulty range."""

    height: int
    width: int
    boxes: int
    min_moves: int
    max_moves: int

    @property
    def name(self) -> str:
        """A name that changes whenever the levels do."""
        size = f"{self.height}x{self.width}-{self.boxes}"
        return f"sokoban-{size}-moves{self.min_moves}to{self.max_moves}-g{VERSION}"


def floor_needed(boxes: int) -> int:
    """Return the least floor of a room: a target and a cell for each box, and some cells to walk."""
    return 2 * boxes + 3


def canonical(text: str) -> str:
    """One text for a board and its turned and mirrored forms: the first of the eight in the alphabet."""
    rows = text.split("\n")
    forms = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
        forms += ["\n".join(rows), "\n".join(rows[::-1])]
    return min(forms)


def generate(
    rng: np.random.Generator, rules: Rules, accept: Callable[[str], bool] = lambda board: True
) -> Level:
    """Generate a level that follows the rules; ``accept`` may refuse boards before they are solved."""
    for _ in range(MAX_ATTEMPTS):
        text = draw_board(rng, rules)
        if text is None or not accept(text):
            continue
        result = plan(text, patience=PATIENCE, node_limit=NODE_LIMIT)
        if result.solved and rules.min_moves <= result.moves <= rules.max_moves:
            return Level(text, Difficulty(result.moves, result.pushes, result.nodes, result.optimal))
    raise UsageError(
        f"{MAX_ATTEMPTS:,} rooms of {rules.height}x{rules.width} with boxes={rules.boxes} were tried, "
        f"and none needs {rules.min_moves} to {rules.max_moves} moves: give it more room or a wider range."
    )


def draw_board(rng: np.random.Generator, rules: Rules) -> str | None:
    """A random board with a solution, or ``None`` where the boxes could not all be pulled away."""
    row = rules.width + 1
    floor = carve(rng, rules)
    cells = list(split(floor))
    order = rng.permutation(len(cells)).tolist()
    targets = sum(cells[i] for i in order[: rules.boxes])
    player = cells[order[rules.boxes]]
    boxes, area = pull_away(rng, floor, targets, player, row)
    if boxes & targets:
        return None
    return draw_text(rules, floor, targets, boxes, _pick(rng, list(split(area))))


def carve(rng: np.random.Generator, rules: Rules) -> int:
    """Carve a connected set of floor cells: the path of a random walk, widened now and then."""
    row = rules.width + 1
    inside = _inside(rules)
    room = inside.bit_count()
    floor_size = max(floor_needed(rules.boxes), int(room * (0.55 + 0.4 * rng.random())))
    steps = (-row, row, -1, 1)
    cell = floor = _pick(rng, list(split(inside)))
    step = _pick(rng, steps)
    while floor.bit_count() < min(floor_size, room):
        if rng.random() < 0.4:
            step = _pick(rng, steps)
        floor |= _moved(cell, _pick(rng, steps)) & inside
        ahead = _moved(cell, step) & inside
        if not ahead:
            step = _pick(rng, steps)
            continue
        cell = ahead
        floor |= cell
    return floor


def pull_away(rng: np.random.Generator, floor: int, boxes: int, player: int, row: int) -> tuple[int, int]:
    """Pull boxes, those on targets first; return the boxes and the cells in the player's reach."""
    pulls = int(boxes.bit_count() * (3 + 9 * rng.random()))
    targets, step, last = boxes, 0, 0
    area = flood(player, floor & ~boxes, row)
    for _ in range(pulls):
        free = floor & ~boxes
        options = [
            (box, direction)
            for direction in (-row, row, -1, 1)
            for box in split(boxes & _moved(area, -direction) & _moved(free, -2 * direction))
        ]
        if not options:
            break
        if (last, step) not in options or rng.random() < 0.3:
            last, step = _pick(rng, [o for o in options if o[0] & targets] or options)
        moved = _moved(last, step)
        boxes ^= last ^ moved
        last = moved
        area = flood(_moved(moved, step), floor & ~boxes, row)
    return boxes, area


def draw_text(rules: Rules, floor: int, targets: int, boxes: int, player: int) -> str:
    """The board in XSB."""
    glyphs = ["#"] * (rules.height * (rules.width + 1) - 1)
    glyphs[rules.width :: rules.width + 1] = ["\n"] * (rules.height - 1)
    for cells, off_target, on_target in ((floor, " ", "."), (boxes, "$", "*"), (player, "@", "+")):
        for bit in split(cells):
            glyphs[bit.bit_length() - 1] = on_target if bit & targets else off_target
    return "".join(glyphs)


def _inside(rules: Rules) -> int:
    line = (1 << rules.width - 2) - 1
    return sum(line << (rules.width + 1) * y + 1 for y in range(1, rules.height - 1))


def _moved(cells: int, by: int) -> int:
    return cells << by if by > 0 else cells >> -by


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]
