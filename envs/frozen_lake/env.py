"""FrozenLake as text, over Gymnasium's own dynamics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollgym.core.env import StepResult, bare
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall
from rollgym.core.tasks import Task, TaskSet
from rollgym.core.tool_env import ToolEnv, tool
from rollgym.envs.arguments import check_choice, check_range
from rollgym.envs.frozen_lake.lake import GYM_RATE, RATE_IS_SETTABLE, make_lake, random_map

MOVES = ("Left", "Down", "Right", "Up")
"""In the order of Gymnasium's actions 0 to 3."""
_BY_NAME = {name.lower(): number for number, name in enumerate(MOVES)} | {str(n): n for n in range(4)}
_SYMBOLS = {"S": "_", "F": "_", "H": "O", "G": "G"}
_PLAYER = {"S": "P", "F": "P", "H": "X", "G": "√"}

VIEWS = ("map", "local")
_CELLS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}

_INSTRUCTIONS = """\
You walk over a frozen lake. Reach the goal and do not fall into a hole.
{view}
{act}
{ice}
You get a reward of 1 for reaching the goal, else 0."""
_MAP = "Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you at the goal."
_LOCAL = "You see how far away the goal is, what is next to you, and your last move."
_ANSWER = "Each turn, answer with one move: Left, Down, Right or Up. Example: Right"
_CALL = "Each turn, make one move with the tool `move`."
_FIRM = "A move takes you one cell; the edge of the lake stops you."
_SLIPPERY = (
    "The ice is slippery: a move goes where you want with probability {rate:.2f}, else to one of the two "
    "sides of it, each as likely. The edge of the lake stops you."
)


def move_call(move: str) -> ToolCall:
    """Return a move as a call of the tool form."""
    return ToolCall(name="move", arguments={"direction": move.lower()})


class FrozenLakeEnv(ToolEnv):
    """Walk from the top left of a frozen lake to the goal at the bottom right.

    Observation: the map, one row a line, after a line about anything special that happened; or words about
    what is near (``view="local"``).

    Actions: ``Left``, ``Down``, ``Right``, ``Up`` in any case, or Gymnasium's numbers 0 to 3. With
    ``tools=True`` the tool ``move``, one call per turn.

    Reward: 1 for the step onto the goal, else 0.

    Success: the player stands on the goal.

    Ends: terminated on the goal or in a hole. The registered turn limit truncates.

    Splits: random maps, no map in two splits. Slips come from the episode's seed.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "the player stands on the goal"
    reward_range = (0.0, 1.0)
    palette = {"P": "bold cyan", "_": "dim", "O": "blue", "G": "green", "X": "bold red", "√": "bold green"}
    tasks: TaskSet

    def __init__(
        self,
        *,
        size: int = 4,
        frozen_probability: float = 0.8,
        slippery: bool = False,
        success_rate: float | None = None,
        spaced: bool = False,
        view: str = "map",
        tools: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """See docs/environments/frozen_lake.md for the options."""
        check_range("size", size, 3, 32)
        check_choice("view", view, VIEWS)
        if spaced and view != "map":
            raise UsageError("spaced=true requires view=map: the local view has no cells.")
        check_range("frozen_probability", frozen_probability, 0.3, 0.95)
        self._size, self._frozen = size, frozen_probability
        self._rate = _rate(slippery, success_rate)
        self._gap = " " if spaced else ""
        self._local = view == "local"
        ice = _SLIPPERY.format(rate=self._rate) if slippery else _FIRM
        self.instructions = _INSTRUCTIONS.format(
            view=_LOCAL if self._local else _MAP, ice=ice, act=_CALL if tools else _ANSWER
        )
        self.tasks = TaskSet(f"FrozenLake-{size}-{frozen_probability}")
        super().__init__(render_mode=render_mode)
        if not tools:
            self.tools = ()

    def begin(self, task: Task) -> str:
        """Make the task's map and put the player at its start."""
        self._rows = self.tasks.draw(
            task, lambda rng: random_map(rng, self._size, self._frozen), key="\n".join
        )
        self._lake = make_lake(self._rows, self._rate)
        self._lake.np_random = self.np_random
        self._cell = self._where(self._lake.reset()[0])
        self._last: int | None = None
        return self._shown()

    max_calls_per_turn = 1

    @tool
    def move(self, direction: Literal["left", "down", "right", "up"]) -> StepResult:
        """Move one cell."""
        return self._move(_BY_NAME[direction])

    def refuse(self, reason: str) -> StepResult:
        """Show the lake again after an action that is not a move."""
        return StepResult(f"{reason}\n{self._shown()}", valid=False)

    def respond(self, action: str) -> StepResult:
        """Move one cell, or slip."""
        if self.tools:
            return super().respond(action)
        move = _BY_NAME.get(bare(action).lower())
        if move is None:
            return self.refuse("That is not a move. Answer Left, Down, Right or Up.")
        return self._move(move)

    def _move(self, move: int) -> StepResult:
        previous, intended = self._cell, self._ahead(move)
        state, reward, over, _, _ = self._lake.step(move)
        self._cell, self._last = self._where(state), move
        note = self._note(previous, intended)
        won = self._letter() == "G"
        return StepResult(f"{note}{self._shown()}", float(reward), terminated=bool(over), success=won)

    def facts(self) -> Mapping[str, Any]:
        """The map, the player's (row, column), the success rate of moves, and the moves."""
        return {
            "map": list(self._rows),
            "position": list(self._cell),
            "success_rate": self._rate,
            "actions": [move_call(move).to_json() for move in MOVES] if self.tools else list(MOVES),
        }

    def render_text(self) -> str:
        """The map with the player on it."""
        cells = [[_SYMBOLS[letter] for letter in row] for row in self._rows]
        row, column = self._cell
        cells[row][column] = _PLAYER[self._letter()]
        return "\n".join(self._gap.join(line) for line in cells)

    def _shown(self) -> str:
        """The observation: the map, or words about the cells around the player."""
        if not self._local:
            return self.render_text()
        row, column = self._cell
        edge = self._size - 1
        cells = []
        for move, name in enumerate(MOVES):
            ahead = self._ahead(move)
            cell = "edge" if ahead == self._cell else _CELLS[self._rows[ahead[0]][ahead[1]]]
            cells.append(f"{name}: {cell}")
        last = "" if self._last is None else f" Last move: {MOVES[self._last]}."
        return f"The goal is {edge - row} down, {edge - column} right. {', '.join(cells)}.{last}"

    def _note(self, previous: tuple[int, int], intended: tuple[int, int]) -> str:
        slipped = "You slipped. " if self._cell != intended else ""
        if self._letter() == "H":
            return f"{slipped}You fell into a hole.\n"
        if self._letter() == "G":
            return f"{slipped}You reached the goal.\n"
        if self._cell == previous:
            return f"{slipped}The edge stopped you.\n"
        return f"{slipped.strip()}\n" if slipped else ""

    def _letter(self) -> str:
        row, column = self._cell
        return self._rows[row][column]

    def _where(self, state: int) -> tuple[int, int]:
        row, column = divmod(int(state), self._size)
        return row, column

    def _ahead(self, move: int) -> tuple[int, int]:
        row, column = self._cell
        down, right = ((0, -1), (1, 0), (0, 1), (-1, 0))[move]
        edge = self._size - 1
        return min(max(row + down, 0), edge), min(max(column + right, 0), edge)


def _rate(slippery: bool, success_rate: float | None) -> float:
    """Return the probability that a move goes in its direction."""
    if success_rate is None:
        return GYM_RATE if slippery else 1.0
    if not slippery:
        raise UsageError("success_rate is for slippery ice: give slippery=True with it.")
    if not 0 < success_rate < 1:
        raise UsageError(f"success_rate must be above 0 and below 1, not {success_rate}.")
    if not RATE_IS_SETTABLE:
        raise UsageError("This version of Gymnasium cannot set success_rate: upgrade gymnasium.")
    return float(success_rate)
