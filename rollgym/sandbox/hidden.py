"""Paths hidden from untrusted code: rollgym itself and packages that were not requested.

Reference solutions, experts and judges of environments are files of rollgym. It may be installed anywhere
that the interpreter inside can read: its own prefix, a virtual environment, an editable source tree, a folder
of ``pip install --target``, a zip file. Each backend hides what `hidden` finds; the worker then looks for
itself.
"""

from __future__ import annotations

import glob
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache

OURS = re.compile(r"(?:__editable__)?[._]*rollgym(?:[-._].*)?", re.IGNORECASE)
"""Names of rollgym in a package folder: package, metadata, links and finders of an editable install."""
SITES = ("lib*/py*", "local/lib*/py*", "*/lib*/py*", "local/*/lib*/py*", "share/*/lib*/py*")
OTHERS = ("envs", "pkgs", "conda-bld", "src", "local/src")
"""Folders of a prefix that hold other installations and sources."""
SOURCE_MARKS = ("pyproject.toml", "setup.py", ".git")


def below(path: str, folder: str) -> bool:
    """Whether a path is a folder or inside it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def hidden(roots: Iterable[str], *, packages: bool, needed: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the real paths below these folders that must be hidden inside.

    Args:
        roots: The folders that the inside can read.
        packages: Whether installed packages may be seen (``preload``); rollgym is hidden either way.
        needed: What the interpreter inside cannot do without; no folder around it is hidden as a whole.
    """
    real_roots = {os.path.realpath(root) for root in roots}
    keep = {os.path.realpath(path) for path in needed}
    candidates = set(own_paths())
    for root in real_roots:
        candidates |= {os.path.join(root, name) for name in OTHERS}
    for folder in _package_folders(tuple(sorted(real_roots))):
        whole = not packages and not any(below(path, folder) for path in (*keep, *real_roots))
        candidates |= {folder} if whole else set(_ours_in(folder))
    split = {part for path in candidates for part in _around(os.path.realpath(path), keep)}
    seen = {path for path in split if os.path.lexists(path) and any(below(path, root) for root in real_roots)}
    return tuple(sorted(path for path in seen if not any(below(path, o) for o in seen if o != path)))


@lru_cache(1)
def own_paths() -> frozenset[str]:
    """Return the paths of the running rollgym: package and metadata, or the source tree."""
    paths: set[str] = set()
    for folder in map(os.path.abspath, sys.modules["rollgym"].__path__):
        while not os.path.exists(folder):  # inside a zip file
            folder = os.path.dirname(folder)
        parts = [folder, *(os.path.join(folder, part) for part in ("envs", "agents", "trainer"))]
        for real in {os.path.realpath(part) for part in parts}:
            parent = os.path.dirname(real)
            source = any(os.path.exists(os.path.join(parent, mark)) for mark in SOURCE_MARKS)
            whole = source and not parent.endswith("-packages")
            paths |= {parent} if whole else {real, *_ours_in(parent)}
    if sys.pycache_prefix:
        paths.add(sys.pycache_prefix)
    return frozenset(paths)


def _ours_in(folder: str) -> Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    yield from (os.path.join(folder, name) for name in names if OURS.fullmatch(name))


@lru_cache(8)
def _package_folders(roots: tuple[str, ...]) -> tuple[str, ...]:
    """Return the package folders below these roots, for any Python."""
    folders = {os.path.realpath(path) for path in (*sys.path, *site.getsitepackages()) if path}
    folders.add(os.path.realpath(site.getusersitepackages()))
    for root in roots:
        for pattern in SITES:
            folders |= {os.path.realpath(path) for path in glob.glob(f"{root}/{pattern}/*-packages")}
    library = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    # The zip file and the folder of compiled modules that the standard library has on the path.
    mine = {path for path in folders if any(below(path, folder) for folder in library)}
    packages = {path for path in mine if path.rpartition("/")[2].endswith("-packages")}
    return tuple(sorted(path for path in (folders - mine) | packages if os.path.isdir(path)))


def _around(path: str, keep: set[str]) -> Iterator[str]:
    """Return the path, or all its other content if it contains something needed."""
    if path in keep:
        return
    if not any(below(needed, path) for needed in keep):
        yield path
        return
    try:
        names = os.listdir(path)
    except OSError:
        return
    for name in names:
        yield from _around(os.path.join(path, name), keep)


def inside(paths: Iterable[str], mounts: Iterable[str]) -> tuple[str, ...]:
    """Map real paths to the names under which mounted folders show them."""
    names = set()
    for mount in mounts:
        real = os.path.realpath(mount)
        names |= {mount + path[len(real) :] for path in paths if below(path, real)}
    return tuple(sorted(names))


def split(roots: Iterable[str], out: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the paths to allow so that only the excluded parts stay hidden, and paths to list only.

    For Landlock, which can allow a whole folder but not exclude a part of it.
    """
    read: list[str] = []
    listed: list[str] = []
    closed = list(out)
    waiting = sorted({os.path.realpath(root) for root in roots})
    while waiting:
        path = waiting.pop()
        if any(below(path, hidden_path) for hidden_path in closed):
            continue
        if not any(below(hidden_path, path) for hidden_path in closed):
            read.append(path)
            continue
        listed.append(path)
        try:
            with os.scandir(path) as entries:
                # Link targets are covered under their own name, or were never readable.
                waiting += [entry.path for entry in entries if not entry.is_symlink()]
        except OSError:
            continue
    return sorted(read), sorted(listed)
