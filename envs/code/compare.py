"""When two encoded values are the same answer, and how they are shown."""

from __future__ import annotations

import math
from typing import Any

from rollgym.envs.code.inside import decode

TOLERANCE = 1e-9
_DEEP = 100


def same(found: Any, expected: Any, deep: int = _DEEP) -> bool:
    """Whether an answer is the expected one. Both are encoded, so that no object has a say in it.

    Lists and tuples are alike, whole numbers and floats too; floats may differ by rounding. True is not 1.
    """
    if deep == 0:
        return False
    found, expected = _plain(found), _plain(expected)
    if isinstance(found, bool) or isinstance(expected, bool) or found is None or expected is None:
        return found is expected
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return _close(found, expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(
            same(a, b, deep - 1) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, dict):
        return _same_tagged(found, expected, deep)
    return type(found) is type(expected) and bool(found == expected)


def _plain(data: Any) -> Any:
    """Big and odd numbers as numbers, tuples as lists; other tags stay."""
    if isinstance(data, dict) and len(data) == 1:
        ((name, content),) = data.items()
        try:
            if name == "tuple":
                return list(content)
            if name in ("int", "float"):
                return decode(data)
        except (TypeError, ValueError):
            return data
    return data


def _same_tagged(found: dict[str, Any], expected: dict[str, Any], deep: int) -> bool:
    if list(found) != list(expected) or "object" in found:
        return False
    ((name, mine),), ((_, theirs),) = found.items(), expected.items()
    if name == "dict":
        mine, theirs = _sorted(mine), _sorted(theirs)
    return same(mine, theirs, deep - 1)


def _sorted(pairs: Any) -> Any:
    return sorted(pairs, key=repr) if isinstance(pairs, list) else pairs


def _close(a: float, b: float) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (a != a and b != b)
    except OverflowError:
        return False


def shown(data: Any, length: int = 120) -> str:
    """An encoded value as Python writes it (sets in order), cut where it is long."""
    try:
        text = _text(data)
    except (TypeError, ValueError, AttributeError, RecursionError):
        text = "a value that cannot be shown"
    return text if len(text) <= length else f"{text[: length - 20]}... ({len(text)} characters)"


def _text(data: Any) -> str:
    if isinstance(data, list):
        return f"[{', '.join(map(_text, data))}]"
    if not isinstance(data, dict):
        return repr(data)
    ((name, content),) = data.items()
    if name == "dict":
        return f"{{{', '.join(f'{_text(key)}: {_text(value)}' for key, value in content)}}}"
    if name == "tuple":
        return f"({', '.join(map(_text, content))}{',' if len(content) == 1 else ''})"
    if name in ("set", "frozenset"):
        inner = f"{{{', '.join(map(_text, content))}}}" if content else ""
        return inner if name == "set" and content else f"{name}({inner})"
    return repr(decode(data))
