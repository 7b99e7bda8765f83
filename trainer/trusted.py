"""Code and addresses that a config names: listed before they are used, never taken from a run's folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgym.agents.credentials import find_key
from rollgym.config import load
from rollgym.errors import UsageError
from rollgym.registry import import_module
from rollgym.rewards.resolve import check_reachable, resolve_rewards
from rollgym.terminal import printable
from rollgym.trainer.config import TrainConfig
from rollgym.trust import find_origin, weakened

TRUST_CODE = "--trust-code"
"""The option that lets a resumed run use the code its own config names."""


def code_of(config: TrainConfig) -> list[str]:
    """Everything in a config that runs code from outside rollgym or sends data away, as ``key value``."""
    found = [f"rollout.modules {name}" for name in config.rollout.modules]
    for number, env in enumerate(config.envs):
        found += [f"envs.{number}.id {env.id}"] * (":" in env.id)
        found += [f"envs.{number}.kwargs.sandbox {one}" for one in weakened(env.kwargs.get("sandbox"))]
    for number, reward in enumerate(config.rewards):
        found += [f"rewards.{number}.target {reward.target}"] * (reward.target is not None)
        found += [f"rewards.{number}.url {reward.url}"] * (reward.url is not None)
    if config.warm_start is not None and ":" in config.warm_start.agent:
        found.append(f"warm_start.agent {config.warm_start.agent}")
    named = {
        "program": config.program,
        "engine.python": config.engine.python,
        "engine.url": config.engine.url,
        "address": None if config.address == "auto" else config.address,
    }
    return found + [f"{key} {value}" for key, value in named.items() if value is not None]


def load_to_run(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = (), note: Callable[[str], None] | None = None
) -> TrainConfig:
    """A config that the user trains with: what code it names is listed, its modules are imported.

    Reading a config for any other purpose is `load`, which imports nothing.
    """
    config = load(TrainConfig, source, overrides)
    named = code_of(config)
    if named:
        places = {name: find_origin(name, "rollout.modules") for name in config.rollout.modules}
        listed = [f"rollout.modules {name} ({place or 'not found'})" for name, place in places.items()]
        others = named[len(config.rollout.modules) :]
        (note or _print)(f"code that the config names: {', '.join([*listed, *others])}")
    for module in config.rollout.modules:
        import_module(module, "rollout.modules")
    return load(TrainConfig, source, overrides) if config.rollout.modules else config


def check_targets(config: TrainConfig) -> None:
    """Resolve what rewards and the engine need from outside, before a run makes or starts anything.

    Functions are imported: only for a config that the user trains with.
    """
    resolve_rewards(config.rewards)
    if config.engine.url is not None:
        find_key(config.engine.api_key_env)
        try:
            check_reachable(config.engine.url, "the SGLang server")
        except UsageError as error:
            raise UsageError(f"engine.url: {error}") from None


def require_trust(config: TrainConfig, folder: Path) -> None:
    """Refuse to run what the config in a run's folder names: the folder may come from a stranger."""
    named = code_of(config)
    if named:
        raise UsageError(
            f"The config in {folder} names code or addresses ({', '.join(named)}), and a run's folder alone "
            f"is not trusted with that: name the config file that started the run too, or add {TRUST_CODE}."
        )


def _print(sentence: str) -> None:
    print(printable(f"rollgym: {sentence}"), file=sys.stderr, flush=True)
