"""Names in a config that modules in ``imports`` may register, while those modules are not imported.

Reading a config imports nothing, so an unknown estimator or loss may still be registered by one of the
``imports``. Training imports them first and then checks every name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_allowed: ContextVar[bool] = ContextVar("deferred_names_allowed", default=False)


@contextmanager
def allow_deferred_names(values: Mapping[str, Any]) -> Iterator[None]:
    """Context in which unknown names are valid if ``imports`` lists a module that is not imported yet."""
    modules = values.get("imports")
    token = _allowed.set(isinstance(modules, list) and any(str(name) not in sys.modules for name in modules))
    try:
        yield
    finally:
        _allowed.reset(token)


def deferred_names_allowed() -> bool:
    """Return whether a name that is not registered may still be registered later."""
    return _allowed.get()
