"""Where settings come from: files that extend files, and ``key=value`` words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from rollgym.config_types import Model, entries, jsonable
from rollgym.config_yaml import Path as Keys
from rollgym.config_yaml import Tree, line, read_tree, read_value
from rollgym.errors import UsageError, nearest
from rollgym.files import read_bounded

EXTENDS = "extends"
MOST_BYTES = 1_000_000
"""Of one file of settings."""


def read_file(path: Path, below: tuple[Path, ...] = (), shipped: Mapping[str, Path] | None = None) -> Tree:
    """A file's settings, on top of those of the file it extends.

    ``shipped`` are files that can be extended by name; a file of that path beside this one comes first.
    """
    name = str(path)
    if path.resolve() in below:
        chain = " -> ".join(part.name for part in (*below, path))
        raise UsageError(f"{name}: files extend each other in a circle: {chain}.")
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: is not a text file in UTF-8.") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}.") from None
    tree = read_tree(text, name)
    if EXTENDS not in tree.values:
        return tree
    other = tree.values.pop(EXTENDS)
    place = tree.where.pop((EXTENDS,))
    if not isinstance(other, str) or not other:
        raise UsageError(
            line(
                place,
                (EXTENDS,),
                f"must be the path of one YAML file or the name of a shipped config, not {other!r}",
            )
        )
    base = path.parent / other
    named = shipped or {}
    if not base.is_file():
        if other not in named:
            near = nearest(other, named)
            ask = f", did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(line(place, (EXTENDS,), f"there is no file {base}, nor a config {other!r}{ask}"))
        base = named[other]
    return merge(read_file(base, (*below, path.resolve()), named), tree)


def merge(base: Tree, over: Tree) -> Tree:
    """Mappings are merged key by key; everything else, lists included, is replaced."""
    where = dict(base.where)
    values = _merge(base.values, over.values, (), where)
    return Tree(values, where | over.where)


def _merge(base: dict[str, Any], over: dict[str, Any], path: Keys, where: dict[Keys, str]) -> dict[str, Any]:
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
    for old in [one for one in where if one[: len(path)] == path]:
        del where[old]


def apply(tree: Tree, overrides: Sequence[str], model: Model) -> list[str]:
    """Change a tree as ``key.sub=value`` words say, in their order; gives back the mistakes in them."""
    mistakes = []
    for word in overrides:
        try:
            path, value = _parse(word)
            done = _put(tree.values, path, value, (), model)
        except UsageError as error:
            mistakes.append(f"override {word!r}: {error}")
            continue
        _forget(tree.where, done)
        tree.where[done] = f"override {word!r}"
    return mistakes


def _parse(word: str) -> tuple[list[str], Any]:
    key, equals, text = word.partition("=")
    path = key.split(".")
    if key[:1] in ("+", "~"):
        raise UsageError("+ and ~ are not supported; write key=value, and key=null for nothing")
    if not equals or not all(path) or key != key.strip():
        raise UsageError("is not of the form key=value or key.sub=value")
    # In YAML nothing is null, but `name=` on a command line means an empty text.
    return path, read_value(text) if text.strip() else ""


def _put(at: Any, path: list[str], value: Any, done: Keys, model: Model) -> Keys:
    """Set a value below a mapping or list; gives back the path with numbers for places in lists."""
    key: Any = _index(at, path[0], done) if isinstance(at, list) else path[0]
    here = (*done, key)
    if len(path) == 1:
        at[key] = value
        return here
    below = at[key] if isinstance(at, list) else at.get(key)
    if below is None:
        below = at[key] = _empty(here, path[1], model)
    if not isinstance(below, dict | list):
        raise UsageError(f"{'.'.join(map(str, here))} is a single value; nothing is below it")
    return _put(below, path[1:], value, here, model)


def _index(items: list[Any], word: str, done: Keys) -> int:
    if word.isdecimal() and int(word) < len(items):
        return int(word)
    name = ".".join(map(str, done))
    has = f"has {len(items)} elements, from 0" if items else "is empty"
    raise UsageError(f"there is no {name}.{word}: {name} {has}. To change the number of them, write the list")


def _empty(path: Keys, step: str, model: Model) -> Any:
    """What an override goes into where the file says nothing: the default list, or a new section."""
    if step.isdecimal():
        key = ".".join(map(str, path))
        for entry in entries(model):
            if entry.key == key and entry.default is not PydanticUndefined:
                default = jsonable(entry.default)
                return default if isinstance(default, list) else {}
    return {}
