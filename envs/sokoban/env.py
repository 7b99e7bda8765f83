"""Sokoban as a text environment."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollgym.core.env import StepResult, check_whole
from rollgym.core.tasks import Task, TaskSet
from rollgym.core.tool_env import ToolEnv, tool
from rollgym.core.tools import write_calls
from rollgym.envs.arguments import check_choice
from rollgym.envs.sokoban.actions import NAMES, SEPARATOR, move_calls, parse_actions
from rollgym.envs.sokoban.deadlock import is_lost
from rollgym.envs.sokoban.game import BOX_REWARD, NOOP, SOLVED_REWARD, STEP_REWARD, Game
from rollgym.envs.sokoban.generate import Rules, canonical, generate
from rollgym.envs.sokoban.levels import Level
from rollgym.envs.sokoban.options import FileLevels, LevelRequest, check_amount
from rollgym.envs.sokoban.solver import Status, solve
from rollgym.envs.sokoban.views import VIEWS, VOCABULARIES, legend, palette, show, translation

SEARCH_LIMIT = 3_000
"""Positions that a search for `moves_left` looks at: far more than a room with one box has."""


class SokobanEnv(ToolEnv):
    """Push every box onto a target. Boxes can be pushed, one at a time, and never pulled.

    Observation: the room as a grid of symbols, one row a line; coordinates on request (``view``). A line
    under it tells when an action was not understood or left out, and with ``tell_bumps`` when nothing moved.

    Actions: ``Up``, ``Down``, ``Left``, ``Right`` walk, or push a box that is in the way. Also understood:
    ``push up``, ``move up`` (walk only, never push), ``noop``, and gym-sokoban's numbers 0 to 8. With
    ``actions_per_turn=2``, up to two in one turn: ``Right || Up`` or ``Right, Up``; more are left out. With
    ``tools=True`` the tool ``move``, as many calls per turn.

    Reward: gym-sokoban's. Each action -0.1; +1 when a box comes onto a target and -1 when one leaves it;
    +10 when all are on targets. A turn's reward is the sum over its actions. A turn that is not understood
    is one ``noop`` (-0.1), less ``invalid_penalty``; one that moved nothing costs ``bump_penalty`` more. With
    ``progress_reward`` a turn also earns that much for each move by which the solver's solution became
    shorter, and loses as much for each by which it became longer (an unsolvable position counts as
    ``max_steps`` moves): a hint for training, not a score.

    Success: every box stands on a target.

    Ends: terminated when solved; truncated when ``max_steps`` actions are used up without that. With
    ``end_when_lost`` also terminated once a box stands where it can never reach a target: what would
    follow is a waste of turns.

    Splits: train, dev and test share no level, nor a turned or mirrored copy of one. Levels from a file:
    of every ten, the first eight are train, then one dev, one test; ``all`` has them in order.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "every box stands on a target"

    def __init__(
        self,
        preset: str = "6x6",
        *,
        size: int | str | tuple[int, int] | None = None,
        boxes: int | None = None,
        max_steps: int | None = None,
        actions_per_turn: int = 1,
        vocabulary: str = "ragen",
        view: str = "grid",
        levels: str | Path | None = None,
        min_moves: int | None = None,
        max_moves: int | None = None,
        invalid_penalty: float = 0.0,
        bump_penalty: float = 0.0,
        progress_reward: float = 0.0,
        end_when_lost: bool = False,
        tell_bumps: bool = False,
        tools: bool = False,
        render_mode: str | None = None,
    ) -> None:
        check_choice("vocabulary of Sokoban", vocabulary, VOCABULARIES)
        check_choice("view of Sokoban", view, VIEWS)
        self._per_turn = check_whole("actions_per_turn", actions_per_turn)
        self._penalty = check_amount("invalid_penalty", invalid_penalty)
        self._bump_penalty = check_amount("bump_penalty", bump_penalty)
        self._progress = check_amount("progress_reward", progress_reward)
        self._end_when_lost = bool(end_when_lost)
        self._tell_bumps = bool(tell_bumps)
        request = LevelRequest(size, boxes, min_moves, max_moves, max_steps)
        self._rules, self._max_steps = request.settle(preset, from_file=levels is not None)
        self._file = None if levels is None else FileLevels(levels)
        self.tasks = self._file.tasks if self._file else TaskSet(self._rules.name)
        super().__init__(render_mode=render_mode)
        self.max_calls_per_turn = self._per_turn
        if not tools:
            self.tools = ()
        self._view, self._table = view, translation(vocabulary)
        self.palette = palette(vocabulary)
        self.instructions = _instructions(vocabulary, view, self._per_turn, self._max_steps, tools)
        bumps = self._bump_penalty * (self._per_turn if tools else 1)
        idle = min(STEP_REWARD - self._penalty, sum([STEP_REWARD] * self._per_turn) - bumps)
        self.reward_range = _reward_range(self._per_turn, idle, self._progress, self._max_steps)
        self._left = 0

    def begin(self, task: Task) -> str:
        """Set up the task's level."""
        self._level = self._file.level(task) if self._file else generated(self._rules, task)
        self._game = Game(self._level.text, self._max_steps)
        self._moved = (False, False)
        self._left = self._moves_left() if self._progress else 0
        return self._show()

    @tool
    def move(self, direction: Literal["up", "down", "left", "right"]) -> StepResult:
        """Walk one cell, or push a box that is in the way.

        Args:
            direction: Where to.
        """
        return self._take(direction)

    def refuse(self, reason: str) -> StepResult:
        """Count an invalid action as one step in which nothing moves."""
        return self._take("", f"{reason} Nothing moved.")

    def respond(self, action: str) -> StepResult:
        """Play the actions of one turn, up to the end of the game."""
        return super().respond(action) if self.tools else self._take(action)

    def _take(self, action: str, problem: str = "") -> StepResult:
        codes, left_out = parse_actions(action, self._per_turn)
        reward, done = self._play([NOOP] if codes is None else codes)
        if self._progress:
            before, self._left = self._left, self._moves_left()
            reward += self._progress * (before - self._left)
        if codes is None:
            reward -= self._penalty
        elif not self._moved[0]:
            reward -= self._bump_penalty
        solved = self._game.solved
        lost = self._end_when_lost and self._moved[1] and not solved and is_lost(self._game.text)
        note = problem or self._note(codes, left_out)
        return StepResult(
            f"{self._show()}\n{note}" if note else self._show(),
            reward,
            terminated=solved or lost,
            truncated=done and not solved and not lost,
            success=solved,
            valid=codes is not None,
        )

    def facts(self) -> Mapping[str, Any]:
        """The position in XSB, counts, and at the start the level's difficulty."""
        game = self._game
        facts: dict[str, Any] = {
            "board": game.text,
            "boxes": game.boxes,
            "boxes_on_target": game.boxes_on_target,
            "steps_left": game.max_steps - game.steps,
            "moved_player": self._moved[0],
            "moved_box": self._moved[1],
            "actions": [write_calls(move_calls(name)) for name in NAMES] if self.tools else NAMES,
            "actions_per_turn": self._per_turn,
        }
        if game.steps == 0 and self._level.difficulty is not None:
            facts["difficulty"] = asdict(self._level.difficulty)
        return facts

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """As many random directions as a turn may have."""
        moves = SEPARATOR.join(NAMES[int(i)] for i in rng.integers(len(NAMES), size=self._per_turn))
        return write_calls(move_calls(moves)) if self.tools else moves

    def render_text(self) -> str:
        """The grid, with the steps and boxes counted under it."""
        game = self._game
        counts = f"step {game.steps} of {game.max_steps}, {game.boxes_on_target} of {game.boxes} on target"
        return f"{game.text.translate(self._table)}\n{counts}"

    def _play(self, codes: list[int]) -> tuple[float, bool]:
        total, done, player, box = 0.0, False, False, False
        for code in codes:
            reward, done, moved_player, moved_box = self._game.step(code)
            total += reward
            player, box = player or moved_player, box or moved_box
            if done:
                break
        self._moved = (player, box)
        return total, done

    def _moves_left(self) -> int:
        """Return the moves a solver needs from here; if unknown, the previous value."""
        moves = moves_left(self._game.text)
        return self._left if moves is None else int(min(moves, self._max_steps))

    def _show(self) -> str:
        return show(self._game.text, self._view, self._table)

    def _note(self, codes: list[int] | None, left_out: int) -> str:
        if codes is None:
            return f"Not understood, so nothing moved. Actions: {', '.join(NAMES)}."
        if left_out:
            return f"Only {self._per_turn} per turn: the last {left_out} of your actions did not count."
        if self._tell_bumps and not self._moved[0]:
            return f"Nothing moved: {NAMES[(codes[-1] - 1) % len(NAMES)]}" if codes[-1] != NOOP else ""
        return ""


@functools.lru_cache(maxsize=4096)
def generated(rules: Rules, task: Task) -> Level:
    """The level of a task. Kept, since the members of a group all play the same one."""
    tasks = TaskSet(rules.name)

    def belongs(text: str) -> bool:
        return tasks.home(canonical(text)) == task.split

    return tasks.draw(task, lambda rng: generate(rng, rules, belongs), lambda level: canonical(level.text))


@functools.lru_cache(maxsize=65_536)
def moves_left(board: str) -> float | None:
    """Moves of the shortest solution: infinite if there is none, ``None`` if the search limit was reached."""
    result = solve(board, node_limit=SEARCH_LIMIT)
    if result.status is Status.GAVE_UP:
        return None
    return result.moves if result.solved else math.inf


def _instructions(vocabulary: str, view: str, per_turn: int, max_steps: int, tools: bool) -> str:
    symbols = f"Symbols: {legend(vocabulary)}.\n" if view in ("grid", "grid_coords") else ""
    coordinates_note = {
        "grid": "",
        "cells": "Cells are named by column, a at the left, and row, 1 at the top. The border of the room is "
        "wall.\n",
        "relative": "You are told what is above, below, left and right of you; how far off each box is, with "
        "what is above, below, left and right of it; and how far from that box each target is.\n",
        "words": "You see what is next to you, how far off each box is, what is next to that box, which of "
        "its corners are blocked, and how far from it each target is.\n",
        "around": "You are told what is in the eight cells around you, row by row; how far off each box is, "
        "with what is in the eight cells around it; and how far from that box each target is.\n",
    }.get(
        view,
        "Places are (row, column), counted from (0, 0) at the top left. The border of the room is wall.\n",
    )
    several = (
        f"You may give up to {per_turn} actions in one turn, in order, like this: Right || Up\n"
        if per_turn > 1
        else "Give one action per turn, for example: Right\n"
    )
    if tools:
        calls = "Call it once per turn" if per_turn == 1 else f"Call it up to {per_turn} times per turn"
        several = f"Move with the tool `move`. {calls}.\n"
    return (
        "You are playing Sokoban. Push every box onto a target.\n"
        f"{symbols}{coordinates_note}"
        "Actions: Up, Down, Left, Right. You walk one cell; if a box is in the way, you push it, provided "
        "the cell behind it is free. You cannot pull a box, push two at once, or walk through walls.\n"
        f"{several}"
        f"You have {max_steps} actions. Each costs 0.1; a box brought onto a target earns 1 (moved off it, "
        "it costs 1), and all boxes on targets earn 10."
    )


def _reward_range(per_turn: int, idle: float, progress: float, max_steps: int) -> tuple[float, float]:
    """Each action could lose a box; the last could solve the level after each other one placed a box."""
    lowest = min(sum([STEP_REWARD - BOX_REWARD] * per_turn), idle)
    highest = sum([STEP_REWARD + BOX_REWARD] * (per_turn - 1)) + STEP_REWARD + BOX_REWARD + SOLVED_REWARD
    # No move brings the end nearer by more than itself; one push can make it as far as it counts. Where the
    # solver gave up for some turns, a later result counts at once.
    return lowest - progress * max_steps, highest + progress * max_steps
