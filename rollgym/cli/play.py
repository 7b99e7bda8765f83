"""``rollgym play``: play an environment in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.utils.cli_options import EnvArgs, EnvModules, EnvName, console, import_modules, parse_pairs

if TYPE_CHECKING:
    import gymnasium as gym
    from rich.console import Console, RenderableType

    from rollgym.core.agent import Player

EPILOG = "Example: rollgym play rollgym/Sokoban-v0 --split test --task 3"
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
) -> None:
    """Play an environment in the terminal.

    Type an action, or its first letters if they are unambiguous. /help shows the other commands.
    """
    from rollgym.core.registry import make

    import_modules(env_module)
    kwargs = parse_pairs(env_arg, "--env-arg")
    session = PlaySession(console(), make(env, **kwargs), env, kwargs)
    try:
        options = {"task": task, "split": split}
        session.play({key: value for key, value in options.items() if value is not None}, seed)
    except (EOFError, KeyboardInterrupt):
        session.screen.print("\nBye.", style="dim")
    finally:
        session.env.close()


class PlaySession:
    """Interactive episodes of one environment."""

    def __init__(
        self, screen: Console, env: gym.Env[str, str], env_id: str, kwargs: Mapping[str, Any]
    ) -> None:
        from rollgym.core.env import text_interface

        self.screen = screen
        self.env = env
        self.env_id = env_id
        self.kwargs = kwargs
        self.interface = text_interface(env)
        self.hints: Player | None = None

    def play(self, options: dict[str, Any], seed: int | None) -> None:
        """Play episodes until the person quits."""
        from rich.panel import Panel
        from rich.text import Text

        self.screen.print(Panel(Text(self.interface.instructions), title=self.env_id, border_style="cyan"))
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
        total, turn, over = 0.0, 0, False
        self._show(observation, info)
        while not over:
            word = self._ask(observation, info)
            if word == "/new":
                return True
            if word == "/quit":
                return False
            with boundary(EnvError, f"{self.env_id} raised in step()"):
                observation, reward, terminated, truncated, info = self.env.step(word)
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

    def _ask(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next action, after any commands before it."""
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
                self.screen.print(self.interface.instructions, markup=False, highlight=False)
            elif word == "/hint":
                self.screen.print(self._hint(observation, info), style="green", markup=False)
            elif word.startswith("/"):
                self.screen.print(HELP, style="dim", highlight=False)
            elif word:
                return complete(word, info.get("actions"))

    def _expert(self) -> Player | None:
        from rollgym.core.agent import AgentSetup, Briefing, make_agent
        from rollgym.core.errors import RollgymError
        from rollgym.core.tool_env import tools_of
        from rollgym.core.types import EpisodeSpec

        try:
            agent = make_agent("expert", AgentSetup(env_id=self.env_id, env_kwargs=self.kwargs))
            spec = EpisodeSpec(episode_id="play", env_id=self.env_id, env_kwargs=dict(self.kwargs))
            interface = self.interface
            briefing = Briefing(spec=spec, instructions=interface.instructions, tools=tools_of(interface))
            return agent.player(briefing)
        except RollgymError:
            return None

    def _hint(self, observation: str, info: Mapping[str, Any]) -> str:
        import asyncio

        if self.hints is None:
            return "This environment has no expert."
        try:
            answer = asyncio.run(_first(self.hints, observation, info))
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
