"""Weights & Biases: the same numbers, under one run id for all starts of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, RunError, boundary
from rollgym.io.run_dir import read_json, write_json
from rollgym.trainer.tracking.base import Tags, Tracker

WANDB = "wandb.json"


class WandbTracker(Tracker):
    """A W&B run; its id is kept in ``wandb.json``, so that a resumed run continues it.

    W&B ignores repeated steps, which have the same numbers, and uploads in the background: there is nothing
    to rewind or flush.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            init = importlib.import_module("wandb").init
        except (ImportError, AttributeError):  # any folder called wandb imports as an empty package
            raise MissingExtra("Logging to W&B needs the package wandb: pip install wandb") from None
        path = folder / WANDB
        resumed = {"id": read_json(path).get("id"), "resume": "allow"} if path.exists() else {}
        with boundary(RunError, "W&B could not be started"):
            self._run = init(**{"dir": str(folder), **resumed, **settings})
            write_json(path, {"id": self._run.id})

    def log(self, line: Mapping[str, Any], tags: Tags) -> None:
        """Send the numbers of one line."""
        with boundary(RunError, "W&B did not accept the metrics"):
            self._run.log(tags, step=line["step"])

    def close(self, *, failed: bool = False) -> None:
        """Finish the W&B run, marked as failed if it did."""
        self._run.finish(exit_code=int(failed))
