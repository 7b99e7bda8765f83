"""The solver against brute force on small boards, and on Boxoban's levels."""

import itertools
import os
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from rollgym.envs.sokoban.deadlock import any_frozen, is_frozen
from rollgym.envs.sokoban.game import Game
from rollgym.envs.sokoban.generate import Rules, draw_board
from rollgym.envs.sokoban.levels import load_levels
from rollgym.envs.sokoban.matching import cheapest_matching, hungarian
from rollgym.envs.sokoban.maze import FAR, read_maze, split
from rollgym.envs.sokoban.solver import Result, Status, plan, solve

LETTERS = {"U": 1, "D": 2, "L": 3, "R": 4}
State = tuple[int, frozenset[int]]


def random_board(rng: random.Random, height: int, width: int, boxes: int) -> str:
    """Walls, boxes, targets and player anywhere: some of these boards have a solution, some none."""
    inner = [(y, x) for y in range(1, height - 1) for x in range(1, width - 1)]
    rng.shuffle(inner)
    walls, rest = inner[: len(inner) // 8], inner[len(inner) // 8 :]
    targets = set(rng.sample(rest, boxes))
    crates = set(rng.sample(rest, boxes))
    player = rng.choice([cell for cell in rest if cell not in crates])
    floor = set(inner) - set(walls)

    def glyph(cell: tuple[int, int]) -> str:
        if cell not in floor:
            return "#"
        kind = 1 if cell in crates else 2 if cell == player else 0
        return (".*+" if cell in targets else " $@")[kind]

    return "\n".join("".join(glyph((y, x)) for x in range(width)) for y in range(height))


class BruteForce:
    """Every position that can be reached, by single steps, with nothing refused."""

    def __init__(self, text: str) -> None:
        self.row = text.index("\n") + 1
        self.walls = {i for i, c in enumerate(text) if c in "#\n"}
        self.targets = frozenset(i for i, c in enumerate(text) if c in ".*+")
        boxes = frozenset(i for i, c in enumerate(text) if c in "$*")
        player = next(i for i, c in enumerate(text) if c in "@+")
        self.start: State = (player, boxes)
        self.depth: dict[State, int] = {self.start: 0}
        self.parents: dict[State, list[State]] = {self.start: []}
        queue = deque([self.start])
        while queue:
            state = queue.popleft()
            for after in self.steps(state):
                if after not in self.depth:
                    self.depth[after] = self.depth[state] + 1
                    self.parents[after] = []
                    queue.append(after)
                self.parents[after].append(state)

    def steps(self, state: State) -> list[State]:
        player, boxes = state
        moves = []
        for delta in (-self.row, self.row, -1, 1):
            ahead, beyond = player + delta, player + 2 * delta
            if ahead in self.walls:
                continue
            if ahead not in boxes:
                moves.append((ahead, boxes))
            elif beyond not in self.walls and beyond not in boxes:
                moves.append((ahead, boxes - {ahead} | {beyond}))
        return moves

    def fewest_moves(self) -> int | None:
        return min((d for (_, boxes), d in self.depth.items() if boxes == self.targets), default=None)

    def solvable(self) -> set[State]:
        """The positions from which a solution can still be reached."""
        todo = [state for state in self.depth if state[1] == self.targets]
        visited = set(todo)
        while todo:
            for state in self.parents[todo.pop()]:
                if state not in visited:
                    visited.add(state)
                    todo.append(state)
        return visited


def boards(count: int) -> list[str]:
    """Half of them anything, most without a solution; half with one, and with more room."""
    rng, maker = random.Random(20), np.random.default_rng(20)
    kinds = [(5, 6, 1), (5, 6, 2), (6, 6, 2), (6, 7, 3)]
    levels = [random_board(rng, *kinds[i % len(kinds)]) for i in range(count // 2)]
    while len(levels) < count:
        rules = Rules(height=6, width=6, boxes=2 + len(levels) % 2, min_moves=1, max_moves=99)
        levels += filter(None, [draw_board(maker, rules)])
    return levels


def follow(text: str, result: Result) -> None:
    game = Game(text, max_steps=1_000_000)
    for letter in result.path:
        step = game.step(LETTERS[letter.upper()])
        assert step.moved_player
        assert step.moved_box == letter.isupper()
    assert game.solved


def test_small_boards_are_solved_in_the_fewest_moves_or_proved_unsolvable() -> None:
    kinds = set()
    for text in boards(400):
        fewest = BruteForce(text).fewest_moves()
        result = solve(text)
        kinds.add(result.status)
        assert result.status is (Status.UNSOLVABLE if fewest is None else Status.SOLVED), text
        if fewest is not None:
            assert result.optimal
            assert result.moves == fewest, text
            follow(text, result)
    assert kinds == {Status.SOLVED, Status.UNSOLVABLE}


def test_a_greater_weight_solves_the_same_boards_in_no_fewer_moves() -> None:
    for text in boards(80):
        best, fast = solve(text), solve(text, weight=5)
        assert fast.status is best.status, text
        assert fast.moves >= best.moves
        assert not fast.optimal
        if fast.solved:
            follow(text, fast)


def test_no_deadlock_rule_refuses_a_position_that_has_a_solution() -> None:
    checked = refused = 0
    for text in boards(400):
        maze, _, _ = read_maze(text)
        world = BruteForce(text)
        solvable = {boxes for _, boxes in world.solvable()}
        for boxes in {boxes for _, boxes in world.depth}:
            mask = sum(1 << box for box in boxes)
            frozen = any_frozen(maze, mask)
            costs = [maze.distances[box] for box in sorted(boxes)]
            dead = mask & ~maze.alive != 0 or cheapest_matching(costs) >= FAR
            checked += 1
            refused += frozen or dead
            assert not (boxes in solvable and (frozen or dead)), (text, sorted(boxes))
    assert checked > 10_000
    assert refused > checked / 5


@pytest.mark.parametrize(
    ("board", "frozen"),
    [
        ("#####\n#$ .#\n# @ #\n#####", True),  # a corner
        ("#####\n#.$$#\n# @ #\n# . #\n#####", True),  # the second box in a corner holds the first
        ("######\n#    #\n# $$ #\n# $$@#\n#....#\n######", True),  # two by two in the open
        ("######\n#    #\n# ** #\n# **@#\n#$.  #\n######", True),  # all on targets but for the corner
        ("######\n# $$ #\n#    #\n#@.. #\n######", True),  # side by side along a wall without targets
        ("######\n#    #\n#  $*#\n#. #@#\n######", True),  # it leans on one that has only corners to go to
        ("######\n#    #\n# ** #\n# **@#\n# $. #\n#    #\n######", False),
        ("######\n#    #\n# $  #\n#  $ #\n#@.. #\n######", False),
    ],
)
def test_frozen_boxes_are_recognised(board: str, frozen: bool) -> None:
    maze, boxes, _ = read_maze(board)
    assert any_frozen(maze, boxes) is frozen


def test_a_frozen_box_on_its_target_is_no_deadlock() -> None:
    maze, boxes, _ = read_maze("######\n#*   #\n# $. #\n#  @ #\n######")
    corner = next(split(boxes))
    assert not is_frozen(maze, boxes, corner)


def test_one_push_is_found_and_written_in_capitals() -> None:
    result = solve("######\n#@ $.#\n######")
    assert (result.path, result.moves, result.pushes) == ("rR", 2, 1)


def test_unsolvable_and_gave_up_are_told_apart() -> None:
    assert solve("#####\n#$@.#\n#####").status is Status.UNSOLVABLE
    board = "########\n#      #\n# $  . #\n#  $ . #\n#  $@. #\n#      #\n########"
    assert solve(board, node_limit=3).status is Status.GAVE_UP
    assert solve(board, time_limit=0.0).status is Status.GAVE_UP
    assert solve(board).status is Status.SOLVED


def test_an_impatient_plan_is_still_a_solution() -> None:
    board = "########\n#      #\n# $  . #\n#  $ . #\n#  $@. #\n#      #\n########"
    shortest, hasty = plan(board), plan(board, patience=1)
    assert shortest.optimal
    assert not hasty.optimal
    assert hasty.moves >= shortest.moves
    follow(board, hasty)


def test_matchings_are_the_cheapest_of_all_orders() -> None:
    rng = random.Random(3)
    for size in range(1, 7):
        for _ in range(40):
            costs = [[rng.choice([rng.randrange(20), FAR]) for _ in range(size)] for _ in range(size)]
            best = min(
                sum(costs[i][j] for i, j in enumerate(order)) for order in itertools.permutations(range(size))
            )
            assert cheapest_matching(costs) == hungarian(costs) == best


def test_a_level_with_many_boxes_is_solved() -> None:
    board = "##########\n#@       #\n# $$$$$$ #\n#        #\n# ...... #\n#        #\n##########"
    follow(board, solve(board, weight=5))


def boxoban(name: str) -> list[str]:
    folder = os.environ.get("ROLLGYM_TEST_DATA")
    if not folder:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no Boxoban levels to solve")
    return [level.text for level in load_levels(Path(folder, "sokoban", f"boxoban_{name}_valid_000.txt"))]


@pytest.mark.parametrize("name", ["unfiltered", "medium"])
def test_a_sample_of_boxoban_is_solved(name: str) -> None:
    for text in boxoban(name)[::50]:
        result = solve(text, weight=5, node_limit=50_000)
        assert result.solved, text
        follow(text, result)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_thousand_unfiltered_boxoban_levels_are_solved() -> None:
    for text in boxoban("unfiltered"):
        follow(text, solve(text, weight=5, node_limit=100_000))
