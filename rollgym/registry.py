"""Names for environments, on Gymnasium's own registry.

After ``import rollgym`` both ``rollgym.make`` and ``gymnasium.make`` know every environment registered here.
Names that work everywhere an environment is asked for:

- an id, ``rollgym/Sokoban-v0`` or any of Gymnasium's (``CartPole-v1``);
- ``module:Class``, a class that nobody registered;
- in Python, also the class itself, or a function that makes an environment (`environment_id`);
- ids of other packages: installed ones are found by the entry-point group ``rollgym.envs``, others by
  importing a module that registers them (``--env-module`` on the command line).

Registering is a string, so that a long list of environments costs nothing until one is made.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, NoReturn

import gymnasium as gym
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)
from gymnasium.envs.registration import registry as gym_registry

from rollgym.errors import EnvError, RollgymError, UnknownName, UsageError, one_line
from rollgym.extras import require
from rollgym.given import hold, importable_name, is_held, unknown_sentence
from rollgym.text import TextFace
from rollgym.trust import find_origin

ENV_GROUP = "rollgym.envs"
BUILT_IN = "rollgym.envs"
"""The module of our own environments: found by name, since the core imports none of the rooms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCard:
    """What is known of an environment without importing it."""

    env_id: str
    summary: str = ""
    expert: str | None = None
    """``module:factory`` of an agent that plays it well."""
    expert_is: str = "expert"
    """``expert`` (solves every task) or ``baseline`` (sound, but no promise)."""
    needs: tuple[str, ...] = ()
    """Extras of rollgym that must be installed."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


_cards: dict[str, EnvCard] = {}
_plugins_loaded = False
_retired: set[str] = set()
"""Names that a warning was given for: once is enough."""


def register(
    env_id: str,
    entry_point: str | Callable[..., gym.Env[Any, Any]],
    *,
    summary: str = "",
    max_turns: int | None = None,
    expert: str | None = None,
    expert_is: str = "expert",
    needs: Iterable[str] = (),
    kwargs: Mapping[str, Any] | None = None,
    reward_threshold: float | None = None,
) -> None:
    """Give an environment an id, here and in Gymnasium's registry.

    Args:
        env_id: ``namespace/Name-vN``; raise N whenever results stop being comparable.
        entry_point: ``module:Class`` (imported only when made) or a callable.
        summary: One line for tables.
        max_turns: After how many steps Gymnasium's TimeLimit truncates an episode.
        expert: ``module:factory`` of an agent for ``--agent expert``.
        expert_is: ``"expert"`` if it solves every task, ``"baseline"`` if it is merely sound.
        needs: Extras of rollgym the environment cannot run without.
        kwargs: Arguments for the constructor.
        reward_threshold: Gymnasium's field of that name.
    """
    if expert_is not in ("expert", "baseline"):
        raise ValueError(f"expert_is must be 'expert' or 'baseline', not {expert_is!r}")
    arguments = dict(kwargs or {})
    known = gym_registry.get(env_id)
    wanted = (entry_point, arguments, max_turns, reward_threshold)
    if known is None or wanted != (
        known.entry_point,
        known.kwargs,
        known.max_episode_steps,
        known.reward_threshold,
    ):
        gym.register(
            env_id,
            entry_point,
            max_episode_steps=max_turns,
            kwargs=arguments,
            reward_threshold=reward_threshold,
        )
    _cards[env_id] = EnvCard(
        env_id=env_id,
        summary=summary,
        expert=expert,
        expert_is=expert_is,
        needs=tuple(needs),
        kwargs=arguments,
    )


def register_built_in() -> None:
    """Register the environments of this package; ``import rollgym`` calls it."""
    importlib.import_module(BUILT_IN).register_all()


def load_plugins() -> None:
    """Let installed packages register their environments, once. A broken one is a warning."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    call_plugins(ENV_GROUP, "environments")


def call_plugins(group: str, what: str) -> None:
    """Call the entry points of a group, each of which registers something. A broken one is a warning."""
    for plugin in entry_points(group=group):
        try:
            plugin.load()()
        except Exception as error:
            warnings.warn(
                f"the plugin {plugin.name!r} ({plugin.value}) could not register its {what}: "
                f"{one_line(error)}",
                stacklevel=3,
            )


def import_module(name: str, flag: str = "--env-module") -> None:
    """Import a module that the user named; a clear error where it cannot be, or lies in a run's folder.

    Names that only a file holds must not come here: see `rollgym.trust`.
    """
    find_origin(name, flag)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(
                f"{flag} {name}: there is no module of that name on the Python path or in the current folder "
                "(a run's folder is not searched)."
            ) from error
        raise UsageError(f"{flag} {name}: it imports {error.name!r}, which is missing.") from error
    except Exception as error:
        raise UsageError(f"{flag} {name}: importing it failed with {one_line(error)}.") from error


def load_object(path: str, what: str) -> Any:
    """What ``module:name`` points at."""
    module, _, name = path.partition(":")
    import_module(module, what)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise UnknownName(f"object in {module}", part, names)
        found = getattr(found, part)
    return found


def environment_id(env: str | Callable[..., Any]) -> str:
    """The name of an environment; a class, or a function that makes one, gets a name.

    A class at the top of a module is ``module:Class``. Others get an id ``local/NAME-v0``, which is known in
    this process only: worker processes cannot make them.

    Example:
        >>> environment_id(lambda: gymnasium.make("CartPole-v1"))
        'local/lambda-v0'
    """
    if isinstance(env, str):
        return env
    kind = env.__name__ if inspect.isclass(env) else type(env).__name__
    plays = hasattr(env, "reset") and hasattr(env, "step")
    if inspect.isclass(env) and not plays:
        raise UsageError(
            f"The class {kind} has no reset() and step(), so it cannot be an environment: pass a class with "
            "both, or a function that makes an environment."
        )
    if plays and not inspect.isclass(env):
        raise UsageError(
            f"An environment was passed as an instance of {kind}, but each episode needs its own: pass the "
            "class, or a function that makes one (lambda: ...)."
        )
    if not callable(env):
        raise UsageError(
            f"An environment cannot be an object of type {kind}: pass an id, a class, or a function that "
            "makes an environment."
        )
    name = importable_name(env)
    if name is None:
        name = hold(env, "-v0")
        known = gym_registry.get(name)
        if known is None:
            gym.register(name, env)
        elif known.entry_point is not env:
            raise UsageError(f"The id {name} is registered already: rename the class or function.")
    return name


def find_spec(name: str) -> EnvSpec:
    """Gymnasium's spec for a name, in any of the forms that name an environment."""
    load_plugins()
    if name in gym_registry:
        return gym_registry[name]
    module, colon, rest = name.partition(":")
    if colon and "/" not in module and rest not in gym_registry:
        import_module(module, "environment")
        if rest not in gym_registry:
            if "/" in rest:
                unknown_environment(rest)
            found = load_object(name, "environment")
            # An id of its own; Gymnasium's ids have no room for dots and colons in a namespace.
            # Gymnasium finds names at the top of a module only, so a nested class goes in as it is.
            return EnvSpec(id=f"{rest.replace('.', '-')}-v0", entry_point=found if "." in rest else name)
    if colon and rest in gym_registry:
        return gym_registry[rest]
    return _newer_version(name) or unknown_environment(name)


def is_registered(name: str) -> bool:
    """Whether a name is a registered id, in this or a newer version. Installed plugins are all it imports."""
    load_plugins()
    return name in gym_registry or (":" not in name and _newer_version(name) is not None)


def _newer_version(name: str) -> EnvSpec | None:
    """The newest version of an environment whose named version Gymnasium has retired."""
    try:
        namespace, base, version = parse_env_id(name)
    except gym.error.Error:
        return None
    newest = find_highest_version(namespace, base)
    if newest is None or (version is not None and version > newest):
        return None
    spec = gym_registry[get_env_id(namespace, base, newest)]
    if version is not None and name not in _retired:
        _retired.add(name)
        warnings.warn(f"{name} is retired in this Gymnasium: {spec.id} takes its place", stacklevel=4)
    return spec


def unknown_environment(name: str) -> NoReturn:
    """Say that there is no such environment, and which ones are called alike."""
    if is_held(name):
        raise UsageError(unknown_sentence(name, "environment"))
    raise UnknownName("environment", name, gym_registry, "`rollgym envs` lists what there is.")


def card(name: str) -> EnvCard:
    """What is known of an environment, for any name that `make` takes."""
    load_plugins()
    if name in _cards:
        return _cards[name]
    return _cards.get(find_spec(name).id) or EnvCard(env_id=name)


def cards() -> list[EnvCard]:
    """All environments registered through rollgym, in order of their ids."""
    load_plugins()
    return [_cards[env_id] for env_id in sorted(_cards)]


def make(name: str | Callable[..., Any], **kwargs: Any) -> gym.Env[str, str]:
    """Make an environment that speaks text; one that does not is adapted (see `rollgym.adapt`).

    ``name`` is an id, ``module:Class``, or in Python a class or a function that makes an environment.
    ``kwargs`` go to its constructor; ``max_episode_steps`` replaces the registered turn limit.
    """
    name = environment_id(name)
    spec = find_spec(name)
    for extra in _cards[spec.id].needs if spec.id in _cards else ():
        require(name, extra)
    # Gymnasium's passive checker warns step by step; `rollgym check` says it once and says more.
    kwargs.setdefault("disable_env_checker", True)
    try:
        env = _gym_make(spec, kwargs)
    except RollgymError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise UsageError(f"{name} cannot be made: {one_line(error)}") from error
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise UsageError(f"{name}: {' '.join(str(error).split())}.") from error
        raise EnvError(f"{name} cannot be made: {one_line(error)}") from error
    except Exception as error:
        raise EnvError(f"{name} cannot be made: {one_line(error)}") from error
    if _speaks_text(env):
        return env
    from rollgym.adapt import adapt

    return adapt(env)


def _gym_make(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """``gym.make``, also for classes and functions whose environments do not inherit from ``gym.Env``."""
    from rollgym.foreign_env import inherited

    entry = spec.entry_point
    creator: Any = load_env_creator(entry) if isinstance(entry, str) else entry
    if isinstance(creator, type) and issubclass(creator, gym.Env):
        return gym.make(spec, **kwargs)
    if not isinstance(creator, type):
        try:
            return gym.make(spec, **kwargs)
        except TypeError as error:
            # What a function makes is known once it has made it, and Gymnasium checks it before anybody else.
            if "gymnasium.Env" not in str(error):
                raise
    return gym.make(dataclasses.replace(spec, entry_point=inherited(creator)), **kwargs)


def _speaks_text(env: gym.Env[Any, Any]) -> bool:
    layer: Any = env
    while isinstance(layer, gym.Wrapper) and not isinstance(layer, TextFace):
        layer = layer.env
    return isinstance(layer, TextFace)
