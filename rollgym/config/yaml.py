"""A safe subset of YAML 1.2 for settings, with the line of every value.

Plain scalars follow YAML 1.2: ``1e-3`` is a number; ``yes``, ``on``, ``010``, ``1:30`` and dates are text.
Keys are always text. Tags, aliases and repeated keys are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from rollgym.core.errors import UsageError
from rollgym.core.text import shorten

Path = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_PLAIN = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)
_MAX_DEPTH = 60


class _Loader(yaml.SafeLoader):
    """Composes nodes only; `_Reader` converts them to values."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            message = "aliases (*name) are not supported; repeat the value, or use extends"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


def _represent_list(dumper: _Dumper, items: list[Any]) -> Any:
    flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(f"{_TAG}seq", items, flow_style=flat or dumper.default_flow_style)


def _represent_text(dumper: _Dumper, text: str) -> Any:
    # Unquoted, these end a line and would be read as spaces.
    odd = any(char in text for char in "\r\x85\u2028\u2029")
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if odd else None)


for _name, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


@dataclass
class Tree:
    """Values as written, and the location of each."""

    values: dict[str, Any] = field(default_factory=dict)
    where: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Return the location of a value, or of the nearest enclosing one."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.where:
                return self.where[path[:length]]
        return ""


class _Reader:
    """Converts nodes to values and records locations and errors."""

    def __init__(self, name: str, where: dict[Path, str]) -> None:
        self.name = name
        self.where = where
        self.errors: list[str] = []

    def value(self, node: Any, path: Path = ()) -> Any:
        self.where[path] = self._line(node)
        if len(path) > _MAX_DEPTH:
            return self._error(node, path, "is nested too deeply")
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and tag in _SCALARS:
            try:
                return _SCALARS[tag](node.value)
            except ValueError:
                return self._error(node, path, f"{short(node.value)} is not a valid {tag}")
        return self._error(node, path, f"the tag {node.tag} is not supported; use plain values")

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._error(key_node, path, "a key must be text, not a list or a mapping")
                continue
            key = key_node.value
            if key in values:
                first = self.where[(*path, key)]
                self._error(key_node, (*path, key), f"duplicate key; first at {first}")
                continue
            values[key] = self.value(value_node, (*path, key))
            self.where[(*path, key)] = self._line(key_node)
        return values

    def _line(self, node: Any) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.name else ""

    def _error(self, node: Any, path: Path, sentence: str) -> None:
        self.errors.append(line(self._line(node), path, sentence))


def _number(text: str) -> float:
    special = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
    if text.lower() in special:
        return special[text.lower()]
    number = float(text)
    if not math.isfinite(number):
        # No setting accepts NaN, and infinity is written .inf, not 1e999.
        raise ValueError(text)
    return number


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0),
    "float": _number,
    "str": str,
}


def line(location: str, path: Path, sentence: str) -> str:
    """Join location, key and message of one error."""
    return ": ".join(part for part in (location, ".".join(map(str, path)), sentence) if part)


def report(errors: list[str]) -> UsageError:
    """Combine all errors into one, a line each."""
    if len(errors) == 1:
        return UsageError(errors[0])
    return UsageError("\n  ".join([f"{len(errors)} errors in the config:", *errors]))


def read_value(text: str, name: str = "", where: dict[Path, str] | None = None) -> Any:
    """Parse a YAML text; all errors in it are raised as one `UsageError`."""
    reader = _Reader(name, {} if where is None else where)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        value = None if node is None else reader.value(node)
    except yaml.YAMLError as error:
        raise UsageError(_syntax(error, name)) from None
    except RecursionError:
        raise UsageError(line(name, (), "is nested too deeply")) from None
    if reader.errors:
        raise report(reader.errors)
    return value


def read_tree(text: str, name: str = "") -> Tree:
    """Parse a YAML mapping; an empty text is an empty mapping."""
    tree = Tree()
    values = read_value(text, name, tree.where)
    if not isinstance(values, dict | None):
        raise UsageError(line(name, (), f"must contain `key: value` lines, not {short(values)}"))
    tree.values = values or {}
    tree.where[()] = name
    return tree


def write(values: Any) -> str:
    """Write values as YAML that `read_value` reads back unchanged."""
    return _dump(values, default_flow_style=False, width=100)


def inline(value: Any) -> str:
    """Write a value as YAML on one line."""
    return _dump(value, default_flow_style=True, width=10**9).removesuffix("...\n").strip()


def short(value: Any, max_length: int = 60) -> str:
    """Write a value on one line, shortened for a message."""
    text = repr(value) if isinstance(value, str) else inline(value)
    return shorten(text, max_length)


def _dump(value: Any, **options: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options))


def _syntax(error: yaml.YAMLError, name: str) -> str:
    """Format a YAML syntax error on one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    context = getattr(error, "context", None)
    location = f"{name}:{mark.line + 1}" if name and mark else name
    return line(location, (), f"invalid YAML: {problem}{f' ({context})' if context else ''}")
