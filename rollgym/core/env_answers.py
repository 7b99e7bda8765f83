"""Checks of what ``reset`` and ``step`` return: a wrong type is an `EnvError` that names it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from rollgym.core.errors import EnvError


def answer_parts(answer: Any, count: int, where: str) -> tuple[Any, ...]:
    """The parts of an answer; ``where`` is as in ``maze:Maze returned from step()``."""
    if not isinstance(answer, tuple) or len(answer) != count:
        got = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
        raise EnvError(f"{where} {got}; it must be a tuple of {count}")
    return answer


def checked_reward(reward: Any, name: str) -> float:
    """A reward as a finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise EnvError(f"{name} returned {reward!r} as reward; it must be a number") from None
    if not math.isfinite(value):
        raise EnvError(f"{name} returned the reward {value}; it must be finite")
    return value


def checked_flag(flag: Any, name: str) -> bool:
    """``terminated`` or ``truncated`` as a bool; texts are refused, of which any but "" would be true."""
    with suppress(TypeError, ValueError):
        if not isinstance(flag, (str, bytes)):
            return bool(flag)
    raise EnvError(f"{name} returned a {type(flag).__name__} as end flag; it must be true or false")


def checked_info(info: Any, name: str) -> dict[str, Any]:
    """``info`` as a dict."""
    if not isinstance(info, dict):
        raise EnvError(f"{name} returned a {type(info).__name__} as info; it must be a dict")
    return info
