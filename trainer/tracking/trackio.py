"""Trackio: the same numbers in a local project, which ``trackio show`` displays."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, RunError, boundary
from rollgym.trainer.tracking.base import Tags, Tracker


class TrackioTracker(Tracker):
    """A Trackio run with the name of the run folder, in the local store; nothing is sent anywhere.

    A resumed run continues it. Steps that are played again are logged again, with the same numbers.
    """

    def __init__(self, folder: Path, project: str) -> None:
        try:
            trackio = importlib.import_module("trackio")
            init, self._finish_current = trackio.init, trackio.finish
        except (ImportError, AttributeError):
            raise MissingExtra("Logging to Trackio needs the package trackio: pip install trackio") from None
        # It prints to stdout, which belongs to the results of a command.
        with boundary(RunError, "Trackio could not be started"), redirect_stdout(sys.stderr):
            self._run = init(
                project=project,
                name=folder.resolve().name,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, line: Mapping[str, Any], tags: Tags) -> None:
        """Write the numbers of one line that are finite."""
        finite = {name: value for name, value in tags.items() if math.isfinite(value)}
        with boundary(RunError, "Trackio did not accept the metrics"):
            self._run.log(finite, step=line["step"])

    def close(self, *, failed: bool = False) -> None:
        """Finish the Trackio run."""
        with boundary(RunError, "Trackio could not end the run"), redirect_stdout(sys.stderr):
            try:
                self._finish_current()  # unlike that of the run, it is not repeated when the process ends
            except RuntimeError:  # the run was started in another context
                self._run.finish()
