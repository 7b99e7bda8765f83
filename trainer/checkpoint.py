"""Checkpoints: everything needed to go on as if nothing had happened, written whole or not at all.

A checkpoint is a folder with a manifest of sizes and SHA-256 sums, which is written last; the folder gets its
name only then. A crash leaves the one before, and a damaged one is named and passed over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollgym.errors import ResultsError, RunError, one_line
from rollgym.seeding import file_hash
from rollgym.store import read_json, write_json

SUMS, STATE = "sums.json", "state.json"
BEST = "best"


class Checkpoints:
    """The checkpoints of one run, in ``folder``."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write one: ``write`` fills a folder with everything that is not in ``state``. Older ones go."""
        place = self.folder / f"step-{step:08d}"
        self._write(place, {"step": step, **state}, write)
        # A damaged one of a later step, which was passed over, is not one of the last.
        for old in [one for one in self.steps() if one <= step][: -self._keep]:
            shutil.rmtree(self._of(old), ignore_errors=True)
        return place

    def save_best(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write the best one so far, in the place of the last best."""
        self._write(self.folder / BEST, {"step": step, **state}, write)
        return self.folder / BEST

    def steps(self) -> list[int]:
        """The steps that have one, whole or damaged, oldest first."""
        found = self.folder.glob("step-*") if self.folder.is_dir() else ()
        return sorted(int(path.name[5:]) for path in found if path.name[5:].isdigit())

    def newest(self, notice: Callable[[str], None] = lambda text: None) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole one and its state; damaged ones are passed over with a notice."""
        self._mend()
        damaged = []
        for step in reversed(self.steps()):
            try:
                return self._of(step), check(self._of(step))
            except ResultsError as error:
                damaged.append(str(error))
                notice(f"{error} Going on from the one before.")
        if damaged:
            raise ResultsError("No checkpoint of this run is whole:\n" + "\n".join(damaged))
        return None

    def _mend(self) -> None:
        """Remove what a crash left half written; where it was to replace one, that gets its name back."""
        for part in self.folder.glob(".*.part"):
            shutil.rmtree(part, ignore_errors=True)
        for old in self.folder.glob(".*.old"):
            place = old.with_name(old.name[1:-4])
            if place.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(place)

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _write(self, place: Path, state: dict[str, Any], write: Callable[[Path], None]) -> None:
        part = place.with_name(f".{place.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(part)
            write_json(part / STATE, state)
            sums = {name: file_hash(part / name) for name in _files(part)}
            for name in sums:
                _flush(part / name)
            write_json(part / SUMS, {"files": sums})
            _flush(part)
            _replace(part, place)
            _flush(place.parent)
        except Exception as error:  # a full disk is an OSError here, and errors of their own in torch
            why = getattr(error, "strerror", None) or one_line(error)
            raise RunError(
                f"The checkpoint {place} could not be written: {why}. Those saved before it are whole: make "
                "room, and resume."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def check(place: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files are all as they were written. `ResultsError` names the damage."""
    if not place.is_dir():
        raise ResultsError(f"There is no checkpoint {place}.")
    sums = read_json(place / SUMS).get("files", {})
    if STATE not in sums:
        raise ResultsError(f"The checkpoint {place} is damaged: {SUMS} does not list its files.")
    for name, expected in sums.items():
        if not (place / name).is_file():
            raise ResultsError(f"The checkpoint {place} is damaged: {name} is missing.")
        if file_hash(place / name) != expected:
            raise ResultsError(f"The checkpoint {place} is damaged: {name} is not what was written.")
    return read_json(place / STATE)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(part: Path, place: Path) -> None:
    """Give the folder its name. Where there is one of that name, it goes only after the new one is whole."""
    if not place.exists():
        part.rename(place)
        return
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    place.rename(old)
    try:
        part.rename(place)
    except OSError:
        old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)
