"""The JSON files of an import: finding them, streaming large ones, reading small ones."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rollgym.core.errors import MissingExtra, UsageError

EVERY = 500
"""Records between two progress calls."""

Progress = Callable[[int, int | None, str], None]
"""Progress callback: done, total (None if unknown) and the name of the phase."""


@dataclass(frozen=True)
class Files:
    """The original files that belong together."""

    products: Path
    attributes: Path
    human: Path | None


def find_files(path: str | Path) -> Files:
    """Find the files in a folder; pass the products file itself if there are several."""
    path = Path(path)
    if path.is_file():
        products = path
    elif path.is_dir():
        products = _only(path, "items_shuffle*.json")
    else:
        raise UsageError(f"Folder not found: {path}. It must hold the original items_shuffle*.json.")
    folder, ending = products.parent, products.name.removeprefix("items_shuffle")
    attributes = folder / f"items_ins_v2{ending}"
    if not attributes.is_file():
        attributes = _only(folder, "items_ins_v2*.json")
    human = folder / "items_human_ins.json"
    return Files(products, attributes, human if human.is_file() else None)


def _only(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise UsageError(f"{folder} holds no {pattern}, which the original data has.")
    if len(paths) > 1:
        names = " and ".join(path.name for path in paths)
        raise UsageError(f"{folder} holds {names}: name the items_shuffle file itself instead of its folder.")
    return paths[0]


def stream_array(path: Path, progress: Progress | None) -> Iterator[Any]:
    """The elements of a file that is one JSON array."""
    with _opened(path, "[", "an array of products") as file:
        yield from _each(path, file, _ijson().items(file, "item", use_float=True), progress)


def stream_object(path: Path, progress: Progress | None) -> Iterator[tuple[str, Any]]:
    """Keys and values of a file that is one JSON object."""
    with _opened(path, "{", "an object by asin") as file:
        yield from _each(path, file, _ijson().kvitems(file, "", use_float=True), progress)


def _each(path: Path, file: BinaryIO, items: Iterator[Any], progress: Progress | None) -> Iterator[Any]:
    size, number = path.stat().st_size, 0
    try:
        for number, item in enumerate(items, 1):
            yield item
            if progress and number % EVERY == 0:
                progress(file.tell(), size, path.name)
    except _ijson().JSONError as error:
        reason = error.args[0] if error.args else ""
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        reason = (reason.strip() or "unknown reason").splitlines()[0]
        raise UsageError(f"{path} is invalid JSON after {number} records ({reason}). Get it again.") from None
    if progress:
        progress(size, size, path.name)


@contextmanager
def _opened(path: Path, bracket: str, content: str) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            first_char = file.read(64).lstrip()[:1].decode("latin-1")
            if first_char != bracket:
                raise UsageError(f"{path} must hold {content} and begin with {bracket}, not {first_char!r}.")
            file.seek(0)
            yield file
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


def _ijson() -> Any:
    try:
        return importlib.import_module("ijson")
    except ModuleNotFoundError:
        raise MissingExtra("Reading the original WebShop files", "webshop") from None


def read_price_file(path: Path) -> dict[str, float]:
    """A file of prices by asin."""
    prices = _read_object(path, "prices")
    for asin, price in prices.items():
        if type(price) not in (int, float) or not math.isfinite(price) or price < 0:
            raise UsageError(f"{path}: the price of {asin} must be a number, not {str(price)[:40]!r}.")
    return {asin: float(price) for asin, price in prices.items()}


def read_noun_file(path: Path) -> dict[str, tuple[str, ...]]:
    """A file of lists of nouns by asin."""
    nouns = _read_object(path, "lists of nouns")
    for asin, words in nouns.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UsageError(f"{path}: the nouns of {asin} must be a list of words.")
    return {asin: tuple(word.lower() for word in words) for asin, words in nouns.items()}


def _read_object(path: Path, content: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a JSON file ({error}).") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold one JSON object of {content} by asin.")
    return value
