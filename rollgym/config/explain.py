"""Reference of all settings: a table of every key, and a JSON schema for editors."""

from __future__ import annotations

import enum
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from rollgym.config.errors import unknown
from rollgym.config.settings import Entry, Model, Settings, entries, jsonable, models_in
from rollgym.config.yaml import inline
from rollgym.core.errors import UsageError

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
    Any: "anything",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >=", "max_length": "length <="}


@dataclass(frozen=True, slots=True)
class Row:
    """Type, default and description of one key."""

    key: str
    """Dotted; ``N`` stands for an index of a list, ``KEY`` for a key of a mapping."""
    type: str
    default: str
    """In YAML; ``required`` if there is none, empty for a section."""
    description: str


def explain(model: Model, key: str | None = None) -> list[Row]:
    """Return every key with type, default and description; with ``key``, only it and the keys below it."""
    selected = list(entries(model))
    if key is not None:
        path = key.split(".")
        selected = [entry for entry in selected if _matches(entry.key.split("."), path)]
        if not selected:
            renames = model.renames if issubclass(model, Settings) else None
            new = renames and renames.new_key(key)
            if renames and new:
                raise UsageError(f"{key} was renamed to {new} in {renames.since}.")
            raise UsageError(f"{key}: {_suggest(model, path)}")
    return [_row(entry) for entry in selected]


def schema(model: Model) -> dict[str, Any]:
    """Return the JSON schema of a config file."""
    result = model.model_json_schema()
    result["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    extends = {
        "type": "string",
        "description": "Base config: a file relative to this one, or the name of a shipped config.",
    }
    result.setdefault("properties", {})["extends"] = extends
    # A required key may be in the file that this one extends, or in a section's default.
    for part in (result, *result.get("$defs", {}).values()):
        part.pop("required", None)
    return result


def _matches(names: list[str], path: list[str]) -> bool:
    same = (w == n or n == "KEY" or (n == "N" and w.isdecimal()) for n, w in zip(names, path, strict=False))
    return len(names) >= len(path) and all(same)


def _suggest(model: Model, path: list[str]) -> str:
    """Follow the path as far as it exists and suggest keys of that section."""
    here = [model]
    for depth, name in enumerate(path):
        fields = [section.model_fields[name] for section in here if name in section.model_fields]
        if not fields:
            if here:
                return unknown(name, here, model)
            return f"{'.'.join(path[:depth])} is a single value without keys below it."
        here = [inner for field in fields for _, inner in models_in(field.annotation)]
    return "unknown setting."


def _row(entry: Entry) -> Row:
    section = any(not steps for steps, _ in models_in(entry.annotation))
    if entry.default is PydanticUndefined:
        default = "required"
    elif section and entry.default is not None:
        default = ""
    else:
        default = inline(jsonable(entry.default))
    only = f"Only with {entry.only_with}." if entry.only_with else ""
    description = " ".join(part for part in (entry.description, only) if part)
    return Row(entry.key, _with_bounds(_name(entry.annotation), entry.metadata), default, description)


def _with_bounds(name: str, metadata: Collection[Any]) -> str:
    marks = [part for item in metadata for part in (item, *getattr(item, "metadata", ()))]
    bounds = [
        f"{sign} {getattr(mark, word)}"
        for mark in marks
        for word, sign in _BOUNDS.items()
        if getattr(mark, word, None) is not None
    ]
    return " ".join([name, ", ".join(bounds)]) if bounds else name


def _name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is Annotated:
        return _with_bounds(_name(inner[0]), inner[1:])
    if origin is Literal:
        return " | ".join(map(inline, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_name, inner)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of {_name(inner[0])} to {_name(inner[1])}"
    if isinstance(origin, type) and issubclass(origin, Collection):
        items = [_name(member) for member in inner if member is not Ellipsis]
        fixed = origin is tuple and Ellipsis not in inner
        return f"list: {', '.join(items)}" if fixed else f"list of {', '.join(items)}"
    return _class_name(annotation)


def _class_name(annotation: Any) -> str:
    if any(models_in(annotation)):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(str(member.value) for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, PurePath):
        return "path"
    return str(getattr(annotation, "__name__", annotation))
