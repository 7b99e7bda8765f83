"""Objects in place of names: classes, functions and instances, passed from Python where a name is expected.

What another process can import is named ``module:qualname``, as on the command line. Everything else (defined
in a notebook, in ``__main__`` or inside a function, and every instance) is kept by this process under a name
``local/NAME``, which means nothing to any other process.
"""

from __future__ import annotations

import re
import sys
import threading
from functools import partial
from typing import Any

from rollgym.errors import UsageError

PREFIX = "local/"
_held: dict[str, Any] = {}
_lock = threading.Lock()


def importable_name(thing: Any) -> str | None:
    """``module:qualname`` where another process that imports the module finds the same object."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    if getattr(found, "__spec__", None) is None:
        return None  # made by hand, in this process alone
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def hold(thing: Any, suffix: str = "") -> str:
    """A name for an object, the same one each time; different objects never share one."""
    base = PREFIX + (re.sub(r"\W", "", _short(thing)) or "object")
    with _lock:
        number = 1
        while True:
            name = f"{base}{'' if number == 1 else f'-{number}'}{suffix}"
            if name not in _held:
                _held[name] = thing
            if _held[name] is thing:
                return name
            number += 1


def is_held(name: str) -> bool:
    """Whether a name stands for an object that only the process it was given to knows."""
    return name.startswith(PREFIX)


def held(name: str, what: str) -> Any:
    """The object behind a name; ``what`` says in an error what it was."""
    if name not in _held:
        raise UsageError(unknown_sentence(name, what))
    return _held[name]


def origin_of(name: str) -> dict[str, str]:
    """For a manifest: where an object kept under ``name`` was defined; empty for any other name."""
    thing = _held.get(name)
    if thing is None:
        return {}
    source = thing.func if isinstance(thing, partial) else thing
    if not hasattr(source, "__qualname__"):
        source = type(source)
    return {"defined_in": f"{source.__module__}:{source.__qualname__}"}


def unknown_sentence(name: str, what: str) -> str:
    """Why a name that another process kept cannot be used here."""
    return (
        f"The {what} {name!r} was passed as a Python object, which only the process of that run knew: pass "
        "the object again from Python, or put it into a module and name it module:NAME."
    )


def _short(thing: Any) -> str:
    if isinstance(thing, partial):
        return _short(thing.func)
    return str(getattr(thing, "__name__", type(thing).__name__))
