"""Serialization: episodes as lines of JSON, and values of environments as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollgym.core.errors import ResultsError
from rollgym.core.files import read_bounded
from rollgym.core.types import SCHEMA_VERSION, Episode

MOST_BYTES = 4_000_000_000
"""Maximum size of a file of episodes that is read as a whole."""
_decoder = msgspec.json.Decoder(Episode)
_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def clean_text(text: str) -> str:
    """Replace lone surrogates, which JSON allows and UTF-8 does not."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


class _NotPlain(TypeError):
    """A value that JSON cannot represent, and the keys that lead to it (innermost first)."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__
        self.keys: list[object] = []


def jsonable(value: Any, where: str = "info", *, lenient: bool = False) -> Any:
    """Convert ``value`` to plain JSON types that survive a round trip through a file.

    numpy values become Python ones, tuples and sets lists, NaN and infinity ``None``. Any other type raises a
    TypeError that states the key, or with ``lenient`` becomes the name of its type.
    """
    try:
        return _plain(value, lenient)
    except _NotPlain as error:
        key = where + "".join(f"[{step!r}]" for step in reversed(error.keys))
        raise TypeError(f"{key} is a {error.kind}, which JSON cannot represent") from None


def _plain(value: Any, lenient: bool) -> Any:
    # Hot path of every environment step: the common types come first.
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
        return _plain(float(value), lenient)  # tolist() of a long double returns a long double
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
            error.keys.append(key)
            raise
    return result


def encode_episode(episode: Episode, *, routed_experts: bool = False) -> bytes:
    """Encode an episode as one line of JSON (without the newline).

    Args:
        episode: A finished episode.
        routed_experts: Include `Turn.routed_experts`, which takes more space than everything else.
    """
    if not routed_experts and any(turn.routed_experts for turn in episode.turns):
        turns = tuple(replace(turn, routed_experts=msgspec.UNSET) for turn in episode.turns)
        episode = replace(episode, turns=turns)
    head = {"schema": SCHEMA_VERSION, "return": episode.total_reward, "length": episode.length}
    try:
        body = msgspec.json.encode(episode)
    except UnicodeEncodeError:
        body = msgspec.json.encode(jsonable(msgspec.to_builtins(episode)))
    return msgspec.json.encode(head)[:-1] + b"," + body[1:]


def decode_episode(line: bytes | str) -> Episode:
    """Decode an episode from its line; raises `ResultsError` for an invalid one."""
    try:
        head = _header.decode(line)
        schema = msgspec.json.decode(head.get("schema", b"null"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ResultsError(f"not valid JSON ({error})") from None
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
    """Read all episodes of a JSONL file; a `ResultsError` states the line that cannot be read."""
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
