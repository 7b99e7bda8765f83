"""Code and addresses that a config names: listed before use, and never trusted from a run folder alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollgym.agents.chat.credentials import find_key
from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.core.registry import import_module, is_registered
from rollgym.core.trust import find_origin, named_code, weakened
from rollgym.rewards.resolve import check_reachable, resolve_rewards
from rollgym.rewards.settings import RewardSettings, check_names
from rollgym.serve.program import check_program
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.distill_config import TeacherConfig
from rollgym.trainer.self_play import check_opponents
from rollgym.utils.terminal import printable

SERVERS = {"sglang": "SGLang", "vllm": "vLLM"}
"""Names of the software by ``engine.kind``."""
TRUST_CODE = "--trust-code"
"""The option that lets a resumed run use the code that the config in its folder names."""

OWN_AGENTS = ("rollgym.envs.", "rollgym.agents.")
"""Packages whose agents are part of rollgym: shipped configs name them, and a resumed run may use them."""


def code_of(config: TrainConfig) -> list[str]:
    """All settings that run external code or send data to other hosts, as ``key value``."""
    named = [f"imports {name}" for name in config.imports]
    for number, env in enumerate(config.envs):
        named += [f"envs.{number}.id {env.id}"] * (":" in env.id and not is_registered(env.id))
        named += [f"envs.{number}.kwargs.sandbox {text}" for text in weakened(env.kwargs.get("sandbox"))]
        named += [f"envs.{number}.kwargs.{key} {value}" for key, value in named_code(env.kwargs)]
        named += [f"envs.{number}.roles.{role} {name}" for role, name in env.roles.items() if ":" in name]
        urls = [
            (role, options["base_url"]) for role, options in env.role_options.items() if "base_url" in options
        ]
        named += [f"envs.{number}.role_options.{role}.base_url {url}" for role, url in urls]
        judge = env.kwargs.get("judge")
        if isinstance(judge, Mapping) and "base_url" in judge:
            named.append(f"envs.{number}.kwargs.judge.base_url {judge['base_url']}")
        named += _code_of_rewards(env.rewards, f"envs.{number}.rewards")
    named += _code_of_rewards(config.rewards, "rewards")
    if config.warm_start is not None:
        agents = {name: getattr(config.warm_start, name) for name in ("agent", "mistakes_agent")}
        named += [
            f"warm_start.{name} {agent}"
            for name, agent in agents.items()
            if ":" in agent and not agent.startswith(OWN_AGENTS)
        ]
    if config.program is not None:
        keys = ("command", "function", "python", "reward_function")
        named += [f"program.{key} {value}" for key in keys if (value := getattr(config.program, key))]
        named += ["program.sandbox none"] * (config.program.sandbox == "none")
        named += [f"program.mounts {mount}" for mount in config.program.mounts]
    named += urls_of_teachers(config.distill.teachers if config.distill is not None else ())
    values = {
        "engine.python": config.engine.python,
        "engine.url": config.engine.url,
        "tracking.mlflow_uri": config.tracking.mlflow_uri,
        "ray.address": None if config.ray.address == "auto" else config.ray.address,
    }
    return named + [f"{key} {value}" for key, value in values.items() if value is not None]


def urls_of_teachers(teachers: Sequence[TeacherConfig]) -> list[str]:
    """The addresses that tokens are sent to, as ``key value``."""
    return [f"distill.teachers.{number}.url {each.url}" for number, each in enumerate(teachers) if each.url]


def _code_of_rewards(rewards: Sequence[RewardSettings], key: str) -> list[str]:
    named: list[str] = []
    for number, reward in enumerate(rewards):
        named += [f"{key}.{number}.target {reward.target}"] * (reward.target is not None)
        named += [f"{key}.{number}.url {reward.url}"] * (reward.url is not None)
    return named


def load_to_run(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = (), note: Callable[[str], None] | None = None
) -> TrainConfig:
    """Load a config to train with: print the code it names and import its modules.

    For any other purpose use `load`, which imports nothing.
    """
    return load_with_code(lambda: load(TrainConfig, source, overrides), code_of, note)


class _NamesModules(Protocol):
    @property
    def imports(self) -> list[str]: ...


C = TypeVar("C", bound=_NamesModules)


def load_with_code(
    read: Callable[[], C], code_of: Callable[[C], list[str]], note: Callable[[str], None] | None = None
) -> C:
    """Read a config with ``read``, print the code that it names, and import its modules.

    It is read again afterwards, because its modules may register names that it contains.
    """
    config = read()
    named = code_of(config)
    if named:
        origins = {name: find_origin(name, "imports") for name in config.imports}
        listed = [f"imports {name} ({origin or 'not found'})" for name, origin in origins.items()]
        others = named[len(config.imports) :]
        (note or _print)(f"code that the config names: {', '.join([*listed, *others])}")
    for module in config.imports:
        import_module(module, "imports")
    return read() if config.imports else config


def check_targets(config: TrainConfig) -> None:
    """Check reward functions, opponents, URLs and keys before a run makes or starts anything.

    Imports the functions and agents, so only for a config that the user trains with.
    """
    resolve_rewards(config.all_rewards)
    for number, env in enumerate(config.envs):
        resolve_rewards(env.rewards, f"envs.{number}.rewards")
        check_names([*config.all_rewards, *env.rewards])
    check_opponents(config)
    if config.program is not None:
        try:
            check_program(config.program)
        except UsageError as error:
            raise UsageError(f"program: {error}") from None
    if config.engine.url is not None:
        find_key(config.engine.api_key_env)
        try:
            check_reachable(config.engine.url, f"the {SERVERS[config.engine.kind]} server")
        except UsageError as error:
            raise UsageError(f"engine.url: {error}") from None


def require_trust(named: Sequence[str], folder: Path) -> None:
    """Reject code (of `code_of`) that only the config in a run folder names: it may be someone else's."""
    if named:
        raise UsageError(
            f"The config in {folder} names code or addresses ({', '.join(named)}), which are not trusted "
            f"from a run folder alone: also pass the config file that started the run, or add {TRUST_CODE}."
        )


def _print(sentence: str) -> None:
    print(printable(f"rollgym: {sentence}"), file=sys.stderr, flush=True)
