"""Settings from Python: objects in a mapping of settings become the names that a config file would hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollgym.agent import agent_name
from rollgym.errors import UsageError
from rollgym.given import is_held
from rollgym.registry import environment_id
from rollgym.rewards.given import reward_target
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.credit import Estimator


def named_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with names in place of objects: environments, reward functions, estimator, loss, teacher.

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
    """Refuse environments that only this process knows where other processes would have to make them."""
    elsewhere = "rollout.workers=0" if config.rollout.workers else "runtime=local"
    for number, env in enumerate(config.envs):
        if is_held(env.id) and (config.rollout.workers or config.runtime != "local"):
            raise UsageError(
                f"envs.{number}.id: {env.id} is not defined at the top of a module that other processes can "
                f"import: put it into a module, or use {elsewhere}."
            )


def _with_name(entry: Any, key: str, name_of: Callable[[Any], str]) -> Any:
    if not isinstance(entry, Mapping) or entry.get(key) is None or isinstance(entry[key], str):
        return entry
    return {**entry, key: name_of(entry[key])}


def _estimator_name(thing: Any) -> str:
    if not isinstance(thing, Estimator):
        raise UsageError(
            f"estimator: an object of type {type(thing).__name__} is not a registered estimator: pass a "
            "name, or what the decorator @estimator returned."
        )
    return thing.name


def _loss_name(thing: Any) -> str:
    from rollgym.trainer.losses import POLICY_LOSSES  # which imports torch

    name = next((name for name, rule in POLICY_LOSSES.items() if rule is thing), None)
    if name is None:
        raise UsageError(
            f"loss.name: an object of type {type(thing).__name__} is not a registered policy loss: pass a "
            "name, or a function decorated with @register_loss."
        )
    return name


_NAMED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("envs", "id", environment_id),
    ("rewards", "target", reward_target),
    ("warm_start", "agent", agent_name),
    ("loss", "name", _loss_name),
)
"""Settings that hold names: section, key, and what names an object there."""
