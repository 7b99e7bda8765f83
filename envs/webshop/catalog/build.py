"""Builds shops once, caches them and finds them by name.

    synthetic               1,000 generated products, seed 0
    synthetic:100000        as many as that
    synthetic:100000:7      from another seed
    simple:200:7            the same in few and short words, for small policies
    NAME                    what `rollgym shop import --name NAME` made
    a folder                what `rollgym shop build --out` made

The cache is ``$ROLLGYM_CACHE/shop``, or ``~/.cache/rollgym/shop``.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.seeding import file_hash, stable_digest
from rollgym.envs.arguments import check_choice
from rollgym.envs.webshop.catalog.jsonfiles import Progress
from rollgym.envs.webshop.catalog.store import (
    FORMAT,
    MANIFEST,
    DamagedShop,
    check_sizes,
    import_again,
    read_manifest,
)
from rollgym.envs.webshop.catalog.writer import Goals, Order, Products, write_shop
from rollgym.io.atomic import cache_root, locked, replaced

SIZE, SEED = 1000, 0
"""The shop called ``synthetic``."""
SYNTHETIC = "synthetic"
STYLES = {SYNTHETIC: "full", "simple": "simple"}
"""Synthetic shops by the name they begin with: the style of their words."""
LARGEST = 10_000_000
IMPORTED = "import-"
"""Prefix of the folders of imports in the cache."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Sources that determine a synthetic shop: when one changes, it is rebuilt.
_SOURCES = "types.py goals.py catalog/writer.py synthetic/* search/*.py"


def build_shop(
    folder: str | Path,
    products: Products,
    goals: Goals | Mapping[str, Goals],
    *,
    kind: str = "made",
    seed: int | None = None,
    tagger: str = "given",
    order: Order | None = None,
    facts: Callable[[], Mapping[str, Any]] | None = None,
    total: int | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Build a shop's folder from products and goals; it replaces an earlier one atomically.

    Args:
        folder: Target folder.
        products: Products in order, or a function that makes them, given a work folder. Read once as a
            stream.
        goals: Goals or a function that makes them from the products; or a mapping of such by kind
            (``synthetic``, ``human``).
        kind: ``synthetic``, ``imported`` or ``made``, for the manifest.
        seed: Seed of the products, for the manifest.
        tagger: Name of the noun tagger, for the manifest.
        order: Order of the goals, if not as given.
        facts: Returns more entries of the manifest, called after everything else is written.
        total: Number of products for ``progress``, if known.
        search: False skips the search index.
        progress: Called with done, total (or None) and the phase.
    """
    target = Path(folder).absolute()
    _refuse_foreign(target)
    kinds = goals if isinstance(goals, Mapping) else {SYNTHETIC: goals}

    def about() -> dict[str, Any]:
        return {"kind": kind, "seed": seed, "tagger": tagger, **(facts() if facts else {})}

    with locked(target), replaced(target) as work:
        write_shop(
            work, products, kinds, facts=about, order=order, total=total, search=search, progress=progress
        )
    return target


def synthetic_shop(
    size: int = SIZE,
    seed: int = SEED,
    *,
    style: str = "full",
    out: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return a synthetic shop, built if missing or incomplete."""
    check_choice("style", style, list(STYLES.values()))
    if not 1 <= size <= LARGEST:
        raise UsageError(f"A shop has from 1 to {LARGEST:,} products, not {size:,}.")
    if seed < 0:
        raise UsageError(f"The seed of a shop is 0 or more, not {seed}.")
    key = stable_digest("synthetic shop", FORMAT, style, size, seed, _sources()).hex()
    cached = cache_folder() / f"{_style_name(style)}-{size}-{seed}-{key[:8]}"
    target = cached if out is None else out.absolute()
    if _is_whole(target, key):
        return target
    _refuse_foreign(target)
    with locked(target):
        # Another process may have built it while this one waited.
        if not _is_whole(target, key):
            _write_synthetic(target, size, seed, style, key, progress)
    return target


def _write_synthetic(
    target: Path, size: int, seed: int, style: str, key: str, progress: Progress | None
) -> None:
    # Lazy: only building a synthetic shop needs its vocabulary.
    from rollgym.envs.webshop import synthetic

    facts = {
        "kind": SYNTHETIC,
        "name": shop_name(size, seed, style),
        "seed": seed,
        "style": style,
        "tagger": "given",
        "key": key,
    }
    with replaced(target) as work_folder:
        write_shop(
            work_folder,
            synthetic.products(size, seed, style=style),
            {SYNTHETIC: lambda shop: synthetic.goals(catalog=shop, size=size, seed=seed, style=style)},
            facts=lambda: facts,
            total=size,
            progress=progress,
        )


def imported_shop(name: str) -> Path:
    """Return the folder of an import; raise `DamagedShop` if it is damaged, since it cannot be rebuilt."""
    target = import_folder(name)
    if not target.is_dir():
        names = [*STYLES, *imported_names()]
        raise UnknownName("shop", name, names, f"Known: {', '.join(names)}, synthetic:SIZE, or a folder.")
    try:
        manifest = read_manifest(target)
    except DamagedShop as error:
        raise DamagedShop(f"{error}{import_again(name)}") from None
    check_sizes(target, manifest)
    return target


def resolve_shop(name: str | Path, *, progress: Progress | None = None) -> Path:
    """Return the folder of a shop by name or path; a missing synthetic one is built."""
    text = str(name)
    style = STYLES.get(text.split(":")[0])
    if style is not None:
        return synthetic_shop(*_size_and_seed(text), style=style, progress=progress)
    if _NAME.fullmatch(text) and import_folder(text).is_dir():
        return imported_shop(text)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        check_sizes(folder, read_manifest(folder))
        return folder.resolve()
    if isinstance(name, Path) or os.sep in text:
        raise UsageError(f"Shop folder not found: {folder}. Create it: rollgym shop build --out {folder}.")
    return imported_shop(text)


def shop_name(size: int, seed: int, style: str = "full") -> str:
    """Return the name of a synthetic shop for `resolve_shop`."""
    numbers = (size, seed) if seed != SEED else (size,) if size != SIZE else ()
    return ":".join(map(str, (_style_name(style), *numbers)))


def _style_name(style: str) -> str:
    return next(name for name, its_style in STYLES.items() if its_style == style)


def _size_and_seed(text: str) -> tuple[int, int]:
    name, *parts = text.split(":")
    if len(parts) > 2 or not all(re.fullmatch(r"[0-9]{1,15}", part) for part in parts):
        raise UsageError(f"Invalid shop {text!r}: use {name}:SIZE or {name}:SIZE:SEED ({name}:5000:1).")
    size, seed = (*map(int, parts), *(SIZE, SEED)[len(parts) :])
    return size, seed


def cache_folder() -> Path:
    """Return the cache folder of shops."""
    return cache_root() / "shop"


def import_folder(name: str) -> Path:
    """Return the folder of an import."""
    if name in STYLES:
        raise UsageError(f"A shop cannot be called {name!r}, which is a built-in one: give another name.")
    if not _NAME.fullmatch(name):
        raise UsageError(f"A shop cannot be called {name!r}: use letters, digits, dots, dashes, underscores.")
    return cache_folder() / f"{IMPORTED}{name}"


def imported_names() -> list[str]:
    """Return the names of all imports."""
    return sorted(path.name.removeprefix(IMPORTED) for path in cache_folder().glob(f"{IMPORTED}*"))


def _is_whole(folder: Path, key: str) -> bool:
    """Return whether a folder holds this synthetic shop, by the file sizes."""
    if not folder.is_dir():
        return False
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except DamagedShop:
        return False
    return manifest.get("key") == key


def _refuse_foreign(folder: Path) -> None:
    """Raise `UsageError` if the folder holds something other than a shop; the cache is always replaced."""
    if not folder.exists() or folder.parent == cache_folder():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not _was_shop(folder)):
        raise UsageError(f"{folder} exists and is not a shop: pass an empty or new folder.")


def _was_shop(folder: Path) -> bool:
    """Return whether the folder has a shop's manifest, of any format version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"format", "fingerprint", "files", "goals"} <= manifest.keys()


@functools.cache
def _sources() -> str:
    folder = Path(__file__).parents[1]
    files = sorted({path for pattern in _SOURCES.split() for path in folder.glob(pattern) if path.is_file()})
    return stable_digest(*(f"{path.name} {file_hash(path)}" for path in files)).hex()
