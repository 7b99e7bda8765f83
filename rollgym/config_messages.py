"""What was wrong with a configuration, in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rollgym.config_types import Model, alternatives, entries, inside, is_model
from rollgym.config_yaml import Path, Tree, line, short
from rollgym.errors import nearest

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping (key: value)",
    "mapping_type": "a mapping (key: value)",
    "model_type": "a section (key: value)",
    "model_attributes_type": "a section (key: value)",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "finite",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "union_tag_invalid": "{expected_tags}",
}
_MOST_KEYS = 12


def sentences(error: ValidationError, model: Model, values: Mapping[str, Any], tree: Tree) -> list[str]:
    """One line for each key that is wrong: where it was written, the key, what was expected."""
    wanted: dict[Path, list[str]] = {}
    said: list[tuple[Path, str | None]] = []
    for one in error.errors(include_url=False):
        path = _path(one["loc"], model, values)
        if one["type"] == "union_tag_invalid":
            path = (*path, one["ctx"]["discriminator"].strip("'"))
        expected = _expected(one)
        if expected and one["loc"][-1:] == ("[key]",):
            said.append((path, f"the key {_must_be([expected], path[-1])}"))
        elif expected is None:
            said.append((path, _other(one, path, model, values)))
        elif path in wanted:
            wanted[path].append(expected)
        else:
            wanted[path] = [expected]
            said.append((path, None))
    lines = [
        line(tree.place(path), path, text or _must_be(wanted[path], _at(values, path))) for path, text in said
    ]
    return list(dict.fromkeys(lines))


def _expected(one: Any) -> str | None:
    if one["type"] == "missing" and one["loc"] and isinstance(one["loc"][-1], int):
        return f"a list of at least {one['loc'][-1] + 1}"
    words = _EXPECTED.get(one["type"])
    words = words and words.format(**one.get("ctx", {}))
    if words and one["type"] == "union_tag_invalid":
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


def _other(one: Any, path: Path, model: Model, values: Any) -> str:
    kind = one["type"]
    if kind == "extra_forbidden":
        return unknown(str(path[-1]), _models_at(model, values, path[:-1]), model)
    if kind == "missing":
        return "is missing; it has no default"
    if kind == "union_tag_not_found":
        return f"needs {one['ctx']['discriminator']}, which says what kind it is"
    if kind in ("value_error", "assertion_error"):
        return str(one["ctx"]["error"])
    text: str = one["msg"]
    return text


def unknown(key: str, here: Sequence[Model], root: Model) -> str:
    """That there is no such key, with what may have been meant."""
    known = list(dict.fromkeys(name for model in here for name in model.model_fields))
    near = nearest(key, known)
    same = [entry for entry in entries(root) if entry.key.rsplit(".", 1)[-1] == key]
    elsewhere = dict.fromkeys(e.key + (f" (with {e.only_with})" if e.only_with else "") for e in same)
    words = ["there is no such setting."]
    if near:
        words.append(f"Did you mean {' or '.join(near)}?")
    if elsewhere:
        words.append(f"There is {' and '.join(elsewhere)}.")
    if len(words) == 1 and known:
        more = ", …" if len(known) > _MOST_KEYS else ""
        words.append(f"Known here: {', '.join(known[:_MOST_KEYS])}{more}.")
    return " ".join(words)


def _path(loc: Sequence[str | int], model: Model, values: Any) -> Path:
    """The key a message is about: without the members of unions, which pydantic names as well."""
    path: Path = ()
    for step in loc:
        at = _at(values, path)
        inside = isinstance(at, dict) and step in at
        inside = inside or (isinstance(at, list) and isinstance(step, int) and step < len(at))
        if inside or any(step in one.model_fields for one in _models_at(model, values, path)):
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
    """The sections that may be at a place, given what is written there."""
    found = alternatives(model, values)
    for length, step in enumerate(path, 1):
        value = _at(values, path[:length])
        found = [one for outer in found for one in alternatives(inside(outer, step), value)]
    return [one for one in found if is_model(one)]
