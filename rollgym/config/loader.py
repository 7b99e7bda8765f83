"""Read configs from YAML files and ``key=value`` overrides; write, compare and find them.

The models are defined by the callers (`Settings`, `Closed`). Unknown settings are errors with a suggestion,
and all errors are reported at once.
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

from rollgym.core.errors import MissingExtra, RollgymError, UnknownName, UsageError, nearest
from rollgym.core.files import read_bounded

try:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import PydanticSerializationError, PydanticUndefined

    from rollgym.config.errors import messages, renamed_settings
    from rollgym.config.explain import Row, explain, schema
    from rollgym.config.settings import (
        Closed,
        Model,
        Renames,
        Settings,
        alternatives,
        default_of,
        entries,
        holds,
        inside,
        is_model,
        jsonable,
    )
    from rollgym.config.yaml import Path as Keys
    from rollgym.config.yaml import Tree, inline, line, read_tree, read_value, report, write
except ModuleNotFoundError as error:
    if error.name not in ("pydantic", "pydantic_core", "yaml"):
        raise
    raise MissingExtra("Reading a config", "train") from error

__all__ = [
    "ABSENT", "Closed", "Difference", "Renames", "Row", "Settings", "diff", "dump", "explain",
    "find_config", "fingerprint", "known_configs", "load", "parse", "renamed_settings", "schema",
    "values_of",
]  # fmt: skip

EXTENDS = "extends"
MAX_BYTES = 1_000_000
"""Maximum size of a config file."""

M = TypeVar("M", bound=BaseModel)


def load(model: type[M], source: Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> M:
    """Load settings from a YAML file or a mapping, changed by ``key.sub=value`` overrides.

    Imports nothing that the settings name.

    Args:
        model: The settings model.
        source: A YAML file or a mapping. Default: the model's defaults.
        overrides: Changes such as ``loss.clip_low=0.1``, applied in order.

    Raises:
        UsageError: The settings are invalid; one line for each error: location, key, what was expected.

    Example:
        >>> load(TrainConfig, find_config("bandit-grpo"), ["stop.steps=5"]).stop.steps
        5
    """
    package = model.shipped_in if issubclass(model, Settings) else ""
    tree = _read(source, known_configs(package) if package else {})
    errors = _apply(tree, overrides, model)
    values = _filled(model, tree.values)
    try:
        with model.reading(values) if issubclass(model, Settings) else nullcontext():
            config = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        errors += messages(error, model, values, tree)
    except RollgymError as error:
        errors.append(line(tree.place(()), (), str(error)))
    if errors:
        raise report(errors)
    return config


def parse(text: str, name: str = "") -> dict[str, Any]:
    """Parse a YAML text into a mapping for `load`; errors refer to the text as ``name``."""
    return read_tree(text, name).values


def values_of(config: BaseModel) -> dict[str, Any]:
    """Return all settings, defaults included, in JSON types."""
    values: dict[str, Any] = jsonable(config)
    return values


def dump(config: BaseModel) -> str:
    """Write all settings as YAML; loading it gives an equal config."""
    return write(values_of(config))


def fingerprint(config: BaseModel) -> str:
    """Return the SHA-256 of all settings: equal if and only if the settings are."""
    text = json.dumps(values_of(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Value in a `Difference` of the side that lacks the key."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting with different values in two configs."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        a, b = (repr(value) if value is ABSENT else inline(value) for value in (self.a, self.b))
        return f"{self.key}: {a} / {b}"


def diff(a: BaseModel | Mapping[str, Any], b: BaseModel | Mapping[str, Any]) -> list[Difference]:
    """Return the settings that differ, by dotted key. Mappings must include all defaults."""
    return _diff(jsonable(a), jsonable(b), "")


def _diff(a: Any, b: Any, key: str) -> list[Difference]:
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(a, dict) and isinstance(b, dict) and (a and b or not key):
        pairs = [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b}]
    elif _sections(a) and _sections(b):
        both = range(max(len(a), len(b)))
        pairs = [(i, a[i] if i < len(a) else ABSENT, b[i] if i < len(b) else ABSENT) for i in both]
    else:
        # True == 1 in Python, but not in a config.
        same = a is b or (a is not ABSENT and b is not ABSENT and json.dumps(a) == json.dumps(b))
        return [] if same else [Difference(key, a, b)]
    prefix = f"{key}." if key else ""
    return [difference for name, x, y in pairs for difference in _diff(x, y, f"{prefix}{name}")]


def _sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def find_config(name: str, package: str) -> Path:
    """Return a config file by path, or by the name of one that a package ships in ``configs``."""
    path = Path(name)
    if path.is_file():
        return path
    configs = known_configs(package)
    if name in configs:
        return configs[name]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"Config file not found: {name}.")
    names = (
        f"Configs: {', '.join(configs)}." if configs else "None are shipped; pass the path of a YAML file."
    )
    raise UnknownName("config", name, configs, names)


def known_configs(package: str) -> dict[str, Path]:
    """Return the configs a package ships, by name."""
    folder = Path(str(importlib.resources.files(package) / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read(source: Path | Mapping[str, Any] | None, shipped: Mapping[str, Path]) -> Tree:
    if source is None:
        return Tree()
    if isinstance(source, Path):
        return _read_file(source, shipped=shipped)
    try:
        values = jsonable(dict(source))
    except (PydanticSerializationError, ValueError) as error:
        raise UsageError(f"The settings contain a value that YAML cannot represent: {error}") from None
    if not _plain(values):
        raise UsageError("The settings contain NaN, which no setting accepts.")
    return Tree(values)


def _plain(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return not (isinstance(value, float) and math.isnan(value))


def _filled(annotation: Any, value: Any, default: Any = PydanticUndefined) -> Any:
    """Fill a partial section with the values of its default.

    Pydantic would take ``loss: {clip_low: 0.1}`` in place of the default section and miss its name; and it
    would check defaults as if they came from the file, where a path is text.
    """
    if isinstance(value, list):
        return [_filled(inside(annotation, index), item) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    types = alternatives(annotation, value)
    models = [member for member in types if is_model(member)]
    if len(models) > 1:
        models = [model for model in models if holds(model, default)]
    if len(models) == 1:
        return _section(models[0], value, default if holds(models[0], default) else None)
    return {key: _filled(inside(types[0], key), item) for key, item in value.items()} if types else value


def _section(model: type[BaseModel], value: dict[str, Any], whole: Any) -> dict[str, Any]:
    values = {}
    for name, field in model.model_fields.items():
        default = default_of(field) if whole is None else getattr(whole, name)
        if name in value:
            values[name] = _filled(field.annotation, value[name], default)
        elif default is not PydanticUndefined:
            values[name] = jsonable(default)
    return {**value, **values}


# --- files and overrides


def _read_file(path: Path, below: tuple[Path, ...] = (), shipped: Mapping[str, Path] | None = None) -> Tree:
    """Read a file on top of the file it extends.

    ``shipped`` are files that can be extended by name; a file with that path next to this one comes first.
    """
    name = str(path)
    if path.resolve() in below:
        chain = " -> ".join(part.name for part in (*below, path))
        raise UsageError(f"{name}: circular extends: {chain}.")
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not a UTF-8 text file.") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot read the file: {error.strerror}.") from None
    tree = read_tree(text, name)
    if EXTENDS not in tree.values:
        return tree
    other = tree.values.pop(EXTENDS)
    location = tree.where.pop((EXTENDS,))
    if not isinstance(other, str) or not other:
        raise UsageError(
            line(
                location,
                (EXTENDS,),
                f"must be the path of a YAML file or the name of a shipped config, not {other!r}",
            )
        )
    base = path.parent / other
    named = shipped or {}
    if not base.is_file():
        if other not in named:
            near = nearest(other, named)
            hint = f". Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                line(location, (EXTENDS,), f"no file {base} and no shipped config {other!r}{hint}")
            )
        base = named[other]
    below_tree = _read_file(base, (*below, path.resolve()), named)
    where = dict(below_tree.where)
    values = _merge(below_tree.values, tree.values, (), where)
    return Tree(values, where | tree.where)


def _merge(base: dict[str, Any], over: dict[str, Any], path: Keys, where: dict[Keys, str]) -> dict[str, Any]:
    """Merge mappings key by key; everything else, lists included, is replaced."""
    merged = dict(base)
    for key, value in over.items():
        here = (*path, key)
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value, here, where)
        else:
            merged[key] = value
            _forget(where, here)
    return merged


def _forget(where: dict[Keys, str], path: Keys) -> None:
    for old in [keys for keys in where if keys[: len(path)] == path]:
        del where[old]


def _apply(tree: Tree, overrides: Sequence[str], model: Model) -> list[str]:
    """Apply ``key.sub=value`` overrides to a tree, in order; returns the errors in them."""
    errors = []
    for override in overrides:
        try:
            keys, value = _parse_override(override)
            path = _put(tree.values, keys, value, (), model)
        except UsageError as error:
            errors.append(f"override {override!r}: {error}")
            continue
        _forget(tree.where, path)
        tree.where[path] = f"override {override!r}"
    return errors


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    path = key.split(".")
    if key[:1] in ("+", "~"):
        raise UsageError("+ and ~ are not supported; write key=value, or key=null to unset")
    if not equals or not all(path) or key != key.strip():
        raise UsageError("expected key=value or key.sub=value")
    # An empty YAML value is null, but `name=` on a command line means an empty text.
    return path, read_value(text) if text.strip() else ""


def _put(at: Any, path: list[str], value: Any, done: Keys, model: Model) -> Keys:
    """Set a value below a mapping or list; returns the path with integers for list indices."""
    key: Any = _index(at, path[0], done) if isinstance(at, list) else path[0]
    here = (*done, key)
    if len(path) == 1:
        at[key] = value
        return here
    below = at[key] if isinstance(at, list) else at.get(key)
    if below is None:
        below = at[key] = _empty(here, path[1], model)
    if not isinstance(below, dict | list):
        raise UsageError(f"{'.'.join(map(str, here))} is a single value without keys below it")
    return _put(below, path[1:], value, here, model)


def _index(items: list[Any], step: str, done: Keys) -> int:
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    name = ".".join(map(str, done))
    has = f"has elements 0 to {len(items) - 1}" if items else "is empty"
    raise UsageError(f"{name}.{step} does not exist: {name} {has}. To add elements, set the whole list")


def _empty(path: Keys, step: str, model: Model) -> Any:
    """Return the container for an override below an unset key: the default list, or a new section."""
    if step.isdecimal():
        key = ".".join(map(str, path))
        for entry in entries(model):
            if entry.key == key and entry.default is not PydanticUndefined:
                default = jsonable(entry.default)
                return default if isinstance(default, list) else {}
    return {}
