"""Names of reward functions that are passed as objects."""

from __future__ import annotations

from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.local_objects import PREFIX, importable_name, register_local


def reward_target(function: Any) -> str:
    """Return the target of a reward function: ``module:function``, or a name valid only in this process.

    The latter (lambdas, functions in a notebook or inside another function) are called in threads of this
    process, which cannot be killed.
    """
    if isinstance(function, str):
        return function
    if not callable(function):
        raise UsageError(
            f"A reward function cannot be an object of type {type(function).__name__}: pass a function that "
            "takes an Episode, or its name as module:function."
        )
    return importable_name(function) or register_local(function)


def function_name(target: str) -> str:
    """Return the name of the function in a target."""
    return target.rpartition(":")[2].removeprefix(PREFIX)
