"""What can be set: a table of every key, and a JSON schema for editors."""

from __future__ import annotations

import enum
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from rollgym.config_messages import unknown
from rollgym.config_types import Entry, Model, entries, jsonable, models_in
from rollgym.config_yaml import inline
from rollgym.errors import UsageError

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
    """What there is to know about one key."""

    key: str
    """Dotted; ``N`` stands for a place in a list, ``KEY`` for a key of a mapping."""
    type: str
    default: str
    """As it is written in YAML; ``required`` where there is none, empty for a section."""
    description: str


def explain(model: Model, key: str | None = None) -> list[Row]:
    """Every key with its type, default and description; with ``key``, only it and what is below it."""
    found = list(entries(model))
    if key is not None:
        wanted = key.split(".")
        found = [entry for entry in found if _matches(entry.key.split("."), wanted)]
        if not found:
            raise UsageError(f"{key}: {_suggest(model, wanted)}")
    return [_row(entry) for entry in found]


def schema(model: Model) -> dict[str, Any]:
    """The JSON schema of a configuration file."""
    made = model.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    extends = {
        "type": "string",
        "description": "A file, relative to this one, or a shipped config by name, that this one changes.",
    }
    made.setdefault("properties", {})["extends"] = extends
    # What is required may be in the file that this one extends, or in a section's default.
    for part in (made, *made.get("$defs", {}).values()):
        part.pop("required", None)
    return made


def _matches(names: list[str], wanted: list[str]) -> bool:
    same = (w == n or n == "KEY" or (n == "N" and w.isdecimal()) for n, w in zip(names, wanted, strict=False))
    return len(names) >= len(wanted) and all(same)


def _suggest(model: Model, wanted: list[str]) -> str:
    """Go down as far as the key is right, and look around there."""
    here = [model]
    for depth, name in enumerate(wanted):
        fields = [one.model_fields[name] for one in here if name in one.model_fields]
        if not fields:
            if here:
                return unknown(name, here, model)
            return f"{'.'.join(wanted[:depth])} has nothing below it."
        here = [inner for field in fields for _, inner in models_in(field.annotation)]
    return "there is no such setting."


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
    marks = [part for one in metadata for part in (one, *getattr(one, "metadata", ()))]
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
        items = [_name(one) for one in inner if one is not Ellipsis]
        fixed = origin is tuple and Ellipsis not in inner
        return f"list: {', '.join(items)}" if fixed else f"list of {', '.join(items)}"
    return _class_name(annotation)


def _class_name(annotation: Any) -> str:
    if any(models_in(annotation)):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(str(one.value) for one in annotation)
    if isinstance(annotation, type) and issubclass(annotation, PurePath):
        return "path"
    return str(getattr(annotation, "__name__", annotation))
