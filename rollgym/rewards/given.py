"""Reward functions that are passed as objects in place of ``module:function``."""

from __future__ import annotations

from typing import Any

from rollgym.errors import UsageError
from rollgym.given import PREFIX, hold, importable_name


def reward_target(function: Any) -> str:
    """The target of a reward function: ``module:function``, or a name that only this process knows.

    Functions of the second kind (lambdas, functions of a notebook or inside another function) are called in
    threads of this process, which cannot be killed.
    """
    if isinstance(function, str):
        return function
    if not callable(function):
        raise UsageError(
            f"A reward function cannot be an object of type {type(function).__name__}: pass a function that "
            "takes an Episode, or its name as module:function."
        )
    return importable_name(function) or hold(function)


def function_name(target: str) -> str:
    """The function's own name, out of a target."""
    return target.rpartition(":")[2].removeprefix(PREFIX)
