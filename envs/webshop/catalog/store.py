"""A shop on disk, memory-mapped and shared by all processes: products, goals and splits.

manifest.json           kind, seed, counts, a hash of every file; written last
products.*              products, and their numbers by asin (see table.py)
goals-KIND.*            goals in their order; KIND is synthetic or human
goals-KIND.products     the number of each goal's product
goals-KIND.disjoint     goal numbers: test, then dev, then train, no product in two of them
search/                 the search engines' files
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollgym.core.errors import RunError, UsageError
from rollgym.core.seeding import file_hash, stable_digest
from rollgym.envs.webshop.catalog.table import UINT32, Names, Numbers, Table, read_column
from rollgym.envs.webshop.types import Goal, Product

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("test", "dev", "train")
CACHED = 2048
"""Decoded products, and as many goals, that an open shop caches."""

_T = TypeVar("_T")


class DamagedShop(UsageError):
    """The folder is not a complete shop: half written, changed, or of another format."""


class ProductTable:
    """The products of a shop, by number or by asin."""

    def __init__(self, folder: Path) -> None:
        self._names = Names(folder, "products")
        self._table = Table(folder, "products")
        self.get = _reader(self._table, Product, folder, "product")

    def __len__(self) -> int:
        return len(self._table)

    def number(self, asin: str) -> int | None:
        """Return the number of a product, None if unknown."""
        return self._names.find(asin)


class ShopCatalog:
    """The products and one kind of goals of a shop folder. It never changes; threads may share it."""

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], products: ProductTable, goals: str | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.goals = goals
        """Kind of goals: ``synthetic``, ``human``, or None without goals."""
        self._products = products
        self.splits: dict[str, dict[str, Sequence[int]]] = {}
        """Goal numbers by splitting scheme (``original``, ``disjoint``) and split name."""
        self.goal_count = 0
        if goals is not None:
            self._open_goals(goals)

    def _open_goals(self, kind: str) -> None:
        table = Table(self.folder, f"goals-{kind}")
        self.goal_count = len(table)
        self._goal = _reader(table, Goal, self.folder, "goal")
        self._goal_products = read_column(self.folder / f"goals-{kind}.products", UINT32)
        sizes = self.manifest["goals"][kind]
        disjoint = Numbers(read_column(self.folder / f"goals-{kind}.disjoint", UINT32))
        self.splits = {
            "original": _split(range(self.goal_count), sizes["original"]),
            "disjoint": _split(disjoint, sizes["disjoint"]),
        }

    @classmethod
    def open(cls, folder: str | Path, goals: str | None = None) -> ShopCatalog:
        """Open a shop's folder, with its first kind of goals unless ``goals`` names another.

        Raises `DamagedShop` if the folder is not a complete shop.
        """
        folder = Path(folder).resolve()
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
        catalog = cls(folder, manifest, ProductTable(folder))
        kinds = list(manifest["goals"])
        return catalog.with_goals(goals) if goals or kinds else catalog

    def with_goals(self, kind: str | None) -> ShopCatalog:
        """Return the shop with other goals: ``synthetic`` or ``human``; None for its first kind."""
        kinds = list(self.manifest["goals"])
        goal_kind = kind or next(iter(kinds), None)
        if goal_kind is None or goal_kind not in kinds:
            available = f"only {', '.join(kinds)}" if kinds else "only products"
            raise UsageError(f"The shop {self.folder.name} has no {goal_kind or ''} goals, {available}.")
        return ShopCatalog(self.folder, self.manifest, self._products, goal_kind)

    @property
    def human_goals(self) -> ShopCatalog | None:
        """The same shop with human goals, None without such goals."""
        return self.with_goals("human") if "human" in self.manifest["goals"] else None

    @property
    def fingerprint(self) -> str:
        """Hash of the products and goals, independent of machine and time."""
        return stable_digest(self.manifest["fingerprint"], self.goals).hex()

    def __len__(self) -> int:
        return len(self._products)

    def product(self, number: int) -> Product:
        """Product ``number``."""
        return self._products.get(number)

    def number(self, asin: str) -> int | None:
        """Return the number of a product, None if unknown."""
        return self._products.number(asin)

    def goal(self, number: int) -> Goal:
        """Goal ``number``, in the catalog's order."""
        if self.goals is None:
            raise IndexError("this shop has no goals")
        return self._goal(number)

    def goal_product(self, number: int) -> int:
        """The number of goal ``number``'s product."""
        return int(self._goal_products[number])


def open_shop(folder: str | Path, goals: str | None = None) -> ShopCatalog:
    """Cached `ShopCatalog.open`: one shared object per process."""
    path = Path(folder).resolve()
    try:
        stat = (path / MANIFEST).stat()
    except OSError:
        return ShopCatalog.open(path, goals)
    return _open(path, stat.st_ino, stat.st_mtime_ns, goals)


@functools.lru_cache(maxsize=8)
def _open(path: Path, _file: int, _changed: int, goals: str | None) -> ShopCatalog:
    return ShopCatalog.open(path, goals)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a shop's folder."""
    if not folder.is_dir():
        raise UsageError(f"Shop folder not found: {folder}.")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedShop(f"{folder} is not a shop or was never finished: it has no {MANIFEST}.") from None
    except (OSError, ValueError) as error:
        raise DamagedShop(f"{folder / MANIFEST} cannot be read ({error}).") from None
    if not isinstance(manifest, dict) or not {"format", "files", "goals", "fingerprint"} <= manifest.keys():
        raise DamagedShop(f"{folder / MANIFEST} does not describe a shop.")
    if manifest["format"] != FORMAT:
        reason = f"has format {manifest['format']}, but this rollgym reads {FORMAT}"
        raise _damaged(folder, manifest, reason)
    return manifest


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Check that every file exists with its recorded size."""
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise _damaged(folder, manifest, f"is damaged: {name} is missing")
        if size != entry["size"]:
            reason = f"is damaged: {name} has {size} bytes instead of {entry['size']}"
            raise _damaged(folder, manifest, reason)


def verify(folder: Path) -> int:
    """Check every file against its hash; return the number of files."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name, entry in manifest["files"].items():
        if file_hash(folder / name) != entry["sha256"]:
            raise _damaged(folder, manifest, f"is damaged: {name} does not match its hash")
    if fingerprint_of(manifest["files"]) != manifest["fingerprint"]:
        raise _damaged(folder, manifest, "is damaged: its fingerprint does not match its files")
    return len(manifest["files"])


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file of a shop but the manifest, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": file_hash(path)}
        for path in files
    }


def fingerprint_of(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hash of the content, without ``search/``: its files may differ while results are equal."""
    lines = [f"{name} {entry['sha256']}" for name, entry in sorted(files.items()) if "/" not in name]
    return stable_digest("shop", FORMAT, *lines).hex()


def import_again(name: object) -> str:
    """Return the hint to repair an import."""
    return f" Import it again: rollgym shop import DIR --name {name}."


def _damaged(folder: Path, manifest: Mapping[str, Any], reason: str) -> DamagedShop:
    hint = " Remove it and build it again: rollgym shop build."
    if manifest.get("kind") == "imported":
        hint = import_again(manifest.get("name"))
    return DamagedShop(f"{folder} {reason}.{hint}")


def _split(numbers: Any, sizes: Sequence[int]) -> dict[str, Sequence[int]]:
    """Consecutive parts of a sequence, by split name."""
    splits, start = {}, 0
    for name, size in zip(SPLITS, sizes, strict=True):
        splits[name] = numbers[start : start + size]
        start += size
    return splits


def _reader(table: Table, kind: type[_T], folder: Path, noun: str) -> Callable[[int], _T]:
    """Return a cached function from a number to the decoded record."""
    decoder = msgspec.msgpack.Decoder(kind)

    @functools.lru_cache(maxsize=CACHED)
    def read(number: int) -> _T:
        try:
            return decoder.decode(table[number])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RunError(
                f"{folder} is damaged: {noun} {number} cannot be read ({error}). "
                "Check it with rollgym shop info --verify."
            ) from None

    return read
