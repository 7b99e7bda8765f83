"""Frozen boxes: the boxes that can never move again once a push is made.

Together with the dead cells of a `Maze` (from which a box alone could reach no target) and the matching
of boxes to targets, this is all the solver refuses. Each rule refuses only positions without a solution.
"""

from __future__ import annotations

from rollgym.envs.sokoban.maze import Maze, read_maze, split


def is_frozen(maze: Maze, boxes: int, box: int) -> bool:
    """True if ``box`` can never move again, and it or a box frozen with it stands off the targets."""
    stuck = [box]
    others = boxes ^ box
    if not _blocked(maze, box, others, ~maze.floor, 1, stuck):
        return False
    if not _blocked(maze, box, others, ~maze.floor, maze.row, stuck):
        return False
    return any(not bit & maze.targets for bit in stuck)


def any_frozen(maze: Maze, boxes: int) -> bool:
    """True if any box of the position is frozen off the targets."""
    return any(is_frozen(maze, boxes, box) for box in split(boxes))


def _blocked(maze: Maze, box: int, others: int, walls: int, axis: int, stuck: list[int]) -> bool:
    """True if the box cannot move along an axis (1 across, a row down); adds neighbors to ``stuck``."""
    after, before = box << axis, box >> axis
    if (after | before) & walls:
        return True
    if not (after | before) & maze.alive:
        return True
    # A neighbor leans on this box along the axis, so it is stuck if it is blocked along the other one.
    across = maze.row if axis == 1 else 1
    for neighbor in (after, before):
        if neighbor & others and _blocked(maze, neighbor, others ^ neighbor, walls | box, across, stuck):
            stuck.append(neighbor)
            return True
    return False


def is_lost(text: str) -> bool:
    """True if a position in XSB plainly has no solution: a box is frozen, or on a cell with no way out.

    It misses some positions without a solution, but never reports one that has a solution.
    """
    maze, boxes, _ = read_maze(text)
    return bool(boxes & ~maze.alive) or any_frozen(maze, boxes)
