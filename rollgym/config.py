"""Configurations: typed settings, read from YAML files and ``key=value`` words.

The settings themselves are models that others write (`Settings`, `Closed`); nothing here knows them.
A setting nobody reads is an error that says what may have been meant, and all mistakes are told at once.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollgym.errors import MissingExtra, RollgymError, UnknownName, UsageError

try:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import PydanticSerializationError, PydanticUndefined

    from rollgym.config_explain import Row, explain, schema
    from rollgym.config_messages import sentences
    from rollgym.config_source import apply, read_file
    from rollgym.config_types import (
        Closed,
        Settings,
        alternatives,
        default_of,
        holds,
        inside,
        is_model,
        jsonable,
    )
    from rollgym.config_yaml import Tree, inline, line, read_tree, report, write
except ModuleNotFoundError as error:
    if error.name not in ("pydantic", "pydantic_core", "yaml"):
        raise
    raise MissingExtra("Reading a configuration", "train") from error

__all__ = [
    "ABSENT",
    "Closed",
    "Difference",
    "Row",
    "Settings",
    "diff",
    "dump",
    "explain",
    "find_config",
    "fingerprint",
    "known_configs",
    "load",
    "parse",
    "schema",
    "values_of",
]

M = TypeVar("M", bound=BaseModel)


def load(model: type[M], source: Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> M:
    """Settings from a YAML file (or a mapping, or nothing), changed by ``key.sub=value`` words.

    Every mistake is a line of one `UsageError`: where it was written, the key, what was expected. Nothing
    that the settings name is imported.
    """
    tree = _read(source)
    mistakes = apply(tree, overrides, model)
    values = _filled(model, tree.values)
    try:
        with model.reading(values) if issubclass(model, Settings) else nullcontext():
            config = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        mistakes += sentences(error, model, values, tree)
    except RollgymError as error:
        mistakes.append(line(tree.place(()), (), str(error)))
    if mistakes:
        raise report(mistakes)
    return config


def parse(text: str, name: str = "") -> dict[str, Any]:
    """The mapping that a YAML text holds, for `load`; ``name`` is what mistakes call the text."""
    return read_tree(text, name).values


def values_of(config: BaseModel) -> dict[str, Any]:
    """All settings, defaults included, in JSON's types."""
    values: dict[str, Any] = jsonable(config)
    return values


def dump(config: BaseModel) -> str:
    """All settings as YAML; reading it gives an equal configuration."""
    return write(values_of(config))


def fingerprint(config: BaseModel) -> str:
    """SHA-256 of all settings: equal exactly where they are."""
    text = json.dumps(values_of(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands in a `Difference` where one side has no such key."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that two configurations do not agree on."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        a, b = (repr(value) if value is ABSENT else inline(value) for value in (self.a, self.b))
        return f"{self.key}: {a} / {b}"


def diff(a: BaseModel | Mapping[str, Any], b: BaseModel | Mapping[str, Any]) -> list[Difference]:
    """The settings that differ, by dotted key, with both values. Mappings are taken as resolved already."""
    return _diff(jsonable(a), jsonable(b), "")


def _diff(a: Any, b: Any, key: str) -> list[Difference]:
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(a, dict) and isinstance(b, dict) and (a and b or not key):
        pairs = [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b}]
    elif _sections(a) and _sections(b):
        both = range(max(len(a), len(b)))
        pairs = [(i, a[i] if i < len(a) else ABSENT, b[i] if i < len(b) else ABSENT) for i in both]
    else:
        return [] if _same(a, b) else [Difference(key, a, b)]
    prefix = f"{key}." if key else ""
    return [one for name, x, y in pairs for one in _diff(x, y, f"{prefix}{name}")]


def _sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _same(a: Any, b: Any) -> bool:
    # True == 1 in Python, but not in a configuration.
    return a is b or (a is not ABSENT and b is not ABSENT and json.dumps(a) == json.dumps(b))


def find_config(name: str, package: str = "rollgym.trainer") -> Path:
    """The file of that path, or the configuration of that name that a package ships in ``configs``."""
    path = Path(name)
    if path.is_file():
        return path
    known = known_configs(package)
    if name in known:
        return known[name]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"There is no file {name}.")
    names = f"There are {', '.join(known)}." if known else "None is shipped; give the path of a YAML file."
    raise UnknownName("configuration", name, known, names)


def known_configs(package: str = "rollgym.trainer") -> dict[str, Path]:
    """The configurations a package ships, by name."""
    folder = Path(str(importlib.resources.files(package) / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read(source: Path | Mapping[str, Any] | None) -> Tree:
    if source is None:
        return Tree()
    if isinstance(source, Path):
        return read_file(source, shipped=known_configs())
    try:
        values = jsonable(dict(source))
    except (PydanticSerializationError, ValueError) as error:
        raise UsageError(f"The settings hold what no YAML file could: {error}") from None
    if not _plain(values):
        raise UsageError("The settings hold a NaN, which is no value of any setting.")
    return Tree(values)


def _plain(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return not (isinstance(value, float) and math.isnan(value))


def _filled(annotation: Any, given: Any, default: Any = PydanticUndefined) -> Any:
    """What is given, on top of the defaults of what is not.

    Pydantic would take ``loss: {clip_low: 0.1}`` instead of the default section, and miss its name; and it
    would check defaults as if they came from the file, where a path is text.
    """
    if isinstance(given, list):
        return [_filled(inside(annotation, index), item) for index, item in enumerate(given)]
    if not isinstance(given, dict):
        return given
    found = alternatives(annotation, given)
    models = [one for one in found if is_model(one)]
    if len(models) > 1:
        models = [one for one in models if holds(one, default)]
    if len(models) == 1:
        return _section(models[0], given, default if holds(models[0], default) else None)
    return {key: _filled(inside(found[0], key), item) for key, item in given.items()} if found else given


def _section(model: type[BaseModel], given: dict[str, Any], whole: Any) -> dict[str, Any]:
    values = {}
    for name, field in model.model_fields.items():
        default = default_of(field) if whole is None else getattr(whole, name)
        if name in given:
            values[name] = _filled(field.annotation, given[name], default)
        elif default is not PydanticUndefined:
            values[name] = jsonable(default)
    return {**given, **values}
