"""Episodes as lines of JSON, and anything an environment says as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollgym.errors import ResultsError
from rollgym.types import SCHEMA_VERSION, Episode

_decoder = msgspec.json.Decoder(Episode)
_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def clean_text(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates (which JSON allows) become replacement marks."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def jsonable(value: Any, where: str = "info", *, lenient: bool = False) -> Any:
    """``value`` as plain JSON types, so that it is the same after a round trip through a file.

    numpy values become Python ones, tuples and sets lists, not-a-number ``None``. Anything else is a
    TypeError that names the place, or with ``lenient`` the name of its type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, (int, np.integer)):
        number = int(value)
        return number if -(2**63) <= number < 2**63 else str(number)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist(), where, lenient=lenient)
    if isinstance(value, Mapping):
        return {
            clean_text(str(key)): jsonable(item, f"{where}[{key!r}]", lenient=lenient)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [jsonable(item, f"{where}[{i}]", lenient=lenient) for i, item in enumerate(value)]
    if isinstance(value, Set):
        return sorted((jsonable(item, where, lenient=lenient) for item in value), key=repr)
    if lenient:
        return f"<{type(value).__name__}>"
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def encode_episode(episode: Episode) -> bytes:
    """One episode as one line of JSON (without the newline)."""
    head = {
        "schema": SCHEMA_VERSION,
        "return": episode.total_reward,
        "length": episode.length,
    }
    body = msgspec.json.encode(episode)
    return msgspec.json.encode(head)[:-1] + b"," + body[1:]


def decode_episode(line: bytes | str) -> Episode:
    """An episode from its line; a `ResultsError` says what is wrong with a bad one."""
    try:
        head = _header.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultsError(f"not a line of JSON ({error})") from None
    if "schema" not in head:
        raise ResultsError("not an episode: it has no schema version")
    schema = msgspec.json.decode(head["schema"])
    if not isinstance(schema, int) or schema < 1:
        raise ResultsError(f"{schema!r} is not a schema version")
    if schema > SCHEMA_VERSION:
        raise ResultsError(
            f"written with schema {schema}, but this rollgym reads up to {SCHEMA_VERSION}: "
            "upgrade rollgym to read it"
        )
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise ResultsError(f"not a valid episode ({error})") from None


def read_episodes(path: Path) -> list[Episode]:
    """All episodes of a JSONL file; a `ResultsError` names the line that cannot be read."""
    episodes: list[Episode] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                episodes.append(decode_episode(line))
            except ResultsError as error:
                raise ResultsError(f"{path}, line {number}: {error}.") from None
    return episodes
