"""Functions behind ``rollgym shop``, without output."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra
from rollgym.envs.webshop.catalog.build import resolve_shop, synthetic_shop
from rollgym.envs.webshop.catalog.imports import import_shop
from rollgym.envs.webshop.catalog.jsonfiles import Progress
from rollgym.envs.webshop.catalog.store import SPLITS, read_manifest, verify

__all__ = ["build", "describe", "import_files", "info", "resolve_shop", "serve"]


def build(
    size: int, seed: int, style: str, out: Path | None, progress: Progress | None = None
) -> dict[str, Any]:
    """Build a synthetic shop unless it exists, and describe it."""
    return describe(synthetic_shop(size, seed, style=style, out=out, progress=progress))


def info(shop: str, *, check: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Describe a shop; with ``check`` verify every file against its hash."""
    folder = resolve_shop(shop, progress=progress)
    return {**describe(folder), "verified": verify(folder) if check else None}


def import_files(path: Path, **options: Any) -> dict[str, Any]:
    """Make a shop of the original files and describe it, with its bad records; options of `import_shop`."""
    shop = import_shop(path, **options)
    return {**describe(shop.folder), "bad_records": shop.problems.first}


def serve(shop: str, host: str, port: int, rules: str, progress: Progress | None = None) -> None:
    """Serve a shop to a web browser until it is interrupted."""
    folder = resolve_shop(shop, progress=progress)
    try:
        server = importlib.import_module("rollgym.envs.webshop.server")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rollgym"):
            raise
        raise MissingExtra("Serving a shop", "webshop") from error
    server.serve(folder, host, port, rules)


def describe(folder: Path) -> dict[str, Any]:
    """Summarize a shop's manifest."""
    manifest = read_manifest(folder)
    return {
        "name": manifest.get("name") or str(folder),
        "folder": str(folder),
        "kind": manifest["kind"],
        "seed": manifest["seed"],
        "products": manifest["products"],
        "goals": {
            kind: {
                "count": sizes["count"],
                **{split: dict(zip(SPLITS, sizes[split], strict=True)) for split in ("original", "disjoint")},
            }
            for kind, sizes in manifest["goals"].items()
        },
        "nouns": manifest["tagger"],
        "prices": manifest.get("prices"),
        "left_out": manifest.get("left_out"),
        "bytes": sum(entry["size"] for entry in manifest["files"].values()),
        "fingerprint": manifest["fingerprint"],
    }
