"""Games of TextArena as environments: ``textarena:GAME``.

A game for one player is an ordinary environment. In a game for more players every player is a role (see
`rollgym.core.role_env`): by default the agent plays one of them and random legal actions play the others;
with ``others=None`` agents, models and people play all roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from rollgym.adapters.prefixes import TEXTARENA
from rollgym.adapters.task_sets import draw, make_task_set
from rollgym.adapters.textarena_game import Game
from rollgym.core.env import StepResult, TextEnv, check_number, check_whole
from rollgym.core.errors import EnvError, UsageError
from rollgym.core.role_env import RoleEnv, ScriptedRole
from rollgym.core.seeding import MAX_SEED, derive_rng, derive_seed
from rollgym.core.tasks import Task, TaskSet

MAX_TURNS = 200
"""Default number of actions of all players together after which an episode is truncated."""
PROBES = 32
"""Seeds that show in how many ways a game starts."""

_INSTRUCTIONS = """\
You play the game {name}. The first message explains its rules and how an action is written.
Reply with one action in that form, such as [4] or [up], and nothing else."""


def make_env(
    *,
    inner_id: str,
    players: int | None = None,
    success_reward: float = 1.0,
    max_turns: int = MAX_TURNS,
    list_actions: bool = True,
    action_examples: Sequence[str] = (),
    splits: Mapping[str, int] | None = None,
    others: str | None = "",
    render_mode: str | None = None,
    **options: Any,
) -> TextEnv:
    """Make the environment of a game.

    Args:
        inner_id: The id of the game in TextArena, such as ``TicTacToe-v0``.
        players: The number of players. Default: the smallest that the game starts with.
        success_reward: Reward at the end from which a player's episode is a success.
        max_turns: Actions of all players together after which the episode is truncated.
        list_actions: Whether ``info["actions"]`` lists the legal actions that a trial finds.
        action_examples: Actions like which others may be legal, for games whose rules show no example.
        splits: Names and sizes of the splits.
        others: Who plays the other roles in games for several players: ``random``, or ``None`` (all roles).
        render_mode: Gymnasium's argument of that name.
        options: Options of the game itself, such as ``size=5``.
    """
    library = TEXTARENA.load()
    check_whole("max_turns", max_turns)
    if players is not None:
        check_whole("players", players)
    success_reward = check_number("success_reward", success_reward)
    if isinstance(action_examples, str) or not all(isinstance(text, str) for text in action_examples):
        raise UsageError(f"action_examples must be a list of texts, not {action_examples!r}.")
    game = Game(library, inner_id, players, options, action_examples)
    # The key covers all that determines the content of a task.
    content = {**options, "players": game.num_players}
    tasks = make_task_set(f"textarena:{inner_id}", version(TEXTARENA.package), content, splits)
    table = GameTable(game, tasks, success_reward, max_turns, list_actions)
    if game.num_players == 1:
        if others not in ("", "random"):
            raise UsageError(f"textarena:{inner_id} has no roles: one agent plays it.")
        return TextArenaEnv(table, render_mode=render_mode)
    return TextArenaRoleEnv(table, others=others, render_mode=render_mode)


make_env.pool_thread = "own"  # type: ignore[attr-defined]


class GameTable:
    """A game with its task set and limits: what the environments for one and for several players share."""

    def __init__(
        self, game: Game, tasks: TaskSet, success_reward: float, max_turns: int, list_actions: bool
    ) -> None:
        self.game, self.tasks = game, tasks
        self.success_reward, self._max_turns, self._list_actions = success_reward, max_turns, list_actions
        keys = {game.start(derive_seed("textarena probe", probe)) for probe in range(PROBES)}
        self.few_starts = len(keys) < PROBES // 2
        """True for a game like TicTacToe: its tasks differ in what happens later, not in their start."""
        self._turns = 0

    def begin(self, task: Task, rng: np.random.Generator) -> None:
        """Start the game of a task; ``rng`` determines what the game draws later."""
        # Where there are too few starts to keep splits apart, the seed alone names the task.
        draw(self.tasks, task, self._start, key=lambda start: str(start[0]) if self.few_starts else start[1])
        self.game.reseed(int(rng.integers(MAX_SEED)))
        self._turns = 0

    def _start(self, rng: np.random.Generator) -> tuple[int, str]:
        seed = int(rng.integers(MAX_SEED))
        return seed, self.game.start(seed)

    def play(self, action: str) -> tuple[bool, bool, bool]:
        """Play an action; return whether the game is over, the limit is reached, the action was valid."""
        over, valid = self.game.play(action)
        self._turns += 1
        return over, not over and self._turns >= self._max_turns, valid

    def facts(self) -> dict[str, Any]:
        """The legal actions that a trial finds, if any."""
        actions = self.game.actions() if self._list_actions else []
        return {"actions": actions} if actions else {}

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A listed action; where none are listed, one of ``action_examples``, or one that the text shows."""
        choices = info.get("actions") or self.game.shown_actions(observation)
        if not choices:
            raise UsageError(
                f"A random agent cannot play textarena:{self.game.name}: no action is listed in "
                "info['actions'] or shown in square brackets. Give some with action_examples."
            )
        return str(choices[int(rng.integers(len(choices)))])


class TextArenaEnv(TextEnv):
    """A game of TextArena for one player.

    Observation: the game's messages since the last action; the first has the rules.

    Actions: text in the form that the rules state. Square brackets are added where TextArena does so.

    Reward: the game's own, at its end.

    Success: a reward of at least ``success_reward``.

    Ends: terminated by the game, truncated after ``max_turns`` actions.

    Splits: seeds of the game; no two splits share a start, unless the game has few starts.
    """

    tasks: TaskSet

    def __init__(self, table: GameTable, *, render_mode: str | None = None) -> None:
        self._table = table
        self.tasks = table.tasks
        self.instructions = _INSTRUCTIONS.format(name=table.game.name)
        self.success_means = f"the game ends with a reward of at least {table.success_reward:g}"
        super().__init__(render_mode=render_mode)
        self._over = False

    def begin(self, task: Task) -> str:
        """Start the task's game."""
        self._over = False
        self._table.begin(task, self.np_random)
        return self._table.game.messages(0)

    def respond(self, action: str) -> StepResult:
        """Play one action."""
        over, cut, valid = self._table.play(action)
        self._over = over or cut
        text = self._table.game.messages(0)
        if not over:
            return StepResult(text, truncated=cut, valid=valid)
        reward = self._table.game.rewards().get(0, 0.0)
        return StepResult(
            "\n".join(part for part in (text, self._table.game.reason(0)) if part),
            reward,
            terminated=True,
            success=reward >= self._table.success_reward,
            valid=valid,
        )

    def facts(self) -> Mapping[str, Any]:
        """The legal actions that a trial finds."""
        return {} if self._over else self._table.facts()

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """An action that is listed, or given as an example, or shown."""
        return self._table.random_action(observation, info, rng)


class TextArenaRoleEnv(RoleEnv):
    """A game of TextArena for several players, each a role; or for one agent against random legal actions.

    Observation: the messages to the player since its last turn; the first has the rules.

    Actions: text in the form that the rules state. Square brackets are added where TextArena does so.

    Reward: the game's own, at its end, by role.

    Success: the role's reward is at least ``success_reward``.

    Ends: terminated by the game, truncated after ``max_turns`` actions of all players.

    Splits: seeds of the game; no two splits share a start, unless the game has few starts. The task also
    names the agent's role and what random players play.
    """

    others_known = ("random",)
    tasks: TaskSet

    def __init__(self, table: GameTable, *, others: str | None = "", render_mode: str | None = None) -> None:
        self._table = table
        self.tasks = table.tasks
        self.role_names = tuple(f"player_{number}" for number in range(table.game.num_players))
        self.instructions = _INSTRUCTIONS.format(name=table.game.name)
        self.success_means = f"the player's reward at the end is at least {table.success_reward:g}"
        super().__init__(others=others, render_mode=render_mode)
        self._over = False
        self._task = self.tasks.task(next(iter(self.tasks.splits)), 0)

    def begin(self, task: Task) -> str:
        """Start the task's game."""
        self._over, self._task = False, task
        self._table.begin(task, self.np_random)
        rng = derive_rng("textarena role", task.set_name, task.split, task.index)
        self.own_role = self.role_names[int(rng.integers(len(self.role_names)))]
        return self._address()

    def respond(self, action: str) -> StepResult:
        """Play one action of the player to move."""
        mover = self.to_move
        over, cut, valid = self._table.play(action)
        self._over = over or cut
        if not over:
            return StepResult(self._address(), truncated=cut, valid=valid)
        reader = self.role_names.index(mover if self.roles else self.own_role)
        rewards = self._table.game.rewards()
        by_role = {role: rewards.get(number, 0.0) for number, role in enumerate(self.role_names)}
        parts = (self._table.game.messages(reader), self._table.game.reason(reader))
        return StepResult(
            "\n".join(part for part in parts if part),
            terminated=True,
            valid=valid,
            rewards=by_role,
            successes={role: reward >= self._table.success_reward for role, reward in by_role.items()},
        )

    def facts(self) -> Mapping[str, Any]:
        """The legal actions that a trial finds, of the player to move."""
        return {} if self._over else self._table.facts()

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """An action that is listed, or given as an example, or shown."""
        return self._table.random_action(observation, info, rng)

    def scripted(self, role: str, name: str, rng: np.random.Generator) -> ScriptedRole:
        """Random legal actions, the same for every episode of a task."""
        task = self._task
        own = derive_rng("textarena other", role, task.set_name, task.split, task.index)

        def act(observation: str, info: Mapping[str, Any]) -> str:
            actions = info.get("actions") or self._table.game.actions()
            if not actions:
                raise EnvError(
                    f"textarena:{self._table.game.name}: no legal action was found for the random player "
                    f"{role}; let agents or models play all roles (--role {role}=AGENT, others=None)."
                )
            return str(actions[int(own.integers(len(actions)))])

        return act

    def _address(self) -> str:
        """Set who acts next; return the messages to that player, or to the agent where the game is cut."""
        number = self._table.game.current
        self.to_move = self.role_names[number]
        if self._over and not self.roles:
            number = self.role_names.index(self.own_role)
        return self._table.game.messages(number)
