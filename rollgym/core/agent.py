"""The agent protocol and the registry of agents.

An `Agent` lives as long as a run and makes one `Player` per episode, so that many episodes run at once
without sharing state. A custom agent can be as small as a function::

    def always_up(observation: str, info: dict) -> str:
        return "Up"

Pass it as ``my_module:always_up`` wherever an agent is expected, or register a short name with
`register_agent` (in a module given by ``--agent-module``, or in a package with the entry-point group
``rollgym.agents``).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollgym.core.errors import AgentError, RollgymError, UnknownName, UsageError, one_line
from rollgym.core.local_objects import get_local, importable_name, is_local, register_local
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.registry import call_plugins_once, load_object
from rollgym.core.routed_experts import RoutedExperts
from rollgym.core.tools import write_calls
from rollgym.core.types import EpisodeSpec, Usage

AGENT_GROUP = "rollgym.agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAction:
    """An agent's action in one turn, with the tokens it was sampled as where they are known.

    Example:
        >>> AgentAction(action="Up", response="The goal is above me. Up")
    """

    action: str
    response: str | None = None
    """The whole reply, where the action was parsed out of a longer one."""
    message: Message | None = None
    """The reply by its parts, from an agent that calls tools."""
    prompt_ids: tuple[int, ...] = ()
    action_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    new_row: bool = False
    policy_version: int | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    routed_experts: RoutedExperts | None = None
    """As in `Turn.routed_experts`."""
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Briefing:
    """The episode, the environment's instructions and its tools, given to a player before it observes.

    Example:
        >>> spec = EpisodeSpec(episode_id="test-7-0", env_id="rollgym/Sokoban-v0", task=7, split="test")
        >>> Briefing(spec=spec, instructions="Push every box onto a target.")
    """

    spec: EpisodeSpec
    instructions: str
    tools: tuple[ToolSpec, ...] = ()
    """Tools that the agent may call; empty where actions are plain text."""
    role: str = ""
    """The role to play; empty in an episode of one agent. Each role gets its own player and briefing."""
    free_text: bool = False
    """As in `RoleSpec.free_text`."""


@runtime_checkable
class Player(Protocol):
    """One agent in one episode. A custom player needs only `act`; `as_player` adds the rest.

    Example:
        >>> player = agent.player(briefing)
        >>> action = await player.act("The lock is closed.", {"actions": ["1", "2"]})
    """

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction | str:
        """Return the next action."""

    async def leave(self) -> None:
        """Release what the player holds; called once, when the episode has ended."""
        return

    def final_prompt(self, observation: str) -> tuple[tuple[int, ...], bool]:
        """Return the token ids that an observation after the last turn adds, for a critic to value.

        The second value is whether they start a new row. Without ids, the critic does not value the state.
        """
        return (), False


@runtime_checkable
class MinimalAgent(Protocol):
    """The part of `Agent` that a custom agent must define; `as_agent` adds the rest."""

    def player(self, briefing: Briefing) -> Any:
        """Return a player for one episode; it must not share state with another."""

    async def close(self) -> None:
        """Release what the agent holds, such as connections and models."""
        return


@runtime_checkable
class Agent(MinimalAgent, Protocol):
    """Makes a player for each episode.

    Example:
        >>> class Constant:
        ...     def player(self, briefing):
        ...         return self
        ...     async def act(self, observation, info):
        ...         return "Up"
        ...     async def close(self):
        ...         pass
    """

    default_concurrency: int = 1
    """Episodes to run at once unless the caller sets a number."""
    notes: Sequence[str] = ()
    """Sentences about where the settings came from, for the console."""

    def player(self, briefing: Briefing) -> Player:
        """Return a player for one episode; it must not share state with another."""

    def describe(self) -> dict[str, Any]:
        """Return the settings, for the record of a run. They must not hold a secret."""
        return {}

    def totals(self) -> dict[str, Any]:
        """Return counts over all episodes so far, such as requests and tokens."""
        return {}


def as_player(player: Any) -> Player:
    """Return ``player`` with every method of `Player`; the ones it lacks get the defaults."""
    # By inheritance: isinstance() on a protocol looks up every member, in every episode.
    if Player in type(player).__mro__:
        inherited: Player = player
        return inherited
    return _PlayerAdapter(player)


def as_agent(agent: MinimalAgent) -> Agent:
    """Return ``agent`` with every member of `Agent`; the ones it lacks get the defaults."""
    return agent if isinstance(agent, Agent) else _AgentAdapter(agent)


class _PlayerAdapter(Player):
    def __init__(self, player: Any) -> None:
        self._player = player
        # The player's own methods in place of wrappers: a call of `act` is made in every turn.
        for name in ("act", "leave", "final_prompt"):
            if hasattr(player, name):
                setattr(self, name, getattr(player, name))

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction | str:
        action: AgentAction | str = await self._player.act(observation, info)
        return action


class _AgentAdapter(Agent):
    def __init__(self, agent: MinimalAgent) -> None:
        self._agent = agent
        self.default_concurrency = getattr(agent, "default_concurrency", 1)
        self.notes = getattr(agent, "notes", ())

    def player(self, briefing: Briefing) -> Player:
        return as_player(self._agent.player(briefing))

    async def close(self) -> None:
        await self._agent.close()

    def describe(self) -> dict[str, Any]:
        return self._optional("describe")

    def totals(self) -> dict[str, Any]:
        return self._optional("totals")

    def _optional(self, name: str) -> dict[str, Any]:
        method = getattr(self._agent, name, None)
        return dict(method()) if callable(method) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetup:
    """The environment that an agent will play, given to its factory.

    Example:
        >>> AgentSetup(env_id="rollgym/Sokoban-v0", env_kwargs={"size": 6})
    """

    env_id: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)


class FunctionAgent(Agent, Player):
    """An agent made from a function of (observation, info), plain or async."""

    def __init__(self, function: Callable[..., str | AgentAction | Awaitable[str | AgentAction]]) -> None:
        self._function = function

    def player(self, briefing: Briefing) -> FunctionAgent:
        """Return the agent itself: functions keep no state between episodes."""
        return self

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction | str:
        """Call the function."""
        result = self._function(observation, info)
        return await result if inspect.isawaitable(result) else result


class SoloAgent(Agent, Player):
    """Base class of agents that need no shared resources: each episode is played by a fresh copy.

    Override `choose`, and `start` to reset the state for a new episode. An agent that chooses text actions
    plays the tool form of an environment as well where `calls` turns them into calls.

    Example:
        >>> class First(SoloAgent):
        ...     def choose(self, observation, info):
        ...         return info["actions"][0]
    """

    tools: tuple[ToolSpec, ...] = ()
    """Tools of the environment that is played."""

    def __init__(self, setup: AgentSetup) -> None:
        self.setup = setup

    def player(self, briefing: Briefing) -> SoloAgent:
        """Return a copy of this agent, started on the episode."""
        player = copy.copy(self)
        player.tools = briefing.tools
        player.start(briefing)
        return player

    def start(self, briefing: Briefing) -> None:
        """Reset the state; called once per episode, before the first observation."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Return the next action."""
        raise NotImplementedError(f"{type(self).__name__} must define choose(observation, info)")

    def calls(self, action: str) -> Sequence[ToolCall]:
        """Return a text action as tool calls; none where `choose` returns calls as JSON itself."""
        return ()

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """Return the next action, as the protocol requires it."""
        action = self.choose(observation, info)
        calls = self.calls(action) if self.tools else ()
        return write_calls(calls) if calls else action


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInfo:
    """A registered agent: known without importing its module.

    Example:
        >>> [info.name for info in rollgym.list_agents()][:2]
        ['chat', 'expert']
    """

    name: str
    factory: str
    summary: str = ""


_registered: dict[str, AgentInfo] = {}
_register_builtin: Callable[[], None] | None = None


def register_agent(name: str, factory: str, *, summary: str = "") -> None:
    """Register an agent under a short name.

    Args:
        name: Used as ``--agent NAME`` and ``agent: NAME``.
        factory: ``module:callable``, called with an `AgentSetup` and the options as keywords.
        summary: One line for lists of agents.

    Example:
        >>> rollgym.register_agent("greedy", "my_package.agents:Greedy", summary="takes the first action")
    """
    _registered[name] = AgentInfo(name=name, factory=factory, summary=summary)


def set_builtin_agents(register_all: Callable[[], None]) -> None:
    """Set the function that registers the agents of rollgym, called on first use of the registry."""
    global _register_builtin
    _register_builtin = register_all


def load_agents() -> None:
    """Register the agents of rollgym and of other packages, once. A broken package only gives a warning."""
    global _register_builtin
    if _register_builtin is not None:
        registered_before, register_all = dict(_registered), _register_builtin
        _register_builtin = None
        register_all()
        _registered.update(registered_before)
    call_plugins_once(AGENT_GROUP, "agents")


def list_agents() -> list[AgentInfo]:
    """Return all registered agents, sorted by name.

    Example:
        >>> [info.name for info in rollgym.list_agents()][:2]
        ['chat', 'expert']
    """
    load_agents()
    return [_registered[name] for name in sorted(_registered)]


class _BorrowedAgent(_AgentAdapter):
    """An agent that the caller made and keeps open: it is not closed with a run."""

    async def close(self) -> None:
        return


def agent_name(agent: str | MinimalAgent | Callable[..., Any]) -> str:
    """Return the name of an agent; an instance, a class, or a function of (observation, info) gets one.

    A class or function at the top of a module is named ``module:name``; other names are valid only in this
    process.

    Example:
        >>> agent_name(lambda observation, info: "Up")
        'local/lambda'
    """
    if isinstance(agent, str):
        return agent
    if not callable(agent) and not isinstance(agent, MinimalAgent):
        raise UsageError(
            f"An agent cannot be an object of type {type(agent).__name__}: pass a name, a function of "
            "(observation, info), a class, or an instance with player(briefing) and async close()."
        )
    return importable_name(agent) or register_local(agent)


def make_agent(name: str | MinimalAgent | Callable[..., Any], setup: AgentSetup, **options: Any) -> Agent:
    """Make an agent from its name, ``module:function`` or ``module:Class``, or from the object itself.

    An agent instance is used as it is, and stays open when the run closes its agent.

    Example:
        >>> agent = make_agent("random", AgentSetup(env_id="rollgym/Sokoban-v0"))
    """
    name = agent_name(name)
    if is_local(name):
        local = get_local(name, "agent")
        if inspect.isclass(local) or not isinstance(local, MinimalAgent):
            return build_agent(local, name, setup, options)
        if options:
            raise UsageError(f"Agent {name!r} is an instance and takes no options ({next(iter(options))!r}).")
        return _BorrowedAgent(local)
    load_agents()
    if name in _registered:
        path = _registered[name].factory
    elif ":" in name:
        path = name
    else:
        raise UnknownName("agent", name, _registered, f"Agents: {', '.join(sorted(_registered))}.")
    return build_agent(load_object(path, "agent"), name, setup, options)


def build_agent(
    factory: Any, name: str, setup: AgentSetup, options: Mapping[str, Any] | None = None
) -> Agent:
    """Make an agent from a factory, or from a function of (observation, info)."""
    options = dict(options or {})
    if not callable(factory):
        raise UsageError(f"{name!r} is a {type(factory).__name__}, not an agent: name a function or a class.")
    parameters = inspect.signature(factory).parameters
    if not inspect.isclass(factory) and _is_policy_function(parameters):
        if options:
            raise UsageError(
                f"Agent {name!r} is a plain function and takes no options ({next(iter(options))!r})."
            )
        return FunctionAgent(factory)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in options if key not in parameters]
    if unknown and not takes_any:
        raise UnknownName(f"option of agent {name!r}", unknown[0], list(parameters)[1:])
    try:
        agent = factory(setup, **options)
    except RollgymError:
        raise
    except Exception as error:
        kind = UsageError if isinstance(error, TypeError) else AgentError
        raise kind(f"Agent {name!r} cannot be made: {one_line(error)}") from error
    if not isinstance(agent, MinimalAgent):
        raise UsageError(
            f"{name!r} makes a {type(agent).__name__}, which is not an agent: it needs player(briefing) "
            "and async close()."
        )
    return as_agent(agent)


def _is_policy_function(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function takes (observation, info), under any names; a factory takes a setup."""
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
    ]
    return len(required) == 2 and required[0] != "setup"
