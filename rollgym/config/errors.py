"""Error messages for invalid configs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rollgym.config.settings import Model, Renames, Settings, alternatives, entries, inside, is_model
from rollgym.config.yaml import Path, Tree, inline, line, short
from rollgym.core.errors import nearest

_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "string_type": "text", "path_type": "a path", "none_required": "null",
    "list_type": "a list", "tuple_type": "a list", "set_type": "a list", "frozen_set_type": "a list",
    "dict_type": "a mapping (key: value)", "mapping_type": "a mapping (key: value)",
    "model_type": "a section (key: value)", "model_attributes_type": "a section (key: value)",
    "greater_than": "above {gt}", "greater_than_equal": "{ge} or more", "less_than": "below {lt}",
    "less_than_equal": "{le} or less", "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "finite", "literal_error": "{expected}", "enum": "{expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "a list of at least {min_length}", "too_long": "a list of at most {max_length}",
    "union_tag_invalid": "{expected_tags}",
}  # fmt: skip
_MAX_LISTED_KEYS = 12


def messages(error: ValidationError, model: Model, values: Mapping[str, Any], tree: Tree) -> list[str]:
    """Return one line for each invalid key: where it was written, the key, what was expected."""
    expected_at: dict[Path, list[str]] = {}
    problems: list[tuple[Path, str | None]] = []
    renamed = renamed_settings(model, tree.values)
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"], model, values)
        if detail["type"] == "union_tag_invalid":
            path = (*path, detail["ctx"]["discriminator"].strip("'"))
        expected = _expected(detail)
        if path in renamed:
            continue
        if expected and detail["loc"][-1:] == ("[key]",):
            problems.append((path, f"the key {_must_be([expected], path[-1])}"))
        elif expected is None:
            problems.append((path, _other(detail, path, model, values)))
        elif path in expected_at:
            expected_at[path].append(expected)
        else:
            expected_at[path] = [expected]
            problems.append((path, None))
    lines = [line(_first_place(tree, path), (), message) for path, message in renamed.items()]
    lines += [
        line(tree.place(path), path, text or _must_be(expected_at[path], _at(values, path)))
        for path, text in problems
    ]
    return list(dict.fromkeys(lines))


def _first_place(tree: Tree, path: Path) -> str:
    """The location of a section, or of the first override below it."""
    below = (where for keys, where in tree.where.items() if keys[: len(path)] == path)
    return next(below, tree.place(path))


def renamed_settings(model: Model, values: Mapping[str, Any]) -> dict[Path, str]:
    """Return a message for each key or value in ``values`` that `Settings.renames` of the model lists."""
    renames = model.renames if issubclass(model, Settings) else Renames()
    messages: dict[Path, str] = {}

    def visit(value: Any, path: Path) -> None:
        key = ".".join("N" if isinstance(step, int) else step for step in path)
        written = ".".join(map(str, path))
        new_key = renames.keys.get(key)
        new_value = renames.new_value(renames.new_key(key) or key, value)
        if new_key is not None:
            example = f" (write {new_key}={inline(new_value[0])})" if new_value else ""
            messages[path] = f"{written} was renamed to {new_key} in {renames.since}{example}."
        elif new_value is not None:
            new = inline(new_value[0])
            messages[path] = f"{written}: {inline(value)} was renamed to {new} in {renames.since}."
        if isinstance(value, dict | list):
            for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
                visit(inner, (*path, step))

    visit(values, ())
    return messages


def _expected(detail: Any) -> str | None:
    if detail["type"] == "missing" and detail["loc"] and isinstance(detail["loc"][-1], int):
        return f"a list of at least {detail['loc'][-1] + 1}"
    words = _EXPECTED.get(detail["type"])
    words = words and words.format(**detail.get("ctx", {}))
    if words and detail["type"] == "union_tag_invalid":
        words = " or ".join(words.rsplit(", ", 1))
    return words


def _must_be(expected: Sequence[str], value: Any) -> str:
    words = " or ".join(dict.fromkeys(expected))
    hint = ""
    if isinstance(value, str):
        near = nearest(value, re.findall(r"'([^']*)'", words))
        if near:
            hint = f". Did you mean {' or '.join(near)}?"
        elif "number" in words and value.lower().lstrip("+-.") in ("inf", "infinity"):
            hint = "; infinity is written .inf"
    elif isinstance(value, float) and "whole number" in words and value.is_integer():
        hint = f"; write {int(value)}"
    return f"must be {words}, not {short(value)}{hint}"


def _other(detail: Any, path: Path, model: Model, values: Any) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return unknown(str(path[-1]), _models_at(model, values, path[:-1]), model)
    if kind == "missing":
        return "is required and has no default"
    if kind == "union_tag_not_found":
        return f"needs {detail['ctx']['discriminator']}, which selects the kind of section"
    if kind in ("value_error", "assertion_error"):
        return str(detail["ctx"]["error"])
    text: str = detail["msg"]
    return text


def unknown(key: str, here: Sequence[Model], root: Model) -> str:
    """Return the message for an unknown key, with the nearest known ones."""
    names = list(dict.fromkeys(name for model in here for name in model.model_fields))
    near = nearest(key, names)
    same = [entry for entry in entries(root) if entry.key.rsplit(".", 1)[-1] == key]
    elsewhere = dict.fromkeys(e.key + (f" (with {e.only_with})" if e.only_with else "") for e in same)
    suggestions = [*near, *elsewhere]
    if suggestions:
        return f"unknown setting. Did you mean {' or '.join(suggestions)}?"
    if not names:
        return "unknown setting."
    more = ", …" if len(names) > _MAX_LISTED_KEYS else ""
    return f"unknown setting. Settings here: {', '.join(names[:_MAX_LISTED_KEYS])}{more}."


def _path(loc: Sequence[str | int], model: Model, values: Any) -> Path:
    """Return the path of the key an error is about, without the union members that pydantic inserts."""
    path: Path = ()
    for step in loc:
        at = _at(values, path)
        inside = isinstance(at, dict) and step in at
        inside = inside or (isinstance(at, list) and isinstance(step, int) and step < len(at))
        if inside or any(step in section.model_fields for section in _models_at(model, values, path)):
            path = (*path, step)
    return path


def _at(values: Any, path: Path) -> Any:
    for step in path:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _models_at(model: Model, values: Any, path: Path) -> list[Model]:
    """Return the sections that may be at a path, given the values written there."""
    types = alternatives(model, values)
    for length, step in enumerate(path, 1):
        value = _at(values, path[:length])
        types = [member for outer in types for member in alternatives(inside(outer, step), value)]
    return [member for member in types if is_model(member)]
