"""Comparison and display of encoded values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.envs.code.harness import DEEP, decode

TOLERANCE = 1e-9
_DEEP = 100
_HEX = re.compile(r"-?0x[0-9a-f]+")
_BYTES = re.compile(r"(?:[0-9a-f]{2})*+")


def readable(data: Any) -> bool:
    """Whether `inside.encode` can have written this.

    A solution can forge the judge's output, so nothing else reads it before this check of depth, tags and the
    shape of each content. It uses no recursion.
    """
    left = [(data, DEEP)]
    while left:
        one, deep = left.pop()
        if isinstance(one, dict):
            if len(one) != 1:
                return False
            ((tag, content),) = one.items()
            parts = _CONTENTS[tag](content) if tag in _CONTENTS else None
        elif isinstance(one, list):
            parts = one
        elif isinstance(one, float):
            parts = [] if math.isfinite(one) else None
        else:
            parts = []
        if parts is None or deep == 0:
            return False
        left += [(part, deep - 1) for part in parts]
    return True


def _listed(content: Any) -> list[Any] | None:
    return content if isinstance(content, list) else None


def _pairs(content: Any) -> list[Any] | None:
    if not isinstance(content, list) or any(not isinstance(p, list) or len(p) != 2 for p in content):
        return None
    return [part for pair in content for part in pair]


def _when(holds: bool) -> list[Any] | None:
    return [] if holds else None


def _odd_float(content: Any) -> bool:
    return content in ("inf", "-inf", "nan")


def _real(part: Any) -> bool:
    return isinstance(part, float) or (isinstance(part, dict) and _odd_float(part.get("float")))


_CONTENTS: Mapping[str, Callable[[Any], list[Any] | None]] = {
    "int": lambda text: _when(isinstance(text, str) and _HEX.fullmatch(text) is not None),
    "float": lambda text: _when(_odd_float(text)),
    "complex": lambda parts: _when(isinstance(parts, list) and len(parts) == 2 and all(map(_real, parts))),
    "bytes": lambda text: _when(isinstance(text, str) and _BYTES.fullmatch(text) is not None),
    "tuple": _listed,
    "set": _listed,
    "frozenset": _listed,
    "object": lambda parts: _when(
        isinstance(parts, list)
        and len(parts) == 2
        and isinstance(parts[0], str)
        and isinstance(parts[1], bool)
    ),
    "dict": _pairs,
}
"""By tag of an encoded value: its inner values, or ``None`` for another shape."""


def same(found: Any, expected: Any, deep: int = _DEEP) -> bool:
    """Whether an answer equals the expected one. Both are encoded, so that no object's ``__eq__`` is called.

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
        except (TypeError, ValueError, LookupError, ArithmeticError):
            return data
    return data


def _same_tagged(found: dict[str, Any], expected: dict[str, Any], deep: int) -> bool:
    if list(found) != list(expected) or "object" in found:
        return False
    ((name, mine),), ((_, theirs),) = found.items(), expected.items()
    if name == "dict":
        if not isinstance(mine, list) or len(mine) != len(theirs):
            return False
        mine, theirs = sorted(mine, key=repr), sorted(theirs, key=repr)
    return same(mine, theirs, deep - 1)


def _close(a: float, b: float) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (a != a and b != b)
    except OverflowError:
        return False


def shown(data: Any, length: int = 120) -> str:
    """Return an encoded value as Python source (sets sorted), truncated if long."""
    try:
        text = _text(data)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError):
        # For example an integer with more digits than Python prints.
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
