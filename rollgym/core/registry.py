"""Environment registry, on top of Gymnasium's own.

After ``import rollgym`` both ``rollgym.make`` and ``gymnasium.make`` know every environment registered here.
Names that work wherever an environment is expected:

- an id, ``rollgym/Sokoban-v0`` or any of Gymnasium's (``CartPole-v1``);
- ``PREFIX:NAME``, an environment of another library (`rollgym.core.env_prefixes`);
- ``module:Class``, a class that is not registered;
- in Python, also the class itself, or a function that makes an environment (`env_id_of`);
- ids of other packages: installed ones are found by the entry-point group ``rollgym.envs``, others by
  importing a module that registers them (``--env-module`` on the command line).

An entry is a string, so a long list of environments costs nothing until one is made.
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

from rollgym.core.env import find_text_interface
from rollgym.core.env_prefixes import find_prefix, list_prefixes
from rollgym.core.errors import EnvError, RollgymError, UnknownName, UsageError, nearest, one_line
from rollgym.core.extras import require
from rollgym.core.local_objects import importable_name, is_local, register_local, unknown_sentence
from rollgym.core.renamed import MODULES
from rollgym.core.trust import find_origin

ENV_GROUP = "rollgym.envs"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvInfo:
    """Metadata of a registered environment, available without importing it.

    Example:
        >>> [info.env_id for info in rollgym.list_envs() if info.expert][:1]
        ['rollgym/Bandit-v0']
    """

    env_id: str
    summary: str = ""
    expert: str | None = None
    """``module:factory`` of an agent that plays it well."""
    expert_is: str = "expert"
    """``expert`` (solves every task) or ``baseline`` (sound, without a guarantee)."""
    needs: tuple[str, ...] = ()
    """Extras of rollgym that must be installed."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


_infos: dict[str, EnvInfo] = {}
_called_groups: set[str] = set()
"""Entry-point groups whose plugins were called."""
_retired: set[str] = set()
"""Names that were warned about: once per process is enough."""


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
    """Register an environment under an id, here and in Gymnasium's registry.

    Args:
        env_id: ``namespace/Name-vN``; raise N whenever results stop being comparable.
        entry_point: ``module:Class`` (imported only when made) or a callable.
        summary: One line for tables.
        max_turns: Number of steps after which Gymnasium's TimeLimit truncates an episode.
        expert: ``module:factory`` of an agent for ``--agent expert``.
        expert_is: ``"expert"`` if it solves every task, ``"baseline"`` if it is merely sound.
        needs: Extras of rollgym that the environment requires.
        kwargs: Arguments for the constructor.
        reward_threshold: Gymnasium's field of that name.

    Example:
        >>> rollgym.register("my/Maze-v0", "my_package.envs:Maze", summary="Leave a maze", max_turns=50)
    """
    if expert_is not in ("expert", "baseline"):
        raise ValueError(f"expert_is must be 'expert' or 'baseline', not {expert_is!r}")
    arguments = dict(kwargs or {})
    spec = gym_registry.get(env_id)
    wanted = (entry_point, arguments, max_turns, reward_threshold)
    if spec is None or wanted != (
        spec.entry_point,
        spec.kwargs,
        spec.max_episode_steps,
        spec.reward_threshold,
    ):
        gym.register(
            env_id,
            entry_point,
            max_episode_steps=max_turns,
            kwargs=arguments,
            reward_threshold=reward_threshold,
        )
    _infos[env_id] = EnvInfo(
        env_id=env_id,
        summary=summary,
        expert=expert,
        expert_is=expert_is,
        needs=tuple(needs),
        kwargs=arguments,
    )


@dataclass(frozen=True, slots=True)
class Adapter:
    """Functions with which `make` turns other environments into text environments."""

    adapt: Callable[[gym.Env[Any, Any]], gym.Env[str, str]]
    """Wraps an environment whose observations or actions are not text."""
    inherit: Callable[[Callable[..., Any]], Callable[..., gym.Env[Any, Any]]]
    """Makes a class or function whose environments do not derive from ``gym.Env`` return ones that do."""


_adapter: Adapter


def set_adapter(adapter: Adapter) -> None:
    """Install the adapter that `make` uses; ``import rollgym`` installs that of `rollgym.adapters`."""
    global _adapter
    _adapter = adapter


def load_plugins() -> None:
    """Let installed packages register their environments, once. A package that fails is a warning."""
    call_plugins_once(ENV_GROUP, "environments")


def call_plugins_once(group: str, kind: str) -> None:
    """Call the entry points of a group the first time that this is called."""
    if group not in _called_groups:
        _called_groups.add(group)
        call_plugins(group, kind)


def call_plugins(group: str, kind: str, *arguments: Any) -> None:
    """Call the entry points of a group, each of which registers something. One that fails is a warning."""
    for plugin in entry_points(group=group):
        try:
            plugin.load()(*arguments)
        except Exception as error:
            warnings.warn(
                f"the plugin {plugin.name!r} ({plugin.value}) could not register its {kind}: "
                f"{one_line(error)}",
                stacklevel=3,
            )


def import_module(name: str, flag: str = "--env-module") -> None:
    """Import a module that the user named; raises `UsageError` where that fails or it lies in a run folder.

    Never call it with a name that only a file contains: see `rollgym.core.trust`.
    """
    find_origin(name, flag)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in MODULES:
            raise UsageError(f"{flag} {name}: {error}.") from error
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(
                f"{flag} {name}: no such module on the Python path or in the current folder (run folders are "
                "not searched)."
            ) from error
        raise UsageError(f"{flag} {name}: it imports {error.name!r}, which is not installed.") from error
    except Exception as error:
        raise UsageError(f"{flag} {name}: importing it failed with {one_line(error)}.") from error


def load_object(path: str, kind: str) -> Any:
    """Import and return the object that ``module:name`` names."""
    module, _, name = path.partition(":")
    import_module(module, kind)
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(value, part):
            names = [n for n in vars(value) if not n.startswith("_")]
            raise UnknownName(f"object in {module}", part, names)
        value = getattr(value, part)
    return value


def env_id_of(env: str | Callable[..., Any]) -> str:
    """The name of an environment; a class, or a function that makes one, is given a name.

    A class at the top of a module is ``module:Class``. Others get an id ``local/NAME-v0``, which is known in
    this process only: worker processes cannot make them.

    Example:
        >>> env_id_of(lambda: gymnasium.make("CartPole-v1"))
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
        name = register_local(env, "-v0")
        spec = gym_registry.get(name)
        if spec is None:
            gym.register(name, env)
        elif spec.entry_point is not env:
            raise UsageError(f"The id {name} is already registered: rename the class or function.")
    return name


def find_spec(name: str) -> EnvSpec:
    """Gymnasium's spec for a name, in any of the forms that name an environment.

    ``gymnasium.make`` takes the spec, also for names that it does not know itself.

    Example:
        >>> env = gymnasium.make(find_spec("reasoning_gym:leg_counting"))
    """
    load_plugins()
    if name in gym_registry:
        return gym_registry[name]
    if prefix := find_prefix(name):
        return prefix.spec(name)
    module, colon, rest = name.partition(":")
    if colon and "/" not in module and rest not in gym_registry:
        _import_named(module, name)
        if rest not in gym_registry:
            if "/" in rest:
                unknown_environment(rest)
            maker = load_object(name, "environment")
            # Gymnasium's ids allow no dots and colons in a namespace, so the id leaves the module out.
            # Gymnasium finds names at the top of a module only, so a nested class is passed as an object.
            return EnvSpec(id=f"{rest.replace('.', '-')}-v0", entry_point=maker if "." in rest else name)
    if colon and rest in gym_registry:
        return gym_registry[rest]
    return _newer_version(name) or unknown_environment(name)


def _import_named(module: str, name: str) -> None:
    """Import the module of ``module:Class``; the error for an absent one also names the known prefixes."""
    try:
        import_module(module, "environment")
    except UsageError as error:
        absent = isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == module
        if not absent:
            raise
        known = [prefix.name for prefix in list_prefixes()]
        near = nearest(module, known)
        ask = f" Did you mean {near[0]}:{name.partition(':')[2]}?" if near else ""
        raise UsageError(
            f"There is no environment called {name!r}: no such module on the Python path, and no such "
            f"prefix. The prefixes are {', '.join(known)}.{ask}"
        ) from error


def is_registered(name: str) -> bool:
    """True for a registered id, in this or a newer version. It imports nothing but installed plugins.

    Ids with a prefix count unless they name code or an address themselves.
    """
    load_plugins()
    if prefix := find_prefix(name):
        return prefix.from_files
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
        warnings.warn(f"{name} is retired in this Gymnasium version: using {spec.id}", stacklevel=4)
    return spec


def unknown_environment(name: str) -> NoReturn:
    """Raise the error for an unknown environment, with the nearest names."""
    if is_local(name):
        raise UsageError(unknown_sentence(name, "environment"))
    raise UnknownName("environment", name, gym_registry, "`rollgym envs` lists all environments.")


def env_info(name: str) -> EnvInfo:
    """Metadata of an environment, for any name that `make` accepts."""
    load_plugins()
    if name in _infos:
        return _infos[name]
    return _infos.get(find_spec(name).id) or EnvInfo(env_id=name)


def list_envs() -> list[EnvInfo]:
    """All environments registered through rollgym, sorted by id.

    Example:
        >>> [info.env_id for info in rollgym.list_envs()][:2]
        ['rollgym/Bandit-v0', 'rollgym/Code-v0']
    """
    load_plugins()
    return [_infos[env_id] for env_id in sorted(_infos)]


def make(name: str | Callable[..., Any], **kwargs: Any) -> gym.Env[str, str]:
    """Make a text environment; one with other spaces is adapted (see `rollgym.adapters.gymnasium`).

    Args:
        name: An id, ``PREFIX:NAME``, ``module:Class``, a class, or a function that makes an environment.
        kwargs: Arguments for the constructor; ``max_episode_steps`` replaces the registered turn limit.

    Raises:
        UsageError: The name or an argument is wrong, or an optional dependency is missing.
        EnvError: The environment raised while it was made.

    Example:
        >>> env = rollgym.make("rollgym/Sokoban-v0")
        >>> observation, info = env.reset(seed=1, options={"task": 7, "split": "test"})
        >>> observation, reward, terminated, truncated, info = env.step("Up")
    """
    name = env_id_of(name)
    spec = find_spec(name)
    for extra in _infos[spec.id].needs if spec.id in _infos else ():
        require(name, extra)
    # Gymnasium's passive checker warns at every step; `rollgym check` reports once, and more.
    kwargs.setdefault("disable_env_checker", True)
    try:
        env = _gym_make(spec, kwargs)
    except RollgymError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise UsageError(f"{name}: {' '.join(str(error).split())}.") from error
        kind = UsageError if isinstance(error, gym.error.DependencyNotInstalled) else EnvError
        raise kind(f"{name} cannot be made: {one_line(error)}") from error
    return env if find_text_interface(env) is not None else _adapter.adapt(env)


def _gym_make(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """``gym.make``, also for classes and functions whose environments do not inherit from ``gym.Env``."""
    entry = spec.entry_point
    creator: Any = load_env_creator(entry) if isinstance(entry, str) else entry
    if isinstance(creator, type) and issubclass(creator, gym.Env):
        return gym.make(spec, **kwargs)
    if not isinstance(creator, type):
        try:
            return gym.make(spec, **kwargs)
        except TypeError as error:
            # The type is known only after the function ran, and Gymnasium checks it before we can.
            if "gymnasium.Env" not in str(error):
                raise
    return gym.make(dataclasses.replace(spec, entry_point=_adapter.inherit(creator)), **kwargs)
