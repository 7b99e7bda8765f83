"""``rollgym play``: play an environment in the terminal."""

from __future__ import annotations

import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rollgym.utils.cli_options import (
    AgentModules,
    EnvArgs,
    EnvModules,
    EnvName,
    RoleArgs,
    Roles,
    console,
    import_modules,
    parse_pairs,
    parse_roles,
)

if TYPE_CHECKING:
    import asyncio

    import gymnasium as gym
    from rich.console import Console, RenderableType

    from rollgym.core.agent import Player
    from rollgym.core.roles import TeamAgent

EPILOG = "Example: rollgym play rollgym/Sokoban-v0 --split test --task 3"
T = TypeVar("T")
YOU = "you"
HELP = (
    "/hint the expert's action   /rules the instructions   /new another task   /quit leave   "
    "/say TEXT plays TEXT verbatim\nquit, exit and help also work without the slash."
)
PLAIN = dict.fromkeys(("quit", "exit", "q", "/q", "/exit"), "/quit") | {"help": "/help", "?": "/help"}
"""Common words for commands, unless the environment has an action of that name."""


def play(
    env: EnvName,
    task: Annotated[
        int | None, typer.Option(help="Index of the task in the split.", show_default="random")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split of the environment's task set.", show_default="the first, usually train"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the episode.", show_default="random")] = None,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
    agent_module: AgentModules = None,
    role: Roles = None,
    role_arg: RoleArgs = None,
) -> None:
    """Play an environment in the terminal.

    Type an action, or its first letters if they are unambiguous. /help shows the other commands.
    In an environment with roles, --role gives roles to agents; you play the others.
    """
    from rollgym.core.registry import make

    import_modules(env_module)
    import_modules(agent_module, "--agent-module")
    kwargs = parse_pairs(env_arg, "--env-arg")
    others = _others(env, kwargs, parse_roles(role, role_arg))
    if others is not None:
        kwargs = dict(others.env_kwargs)
    session = PlaySession(console(), make(env, **kwargs), env, kwargs, others)
    try:
        options = {"task": task, "split": split}
        session.play({key: value for key, value in options.items() if value is not None}, seed)
    except (EOFError, KeyboardInterrupt):
        session.screen.print("\nBye.", style="dim")
    finally:
        session.close()


@dataclass(frozen=True, slots=True)
class Others:
    """The agents that play the other roles."""

    team: TeamAgent
    players: Mapping[str, str]
    """The agent of each role; ``you`` for the person."""
    env_kwargs: Mapping[str, Any]

    @property
    def role(self) -> str:
        """The first role of the person."""
        return next(role for role, player in self.players.items() if player == YOU)


def _others(
    env: str, kwargs: Mapping[str, Any], roles: Mapping[str, tuple[str, dict[str, Any]]]
) -> Others | None:
    from rollgym.core.types import Limits
    from rollgym.evaluation.plan import Request, RoleAgent, cast_roles, look_at

    if not roles:
        return None
    agents = {role: RoleAgent(agent=name, options=options) for role, (name, options) in roles.items()}
    request = Request(env_id=env, agent="human", env_kwargs=kwargs, roles=agents)
    found = look_at(env, request.env_kwargs, Limits()).roles
    players = cast_roles(env, found, request.role_labels, YOU)
    return Others(request.make_team(), players, request.env_kwargs)


class PlaySession:
    """Interactive episodes of one environment."""

    def __init__(
        self,
        screen: Console,
        env: gym.Env[str, str],
        env_id: str,
        kwargs: Mapping[str, Any],
        others: Others | None = None,
    ) -> None:
        from rollgym.core.env import text_interface
        from rollgym.core.tool_env import tools_of

        self.screen = screen
        self.env = env
        self.env_id = env_id
        self.kwargs = kwargs
        self.interface = text_interface(env)
        self.tools = tools_of(self.interface)
        self.hints: Player | None = None
        self.others = others
        self.others_playing: dict[str, Player] = {}
        """The players of the other roles in the current episode."""
        self._loop: asyncio.Runner | None = None

    def close(self) -> None:
        """Close the environment and the agents."""
        self.env.close()
        if self.others is not None:
            self._run(self.others.team.close())
        if self._loop is not None:
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in one event loop for the whole session: connections of an agent belong to a loop."""
        import asyncio  # here: `rollgym --help` must not wait for it

        self._loop = self._loop or asyncio.Runner()
        return self._loop.run(work)

    def play(self, options: dict[str, Any], seed: int | None) -> None:
        """Play episodes until the person quits."""
        from rich.panel import Panel
        from rich.text import Text

        self.screen.print(Panel(Text(self._rules()), title=self.env_id, border_style="cyan"))
        self.screen.print(HELP, style="dim", highlight=False)
        while self._episode(options, seed):
            options.pop("task", None)
            seed = None

    def _episode(self, options: dict[str, Any], seed: int | None) -> bool:
        """Play one episode; returns True if the person wants another."""
        from rollgym.core.errors import EnvError, boundary

        with boundary(EnvError, f"{self.env_id} raised in reset()"):
            observation, info = self.env.reset(seed=seed, options=options or None)
        self.hints = self._expert()
        self._start_others(seed)
        total, turn, over = 0.0, 0, False
        self._show(observation, info)
        while not over:
            word = self._others_action(observation, info) or self._ask(observation, info)
            if word == "/new":
                return True
            if word == "/quit":
                return False
            with boundary(EnvError, f"{self.env_id} raised in step()"):
                observation, reward, terminated, truncated, info = self.env.step(word)
            if self.others is not None:  # the person's own
                reward = info["role_rewards"][self.others.role]
                info["success"] = info["role_success"][self.others.role]
            over, turn, total = terminated or truncated, turn + 1, total + float(reward)
            self._show(observation, info)
            score = f"turn {turn}   reward {reward:+g}   return {total:+g}"
            self.screen.print(score, style="dim", highlight=False)
        word, style = ("The end.", "bold")
        if info.get("success") is not None:
            word, style = ("You did it!", "bold green") if info["success"] else ("Not this time.", "bold red")
        self.screen.print(f"{word} Return {total:g} in {turn} turns.", style=style)
        answer = self.screen.input("Another one? [y/N] ", markup=False)
        return answer.strip().lower() in ("y", "yes", "/new")

    def _start_others(self, seed: int | None) -> None:
        """Start the agents of the other roles on a new episode."""
        from rollgym.core.agent import Briefing, as_player
        from rollgym.core.role_env import roles_of
        from rollgym.core.types import EpisodeSpec

        if self.others is None:
            return
        players = dict(self.others.players)
        spec = EpisodeSpec(
            episode_id="play",
            env_id=self.env_id,
            env_kwargs=dict(self.kwargs),
            sampling_seed=secrets.randbits(31) if seed is None else seed,
            players=players,
        )
        self.others_playing = {
            role.name: as_player(
                self.others.team.player(
                    Briefing(
                        spec=spec,
                        instructions=role.instructions,
                        tools=role.tools,
                        role=role.name,
                        free_text=role.free_text,
                    )
                )
            )
            for role in roles_of(self.interface)
            if players[role.name] != YOU
        }

    def _others_action(self, observation: str, info: Mapping[str, Any]) -> str:
        """The action of an agent whose turn it is; empty on the person's turn."""
        player = self.others_playing.get(str(info.get("role")))
        if player is None:
            return ""
        answer = self._run(_first(player, observation, info))
        action = answer if isinstance(answer, str) else str(answer.action)
        self.screen.print(f"{info['role']}: {action}", style="magenta", markup=False, highlight=False)
        return action

    def _ask(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next action, after any commands before it."""
        from rollgym.core.tools import typed_call

        while True:
            word = self.screen.input("[bold cyan]>[/] ").strip()
            listed = [str(action).lower() for action in info.get("actions") or ()]
            if word.lower() not in listed:
                word = PLAIN.get(word.lower(), word)
            if word in ("/quit", "/new"):
                return word
            if word.startswith("/say "):
                return word.removeprefix("/say ")
            if word == "/rules":
                self.screen.print(self._rules(), markup=False, highlight=False)
            elif word == "/hint":
                self.screen.print(self._hint(observation, info), style="green", markup=False)
            elif word.startswith("/"):
                self.screen.print(HELP, style="dim", highlight=False)
            elif word:
                return typed_call(complete(word, info.get("actions")), self.tools)

    def _rules(self) -> str:
        from rollgym.core.tools import list_tools

        return f"{self.interface.instructions}\n\n{list_tools(self.tools)}".rstrip()

    def _expert(self) -> Player | None:
        from rollgym.core.agent import AgentSetup, Briefing, make_agent
        from rollgym.core.errors import RollgymError
        from rollgym.core.types import EpisodeSpec

        try:
            agent = make_agent("expert", AgentSetup(env_id=self.env_id, env_kwargs=self.kwargs))
            spec = EpisodeSpec(episode_id="play", env_id=self.env_id, env_kwargs=dict(self.kwargs))
            briefing = Briefing(spec=spec, instructions=self.interface.instructions, tools=self.tools)
            return agent.player(briefing)
        except RollgymError:
            return None

    def _hint(self, observation: str, info: Mapping[str, Any]) -> str:
        if self.hints is None:
            return "This environment has no expert."
        try:
            answer = self._run(_first(self.hints, observation, info))
        except Exception as error:
            # Experts follow their own plan and may fail on a state that it does not reach.
            return f"The expert has no hint for this state ({type(error).__name__})."
        return answer if isinstance(answer, str) else answer.action

    def _show(self, observation: str, info: Mapping[str, Any]) -> None:
        from rich.panel import Panel

        style = "white" if info.get("valid", True) else "yellow"
        self.screen.print(Panel(color(observation, self.interface.palette), expand=False, border_style=style))
        actions = info.get("actions")
        if actions:
            words = ", ".join(actions[:12]) + (f", … ({len(actions)} in all)" if len(actions) > 12 else "")
            self.screen.print(words, style="dim", markup=False, highlight=False)


async def _first(player: Player, observation: str, info: Mapping[str, Any]) -> Any:
    return await player.act(observation, info)


def complete(word: str, actions: Any) -> str:
    """Complete a prefix to the only action that starts with it; any other word is returned unchanged."""
    if not isinstance(actions, list):
        return word
    matches = [action for action in actions if str(action).lower().startswith(word.lower())]
    return str(matches[0]) if len(matches) == 1 else word


def color(text: str, palette: Mapping[str, str]) -> RenderableType:
    """Color each character as the environment's palette defines."""
    from rich.text import Text

    painted = Text()
    for character in text:
        painted.append(character, style=palette.get(character))
    return painted
