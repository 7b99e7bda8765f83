"""Comparison and display of encoded values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.envs.code.harness import MAX_DEPTH, decode

TOLERANCE = 1e-9
_MAX_DEPTH = 100
_HEX = re.compile(r"-?0x[0-9a-f]+")
_BYTES = re.compile(r"(?:[0-9a-f]{2})*+")


def is_well_formed(data: Any) -> bool:
    """Whether `harness.encode` can have written this.

    A solution can forge the judge's output, so nothing else reads it before this check of depth, tags and the
    shape of each content. It uses no recursion.
    """
    stack = [(data, MAX_DEPTH)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, dict):
            if len(item) != 1:
                return False
            ((tag, content),) = item.items()
            children = _CONTENTS[tag](content) if tag in _CONTENTS else None
        elif isinstance(item, list):
            children = item
        elif isinstance(item, float):
            children = [] if math.isfinite(item) else None
        else:
            children = []
        if children is None or depth == 0:
            return False
        stack += [(child, depth - 1) for child in children]
    return True


def _list_items(content: Any) -> list[Any] | None:
    return content if isinstance(content, list) else None


def _pairs(content: Any) -> list[Any] | None:
    if not isinstance(content, list) or any(not isinstance(p, list) or len(p) != 2 for p in content):
        return None
    return [part for pair in content for part in pair]


def _leaf_if(holds: bool) -> list[Any] | None:
    return [] if holds else None


def _is_special_float(content: Any) -> bool:
    return content in ("inf", "-inf", "nan")


def _is_real(part: Any) -> bool:
    return isinstance(part, float) or (isinstance(part, dict) and _is_special_float(part.get("float")))


_CONTENTS: Mapping[str, Callable[[Any], list[Any] | None]] = {
    "int": lambda text: _leaf_if(isinstance(text, str) and _HEX.fullmatch(text) is not None),
    "float": lambda text: _leaf_if(_is_special_float(text)),
    "complex": lambda parts: _leaf_if(
        isinstance(parts, list) and len(parts) == 2 and all(map(_is_real, parts))
    ),
    "bytes": lambda text: _leaf_if(isinstance(text, str) and _BYTES.fullmatch(text) is not None),
    "tuple": _list_items,
    "set": _list_items,
    "frozenset": _list_items,
    "object": lambda parts: _leaf_if(
        isinstance(parts, list)
        and len(parts) == 2
        and isinstance(parts[0], str)
        and isinstance(parts[1], bool)
    ),
    "dict": _pairs,
}
"""By tag of an encoded value: its inner values, or ``None`` for another shape."""


def values_equal(value: Any, expected: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether an answer equals the expected one. Both are encoded, so that no object's ``__eq__`` is called.

    Lists and tuples are alike, whole numbers and floats too; floats may differ by rounding. True is not 1.
    """
    if depth == 0:
        return False
    value, expected = _plain(value), _plain(expected)
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or expected is None:
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        return _close(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            values_equal(a, b, depth - 1) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return _same_tagged(value, expected, depth)
    return type(value) is type(expected) and bool(value == expected)


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


def _same_tagged(value: dict[str, Any], expected: dict[str, Any], depth: int) -> bool:
    if list(value) != list(expected) or "object" in value:
        return False
    ((name, content),), ((_, expected_content),) = value.items(), expected.items()
    if name == "dict":
        if not isinstance(content, list) or len(content) != len(expected_content):
            return False
        content, expected_content = sorted(content, key=repr), sorted(expected_content, key=repr)
    return values_equal(content, expected_content, depth - 1)


def _close(a: float, b: float) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (a != a and b != b)
    except OverflowError:
        return False


def format_value(data: Any, length: int = 120) -> str:
    """Return an encoded value as Python source (sets sorted), truncated if long."""
    try:
        text = _source(data)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError):
        # For example an integer with more digits than Python prints.
        text = "a value that cannot be shown"
    return text if len(text) <= length else f"{text[: length - 20]}... ({len(text)} characters)"


def _source(data: Any) -> str:
    if isinstance(data, list):
        return f"[{', '.join(map(_source, data))}]"
    if not isinstance(data, dict):
        return repr(data)
    ((name, content),) = data.items()
    if name == "dict":
        return f"{{{', '.join(f'{_source(key)}: {_source(value)}' for key, value in content)}}}"
    if name == "tuple":
        return f"({', '.join(map(_source, content))}{',' if len(content) == 1 else ''})"
    if name in ("set", "frozenset"):
        inner = f"{{{', '.join(map(_source, content))}}}" if content else ""
        return inner if name == "set" and content else f"{name}({inner})"
    return repr(decode(data))
