"""Settings from Python: replaces objects in a mapping of settings by the names a config file uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollgym.core.agent import agent_name
from rollgym.core.errors import UsageError
from rollgym.core.local_objects import is_local
from rollgym.core.registry import env_id_of
from rollgym.rewards.function_ref import reward_target
from rollgym.trainer.advantages import Estimator
from rollgym.trainer.config import TrainConfig


def named_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with names in place of environment, reward, estimator, loss and agent objects.

    Example:
        >>> named_settings({"envs": [{"id": CartPole}]})
        {'envs': [{'id': 'cartpole:CartPole'}]}
    """
    values = dict(settings)
    for section, key, name_of in _NAMED:
        value = values.get(section)
        if isinstance(value, list | tuple):
            values[section] = [_with_name(entry, key, name_of) for entry in value]
        elif value is not None:
            values[section] = _with_name(value, key, name_of)
    if not isinstance(values.get("estimator", ""), str):
        values["estimator"] = _estimator_name(values["estimator"])
    return values


def refuse_held(config: TrainConfig) -> None:
    """Raise `UsageError` for environments that only this process knows but other processes must create."""
    setting = "rollout.workers=0" if config.rollout.workers else "runtime=local"
    for number, env in enumerate(config.envs):
        if is_local(env.id) and (config.rollout.workers or config.runtime != "local"):
            raise UsageError(
                f"envs.{number}.id: other processes cannot import {env.id}, which is not defined at the top "
                f"level of a module: move it to a module, or use {setting}."
            )


def _with_name(entry: Any, key: str, name_of: Callable[[Any], str]) -> Any:
    if not isinstance(entry, Mapping) or entry.get(key) is None or isinstance(entry[key], str):
        return entry
    return {**entry, key: name_of(entry[key])}


def _estimator_name(thing: Any) -> str:
    if not isinstance(thing, Estimator):
        raise UsageError(
            f"estimator: an object of type {type(thing).__name__} is not a registered estimator: pass a "
            "name, or a function decorated with @register_estimator."
        )
    return thing.name


def _loss_name(thing: Any) -> str:
    from rollgym.trainer.losses.policy import POLICY_LOSSES  # which imports torch

    name = next((name for name, rule in POLICY_LOSSES.items() if rule is thing), None)
    if name is None:
        raise UsageError(
            f"loss.name: an object of type {type(thing).__name__} is not a registered policy loss: pass a "
            "name, or a function decorated with @register_loss."
        )
    return name


_NAMED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("envs", "id", env_id_of),
    ("rewards", "target", reward_target),
    ("warm_start", "agent", agent_name),
    ("warm_start", "mistakes_agent", agent_name),
    ("loss", "name", _loss_name),
)
"""Settings that contain names: section, key, and the function that names an object."""
