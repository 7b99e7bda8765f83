"""Conversion between values of Gymnasium's spaces and text: pure functions.

A value has three forms: the *value* that an environment accepts or returns (numpy), its *plain* form (JSON
types) and its *text*. Observations are written for reading (rounded, large arrays summarized), actions for
lossless parsing. In this order below: values to plain data and back, writing, parsing, describing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from rollgym.core.serialization import clean_text, jsonable

MAX_NUMBERS = 1000
"""An observed array with more numbers than this is summarized instead of written out."""

Names: TypeAlias = Mapping[int, str]
AnySpace: TypeAlias = spaces.Space[Any]
ArraySpace: TypeAlias = "spaces.Box[Any] | spaces.MultiDiscrete[Any] | spaces.MultiBinary"

_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
_NESTED = (spaces.Dict, spaces.Tuple, spaces.OneOf, spaces.Sequence, spaces.Graph)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FENCE = re.compile(r"```[a-z]*\n(.*?)\n?```", re.DOTALL)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_DIGITS = 400
_MAX_RANGES = 16
_UNBOUNDED = 1e18  # A bound beyond this is how environments say that there is none.


class BadAction(ValueError):
    """The text is not an action of the space; the message is a sentence for the agent."""


def to_plain(space: AnySpace, value: Any, *, brief: bool = False) -> Any:
    """Convert a value to JSON types; ``brief`` replaces a large array by a summary."""
    match space:
        case spaces.Discrete():
            return int(value)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _plain_array(np.asarray(value), brief)
        case spaces.Dict():
            return {str(key): to_plain(sub, value[key], brief=brief) for key, sub in space.spaces.items()}
        case spaces.Tuple():
            pairs = zip(space.spaces, value, strict=True)
            return [to_plain(sub, item, brief=brief) for sub, item in pairs]
        case spaces.OneOf():
            return [int(value[0]), to_plain(space.spaces[int(value[0])], value[1], brief=brief)]
        case spaces.Sequence():
            items = iterate(space.stacked_feature_space, value) if space.stack else value
            return [to_plain(space.feature_space, item, brief=brief) for item in items]
        case spaces.Graph():
            return _plain_graph(space, value, brief)
    return jsonable(space.to_jsonable([value])[0], lenient=True)


def _plain_array(array: NDArray[Any], brief: bool) -> Any:
    if array.dtype.kind == "b":
        array = array.astype(np.int8)
    if brief and array.size > MAX_NUMBERS:
        least, most, mean = (short_number(float(f(array))) for f in (np.min, np.max, np.mean))
        return (
            f"array of {'x'.join(map(str, array.shape))} numbers, least {least}, greatest {most}, mean {mean}"
        )
    if array.dtype.kind == "f" and not brief:
        # Through text, so that a 32-bit 0.1 is 0.1 and not 0.10000000149011612.
        array = array.astype(str).astype(np.float64)
    return array.tolist()


def _plain_graph(space: spaces.Graph, graph: Any, brief: bool) -> dict[str, Any]:
    nodes = iterate(batch_space(space.node_space, 1), graph.nodes)
    plain: dict[str, Any] = {"nodes": [to_plain(space.node_space, node, brief=brief) for node in nodes]}
    if space.edge_space is not None:
        edges = [] if graph.edges is None else iterate(batch_space(space.edge_space, 1), graph.edges)
        plain["edges"] = [to_plain(space.edge_space, edge, brief=brief) for edge in edges]
        plain["edge_links"] = [] if graph.edge_links is None else np.asarray(graph.edge_links).tolist()
    return plain


def from_plain(space: AnySpace, data: Any, where: str = "The action") -> Any:
    """Convert plain data to a value of ``space``; raises `BadAction` with the reason."""
    match space:
        case spaces.Discrete():
            low = int(space.start)
            if (number := _integer(data)) is None or not low <= number < low + int(space.n):
                raise _refusal(space, data, where)
            return np.dtype(space.dtype).type(number)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array(space, data, where)
        case spaces.Dict():
            return _dict(space, data, where)
        case spaces.Tuple():
            parts = _list(space, data, where, len(space.spaces))
            pairs = enumerate(zip(space.spaces, parts, strict=True), 1)
            return tuple(from_plain(sub, part, f"Item {i}") for i, (sub, part) in pairs)
        case spaces.OneOf():
            choice, part = _list(space, data, where, 2)
            if (index := _integer(choice)) is None or not 0 <= index < len(space.spaces):
                raise _refusal(space, data, where)
            return index, from_plain(space.spaces[index], part, "Item 2")
        case spaces.Sequence():
            items = _items(space.feature_space, _list(space, data, where))
            return _stack(space.feature_space, items) if space.stack else tuple(items)
        case spaces.Graph():
            return _graph(space, data, where)
    if _contains(space, data):
        return data
    with suppress(Exception):
        if _contains(space, value := space.from_jsonable([data])[0]):
            return value
    raise _refusal(space, data, where)


def _contains(space: AnySpace, value: Any) -> bool:
    try:
        return bool(space.contains(value))
    except Exception:  # a third-party space may raise anything; the value is then not in it
        return False


def _refusal(space: AnySpace, data: Any, where: str) -> BadAction:
    return BadAction(f"{where} must be {describe(space)}, not {_excerpt(data)}.")


def _excerpt(data: Any) -> str:
    text = clean_text(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
    text = text if len(text) <= 40 else text[:40] + "..."
    return json.dumps(text, ensure_ascii=False) if isinstance(data, str) else text


def _integer(data: Any) -> int | None:
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        return None
    return int(data) if isinstance(data, int) or data.is_integer() else None


def _list(space: AnySpace, data: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(data, list) or length not in (None, len(data)):
        raise _refusal(space, data, where)
    return data


def _items(space: AnySpace, data: list[Any]) -> list[Any]:
    return [from_plain(space, item, f"Item {i}") for i, item in enumerate(data, 1)]


def _stack(space: AnySpace, items: list[Any]) -> Any:
    empty: Any = create_empty_array(space, len(items))
    return concatenate(space, items, empty) if items else empty


def _dict(space: spaces.Dict, data: Any, where: str) -> dict[str, Any]:
    names = {str(key): key for key in space.spaces}
    if not isinstance(data, dict) or data.keys() != names.keys():
        raise _refusal(space, data, where)
    return {key: from_plain(space.spaces[key], data[name], f'"{name}"') for name, key in names.items()}


def _graph(space: spaces.Graph, data: Any, where: str) -> spaces.GraphInstance:
    keys = {"nodes", "edges", "edge_links"} if space.edge_space is not None else {"nodes"}
    if not isinstance(data, dict) or data.keys() != keys:
        raise _refusal(space, data, where)
    nodes = _stack(space.node_space, _items(space.node_space, _list(space, data["nodes"], where)))
    if space.edge_space is None or not data["edges"]:
        return spaces.GraphInstance(nodes, None, None)
    edges = _items(space.edge_space, _list(space, data["edges"], where))
    ends = spaces.Box(0, max(len(data["nodes"]) - 1, 0), (len(edges), 2), np.int32)
    links = _array(ends, data["edge_links"], '"edge_links"')
    return spaces.GraphInstance(nodes, _stack(space.edge_space, edges), links)


def _array(space: ArraySpace, data: Any, where: str) -> NDArray[Any]:
    flat = _flatten(data, space.shape)
    if flat is None:
        raise _refusal(space, data, where)
    low, high = bounds(space)
    array = np.empty(space.shape, space.dtype)
    for i, (number, least, most) in enumerate(zip(flat, low.flat, high.flat, strict=True)):
        element = _element(number, array.dtype, least, most)
        if element is None:
            label = where if len(flat) == 1 else f"{where} (number {i + 1} of {len(flat)})"
            kind = "number" if array.dtype.kind == "f" else "whole number"
            raise BadAction(f"{label} must be a {kind} {_range(least, most)}, not {_excerpt(number)}.")
        array.flat[i] = element
    return array


def _flatten(data: Any, shape: tuple[int, ...]) -> list[Any] | None:
    """The numbers of nested lists of a shape; a flat list of the same size is accepted too."""
    size = math.prod(shape)
    if not isinstance(data, list):
        return [data] if size == 1 else None
    if not any(isinstance(item, list) for item in data):
        return data if len(data) == size else None
    if len(shape) < 2 or len(data) != shape[0]:
        return None
    rows = [_flatten(row, shape[1:]) if isinstance(row, list) else None for row in data]
    return None if None in rows else [number for row in rows if row for number in row]


def _element(data: Any, dtype: np.dtype[Any], low: Any, high: Any) -> Any:
    if isinstance(data, bool) and low == 0 and high == 1:
        data = int(data)
    if dtype.kind != "f":
        number = _integer(data)
        return number if number is not None and int(low) <= number <= int(high) else None
    if isinstance(data, bool) or not isinstance(data, (int, float)) or abs(data) > 1e308:
        return None
    with np.errstate(over="ignore"):
        cast = dtype.type(data)
    # Compared as the space's own type: 0.7 is within a 32-bit bound of 0.7.
    return cast if np.isfinite(cast) and low <= cast <= high else None


def bounds(space: ArraySpace) -> tuple[NDArray[Any], NDArray[Any]]:
    """The minimum and maximum of each number of an array."""
    match space:
        case spaces.Box():
            return space.low, space.high
        case spaces.MultiDiscrete():
            return space.start, space.start + (space.nvec - 1)
        case _:
            return np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8)


def observation_text(space: AnySpace, value: Any) -> str:
    """Format an observation: ``key: value`` lines for a Dict, ``item 1: ...`` for a Tuple."""
    match space:
        case spaces.Dict():
            return "\n".join(f"{key}: {_line(sub, value[key])}" for key, sub in space.spaces.items())
        case spaces.Tuple():
            pairs = enumerate(zip(space.spaces, value, strict=True), 1)
            return "\n".join(f"item {i}: {_line(sub, item)}" for i, (sub, item) in pairs)
    plain = to_plain(space, value, brief=True)
    return plain if isinstance(plain, str) else _write(plain, short_number)


def _line(space: AnySpace, value: Any) -> str:
    plain = to_plain(space, value, brief=True)
    one_line = isinstance(plain, str) and len(plain.splitlines()) == 1
    return str(plain) if one_line else _write(plain, short_number)


def short_number(number: float) -> str:
    """Format a number with 4 significant digits, but never fewer than its integer part has."""
    if isinstance(number, int) or (math.isfinite(number) and 1000 <= abs(number) < 1e16):
        return str(round(number))
    return f"{number:.4g}" if number else "0"


def _write(plain: Any, number: Callable[[Any], str]) -> str:
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_write(v, number)}" for k, v in plain.items()) + "}"
    if isinstance(plain, list):
        return "[" + ", ".join(_write(item, number) for item in plain) + "]"
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        return number(plain)
    return json.dumps(plain, ensure_ascii=False)


def action_text(space: AnySpace, value: Any, names: Names | None = None, *, brief: bool = False) -> str:
    """Format an action as text that `parse_action` parses to the same value; ``brief`` rounds its numbers."""
    plain = to_plain(space, value, brief=brief)
    number = short_number if brief else repr
    if isinstance(space, spaces.Discrete):
        return (names or {}).get(plain, str(plain))
    if isinstance(plain, str):
        return plain
    flat = plain if isinstance(plain, list) else [plain]
    if isinstance(space, _ARRAYS) and not any(isinstance(item, list) for item in flat):
        return " ".join(map(number, flat))
    return _write(plain, number)


def parse_action(space: AnySpace, text: str, names: Names | None = None) -> Any:
    """Parse an action from text; raises `BadAction` for any other text, and no other exception."""
    try:
        value = _parse(space, text, names or {})
    except RecursionError:
        raise BadAction("The action is nested too deeply.") from None
    if not _contains(space, value):
        raise _refusal(space, text, "The action")
    return value


def _parse(space: AnySpace, text: str, names: Names) -> Any:
    stripped = text.strip()
    fenced = _FENCE.fullmatch(stripped)
    bare = (fenced.group(1) if fenced else stripped).strip("`'\" \t\r\n")
    if isinstance(space, spaces.Discrete):
        numbers = {folded(name): number for number, name in names.items()}
        with suppress(BadAction):
            return from_plain(space, numbers.get(folded(bare), _number(bare)))
        named = f"one of {', '.join(names.values())} or " if names else ""
        raise BadAction(f"The action must be {named}{describe(space)}, not {_excerpt(bare)}.")
    if isinstance(space, _ARRAYS):
        return from_plain(space, _numbers(bare))
    if not isinstance(space, _NESTED):
        for candidate in (text, stripped, bare):
            if _contains(space, candidate):
                return candidate
    return from_plain(space, _load(bare))


def folded(name: str) -> str:
    """Normalize a name for comparison: case and the amount of white space are ignored."""
    return " ".join(name.casefold().split())


def _number(text: str) -> Any:
    """Parse a number; any other text is returned unchanged."""
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return text
    return float(text) if set(text) & set(".eE") else int(text)


def _numbers(text: str) -> Any:
    data = _load(text)
    if not isinstance(data, str):
        return data
    inside = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
    numbers = [_number(part) for part in re.split(r"[\s,;]+", inside) if part]
    return text if any(isinstance(number, str) for number in numbers) else numbers


def _load(text: str) -> Any:
    """Parse JSON; any other text is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def describe(space: AnySpace) -> str:
    """Describe the values of a space, as a noun phrase."""
    match space:
        case spaces.Discrete():
            return f"a whole number {_range(space.start, space.start + space.n - 1)}"
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _describe_array(space)
        case spaces.Text():
            plain = space.character_set == spaces.text.alphanumeric
            allowed = "letters and digits" if plain else f"out of {space.characters[:100]}"
            return f"text of {space.min_length} to {space.max_length} characters ({allowed})"
        case spaces.Dict():
            parts = (f"{json.dumps(str(key))}: <{describe(sub)}>" for key, sub in space.spaces.items())
            return "a JSON object {" + ", ".join(parts) + "}"
        case spaces.Tuple():
            return f"a JSON list [{', '.join(f'<{describe(sub)}>' for sub in space.spaces)}]"
        case spaces.OneOf():
            choices = (f"[{i}, <{describe(sub)}>]" for i, sub in enumerate(space.spaces))
            return f"a JSON list: {' or '.join(choices)}"
        case spaces.Sequence():
            return f"a JSON list of any length, each item <{describe(space.feature_space)}>"
        case spaces.Graph():
            edge = f', "edges": [<{describe(space.edge_space)}>, ...]' if space.edge_space else ""
            links = ', "edge_links": [[<node number>, <node number>], ...]' if edge else ""
            return f'a JSON object {{"nodes": [<{describe(space.node_space)}>, ...]{edge}{links}}}'
    if space.dtype is not None and np.dtype(space.dtype).kind == "U":
        return "text"
    # The repr of a space may contain that of a function, with its memory address.
    return f"a value of {without_addresses(str(space))}, as text or JSON"


def without_addresses(text: str) -> str:
    """Remove the memory addresses that Python's repr writes."""
    return _ADDRESS.sub("", text)


def _describe_array(space: ArraySpace) -> str:
    low, high = bounds(space)
    kind = "number" if np.dtype(space.dtype).kind == "f" else "whole number"
    if low.size < 2:
        return f"a {kind} {_range(low.flat[0], high.flat[0])}" if low.size else "an empty list"
    shape = "x".join(map(str, low.shape))
    amount = f"{low.size} {kind}s" if low.ndim == 1 else f"{shape} {kind}s in nested lists"
    if np.all(low == low.flat[0]) and np.all(high == high.flat[0]):
        return f"{amount}, each {_range(low.flat[0], high.flat[0])}"
    if low.size <= _MAX_RANGES:
        each = (_range(a, b) for a, b in zip(low.flat, high.flat, strict=True))
        return f"{amount}, in this order: {', '.join(each)}"
    return f"{amount}, each {_range(low.min(), high.max())} (some in a narrower range)"


def _range(low: Any, high: Any) -> str:
    ends = (np.asarray(bound) + 0 for bound in (low, high))
    least, most = ("" if abs(float(end)) >= _UNBOUNDED else str(end).removesuffix(".0") for end in ends)
    if least and most:
        return f"from {least} to {most}"
    return f"of at least {least}" if least else f"of at most {most}" if most else "of any size"
