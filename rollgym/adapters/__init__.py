"""Adapters: environments of other libraries as text environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from rollgym.adapters.prefixes import PREFIXES
from rollgym.core.env_prefixes import register_prefix
from rollgym.core.registry import Adapter, set_adapter


def install() -> None:
    """Let `rollgym.make` adapt environments without text spaces, and know ids with a prefix.

    ``import rollgym`` calls it.
    """
    set_adapter(Adapter(adapt=_adapt, inherit=_inherit))
    for prefix in PREFIXES:
        register_prefix(prefix)


def _adapt(env: gym.Env[Any, Any]) -> gym.Env[str, str]:
    from rollgym.adapters.gymnasium import adapt  # imported only when needed

    return adapt(env)


def _inherit(creator: Callable[..., Any]) -> Callable[..., gym.Env[Any, Any]]:
    from rollgym.adapters.duck_typed import inherited

    return inherited(creator)
