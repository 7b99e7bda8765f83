"""Names in a config that a module of the user's would register, while that module is not imported.

Reading a config imports nothing. So while one is validated that lists ``rollout.modules``, an estimator or
a loss that is not known may still be one of theirs; training imports them first and then checks every name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_awaited: ContextVar[bool] = ContextVar("awaited", default=False)


@contextmanager
def awaiting(values: Mapping[str, Any]) -> Iterator[None]:
    """Validate settings inside: unknown names pass if ``rollout.modules`` has some that is not imported."""
    rollout = values.get("rollout")
    modules = rollout.get("modules") if isinstance(rollout, Mapping) else None
    token = _awaited.set(isinstance(modules, list) and any(str(name) not in sys.modules for name in modules))
    try:
        yield
    finally:
        _awaited.reset(token)


def may_be_late() -> bool:
    """Whether a name that nothing has registered may still be known later."""
    return _awaited.get()
