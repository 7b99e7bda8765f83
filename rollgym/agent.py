"""Who plays: the agent protocol and the names of agents.

An `Agent` lives as long as a run and makes one `Player` for each episode, so that many episodes go on
at once without sharing state. A custom agent can be as small as a function::

    def always_up(observation: str, info: dict) -> str:
        return "Up"

and be named ``my_module:always_up`` wherever an agent is asked for, or register under a short name with
`register_agent` (in a module given by ``--agent-module``, or a package with the entry-point group
``rollgym.agents``).
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollgym.errors import AgentError, RollgymError, UnknownName, UsageError, one_line
from rollgym.given import held, hold, importable_name, is_held
from rollgym.registry import call_plugins, load_object
from rollgym.types import EpisodeSpec, Usage

AGENT_GROUP = "rollgym.agents"
BUILT_IN = "rollgym.agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What an agent does in one turn, with whatever is known of how it came about."""

    action: str
    response: str | None = None
    """The whole reply, where the action was taken out of a longer one."""
    prompt_ids: tuple[int, ...] = ()
    action_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    new_row: bool = False
    policy_version: int | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Briefing:
    """What a player knows before the first observation."""

    spec: EpisodeSpec
    instructions: str


class Player(Protocol):
    """One agent in one episode. It may have an ``async def leave()``, called when the episode has ended."""

    async def act(self, observation: str, info: Mapping[str, Any]) -> Move | str:
        """The next move."""


@runtime_checkable
class Agent(Protocol):
    """Makes a player for each episode."""

    def player(self, briefing: Briefing) -> Player:
        """A player for one episode; it must not share state with another."""

    async def close(self) -> None:
        """Give back what the agent holds (connections, models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetup:
    """What an agent's factory is told: the environment it will play."""

    env_id: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)


class FunctionAgent:
    """An agent made from a function of (observation, info), plain or async."""

    def __init__(self, function: Callable[..., str | Move | Awaitable[str | Move]]) -> None:
        self._function = function

    def player(self, briefing: Briefing) -> FunctionAgent:
        """Functions keep no state, so one player serves all."""
        return self

    async def act(self, observation: str, info: Mapping[str, Any]) -> Move | str:
        """Call the function."""
        result = self._function(observation, info)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Nothing to give back."""


class SoloAgent:
    """Base for agents that decide alone: each episode is played by a fresh copy.

    Override `choose`, and `start` to forget the last episode.
    """

    def __init__(self, setup: AgentSetup) -> None:
        self.setup = setup

    def player(self, briefing: Briefing) -> SoloAgent:
        """A copy of this agent, started on the episode."""
        player = copy.copy(self)
        player.start(briefing)
        return player

    def start(self, briefing: Briefing) -> None:
        """Called once per episode, before the first observation."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next action."""
        raise NotImplementedError(f"{type(self).__name__} must define choose(observation, info)")

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next action, as the protocol asks for it."""
        return self.choose(observation, info)

    async def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCard:
    """What is known of an agent without importing it."""

    name: str
    factory: str
    summary: str = ""


_cards: dict[str, AgentCard] = {}
_loaded = False


def register_agent(name: str, factory: str, *, summary: str = "") -> None:
    """Give an agent a short name. ``factory`` is ``module:callable`` taking an `AgentSetup` and options."""
    _cards[name] = AgentCard(name=name, factory=factory, summary=summary)


def load_agents() -> None:
    """Let this package and installed ones register their agents, once. A broken one is a warning."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    importlib.import_module(BUILT_IN).register_all()
    call_plugins(AGENT_GROUP, "agents")


def agent_cards() -> list[AgentCard]:
    """All registered agents, in order of their names."""
    load_agents()
    return [_cards[name] for name in sorted(_cards)]


class GivenAgent:
    """An agent that the caller made, and keeps: it is not closed with a run."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def player(self, briefing: Briefing) -> Player:
        """A player of the caller's agent."""
        return self._agent.player(briefing)

    async def close(self) -> None:
        """Leave it open: it belongs to the caller."""


def agent_name(agent: str | Agent | Callable[..., Any]) -> str:
    """The name of an agent; an instance, a class, or a function of (observation, info) gets a name.

    A class or function at the top of a module is ``module:name``; others are known in this process only.

    Example:
        >>> agent_name(lambda observation, info: "Up")
        'local/lambda'
    """
    if isinstance(agent, str):
        return agent
    if not callable(agent) and not isinstance(agent, Agent):
        raise UsageError(
            f"An agent cannot be an object of type {type(agent).__name__}: pass a name, a function of "
            "(observation, info), a class, or an instance with player(briefing) and async close()."
        )
    return importable_name(agent) or hold(agent)


def make_agent(name: str | Agent | Callable[..., Any], setup: AgentSetup, **options: Any) -> Agent:
    """Make an agent from its name, ``module:function`` or ``module:Class``, or from the object itself.

    An agent that was made already is used as it is, and stays open.
    """
    name = agent_name(name)
    if is_held(name):
        thing = held(name, "agent")
        if inspect.isclass(thing) or not isinstance(thing, Agent):
            return build_agent(thing, name, setup, options)
        if options:
            raise UsageError(
                f"Agent {name!r} is made already, so it takes no options ({next(iter(options))!r})."
            )
        return GivenAgent(thing)
    load_agents()
    if name in _cards:
        path = _cards[name].factory
    elif ":" in name:
        path = name
    else:
        raise UnknownName("agent", name, _cards, f"Agents: {', '.join(sorted(_cards))}.")
    return build_agent(load_object(path, "agent"), name, setup, options)


def build_agent(
    factory: Any, name: str, setup: AgentSetup, options: Mapping[str, Any] | None = None
) -> Agent:
    """An agent from a factory, or straight from a function of (observation, info)."""
    options = dict(options or {})
    if not callable(factory):
        raise UsageError(
            f"{name!r} is a {type(factory).__name__}, which is no agent: name a function or a class."
        )
    parameters = inspect.signature(factory).parameters
    if not inspect.isclass(factory) and _plays_itself(parameters):
        if options:
            raise UsageError(
                f"Agent {name!r} is a plain function and takes no options ({next(iter(options))!r})."
            )
        return FunctionAgent(factory)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in options if key not in parameters]
    if unknown and not takes_any:
        known = list(parameters)[1:]
        raise UnknownName(f"option of agent {name!r}", unknown[0], known)
    try:
        agent = factory(setup, **options)
    except RollgymError:
        raise
    except TypeError as error:
        raise UsageError(f"Agent {name!r} cannot be made: {one_line(error)}") from error
    except Exception as error:
        raise AgentError(f"Agent {name!r} cannot be made: {one_line(error)}") from error
    if not isinstance(agent, Agent):
        raise UsageError(
            f"{name!r} makes a {type(agent).__name__}, which is no agent: it needs player(briefing) "
            "and async close()."
        )
    return agent


def _plays_itself(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """True for a function of an observation and an info, whatever it calls them; a factory takes a setup."""
    needed = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
    ]
    return len(needed) == 2 and needed[0] != "setup"
