"""Checkpoints: everything that a run needs to resume exactly, written completely or not at all.

A checkpoint is a folder with a manifest of SHA-256 sums, which is written last; only then the folder gets its
name. A crash leaves the checkpoint before; a damaged checkpoint is reported and skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollgym.cluster.errors import ActorLost
from rollgym.core.errors import ResultsError, RunError, one_line
from rollgym.core.seeding import file_hash
from rollgym.io.run_dir import read_json, write_json

SUMS, STATE = "sums.json", "state.json"
BEST = "best"
_THREADS = 8
"""Files that are hashed or flushed at a time: each takes one core, and there is one per rank."""


class Checkpoints:
    """The checkpoints of one run, in ``folder``."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write the checkpoint of a step and delete older ones.

        ``write`` fills a folder with everything that is not in ``state``, which holds JSON values.
        """
        path = self.path(step)
        self._write(path, {"step": step, **state}, write)
        # A damaged checkpoint of a later step was skipped and does not count.
        for old in [saved for saved in self.steps() if saved <= step][: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return path

    def save_best(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write the best policy so far, replacing the one before."""
        self._write(self.folder / BEST, {"step": step, **state}, write)
        return self.folder / BEST

    def steps(self) -> list[int]:
        """Steps with a checkpoint, intact or damaged, oldest first."""
        paths = self.folder.glob("step-*") if self.folder.is_dir() else ()
        return sorted(int(path.name[5:]) for path in paths if path.name[5:].isdigit())

    def newest(self, notice: Callable[[str], None] = lambda text: None) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint and its state; damaged ones are skipped with a notice."""
        self._clean_up()
        damaged = []
        for step in reversed(self.steps()):
            try:
                return self.path(step), verify_checkpoint(self.path(step))
            except ResultsError as error:
                damaged.append(str(error))
                notice(f"{error} Using the checkpoint before it.")
        if damaged:
            raise ResultsError("All checkpoints of this run are damaged:\n" + "\n".join(damaged))
        return None

    def _clean_up(self) -> None:
        """Remove partial checkpoints of a crash; a checkpoint that was being replaced gets its name back."""
        for part in self.folder.glob(".*.part"):
            shutil.rmtree(part, ignore_errors=True)
        for old in self.folder.glob(".*.old"):
            path = old.with_name(old.name[1:-4])
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(path)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def _write(self, path: Path, state: dict[str, Any], write: Callable[[Path], None]) -> None:
        part = path.with_name(f".{path.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(part)
            write_json(part / STATE, state)
            names = _files(part)
            with ThreadPoolExecutor(_THREADS) as threads:
                sums = dict(
                    zip(names, threads.map(lambda name: _hash_and_flush(part / name), names), strict=True)
                )
            write_json(part / SUMS, {"files": sums})
            _flush(part)
            _replace(part, path)
            _flush(path.parent)
        except ActorLost:  # a rank that died while it saved: the run goes back to the checkpoint before
            raise
        except Exception as error:  # a full disk is an OSError here, and other errors in torch
            why = getattr(error, "strerror", None) or one_line(error)
            raise RunError(
                f"Cannot write the checkpoint {path}: {why}. Earlier checkpoints are intact: free some disk "
                "space and resume."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check all files of a checkpoint and return its state.

    Raises:
        ResultsError: A file is missing or was changed.
    """
    if not path.is_dir():
        raise ResultsError(f"No checkpoint at {path}.")
    sums = read_json(path / SUMS).get("files", {})
    if STATE not in sums:
        raise ResultsError(f"The checkpoint {path} is damaged: {SUMS} does not list its files.")
    for name in sums:
        if not (path / name).is_file():
            raise ResultsError(f"The checkpoint {path} is damaged: {name} is missing.")
    with ThreadPoolExecutor(_THREADS) as threads:
        hashes = threads.map(lambda name: file_hash(path / name), sums)
        for (name, expected), found in zip(sums.items(), hashes, strict=True):
            if found != expected:
                threads.shutdown(wait=False, cancel_futures=True)
                raise ResultsError(
                    f"The checkpoint {path} is damaged: {name} was changed after it was written."
                )
    return read_json(path / STATE)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _hash_and_flush(path: Path) -> str:
    """The hash of a file, which is on disk when this returns."""
    found = file_hash(path)
    _flush(path)
    return found


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(part: Path, path: Path) -> None:
    """Rename ``part`` to ``path``; an existing ``path`` is deleted only after the rename."""
    if not path.exists():
        part.rename(path)
        return
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    try:
        part.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
