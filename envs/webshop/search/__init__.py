"""The two search engines behind one interface: documents, building, opening."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollgym.core.errors import UsageError
from rollgym.envs.arguments import check_choice
from rollgym.envs.webshop.search import lucene, tantivy_index
from rollgym.envs.webshop.search.analysis import tokens
from rollgym.envs.webshop.search.lucene_build import LuceneBuilder
from rollgym.envs.webshop.types import Product, Search

ENGINES = (lucene.NAME, tantivy_index.NAME)
LARGE = 100_000
"""With at least this many documents, ``auto`` selects tantivy."""

_MANIFEST = "search.json"
_FORMAT = 1


class _Builder(Protocol):
    def add(self, terms: Sequence[str]) -> None: ...
    def finish(self, names: Sequence[str] | None = None) -> None: ...
    def abandon(self) -> None: ...


def document(product: Product) -> str:
    """The text of a product that is searched."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first_bullet = product.bullets[0] if product.bullets else ""
    return " ".join((product.title, product.description, first_bullet, options)).lower()


def default_engines(count: int) -> tuple[str, ...]:
    """Return the default engines for a catalog of ``count`` products."""
    return (lucene.NAME,) if count < LARGE else (tantivy_index.NAME,)


def build_search(
    folder: Path,
    documents: Iterable[str],
    *,
    engines: Sequence[str] = (lucene.NAME,),
    names: Iterable[str] | None = None,
) -> None:
    """Index the documents, numbered from 0 on, for each of the engines.

    Args:
        folder: Parent folder; each engine gets a subfolder, replaced atomically.
        documents: One text for each product; read once, never held.
        engines: Names out of `ENGINES`.
        names: The products' asins, read after the documents: `lucene-exact` orders equal scores by them, as
            the original does; without them by number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for engine in engines:
        check_choice("search engine", engine, ENGINES)
    work_folders = {engine: folder / f".{engine}-{secrets.token_hex(4)}" for engine in dict.fromkeys(engines)}
    try:
        count = _index(work_folders, documents, names)
        for engine, work_folder in work_folders.items():
            _seal(work_folder, engine, count)
            shutil.rmtree(folder / engine, ignore_errors=True)
            work_folder.rename(folder / engine)
    finally:
        for work_folder in work_folders.values():
            shutil.rmtree(work_folder, ignore_errors=True)


def open_search(folder: Path, engine: str = "auto") -> Search:
    """The search of a shop: ``auto`` is `lucene-exact` under 100,000 products where built, else tantivy."""
    if engine != "auto":
        check_choice("search engine", engine, ENGINES)
    built = {name: _manifest(folder / name) for name in ENGINES if (folder / name).is_dir()}
    if engine == "auto":
        engine = _choose({name: manifest["documents"] for name, manifest in built.items()})
    if engine not in built:
        have = f"only {', '.join(built)}" if built else "none"
        raise UsageError(
            f"{folder} has no search index of engine {engine!r} ({have}): build the shop's search with it."
        )
    if engine == tantivy_index.NAME:
        return tantivy_index.TantivyIndex(folder / engine)
    return lucene.LuceneIndex(folder / engine)


def _choose(built: dict[str, int]) -> str:
    """Return the engine for ``auto``, by the sizes of the built indexes."""
    small = built.get(lucene.NAME, LARGE) < LARGE
    other = lucene.NAME if lucene.NAME in built and tantivy_index.NAME not in built else tantivy_index.NAME
    return lucene.NAME if small or not built else other


def _index(work_folders: dict[str, Path], documents: Iterable[str], names: Iterable[str] | None) -> int:
    """Index every document with every engine; return the number of documents."""
    builders = [_builder(engine, work_folder) for engine, work_folder in work_folders.items()]
    try:
        count = 0
        for text in documents:
            count += 1
            terms = tokens(text)
            for builder in builders:
                builder.add(terms)
        all_names = None if names is None else list(names)
        if all_names is not None and len(all_names) != count:
            raise UsageError(f"There are {len(all_names)} names for {count} documents: each needs one.")
    except BaseException:
        for builder in builders:
            builder.abandon()
        raise
    for builder in builders:
        builder.finish(all_names)
    return count


def _builder(engine: str, folder: Path) -> _Builder:
    folder.mkdir()
    return LuceneBuilder(folder) if engine == lucene.NAME else tantivy_index.TantivyBuilder(folder)


def _seal(folder: Path, engine: str, count: int) -> None:
    """Write the manifest of a complete index."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.suffix != ".lock"}
    manifest = {"format": _FORMAT, "engine": engine, "documents": count, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _manifest(folder: Path) -> dict[str, Any]:
    """Verify the files against the record of `_seal`."""
    again = "build the shop's search again."
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        version, files = manifest["format"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"The search index {folder} is incomplete ({_MANIFEST} cannot be read): {again}"
        ) from None
    if version != _FORMAT:
        raise UsageError(f"The search index {folder} has format {version}, {_FORMAT} is expected: {again}")
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes, {size} are expected"
            raise UsageError(f"The search index {folder} is incomplete ({name} {state}): {again}")
    return manifest
