"""Atomic folders and locks between processes, and the cache root."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollgym.core.errors import RunError, UsageError, os_reason


def cache_root() -> Path:
    """The cache folder: ``$ROLLGYM_CACHE``, or ``~/.cache/rollgym``."""
    path = os.environ.get("ROLLGYM_CACHE")
    return (Path(path).expanduser() if path else Path.home() / ".cache" / "rollgym").absolute()


def new_folder(*names: str) -> Path:
    """An unused path under runs/, named by the time and these names; nothing is created."""
    words = ["".join(c if c.isalnum() else "-" for c in name).strip("-") for name in names]
    base = Path("runs") / "-".join([time.strftime("%Y%m%d-%H%M%S"), *words])
    return unused(base)


def unused(base: Path) -> Path:
    """This path if nothing is there, or else the first of ``NAME-2``, ``NAME-3``, …."""
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


@contextmanager
def removed_unless(folder: Path, worth: Callable[[], bool]) -> Iterator[None]:
    """After an error, remove a folder that the block created, unless ``worth()`` finds results in it.

    A folder that existed and was empty is emptied; one that had content is left unchanged.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    ours = bool(made) or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        if ours and not worth():
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made[1:]:
                with suppress(OSError):
                    parent.rmdir()
            if not made:
                folder.mkdir()
        raise


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes on making ``target``."""
    path = target.parent / f".{target.name}.lock"
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        file = _lock(path)
    try:
        yield
    finally:
        # Removed while still held: a waiting process sees that it is gone, and creates a new one.
        path.unlink(missing_ok=True)
        os.close(file)


def _lock(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.fstat(file).st_ino == path.stat().st_ino:
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` at the end; after an error it is removed.

    Call it under `locked`: leftovers of an earlier process that was killed are removed.
    """
    prefix = f".{target.name}.new-"
    with _writable(target):
        for left in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        temporary.chmod(0o755)
    try:
        with written(target):
            yield temporary
            flush(temporary)
            _swap(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    """Replace a folder by another. A process that has mapped the old files keeps them."""
    old = new.with_name(f"{new.name}.old")
    with suppress(FileNotFoundError):
        target.rename(old)
    new.rename(target)
    flush(target.parent, deep=False)
    shutil.rmtree(old, ignore_errors=True)


def flush(folder: Path, *, deep: bool = True) -> None:
    """Flush a folder to disk (fsync)."""
    for path in [*(folder.rglob("*") if deep else ()), folder]:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextmanager
def _writable(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"Cannot write {target.name} to {target.parent}: {os_reason(error)}. "
            "Set ROLLGYM_CACHE to a writable folder, or pass another folder."
        ) from None


@contextmanager
def written(target: Path) -> Iterator[None]:
    """Convert an `OSError` to a `RunError` that states the file and the reason."""
    try:
        yield
    except OSError as error:
        raise RunError(f"Cannot write {target}: {os_reason(error)}.") from error
