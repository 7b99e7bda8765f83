"""Names for Python objects: classes, functions and instances that are passed where a name is expected.

An object that another process can import is named ``module:qualname``, as on the command line. Any other
(defined in a notebook, in ``__main__`` or inside a function, and every instance) is kept by this process
under the name ``local/NAME``, which no other process can resolve.
"""

from __future__ import annotations

import re
import sys
import threading
from functools import partial
from typing import Any

from rollgym.core.errors import UsageError

PREFIX = "local/"
_objects: dict[str, Any] = {}
_lock = threading.Lock()


def importable_name(thing: Any) -> str | None:
    """``module:qualname`` if another process that imports the module finds the same object, else ``None``."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    value: Any = sys.modules.get(module)
    if getattr(value, "__spec__", None) is None:
        return None  # a module made by hand, in this process only
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is thing else None


def register_local(thing: Any, suffix: str = "") -> str:
    """Keep an object and return its name: the same one each time, and a different one for each object."""
    base = PREFIX + (re.sub(r"\W", "", _short(thing)) or "object")
    with _lock:
        number = 1
        while True:
            name = f"{base}{'' if number == 1 else f'-{number}'}{suffix}"
            if name not in _objects:
                _objects[name] = thing
            if _objects[name] is thing:
                return name
            number += 1


def is_local(name: str) -> bool:
    """True for the name of an object that only the process it was passed to can resolve."""
    return name.startswith(PREFIX)


def get_local(name: str, kind: str) -> Any:
    """The object with a local name; ``kind`` describes it in an error."""
    if name not in _objects:
        raise UsageError(unknown_sentence(name, kind))
    return _objects[name]


def origin_of(name: str) -> dict[str, str]:
    """For a manifest: the definition of the object with a local name; empty for any other name."""
    thing = _objects.get(name)
    if thing is None:
        return {}
    source = thing.func if isinstance(thing, partial) else thing
    if not hasattr(source, "__qualname__"):
        source = type(source)
    return {"defined_in": f"{source.__module__}:{source.__qualname__}"}


def unknown_sentence(name: str, kind: str) -> str:
    """The error message for the local name of another process."""
    return (
        f"The {kind} {name!r} was a Python object in another process: pass the object again from Python, or "
        "put it into a module and name it module:NAME."
    )


def _short(thing: Any) -> str:
    if isinstance(thing, partial):
        return _short(thing.func)
    return str(getattr(thing, "__name__", type(thing).__name__))
