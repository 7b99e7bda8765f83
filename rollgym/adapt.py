"""Any gymnasium.Env as a text environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def adapt(env: gym.Env[Any, Any]) -> gym.Env[str, str]:
    """Wrap an environment so that it speaks text."""
    raise NotImplementedError
