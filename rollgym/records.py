"""Episodes as lines of JSON, and anything an environment says as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollgym.errors import ResultsError
from rollgym.files import read_bounded
from rollgym.types import SCHEMA_VERSION, Episode

MOST_BYTES = 4_000_000_000
"""Of a file of episodes that is read as a whole."""
_decoder = msgspec.json.Decoder(Episode)
_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def clean_text(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates (which JSON allows) become replacement marks."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


class _NotPlain(TypeError):
    """A value JSON cannot hold, and the way to it (innermost step first)."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__
        self.way: list[object] = []


def jsonable(value: Any, where: str = "info", *, lenient: bool = False) -> Any:
    """``value`` as plain JSON types, so that it is the same after a round trip through a file.

    numpy values become Python ones, tuples and sets lists, not-a-number ``None``. Anything else is a
    TypeError that names the place, or with ``lenient`` the name of its type.
    """
    try:
        return _plain(value, lenient)
    except _NotPlain as error:
        place = where + "".join(f"[{step!r}]" for step in reversed(error.way))
        raise TypeError(f"{place} is a {error.kind}, which JSON cannot hold") from None


def _plain(value: Any, lenient: bool) -> Any:
    # Every step of every environment comes through here, so the common types are told apart first.
    kind = type(value)
    if kind is str:
        return clean_text(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else str(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _plain_items(((clean_text(str(key)), item) for key, item in value.items()), lenient)
    if isinstance(value, (list, tuple)):
        return list(_plain_items(enumerate(value), lenient).values())
    if isinstance(value, Set):
        return sorted((_plain(item, lenient) for item in value), key=repr)
    if isinstance(value, np.floating):
        return _plain(float(value), lenient)  # a long double's tolist() gives a long double again
    if isinstance(value, (np.ndarray, np.generic)):
        python = value.tolist()
        if not isinstance(python, np.generic):
            return _plain(python, lenient)
    if isinstance(value, str):
        return clean_text(str.__str__(value))  # str() of a mixed-in Enum would be its name
    for base in (int, float):
        if isinstance(value, base):
            return _plain(base(value), lenient)
    if lenient:
        return f"<{kind.__name__}>"
    raise _NotPlain(value)


def _plain_items(items: Iterable[tuple[Any, Any]], lenient: bool) -> dict[Any, Any]:
    result = {}
    for key, item in items:
        try:
            result[key] = _plain(item, lenient)
        except _NotPlain as error:
            error.way.append(key)
            raise
    return result


def encode_episode(episode: Episode) -> bytes:
    """One episode as one line of JSON (without the newline)."""
    head = {
        "schema": SCHEMA_VERSION,
        "return": episode.total_reward,
        "length": episode.length,
    }
    try:
        body = msgspec.json.encode(episode)
    except UnicodeEncodeError:
        body = msgspec.json.encode(jsonable(msgspec.to_builtins(episode)))
    return msgspec.json.encode(head)[:-1] + b"," + body[1:]


def decode_episode(line: bytes | str) -> Episode:
    """An episode from its line; a `ResultsError` says what is wrong with a bad one."""
    try:
        head = _header.decode(line)
        schema = msgspec.json.decode(head.get("schema", b"null"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ResultsError(f"not a line of JSON ({error})") from None
    if schema is None:
        raise ResultsError("not an episode: it has no schema version")
    if type(schema) is not int or schema < 1:
        raise ResultsError(f"{schema!r} is not a schema version")
    if schema > SCHEMA_VERSION:
        raise ResultsError(
            f"written with schema {schema}, but this rollgym reads up to {SCHEMA_VERSION}: "
            "upgrade rollgym to read it"
        )
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ResultsError(f"not a valid episode ({error})") from None


def read_episodes(path: Path) -> list[Episode]:
    """All episodes of a JSONL file; a `ResultsError` names the line that cannot be read."""
    episodes: list[Episode] = []
    try:
        lines = read_bounded(path, MOST_BYTES).split(b"\n")
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                episodes.append(decode_episode(line))
            except ResultsError as error:
                raise ResultsError(f"{path}, line {number}: {error}.") from None
    return episodes
